"""Preparation and import on a Ray cluster of several nodes: the bytes of one machine, whatever dies meanwhile."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from atlas_fixtures import several_files
from conftest import random_measurements
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.rows.prepare import PrepareSettings, TaskSizes, prepare
from ping_llm.sources.atlas import import_by_file
from ping_llm.tasks.engines import EngineChoice, Timing
from ray_fixtures import add_node, busy_workers, running_cluster

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WriteParquet = Callable[..., Path]
TASK_MEMORY = 256 << 20
SIZES = TaskSizes(piece_rows=20_000, shard_measurements=10_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input that makes 16 tasks of step one and 32 of step two."""
    folder = tmp_path_factory.mktemp("raw")
    for part in range(4):
        table = random_measurements(80_000, seed=part, sources=2_000)
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=20_000)
    return folder


@pytest.fixture(scope="module")
def local(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one machine makes of it."""
    folder = tmp_path_factory.mktemp("local")
    run(raw, folder / "rows")
    return all_files(folder / "rows")


def run(raw: Path, output: Path, cluster: Any = None, on_timing: Any = None, **options: Any) -> None:
    if cluster is not None:
        options = {"engine": "ray", "address": cluster.address, "memory_limit_bytes": TASK_MEMORY} | options
    else:
        options = {"workers": 1} | options
    prepare(PrepareSettings(inputs=(str(raw),), output=output, **{"sizes": SIZES} | options), on_timing)


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class TestPreparation:
    def test_every_file_is_the_same_as_from_one_machine(
        self, tmp_path: Path, raw: Path, local: dict[str, bytes], cluster: Any
    ) -> None:
        timings: list[Timing] = []
        run(raw, tmp_path / "ray", cluster, timings.append)
        assert all_files(tmp_path / "ray") == local
        assert [t.task for t in timings if t.stage == "partition"] == list(range(16))
        assert [t.task for t in timings if t.stage == "shard"] == list(range(32))
        assert len({t.node for t in timings}) == 2
        assert all(t.seconds > 0 and t.bytes_in > 0 and t.bytes_out > 0 for t in timings)

    @pytest.mark.parametrize("stage", ["partition", "shard"])
    def test_a_node_that_is_lost_in_the_middle_changes_nothing(
        self, tmp_path: Path, raw: Path, local: dict[str, bytes], cluster: Any, stage: str
    ) -> None:
        timings: list[Timing] = []
        victim = cluster.worker_nodes and max(cluster.worker_nodes, key=lambda node: node.node_id)

        def lose_a_node(timing: Timing) -> None:
            timings.append(timing)
            if len([t for t in timings if t.stage == stage]) == 3:
                cluster.remove_node(victim, allow_graceful=False)

        run(raw, tmp_path / "ray", cluster, lose_a_node)
        add_node(cluster)
        assert all_files(tmp_path / "ray") == local
        assert len(timings) == 48, "every task once"

    def test_a_worker_that_is_killed_in_the_middle_changes_nothing(
        self, tmp_path: Path, raw: Path, local: dict[str, bytes], cluster: Any
    ) -> None:
        killed: list[int] = []

        def kill_workers(timing: Timing) -> None:
            for worker in busy_workers() if len(killed) < 3 else ():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    killed.append(worker.pid)

        run(raw, tmp_path / "ray", cluster, kill_workers)
        assert len(killed) >= 2
        assert all_files(tmp_path / "ray") == local

    def test_a_driver_that_is_killed_is_continued_by_the_same_command(
        self, tmp_path: Path, write_parquet: WriteParquet, cluster: Any
    ) -> None:
        for part in range(8):
            write_parquet(random_measurements(100_000, seed=part, sources=3_000), f"raw/{part}.parquet")
        run(tmp_path / "raw", tmp_path / "local", sizes=TaskSizes())  # as the command line has it
        command = [
            sys.executable,
            "-m",
            "ping_llm",
            "prepare",
            "-i",
            str(tmp_path / "raw"),
            "-o",
            str(tmp_path / "ray"),
        ]
        command += ["--engine", "ray", "--address", cluster.address, "--memory-limit-gb", "0.25"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "ray").glob(".work/runs/*.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        process.wait()
        done = len(list((tmp_path / "ray").glob(".work/runs/*.json")))
        assert 0 < done < 8
        timings = tmp_path / "timings.jsonl"
        subprocess.run([*command, "--timings", str(timings)], check=True, stdout=subprocess.DEVNULL)
        assert all_files(tmp_path / "ray") == all_files(tmp_path / "local")
        lines = [json.loads(line) for line in timings.read_text().splitlines()]
        assert len([line for line in lines if line["stage"] == "partition"]) <= 8 - done


class TestErrors:
    def test_an_error_of_a_task_is_the_line_that_a_local_one_gives(
        self, tmp_path: Path, write_parquet: WriteParquet, cluster: Any
    ) -> None:
        table = random_measurements(100)
        bad = table.set_column(1, "src_addr", [["", *table["src_addr"].to_pylist()[1:]]])
        path = write_parquet(bad)
        messages = []
        for where in (None, cluster):
            with pytest.raises(MeasurementError) as caught:
                run(path, tmp_path / "rows", where, strict=True)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
        assert "row 0: bad_src_addr" in messages[0]

    def test_a_disk_that_cannot_be_written_is_one_line(self, tmp_path: Path, raw: Path, cluster: Any) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PingLlmError) as caught:
            run(raw, tmp_path / "file" / "rows", cluster)
        assert "\n" not in str(caught.value)

    def test_more_memory_than_any_node_has_is_refused_at_once(self, tmp_path: Path, raw: Path, cluster: Any) -> None:
        with pytest.raises(PingLlmError, match=r"no node of the Ray cluster has 64.2 GB .*the largest has 1.0"):
            run(raw, tmp_path / "rows", cluster, memory_limit_bytes=64 << 30)

    def test_an_address_where_nothing_answers_is_one_line(self, tmp_path: Path, raw: Path) -> None:
        command = [sys.executable, "-m", "ping_llm", "prepare", "-i", str(raw), "-o", str(tmp_path / "rows")]
        done = subprocess.run(
            [*command, "--engine", "ray", "--address", "127.0.0.1:1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "error: no Ray cluster answers at 127.0.0.1:1" in done.stderr


def test_an_import_gives_the_same_files_as_on_one_machine(tmp_path: Path, cluster: Any) -> None:
    files = several_files(tmp_path)
    (tmp_path / "damaged.bz2").write_bytes(files[0].read_bytes()[:-20])
    files.append(tmp_path / "damaged.bz2")
    engine = EngineChoice(engine="ray", address=cluster.address, memory_limit_bytes=TASK_MEMORY)
    local = import_by_file(files, tmp_path / "local")
    ray = import_by_file(files, tmp_path / "ray", engine=engine)
    assert ray.failures == local.failures
    assert list(ray.failures) == [str(tmp_path / "damaged.bz2")]

    def parquet(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}

    assert parquet(tmp_path / "ray") == parquet(tmp_path / "local")
    assert len(parquet(tmp_path / "ray")) == 3
    assert import_by_file(files, tmp_path / "ray", engine=engine).skipped == 3
