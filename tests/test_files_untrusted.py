"""Names and digests from outside never leave their folder, and a lock names who holds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import exclusive, relative_name, sha256_digest


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a", "checkpoints/10/d/0.zarr", "ü nicode"])
def test_a_name_inside_the_folder_is_taken_as_it_is(name: str) -> None:
    assert relative_name(name, "m.json") == name


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "a/../b", "./a", "a//b", "a\\b", "a\0b", "a\n", None, 3, "a/"]
)
def test_any_other_name_is_refused_in_one_line(name: object) -> None:
    with pytest.raises(PingLlmError, match=r"^m\.json names the file .*$"):
        relative_name(name, "m.json")


@pytest.mark.parametrize(
    "digest", ["", "abc/../../../file", "0" * 63, "0" * 65, "G" * 64, "A" * 64, None, "0" * 64 + "\n"]
)
def test_what_is_no_digest_is_refused(digest: object) -> None:
    with pytest.raises(PingLlmError, match="SHA-256"):
        sha256_digest(digest, "m.json")
    assert sha256_digest("0f" * 32, "m.json") == "0f" * 32


def test_a_second_process_learns_who_holds_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "folder" / "lock"
    program = (
        "import sys; from pathlib import Path; from ping_llm.core.files import exclusive\n"
        f"with exclusive(Path({str(lock)!r}), 'the folder'): pass"
    )
    with exclusive(lock, "the folder"):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"the folder is in use by process {os.getpid()} on " in second.stderr.splitlines()[-1]
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
