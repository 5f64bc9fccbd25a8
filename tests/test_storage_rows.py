"""Training from rows in an object store: the same batches as from local ones, through a bounded cache."""

import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from conftest import random_measurements
from ping_llm.batches.batch import digest
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import DataSpec
from ping_llm.contexts.source import global_batches
from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec
from ping_llm.core.errors import PingLlmError
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import CorruptRowError, RowSet, fetch_ahead
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.measurement_set import rows_observations
from ping_llm.rows.prepare import TaskSizes
from ping_llm.rows.reader import RowReader
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import BLOCK, Cache
from pipeline_fixtures import Dataset, prepare_table
from reference_rows import assert_same, pick, picked_by
from storage_fixtures import BUCKET, S3Server, bucket, run_python, s3, s3_server, slow, status, truncated

__all__ = ["bucket", "s3", "s3_server"]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Several shards, several blocks each."""
    return prepare_table(random_measurements(70_000, sources=500), sizes=TaskSizes(shard_measurements=20_000))


@pytest.fixture(scope="module")
def stored(dataset: Dataset, s3_server: S3Server) -> Location:
    """The same rows in the store."""
    folder = locate(f"s3://{BUCKET}/rows")
    for file in locate(dataset.folder).list():
        (folder / file.name).upload(file.local)
    return folder


@pytest.fixture
def remote(stored: Location, s3: S3Server) -> Location:
    return stored


def spec_of(folder: object) -> DataSpec:
    rows = RowsSpec.find(str(folder), "train", contexts=ContextSettings(length=512))
    return data_spec([rows], global_batch_size=8)


def digests(folder: object, steps: int = 4) -> list[str]:
    return [digest(BatchSource(spec_of(folder))[step]) for step in range(steps)]


def fetch_whole(remote: Location) -> None:
    fetch_ahead([(remote, Manifest.load(remote).splits["train"])], Cache.from_environment())


def cached(kind: str) -> list[Path]:
    return list((Cache.from_environment().folder / kind).glob("*/*"))


def overwrite(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


class TestSameBatches:
    def test_in_parts(self, dataset: Dataset, remote: Location) -> None:
        assert len(dataset.rows.info.shards) == 4
        assert digests(remote) == digests(dataset.folder)
        assert len(cached("files")) == 1  # the index
        assert len(cached("blocks")) == 4

    def test_from_whole_shards(self, dataset: Dataset, remote: Location, s3: S3Server) -> None:
        fetch_whole(remote)
        assert len(cached("files")) == 4
        s3.requests.clear()
        assert digests(remote) == digests(dataset.folder)
        assert s3.count("GET", ".arrayrecord") == 0

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_in_worker_processes(self, dataset: Dataset, remote: Location, workers: int) -> None:
        made = global_batches(spec_of(remote), 0, 6, hosts=1, workers=workers)
        assert [digest(batch) for batch in made] == digests(dataset.folder, 6)

    def test_by_a_pattern_of_shards(self, dataset: Dataset, remote: Location) -> None:
        assert RowsSpec.find(f"{remote}/train*.arrayrecord", "eval") == RowsSpec.find(str(remote), "train")
        assert spec_of(remote).identity() == spec_of(dataset.folder).identity()

    def test_through_failures(self, dataset: Dataset, remote: Location, s3: S3Server) -> None:
        s3.fail(truncated, times=3, method="GET", key=".arrayrecord")
        s3.fail(status(503), times=3, method="GET")
        assert digests(remote) == digests(dataset.folder)

    def test_all_rows_as_observations(self, dataset: Dataset, remote: Location) -> None:
        here, there = (rows_observations(folder, "train") for folder in (dataset.folder, remote))
        assert here.nodes == there.nodes
        assert np.array_equal(here.observations.rtt_ms, there.observations.rtt_ms, equal_nan=True)

    def test_single_rows(self, dataset: Dataset, remote: Location) -> None:
        with RowSet(remote) as there:
            assert there[7].source_address == dataset.rows[7].source_address
            assert list(there.verify(lambda *_, **__: None)) == []


class TestDamage:
    def test_of_cached_blocks_is_mended(self, dataset: Dataset, remote: Location, s3: S3Server) -> None:
        digests(remote)
        for path in cached("blocks"):
            overwrite(path, path.stat().st_size // (BLOCK + 1) * BLOCK)  # all of it but the marks
        s3.requests.clear()
        assert digests(remote) == digests(dataset.folder)
        assert s3.count("GET", ".arrayrecord") >= 4

    def test_of_whole_shards_is_mended(self, dataset: Dataset, remote: Location) -> None:
        fetch_whole(remote)
        for path in cached("files"):
            stat = path.stat()
            overwrite(path, stat.st_size)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a disk that rots leaves no trace
        assert digests(remote) == digests(dataset.folder)

    def test_that_is_met_late_does_not_spoil_rows_that_were_checked_before(
        self, dataset: Dataset, remote: Location
    ) -> None:
        fetch_whole(remote)
        rows = RowReader(RowSet(remote))
        everything = np.arange(len(rows.rows))
        rows.check(everything[:-1])
        shard = rows.rows.info.shards[int(rows.rows.column("shard")[-1])]
        path = Cache.from_environment().find(size=shard.bytes, sha256=shard.sha256)
        assert path is not None
        with path.open("r+b") as file:
            file.seek(int(layout.physical(int(rows.rows.column("offset")[-1]))) + 60)
            file.write(b"\xff" * 8)
        rows.check(everything)
        position = np.zeros_like(everything)
        assert_same(picked_by(rows, everything, position), pick(dataset.rows, everything, position))

    def test_of_the_store_itself_names_the_row(self, dataset: Dataset, bucket: Location) -> None:
        for file in locate(dataset.folder).list():
            (bucket / file.name).upload(file.local)
        shard = bucket / dataset.rows.info.shards[0].file
        data = bytearray(shard.read_bytes())
        data[BLOCK // 2 : BLOCK] = b"\xff" * (BLOCK // 2)
        shard.write_bytes(bytes(data))
        with pytest.raises(CorruptRowError, match=r"s3://.*train-00000.*row \d+"):
            digests(bucket, 8)

    def test_a_missing_shard_is_said_at_once(self, dataset: Dataset, bucket: Location) -> None:
        for file in locate(dataset.folder).list():
            if "00003-of" not in file.name:
                (bucket / file.name).upload(file.local)
        with pytest.raises(PingLlmError, match=r"train-00003-of-00004.arrayrecord is missing"):
            digests(bucket)


class TestSmallCache:
    def rows(self, remote: Location, limit: int) -> RowReader:
        """That looks at every fetch whether something was evicted."""
        rows = RowSet(remote, cache=Cache(folder=Cache.from_environment().folder, limit_bytes=limit))
        rows.sweep_every_s = 0.0
        return RowReader(rows)

    def test_the_disk_is_bounded_while_all_rows_pass_through(self, dataset: Dataset, remote: Location) -> None:
        limit = 12 * BLOCK
        rows = self.rows(remote, limit)
        used = []
        for chosen in np.array_split(np.random.default_rng(0).permutation(len(rows.rows)), 40):
            rows.check(chosen)
            first = np.zeros_like(chosen)
            assert_same(picked_by(rows, chosen, first), pick(dataset.rows, chosen, first))
            used.append(Cache.from_environment().used_bytes())
        assert sum(shard.bytes for shard in rows.rows.info.shards) > 1.1 * limit
        assert max(used) <= limit

    def test_what_was_evicted_is_no_longer_mapped(self, remote: Location) -> None:
        rows = self.rows(remote, 10**9)
        everything = np.arange(len(rows.rows))
        rows.check(everything)
        for path in cached("blocks"):
            path.unlink()
        rows.check(everything[:1])
        mapped = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in mapped if "/blocks/" in line and "(deleted)" in line]
        rows.check(everything)  # fetched and verified again
        assert len(cached("blocks")) == 4

    def test_a_batch_larger_than_the_cache_is_advice_not_a_hang(self, remote: Location) -> None:
        rows = self.rows(remote, 3 * BLOCK)
        with pytest.warns(UserWarning, match=r"one batch needs .* Raise PING_LLM_CACHE_GB"):
            rows.check(np.arange(len(rows.rows)))

    def test_a_dataset_that_does_not_fit_is_not_fetched_ahead(
        self, remote: Location, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PING_LLM_CACHE_GB", "0.0005")
        fetch_whole(remote)
        assert cached("files") == []
        assert "fetched in parts" in capsys.readouterr().err

    def test_two_processes_fetch_what_each_needs(self, remote: Location, s3: S3Server) -> None:
        one, two = self.rows(remote, 10**9), self.rows(remote, 10**9)
        some = np.arange(50)
        one.check(some)
        before = s3.count("GET", ".arrayrecord")
        two.check(some)
        assert s3.count("GET", ".arrayrecord") == before


def test_rows_in_parts_are_fetched_concurrently(remote: Location, s3: S3Server) -> None:
    rows = RowReader(RowSet(remote))
    rows.check(np.arange(1))
    s3.fail(slow(0.2), times=99, method="GET", key=".arrayrecord")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows.check(np.arange(0, len(rows.rows), 7))
    assert s3.most_at_once >= 4


def test_local_rows_need_no_cache(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PING_LLM_CACHE_DIR", str(tmp_path / "none"))
    digests(dataset.folder)
    assert not (tmp_path / "none").exists()


READ_AT_RANDOM = """
import sys
from pathlib import Path
import numpy as np
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.reader import RowReader
from ping_llm.storage.cache import Cache
cache = Cache(folder=Path(sys.argv[3]), limit_bytes=int(sys.argv[4]))
here, there = RowReader(RowSet(Path(sys.argv[1]))), RowReader(RowSet(sys.argv[2], cache=cache))
there.rows.sweep_every_s = 0.0
random = np.random.default_rng(int(sys.argv[5]))
for _ in range(60):
    rows = random.integers(0, len(here.rows), 20)
    here.check(rows)
    there.check(rows)
    requested = rows, np.arange(21), np.zeros_like(rows), np.ones(20, dtype=bool)
    picked, expected = (reader.pick(*requested) for reader in (there, here))
    assert np.array_equal(picked.time_s, expected.time_s)
    assert np.array_equal(picked.destination, expected.destination)
"""


@pytest.mark.slow
def test_processes_that_evict_each_others_rows_read_nothing_wrong(
    dataset: Dataset, remote: Location, tmp_path: Path
) -> None:
    limit = 14 * BLOCK
    arguments = dataset.folder, remote, tmp_path / "shared", limit
    processes = [run_python(READ_AT_RANDOM, *arguments, seed) for seed in range(3)]
    cache, used = Cache(folder=tmp_path / "shared", limit_bytes=limit), [0]
    while any(process.poll() is None for process in processes):
        used.append(cache.used_bytes())
        time.sleep(0.05)
    assert [process.communicate()[1].count("Error") for process in processes] == [0, 0, 0]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert 0 < max(used) <= 1.3 * limit  # three readers, each of which may be a batch ahead of the last look
