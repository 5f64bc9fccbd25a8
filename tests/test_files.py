"""Atomic writes: whole or not at all."""

from pathlib import Path

import pytest

from ping_llm.core.files import atomic_file, atomic_folder, file_sha256, write_atomically


def fail_half_way(path: Path) -> None:
    path.write_text("ne")
    path.touch(exist_ok=False)


def test_a_file_is_replaced_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, "old")
    with atomic_file(target) as unfinished:
        unfinished.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_left_as_it_was_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, b"old")
    with pytest.raises(FileExistsError), atomic_file(target) as unfinished:
        fail_half_way(unfinished)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for names in (("a", "b"), ("c",)):
        with atomic_folder(target) as unfinished:
            for name in names:
                (unfinished / name).write_text(name)
        assert sorted(path.name for path in target.iterdir()) == list(names)
    with pytest.raises(FileExistsError), atomic_folder(target) as unfinished:
        fail_half_way(unfinished / "d")
    assert [path.name for path in target.iterdir()] == ["c"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_checksum_is_that_of_the_contents(tmp_path: Path) -> None:
    write_atomically(tmp_path / "empty", "")
    assert file_sha256(tmp_path / "empty").startswith("e3b0c44298fc1c14")
