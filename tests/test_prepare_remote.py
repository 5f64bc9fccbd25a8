"""Preparation with its work and its output in an object store: the bytes of a local one, and nothing left over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas_fixtures import several_files
from conftest import random_measurements
from ping_llm.core.errors import PingLlmError
from ping_llm.rows import prepare as prepare_module
from ping_llm.rows.prepare import PrepareSettings, TaskSizes, prepare
from ping_llm.rows.shards import write_shard
from ping_llm.sources.atlas import import_by_file
from ping_llm.storage import Location, locate
from ping_llm.tasks.engines import EngineChoice
from ray_fixtures import running_cluster
from storage_fixtures import BUCKET, S3Server, s3, s3_server, status, truncated

__all__ = ["s3", "s3_server"]

WriteParquet = Callable[..., Path]
SIZES = TaskSizes(piece_rows=3_000, shard_measurements=1_600)


@pytest.fixture
def raw(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """Input of 4 tasks of step one and 8 of step two."""
    path = tmp_path / "raw"
    write_parquet(random_measurements(12_000, sources=300), "raw/m.parquet", row_group_size=1_000)
    return path


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path) -> Location:
    return locate(f"s3://{BUCKET}/{tmp_path.name}")


def run(raw: Path | Location, output: Path | Location, **options: Any) -> None:
    options = {"workers": 1} | options
    prepare(PrepareSettings(inputs=(str(raw),), output=str(output), sizes=SIZES, **options))


def local_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remote_files(folder: Location) -> dict[str, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.list(recursive=True)}


def test_output_to_a_store_is_the_local_one_and_work_is_done_on_this_disk(
    tmp_path: Path, raw: Path, bucket: Location
) -> None:
    run(raw, tmp_path / "local")
    run(raw, bucket / "rows")
    assert remote_files(bucket / "rows") == local_files(tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("*.run")), "the work folder is gone"


@pytest.mark.slow
def test_work_in_a_store_gives_the_same_bytes_and_is_removed(tmp_path: Path, raw: Path, bucket: Location) -> None:
    run(raw, tmp_path / "local")
    run(raw, bucket / "rows", work=str(bucket / "tmp"))
    run(raw, tmp_path / "mixed", work=str(bucket / "tmp"))
    assert remote_files(bucket / "rows") == local_files(tmp_path / "mixed") == local_files(tmp_path / "local")
    assert remote_files(bucket / "tmp") == {}


def test_a_shard_reads_only_its_own_buckets(raw: Path, bucket: Location, s3: S3Server) -> None:
    run(raw, bucket / "rows", work=str(bucket / "tmp"))
    runs, shards, families = 4, 8, 2
    assert s3.count("GET", ".run") <= runs + runs * shards * families
    assert s3.count("HEAD", ".run") <= 2 * runs + runs * shards


@pytest.mark.parametrize("fault", [status(503), truncated], ids=["503", "truncated"])
def test_passing_trouble_of_the_store_changes_nothing(
    tmp_path: Path, raw: Path, bucket: Location, s3: S3Server, fault: Any
) -> None:
    run(raw, tmp_path / "local")
    s3.fail(fault, times=3, method="GET", key=".run")
    s3.fail(fault, times=2, method="GET", key=".index")
    run(raw, bucket / "rows", work=str(bucket / "tmp"))
    assert remote_files(bucket / "rows") == local_files(tmp_path / "local")


def test_lasting_trouble_is_one_line_and_the_next_run_resumes(
    tmp_path: Path, raw: Path, bucket: Location, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(raw, tmp_path / "local")
    s3.fail(status(503), times=1e9, method="PUT", key="shard-00003")
    with pytest.raises(PingLlmError) as caught:
        run(raw, bucket / "rows", work=str(bucket / "tmp"))
    assert "\n" not in str(caught.value)
    assert not (bucket / "rows" / "manifest.json").exists()
    s3.heal()
    done: list[int] = []

    def recorded(task: Any) -> Any:
        done.append(task.number)
        return write_shard(task)

    monkeypatch.setattr(prepare_module, "write_shard", recorded)
    monkeypatch.setattr(prepare_module, "partition", None)  # not to be called: all of step one is done
    run(raw, bucket / "rows", work=str(bucket / "tmp"))
    assert done == [3, 4, 5, 6, 7]
    assert remote_files(bucket / "rows") == local_files(tmp_path / "local")


def test_a_dataset_in_a_store_is_replaced_only_when_asked(
    tmp_path: Path, raw: Path, bucket: Location, write_parquet: WriteParquet
) -> None:
    run(raw, bucket / "rows")
    other = write_parquet(random_measurements(500, seed=3), "other.parquet")
    with pytest.raises(PingLlmError, match="already holds a dataset"):
        run(other, bucket / "rows")
    run(other, bucket / "rows", overwrite=True)
    run(other, tmp_path / "local")
    assert remote_files(bucket / "rows") == local_files(tmp_path / "local")


def test_files_are_imported_from_a_store_to_a_store(tmp_path: Path, bucket: Location) -> None:
    files = several_files(tmp_path)
    import_by_file(files, tmp_path / "local", engine=EngineChoice(workers=1))
    for file in files:
        (bucket / "dumps" / file.name).upload(file)
    names = [str(bucket / "dumps" / file.name) for file in files]
    report = import_by_file(names, str(bucket / "out"), engine=EngineChoice(workers=1))
    assert report.measurements == 8817
    stored = {name: data for name, data in remote_files(bucket / "out").items() if name.endswith(".parquet")}
    assert stored == {p.name: p.read_bytes() for p in (tmp_path / "local").glob("*.parquet")}
    assert import_by_file(names, str(bucket / "out"), engine=EngineChoice(workers=1)).skipped == 3


@pytest.fixture(scope="module")
def cluster(s3_server: S3Server) -> Iterator[Any]:
    """Its nodes find the store by their environment, as everywhere."""
    pytest.importorskip("ray")
    with running_cluster() as cluster:
        yield cluster


@pytest.mark.slow
def test_a_cluster_without_a_shared_disk_gives_the_same_bytes(
    tmp_path: Path, raw: Path, bucket: Location, cluster: Any
) -> None:
    run(raw, tmp_path / "local")
    for file in raw.iterdir():
        (bucket / "raw" / file.name).upload(file)
    engine = {"engine": "ray", "address": cluster.address, "memory_limit_bytes": 256 << 20, "workers": None}
    run(bucket / "raw", bucket / "rows", **engine)
    found, wanted = remote_files(bucket / "rows"), local_files(tmp_path / "local")
    for files in (found, wanted):
        del files["manifest.json"]  # it names the input
    assert found == wanted
