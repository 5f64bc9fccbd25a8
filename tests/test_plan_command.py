"""`ping-llm plan`: counts that agree with what preparation does, and times that follow from the rates."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conftest import random_measurements
from ping_llm.cli.data import plan
from ping_llm.cli.options import expanded, input_options
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.estimate import GIB, MEASURED, Rates, Workload, estimate
from ping_llm.rows.prepare import PrepareSettings, TaskSizes, prepare
from ping_llm.sources.files import Piece

app = typer.Typer()
app.command()(expanded(plan, "how", input_options))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


class TestCounts:
    def test_tasks_shuffle_and_dataset_are_those_of_a_real_preparation(
        self, tmp_path: Path, write_parquet: Any
    ) -> None:
        sizes = TaskSizes(shard_measurements=3_000, piece_rows=4_000)
        table = random_measurements(20_000, sources=300)
        path = write_parquet(table, row_group_size=1_000)
        timings: list[Any] = []
        settings = PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1, sizes=sizes)
        manifest, _ = prepare(settings, timings.append)
        ipv6 = table["ip_version"].to_pylist().count(6) / len(table)
        rows = sum(split.rows for split in manifest.splits.values())
        load = Workload(measurements=20_000, workers=1, ipv6_share=ipv6, measurements_per_source=20_000 / rows)
        found = estimate(load, sizes=sizes)
        partition, shard, _ = found.stages
        assert partition.tasks == len([t for t in timings if t.stage == "partition"]) == 5
        assert shard.tasks == len([t for t in timings if t.stage == "shard"]) == 8
        shuffled = sum(t.bytes_in for t in timings if t.stage == "shard")
        assert found.shuffle_bytes == pytest.approx(shuffled, rel=1e-3)
        assert found.rows == pytest.approx(rows, abs=2)
        in_rows = sum(split.measurements for split in manifest.splits.values()) * (12 + 12 * load.ipv6_share)
        assert found.dataset_bytes == pytest.approx(in_rows)

    def test_the_design_holds_at_35_billion(self) -> None:
        found = estimate(Workload(measurements=35 * 10**9, workers=64))
        partition, shard, publish = found.stages
        assert (partition.tasks, shard.tasks) == (1024, 4096)
        assert shard.bytes_in / (2 * partition.tasks * shard.tasks) > 100e3, "reads are not tiny"
        assert found.dataset_bytes / shard.tasks < 200e6, "shards are of a size that is easily moved"
        assert max(stage.memory_bytes for stage in found.stages) < 2 * GIB
        assert found.driver_memory_bytes < GIB
        assert publish.memory_bytes < GIB, "the index is larger than that, and joined on disk"
        assert not found.warnings

    def test_more_workers_take_less_time_until_there_is_a_task_for_each(self) -> None:
        times = [estimate(Workload(measurements=10**9, workers=workers)).seconds for workers in (1, 8, 64, 512, 4096)]
        assert times == sorted(times, reverse=True)
        assert times[0] / times[1] > 7
        assert estimate(Workload(measurements=10**9, workers=4096)).warnings

    def test_time_is_work_over_rate(self) -> None:
        rates = Rates(partition=1e6, shard=5e5, index=1e12, atlas=1e5, where="here")
        scale = Workload(measurements=10**8, workers=1, bandwidth=1e15, object_store=False, measurements_per_source=1e6)
        assert estimate(scale, rates).seconds == pytest.approx(100 + 200, rel=1e-3)

    def test_little_memory_is_noted_not_ignored(self) -> None:
        (warning,) = estimate(Workload(measurements=35 * 10**9, workers=64, memory_bytes=GIB // 2)).warnings
        assert "sorted on disk" in warning


class TestPieceGroups:
    @given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 20))
    def test_every_piece_is_in_one_group_in_order_and_there_are_not_too_many(self, sizes: list[int], most: int) -> None:
        pieces = [Piece(path=str(i), format="csv", columns={}, bytes=size) for i, size in enumerate(sizes)]
        groups = TaskSizes(max_runs=most).piece_groups(pieces)
        assert [piece for group in groups for piece in group] == pieces
        assert all(groups)
        assert len(groups) <= max(most, 1) or len(pieces) <= most

    def test_few_pieces_are_a_task_each_and_many_are_shared_out_evenly(self) -> None:
        pieces = [Piece(path=str(i), format="csv", columns={}, bytes=100) for i in range(17_500)]
        assert [len(group) for group in TaskSizes().piece_groups(pieces[:1024])] == [1] * 1024
        groups = TaskSizes().piece_groups(pieces)
        assert len(groups) == 1024
        assert {len(group) for group in groups} == {17, 18}

    def test_grouped_pieces_give_the_same_bytes(self, tmp_path: Path, write_parquet: Any) -> None:
        path = write_parquet(random_measurements(12_000), row_group_size=500)
        contents = []
        for most in (1024, 5, 1):
            sizes = TaskSizes(shard_measurements=3_000, piece_rows=500, max_runs=most)
            folder = tmp_path / str(most)
            prepare(PrepareSettings(inputs=(str(path),), output=folder, workers=1, sizes=sizes))
            contents.append({file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".json"})
        assert contents[0] == contents[1] == contents[2]


class TestCommand:
    def test_prints_what_to_expect(self) -> None:
        result = command("--measurements", "35e9", "--workers", "64")
        assert result.exit_code == 0
        for text in ("partition", "shard", "publish", "1,024", "4,096", "1.06 TB", "35,000,000,000 measurements"):
            assert text in result.output

    def test_json_has_stages_and_totals(self) -> None:
        result = command("-n", "1e9", "--workers", "8", "--atlas", "--json")
        found = json.loads(result.stdout.splitlines()[-1])
        assert [stage["name"] for stage in found["stages"]] == ["import", "partition", "shard", "publish"]
        assert found["seconds"] == pytest.approx(sum(stage["seconds"] for stage in found["stages"]))
        assert found["rates"]["where"] == MEASURED.where

    def test_counts_can_come_from_files(self, tmp_path: Path, write_parquet: Any) -> None:
        path = write_parquet(random_measurements(5_000))
        found = json.loads(command("--input", str(path), "--shared-disk", "--json").stdout)
        assert found["scale"]["measurements"] == 5_000
        assert found["scale"]["input_bytes_per_measurement"] == pytest.approx(path.stat().st_size / 5_000)
        assert found["stages"][0]["tasks"] == 1
        assert found["stages"][0]["requests"] == 0

    @pytest.mark.parametrize("arguments", [[], ["-n", "1e9", "-i", "x.parquet"], ["-n", "0"], ["-n", "nan"]])
    def test_wrong_questions_are_one_line(self, arguments: list[str]) -> None:
        error = command(*arguments).exception
        assert isinstance(error, PingLlmError)
        assert "\n" not in str(error)
