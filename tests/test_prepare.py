"""Preparation: nothing lost, the same bytes however it is run, whole or not there at all."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from conftest import random_measurements
from ping_llm.cli.main import app
from ping_llm.core.console import no_progress
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.core.measurements import format_address
from ping_llm.rows import prepare as prepare_module
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.partition import partition
from ping_llm.rows.prepare import MIB, PrepareSettings, TaskSizes, prepare
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.simulator import SimulatorSettings, simulate

WriteParquet = Callable[..., Path]
SEVERAL = TaskSizes(shard_measurements=1_500, piece_rows=2_000)
"""Several tasks of each step."""


def run(output: Path, *inputs: Path | str, **options: Any) -> Manifest:
    options = {"workers": 1} | options
    return prepare(PrepareSettings(inputs=tuple(str(i) for i in inputs), output=output, **options))[0]


def dataset_bytes(folder: Path) -> dict[str, bytes]:
    """Shards and indexes; the manifest differs in the names of the input files it reports."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in {".arrayrecord", ".index"}}


def contents(folder: Path) -> Counter[tuple[Any, ...]]:
    """All measurements of a dataset, each with how often it occurs."""
    found: Counter[tuple[Any, ...]] = Counter()
    for split in ("train", "eval"):
        with RowSet(folder, split) as rows:
            for number in range(len(rows)):
                row = rows[number]
                assert (np.diff(row.time_us) >= 0).all(), "rows are in time order"
                for t, dst, rtt in zip(row.time_us.tolist(), row.destinations, row.rtt_ms.tolist(), strict=True):
                    destination = format_address(row.family, dst.tobytes())
                    found[t, row.source_address, destination, None if np.isnan(rtt) else rtt] += 1
    return found


def expected(table: pa.Table) -> Counter[tuple[Any, ...]]:
    times = table["event_time"].cast(pa.int64()).to_pylist()
    return Counter(zip(times, *(table[name].to_pylist() for name in ("src_addr", "dst_addr", "rtt")), strict=True))


class TestContent:
    def test_every_measurement_is_in_the_rows_exactly_as_often_as_in_the_input(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        table = random_measurements(20_000)
        manifest = run(tmp_path / "rows", write_parquet(table))
        assert contents(tmp_path / "rows") == expected(table)
        assert manifest.read == manifest.written == 20_000

    def test_times_finer_than_a_second_are_kept(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(3_000, whole_seconds=False)
        run(tmp_path / "rows", write_parquet(table))
        assert contents(tmp_path / "rows") == expected(table)

    def test_input_is_output_plus_the_drop_report(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        good = random_measurements(5_000)
        bad = good.slice(0, 300).set_column(2, "dst_addr", pa.array(["?"] * 300))
        manifest = run(tmp_path / "rows", write_parquet(good, "a.parquet"), write_parquet(bad, "b.parquet"))
        assert manifest.read == 5_300
        assert manifest.written == 5_000 == sum(contents(tmp_path / "rows").values())
        assert manifest.dropped == {"bad_dst_addr": 300}
        assert [i["dropped"] for i in manifest.inputs] == [{}, {"bad_dst_addr": 300}]
        assert [i["read"] for i in manifest.inputs] == [5_000, 300]

    def test_long_histories_are_cut_and_rows_stay_below_the_limit(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        table = random_measurements(20_000, sources=3)
        run(tmp_path / "rows", write_parquet(table), max_row_bytes=4096)
        assert contents(tmp_path / "rows") == expected(table)
        with RowSet(tmp_path / "rows") as rows:
            assert len(rows) > 10
            assert int(rows.column("count").max()) <= 4096 // 12

    def test_the_index_says_what_the_rows_hold(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        run(tmp_path / "rows", write_parquet(random_measurements(5_000)))
        for split in ("train", "eval"):
            with RowSet(tmp_path / "rows", split) as rows:
                assert list(rows.verify(no_progress)) == []


class TestSplit:
    def test_a_source_is_in_the_same_split_whatever_else_is_in_the_data(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        table = random_measurements(8_000)
        few = table.filter(pa.compute.is_in(table["src_addr"], pa.array(table["src_addr"].unique().to_pylist()[:9])))
        run(tmp_path / "all", write_parquet(table, "all.parquet"))
        run(tmp_path / "few", write_parquet(few, "few.parquet"))

        def sources(folder: Path, split: str) -> set[str]:
            with RowSet(folder, split) as rows:
                return {rows[i].source_address for i in range(len(rows))}

        assert sources(tmp_path / "few", "train") <= sources(tmp_path / "all", "train")
        assert sources(tmp_path / "few", "eval") <= sources(tmp_path / "all", "eval")
        assert not sources(tmp_path / "all", "train") & sources(tmp_path / "all", "eval")

    def test_the_share_of_train_sources_is_the_one_requested(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        count = 20_000
        table = pa.table(
            {
                "event_time": pa.array([1_700_000_000] * count),
                "src_addr": [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(count)],
                "dst_addr": ["192.0.2.1"] * count,
                "rtt": [1.0] * count,
            }
        )
        manifest = run(tmp_path / "rows", write_parquet(table), train_ratio=0.7)
        assert abs(manifest.splits["train"].rows / count - 0.7) < 0.015

    @pytest.mark.parametrize(("ratio", "empty"), [(1.0, "eval"), (0.0, "train")])
    def test_a_split_may_be_empty(self, tmp_path: Path, write_parquet: WriteParquet, ratio: float, empty: str) -> None:
        table = random_measurements(500)
        manifest = run(tmp_path / "rows", write_parquet(table), train_ratio=ratio)
        assert manifest.splits[empty].rows == 0
        assert contents(tmp_path / "rows") == expected(table)


class TestSameBytes:
    """The dataset is a function of the measurements and the options that shape rows, and of nothing else."""

    @pytest.fixture
    def reference(self, tmp_path: Path, write_parquet: WriteParquet) -> dict[str, bytes]:
        path = write_parquet(random_measurements(10_000), "reference.parquet", row_group_size=700)
        run(tmp_path / "reference", path, sizes=SEVERAL)
        reference = dataset_bytes(tmp_path / "reference")
        assert len(reference) > 8, "several shards in both splits"
        return reference

    def test_for_one_and_two_workers(
        self, tmp_path: Path, write_parquet: WriteParquet, reference: dict[str, bytes]
    ) -> None:
        path = write_parquet(random_measurements(10_000), row_group_size=700)
        run(tmp_path / "rows", path, workers=2, sizes=SEVERAL)
        assert dataset_bytes(tmp_path / "rows") == reference

    def test_for_any_memory_limit(
        self, tmp_path: Path, write_parquet: WriteParquet, reference: dict[str, bytes]
    ) -> None:
        path = write_parquet(random_measurements(10_000))
        run(tmp_path / "rows", path, memory_limit_bytes=256 * MIB, sizes=SEVERAL)
        assert dataset_bytes(tmp_path / "rows") == reference

    def test_for_files_in_any_order_and_any_number(
        self, tmp_path: Path, write_parquet: WriteParquet, reference: dict[str, bytes]
    ) -> None:
        table = random_measurements(10_000)
        parts = [table.slice(start, 1_700) for start in range(0, 10_000, 1_700)]
        for order, name in ((range(len(parts)), "forward"), (reversed(range(len(parts))), "backward")):
            for position, part in enumerate(order):
                write_parquet(parts[part], f"{name}/{position}.parquet")
            run(tmp_path / f"rows-{name}", tmp_path / name, sizes=SEVERAL)
            assert dataset_bytes(tmp_path / f"rows-{name}") == reference

    def test_for_rows_shuffled_within_the_file(
        self, tmp_path: Path, write_parquet: WriteParquet, reference: dict[str, bytes]
    ) -> None:
        shuffled = random_measurements(10_000).take(np.random.default_rng(5).permutation(10_000))
        run(tmp_path / "rows", write_parquet(shuffled), sizes=SEVERAL)
        assert dataset_bytes(tmp_path / "rows") == reference

    def test_for_csv_and_parquet(self, tmp_path: Path, reference: dict[str, bytes]) -> None:
        table = random_measurements(10_000)
        epoch = pa.compute.divide(table["event_time"].cast(pa.int64()), 1_000_000)
        pyarrow.csv.write_csv(table.set_column(0, "timestamp", epoch), tmp_path / "m.csv")
        run(tmp_path / "rows", tmp_path / "m.csv", sizes=SEVERAL)
        assert dataset_bytes(tmp_path / "rows") == reference

    def test_the_fingerprint_follows_the_content(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(2_000)
        first = run(tmp_path / "a", write_parquet(table, "a.parquet"))
        again = run(tmp_path / "b", write_parquet(table, "b.parquet"))
        other = run(tmp_path / "c", write_parquet(table.slice(1), "c.parquet"))
        assert first.fingerprint == again.fingerprint != other.fingerprint

    def test_the_number_of_shards_depends_on_the_number_of_measurements_alone(self) -> None:
        cut = TaskSizes().bucket_ranges
        assert [len(cut(n)) for n in (1, 2_500_000, 2_500_001, 20_000_000, 35 * 10**9)] == [1, 1, 2, 8, 4096]
        for ranges in map(cut, (1, 10**7, 10**12)):
            assert ranges[0][0] == 0
            assert ranges[-1][1] == 4096
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ping_llm", "prepare", *map(str, arguments)]


@pytest.mark.slow
class TestKill:
    def test_after_kill_minus_nine_anywhere_the_same_command_gives_the_same_bytes(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        table = random_measurements(600_000, sources=4_000)
        for part in range(6):
            write_parquet(table.slice(part * 100_000, 100_000), f"raw/{part}.parquet")
        started = time.monotonic()
        subprocess.run(command("-i", tmp_path / "raw", "-o", tmp_path / "whole", "--workers", "2"), check=True)
        duration = time.monotonic() - started

        again = command("-i", tmp_path / "raw", "-o", tmp_path / "killed", "--workers", "2")
        killed = 0
        for delay in np.linspace(0.15, 1.0, 7) * duration:
            process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            workers: list[psutil.Process] = []
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and process.poll() is None:
                workers = psutil.Process(process.pid).children(recursive=True) or workers
                time.sleep(0.01)
            killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            _, alive = psutil.wait_procs(workers, timeout=10)
            assert not alive, "workers end with their parent"
        assert killed >= 3
        subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
        assert dataset_bytes(tmp_path / "killed") == dataset_bytes(tmp_path / "whole")
        assert (tmp_path / "killed" / "manifest.json").read_text() == (tmp_path / "whole" / "manifest.json").read_text()
        assert not (tmp_path / "killed" / ".work").exists()

    @pytest.mark.parametrize("survived", range(15))
    def test_a_stop_at_any_step_of_publishing_is_mended_by_the_next_run(
        self, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch, survived: int
    ) -> None:
        path = write_parquet(random_measurements(3_000))
        run(tmp_path / "whole", path)
        steps = 0

        def stopping(step: Callable[..., Any]) -> Callable[..., Any]:
            def stop_after(*arguments: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps > survived:
                    raise KeyboardInterrupt
                return step(*arguments)

            return stop_after

        monkeypatch.setattr(Path, "replace", stopping(Path.replace))
        monkeypatch.setattr(os, "link", stopping(os.link))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "rows", path)
        monkeypatch.undo()
        with pytest.raises(PingLlmError, match="unfinished preparation"):
            Manifest.load(tmp_path / "rows")
        run(tmp_path / "rows", path)
        assert dataset_bytes(tmp_path / "rows") == dataset_bytes(tmp_path / "whole")

    def test_finished_tasks_are_not_done_again(
        self, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [write_parquet(random_measurements(1_000, seed=i), f"{i}.parquet") for i in range(4)]
        done: list[int] = []

        def recorded(task: Any) -> Any:
            if len(done) == 3:
                raise KeyboardInterrupt
            done.append(task.number)
            return partition(task)

        monkeypatch.setattr(prepare_module, "partition", recorded)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "rows", *paths)
        assert done == [0, 1, 2]
        done.clear()
        run(tmp_path / "rows", *paths)
        assert done == [3]

    @pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 70_000)])
    def test_a_task_whose_result_was_lost_with_the_machine_is_done_again(
        self, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch, damage: Any
    ) -> None:
        paths = [write_parquet(random_measurements(2_000, seed=i), f"{i}.parquet") for i in range(3)]
        run(tmp_path / "whole", *paths)

        def interrupted(task: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(prepare_module, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "rows", *paths)
        monkeypatch.undo()
        damage(tmp_path / "rows" / ".work" / "runs" / "run-00001.run")
        run(tmp_path / "rows", *paths)
        assert dataset_bytes(tmp_path / "rows") == dataset_bytes(tmp_path / "whole")


class TestExistingOutput:
    def test_the_same_command_again_does_nothing(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        path = write_parquet(random_measurements(1_000))
        settings = PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1)
        assert prepare(settings)[1]
        before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "rows").iterdir()}
        assert not prepare(settings)[1]
        assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "rows").iterdir()} == before

    def test_a_dataset_of_other_input_or_options_is_not_touched(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        path = write_parquet(random_measurements(1_000))
        run(tmp_path / "rows", path)
        before = dataset_bytes(tmp_path / "rows")
        other = write_parquet(random_measurements(1_000, seed=1), "other.parquet")
        with pytest.raises(PingLlmError, match="already holds a dataset"):
            run(tmp_path / "rows", other)
        with pytest.raises(PingLlmError, match="already holds a dataset"):
            run(tmp_path / "rows", path, train_ratio=0.5)
        assert dataset_bytes(tmp_path / "rows") == before

    def test_overwrite_replaces_it_and_leaves_none_of_the_old_files(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        many = write_parquet(random_measurements(3_000), "many.parquet")
        run(tmp_path / "rows", many, sizes=TaskSizes(shard_measurements=300))
        table = random_measurements(100, seed=1)
        run(tmp_path / "rows", write_parquet(table, "few.parquet"), overwrite=True)
        assert contents(tmp_path / "rows") == expected(table)
        assert len(dataset_bytes(tmp_path / "rows")) == 4

    def test_an_unfinished_preparation_of_something_else_is_not_mixed_in(
        self, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(task: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(prepare_module, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "rows", write_parquet(random_measurements(500), "a.parquet"))
        monkeypatch.undo()
        table = random_measurements(400, seed=2)
        other = write_parquet(table, "b.parquet")
        with pytest.raises(PingLlmError, match="unfinished preparation of other input"):
            run(tmp_path / "rows", other)
        run(tmp_path / "rows", other, overwrite=True)
        assert contents(tmp_path / "rows") == expected(table)

    def test_shards_of_unknown_origin_are_not_mixed_in(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "train.arrayrecord").write_bytes(b"mine")
        with pytest.raises(PingLlmError, match="files of another dataset"):
            run(tmp_path / "rows", write_parquet(random_measurements(100)))
        assert (tmp_path / "rows" / "train.arrayrecord").read_bytes() == b"mine"

    def test_a_second_preparation_leaves_a_running_one_alone(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        file = write_parquet(random_measurements(2_000))
        run(tmp_path / "rows", file)
        before = dataset_bytes(tmp_path / "rows")
        refused: list[object] = []

        def second(timing: object) -> None:
            with pytest.raises(PingLlmError, match="is in use by process") as error:
                run(tmp_path / "rows", file)
            refused.append(error)

        settings = PrepareSettings(inputs=(str(file),), output=tmp_path / "rows", workers=1, overwrite=True)
        prepare(settings, second)
        assert len(refused) == 2  # tasks
        assert dataset_bytes(tmp_path / "rows") == before
        assert not [path.name for path in (tmp_path / "rows").iterdir() if path.name.startswith(".")]

    def test_input_that_was_unreadable_can_be_repaired(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        file = write_parquet(random_measurements(2_000), compression="zstd")
        whole = file.read_bytes()
        file.write_bytes(whole[:200] + bytes(len(whole) // 2) + whole[200 + len(whole) // 2 :])
        with pytest.raises(PingLlmError, match="cannot read"):
            run(tmp_path / "rows", file)
        assert not (tmp_path / "rows").exists()
        file.write_bytes(whole)
        run(tmp_path / "rows", file)
        assert contents(tmp_path / "rows") == expected(random_measurements(2_000))

    def test_changed_input_is_other_input(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        run(tmp_path / "rows", write_parquet(random_measurements(1_000)))
        with pytest.raises(PingLlmError, match="already holds a dataset"):
            run(tmp_path / "rows", write_parquet(random_measurements(1_000, seed=3)))


class TestBadInput:
    """One clear line, and no dataset that looks whole."""

    def refused(self, tmp_path: Path, *inputs: Path | str, **options: Any) -> str:
        with pytest.raises(PingLlmError) as caught:
            run(tmp_path / "rows", *inputs, **options)
        assert not (tmp_path / "rows" / "manifest.json").exists()
        with pytest.raises(PingLlmError):
            RowSet(tmp_path / "rows")
        message = str(caught.value)
        assert "\n" not in message
        return message

    def test_an_empty_glob(self, tmp_path: Path) -> None:
        assert "no input file matches" in self.refused(tmp_path, tmp_path / "*.parquet")

    def test_a_folder_without_measurement_files(self, tmp_path: Path) -> None:
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw" / "notes.txt").write_text("hello")
        assert "holds no measurement file" in self.refused(tmp_path, tmp_path / "raw")

    def test_a_truncated_parquet_file(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        path = write_parquet(random_measurements(5_000))
        path.write_bytes(path.read_bytes()[:-5_000])
        assert str(path) in self.refused(tmp_path, path)

    def test_a_parquet_file_with_damaged_pages(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        path = write_parquet(random_measurements(50_000), compression="zstd")
        data = bytearray(path.read_bytes())
        data[5_000:60_000] = bytes(55_000)
        path.write_bytes(data)
        assert str(path) in self.refused(tmp_path, path)

    def test_a_file_that_is_not_what_its_name_says(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"this is not parquet at all")
        assert "a.parquet" in self.refused(tmp_path, tmp_path / "a.parquet")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"")
        assert "a.parquet is empty" in self.refused(tmp_path, tmp_path / "a.parquet")

    def test_an_unknown_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.xlsx").write_bytes(b"PK")
        assert "unknown kind of file" in self.refused(tmp_path, tmp_path / "a.xlsx")

    def test_a_missing_column_is_named_with_what_is_there(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(100).rename_columns(["event_time", "src_addr", "dst_addr", "ip_version", "quux"])
        message = self.refused(tmp_path, write_parquet(table))
        assert "rtt" in message
        assert "quux" in message
        assert "--columns" in message

    def test_a_column_of_the_wrong_type(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(10).set_column(1, "src_addr", pa.array([1.5] * 10))
        assert "column 'src_addr' has type double" in self.refused(tmp_path, write_parquet(table))

    def test_no_usable_measurement(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(10).set_column(1, "src_addr", pa.array(["?"] * 10))
        assert "10 bad_src_addr (row 0: src_addr=?)" in self.refused(tmp_path, write_parquet(table))

    def test_an_output_that_cannot_be_made(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PingLlmError, match="cannot write to"):
            run(tmp_path / "file" / "rows", write_parquet(random_measurements(10)))

    def test_strict_stops_at_the_first_bad_row_and_names_it(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        table = random_measurements(5_000)
        sources = table["src_addr"].to_pylist()
        sources[3_210] = "10.0.0.300"
        sources[4_000] = "10.0.0"
        path = write_parquet(table.set_column(1, "src_addr", pa.array(sources)), row_group_size=500)
        with pytest.raises(MeasurementError, match=r"measurements.parquet, row 3210: bad_src_addr.*10.0.0.300"):
            run(tmp_path / "rows", path, strict=True, workers=2)
        assert run(tmp_path / "rows", path).dropped == {"bad_src_addr": 2}

    @pytest.mark.parametrize(
        "options",
        [{"train_ratio": 1.5}, {"max_row_bytes": 10}, {"workers": 0}, {"memory_limit_bytes": 1}],
        ids=lambda options: next(iter(options)),
    )
    def test_options_out_of_range(self, tmp_path: Path, options: dict[str, Any]) -> None:
        with pytest.raises(PingLlmError):
            run(tmp_path / "rows", "x.parquet", **options)


class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        mount = tmp_path / "small"
        mount.mkdir()
        if (
            os.geteuid()
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], check=False, capture_output=True
            ).returncode
        ):
            pytest.skip("needs the right to mount a small file system")
        try:
            yield mount
        finally:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)

    @pytest.mark.parametrize("measurements", [40_000, 80_000, 300_000])
    def test_a_full_disk_is_one_line_and_the_work_can_be_resumed(
        self, small_disk: Path, write_parquet: WriteParquet, measurements: int
    ) -> None:
        """More measurements fill the disk at an earlier step: while joining, sorting or partitioning."""
        path = write_parquet(random_measurements(measurements, sources=measurements // 3))
        with pytest.raises(PingLlmError, match=r"(?i)space|disk full") as caught:
            run(small_disk / "rows", path)
        assert "\n" not in str(caught.value)
        assert not (small_disk / "rows" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
        assert run(small_disk / "rows", path).written == measurements


def test_command_line_reports_json(tmp_path: Path, write_parquet: WriteParquet) -> None:
    path = write_parquet(random_measurements(1_000))
    done = CliRunner().invoke(
        app, ["prepare", "-i", str(path), "-o", str(tmp_path / "rows"), "--workers", "1", "--json"]
    )
    assert json.loads(done.stdout)["written"] == 1_000
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["read:", "1,000"], "and no progress"


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    arguments = command("-i", "nothing*.csv", "-o", tmp_path / "x")
    failed = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr == "error: no input file matches 'nothing*.csv'\n"


def test_a_simulated_folder_and_a_renamed_csv_are_prepared_as_they_are(tmp_path: Path) -> None:
    simulate(SimulatorSettings(measurements=5_000), tmp_path / "raw")
    assert run(tmp_path / "rows", tmp_path / "raw").written == 5_000

    (tmp_path / "mine.csv").write_text(
        "when;probe;target;ms\n"
        "2024-05-06T07:08:09Z;192.0.2.1;198.51.100.7;12.5\n"
        "2024-05-06T07:09:09Z;192.0.2.1;198.51.100.7;*\n"
        "2024-05-06T07:09:09Z;192.0.2.1\n"
    )
    names = {"event_time": "when", "src_addr": "probe", "dst_addr": "target", "rtt": "ms"}
    with pytest.raises(PingLlmError, match=r"1 of 3 rows cannot be used: 1 malformed_row \(line 4: 2 cells, not 4\)"):
        run(tmp_path / "csv", tmp_path / "mine.csv", input_options=InputOptions(columns=names))
    going_on = InputOptions(columns=names, allow_bad_rows=True)
    manifest = run(tmp_path / "csv", tmp_path / "mine.csv", input_options=going_on)
    assert (manifest.read, manifest.written, manifest.dropped) == (3, 2, {"malformed_row": 1})
    with pytest.raises(MeasurementError, match=r"mine.csv, line 4: malformed_row"):
        run(tmp_path / "strict", tmp_path / "mine.csv", input_options=InputOptions(columns=names), strict=True)


@pytest.mark.slow
def test_the_real_dump_is_prepared_without_loss(shared_data: Path, tmp_path: Path) -> None:
    manifest = run(tmp_path / "rows", shared_data / "ripe-atlas-ping-menog.jsonl.bz2")
    assert (manifest.read, manifest.written, manifest.dropped) == (346_176, 346_176, {})
    assert sum(split.failed for split in manifest.splits.values()) == 21_860
