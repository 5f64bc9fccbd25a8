"""`ping-llm inspect rows`: the numbers are those of the data, and damage is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from conftest import random_measurements
from ping_llm.cli.main import app
from ping_llm.core.console import no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.prepare import PrepareSettings, TaskSizes, prepare
from ping_llm.rows.summary import summarise


@pytest.fixture
def dataset(tmp_path: Path, write_parquet: Callable[..., Path]) -> Path:
    path = write_parquet(random_measurements(6_000))
    prepare(
        PrepareSettings(
            inputs=(str(path),), output=tmp_path / "rows", workers=1, sizes=TaskSizes(shard_measurements=2_000)
        )
    )
    return tmp_path / "rows"


def inspect(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["inspect", "rows", str(path), *options])


def error_of(path: Path, *options: str) -> str:
    """What the command says as it fails: one line."""
    error = inspect(path, *options).exception
    assert isinstance(error, PingLlmError)
    assert "\n" not in str(error)
    return str(error)


def faults(folder: Path) -> list[str]:
    found: list[str] = []
    for split in ("train", "eval"):
        with RowSet(folder, split) as rows:
            found += rows.verify(no_progress)
    return found


def shards(folder: Path, split: str = "train") -> list[Path]:
    return sorted(folder.glob(f"{split}-*.arrayrecord"))


def test_the_numbers_are_those_of_the_input(dataset: Path) -> None:
    table = random_measurements(6_000)
    summary = summarise(dataset)
    splits = summary["splits"].values()
    assert summary["read"] == summary["written"] == sum(s["measurements"] for s in splits) == 6_000
    assert sum(s["sources"] for s in splits) == len(table["src_addr"].unique())
    failed = sum(s["failed_share"] * s["measurements"] for s in splits)
    assert round(failed) == table["rtt"].null_count
    ipv6 = sum(s["ipv6_share"] * s["measurements"] for s in splits)
    assert round(ipv6) == table["ip_version"].to_pylist().count(6)
    for split in splits:
        assert sum(bin["rows"] for bin in split["histogram"]) == split["rows"]
        assert sum(bin["measurements"] for bin in split["histogram"]) == split["measurements"]


def test_json_holds_the_summary_and_the_chosen_row(dataset: Path) -> None:
    done = inspect(dataset, "--json", "--split", "eval", "--row", "1", "--limit", "2")
    assert done.exit_code == 0, done.exception
    result = json.loads(done.stdout)
    assert result["verified"]
    assert result["faults"] == []
    with RowSet(dataset, "eval") as rows:
        row = rows[1]
    assert result["row"]["source"] == row.source_address
    assert len(result["row"]["measurements"]) == min(2, len(row))
    first = result["row"]["measurements"][0]["rtt"]
    assert first is None if np.isnan(row.rtt_ms[0]) else abs(first - float(row.rtt_ms[0])) < 1e-3


def test_the_page_for_the_eye_names_what_matters(dataset: Path) -> None:
    text = inspect(dataset).stdout
    for expected in ("fingerprint", "IPv4 / IPv6", "unanswered", "measurements in a row", "source", "All shards match"):
        assert expected in text


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_flipped_byte_is_found_and_the_shard_named(dataset: Path, share: float) -> None:
    victim = shards(dataset)[1]
    data = bytearray(victim.read_bytes())
    data[int(len(data) * share)] ^= 1
    victim.write_bytes(data)
    assert faults(dataset)
    assert all(victim.name in fault for fault in faults(dataset))
    assert victim.name in error_of(dataset)


def test_a_damaged_row_is_named_when_it_is_read(dataset: Path) -> None:
    victim = shards(dataset)[0]
    data = bytearray(victim.read_bytes())
    data[300:400] = bytes(100)
    victim.write_bytes(data)
    with RowSet(dataset) as rows, pytest.raises(PingLlmError, match=rf"{victim.name}, row \d+: "):
        _ = [rows[number] for number in range(len(rows))]


def test_a_truncated_shard_is_found_at_opening(dataset: Path) -> None:
    victim = shards(dataset)[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(PingLlmError, match=rf"{victim.name} has .* bytes, but the manifest says"):
        RowSet(dataset)


def test_a_missing_shard_is_named(dataset: Path) -> None:
    victim = shards(dataset)[1]
    victim.unlink()
    assert f"{victim.name} is missing" in error_of(dataset)


def test_swapped_shards_do_not_pass(dataset: Path) -> None:
    a, b = shards(dataset)[:2]
    data = a.read_bytes(), b.read_bytes()
    a.write_bytes(data[1])
    b.write_bytes(data[0])
    assert a.name in error_of(dataset)


def test_an_index_of_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    data = bytearray((dataset / "train.index").read_bytes())
    data[len(data) // 2] ^= 1
    (dataset / "train.index").write_bytes(data)
    assert any("train.index: checksum mismatch" in fault for fault in faults(dataset))
    shutil.copy(dataset / "eval.index", dataset / "train.index")
    assert "train.index has" in error_of(dataset)


def test_a_row_that_disagrees_with_its_index_entry_is_named(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowSet.column

    def shifted(self: RowSet, name: str) -> Any:
        values = real(self, name)
        return values + 1 if name == "count" else values

    monkeypatch.setattr(RowSet, "column", shifted)
    assert any("count is" in fault and "but the index says" in fault for fault in faults(dataset))


def test_a_manifest_changed_by_hand_is_refused(dataset: Path) -> None:
    path = dataset / "manifest.json"
    value = json.loads(path.read_text())
    value["splits"]["train"]["shards"].pop()
    path.write_text(json.dumps(value))
    with pytest.raises(PingLlmError, match="changed by hand"):
        RowSet(dataset)


def test_an_unknown_split_or_row_is_an_error(dataset: Path) -> None:
    assert "has no split 'test', only train, eval" in error_of(dataset, "--split", "test")
    assert "there is no row 1000000" in error_of(dataset, "--row", "1000000")
