"""The cache of remote files: bounded, verified, shared by processes."""

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.storage import Location
from ping_llm.storage.cache import BLOCK, BlockFile, Cache, configure
from storage_fixtures import S3Server, bucket, run_python, s3, s3_server, slow, truncated

__all__ = ["bucket", "s3", "s3_server"]


class Remote:
    """Some files in the store, with what the cache must be told about them."""

    def __init__(self, folder: Location, count: int = 4, size: int = 100_000) -> None:
        self.data = [np.random.default_rng(n).bytes(size) for n in range(count)]
        self.files = [folder / f"file-{n}" for n in range(count)]
        for file, data in zip(self.files, self.data, strict=True):
            file.write_bytes(data)
        self.sha256 = [hashlib.sha256(data).hexdigest() for data in self.data]

    def get(self, cache: Cache, number: int) -> Path:
        return cache.whole(self.files[number], size=len(self.data[number]), sha256=self.sha256[number])


@pytest.fixture
def remote(s3: S3Server, bucket: Location) -> Remote:
    found = Remote(bucket)
    s3.requests.clear()
    return found


def cache_of(tmp_path: Path, limit: int = 10_000_000) -> Cache:
    return Cache(folder=tmp_path / "cache", limit_bytes=limit)


class TestWholeFiles:
    def test_are_fetched_once(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path)
        assert [remote.get(cache, 1).read_bytes() for _ in range(3)] == 3 * [remote.data[1]]
        assert s3.count("GET", "file-1") == 1

    def test_that_were_changed_are_fetched_again(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path)
        path = remote.get(cache, 0)
        with path.open("r+b") as file:
            file.seek(500)
            file.write(b"damaged")
        assert cache.find(size=len(remote.data[0]), sha256=remote.sha256[0]) is None
        assert remote.get(cache, 0).read_bytes() == remote.data[0]
        assert s3.count("GET", "file-0") == 2

    def test_that_were_only_touched_are_verified_and_kept(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path)
        remote.get(cache, 0).touch()
        assert remote.get(cache, 0).read_bytes() == remote.data[0]
        assert s3.count("GET", "file-0") == 1

    def test_with_another_checksum_than_the_manifest_says_are_never_used(self, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path)
        remote.files[0].write_bytes(remote.data[1])
        with pytest.raises(PingLlmError, match="file-0 is damaged: its checksum"):
            remote.get(cache, 0)
        assert cache.used_bytes() == 0

    def test_survive_a_truncated_body(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        s3.fail(truncated, times=2, method="GET", key="file-2")
        assert remote.get(cache_of(tmp_path), 2).read_bytes() == remote.data[2]

    def test_least_recently_used_go_first_and_the_limit_is_kept(self, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path, 350_000)
        first, second, third = (remote.get(cache, n) for n in (0, 1, 2))
        remote.get(cache, 0)
        remote.get(cache, 3)
        assert [p.exists() for p in (first, second, third)] == [True, False, True]
        assert cache.used_bytes() <= cache.limit_bytes

    def test_an_evicted_file_that_is_mapped_stays_readable(self, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path, 150_000)
        path = remote.get(cache, 0)
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
        remote.get(cache, 1)
        assert not path.exists()
        assert mapped.tobytes() == remote.data[0]

    def test_larger_than_the_limit_is_advice_not_a_hang(self, remote: Remote, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match=r"more than the cache may hold .* raise PING_LLM_CACHE_GB"):
            remote.get(cache_of(tmp_path, 50_000), 0)

    def test_a_folder_that_cannot_be_written_is_one_line(self, remote: Remote, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(PingLlmError, match=r"the cache folder .* cannot be used"):
            remote.get(cache_of(tmp_path), 0)


FETCH = """
import sys
from pathlib import Path
from ping_llm.storage import locate
from ping_llm.storage.cache import Cache, configure
cache = Cache(folder=Path(sys.argv[1]), limit_bytes=10_000_000)
path = cache.whole(locate(sys.argv[2]), size=int(sys.argv[3]), sha256=sys.argv[4])
print(path, flush=True)
"""


class TestProcesses:
    def arguments(self, remote: Remote, tmp_path: Path) -> tuple[object, ...]:
        return tmp_path / "cache", remote.files[0], len(remote.data[0]), remote.sha256[0]

    def test_that_want_the_same_file_fetch_it_once(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        s3.fail(slow(0.5), times=99, method="GET", key="file-0")
        processes = [run_python(FETCH, *self.arguments(remote, tmp_path)) for _ in range(3)]
        said = {process.communicate(timeout=60)[0].strip() for process in processes}
        assert {Path(path).read_bytes() for path in said} == {remote.data[0]}
        assert s3.count("GET", "file-0") == 1

    def test_one_that_dies_while_it_fetches_does_not_block_others(
        self, s3: S3Server, remote: Remote, tmp_path: Path
    ) -> None:
        s3.fail(slow(5), method="GET", key="file-0")
        dying = run_python(FETCH, *self.arguments(remote, tmp_path))
        while not s3.count("GET", "file-0"):
            time.sleep(0.02)
        unfinished = list((tmp_path / "cache").rglob("*.part"))
        dying.kill()
        dying.communicate()
        assert len(unfinished) == 1
        assert remote.get(cache_of(tmp_path), 0).read_bytes() == remote.data[0]
        assert not list((tmp_path / "cache").rglob("*.part"))

    def test_what_a_dead_process_left_is_removed_for_room(self, remote: Remote, tmp_path: Path) -> None:
        cache = cache_of(tmp_path, 150_000)
        left = tmp_path / "cache" / "files" / "ab" / "abandoned.part"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"x" * 120_000)
        os.utime(left, (0, 0))
        remote.get(cache, 0)
        assert not left.exists()


class TestBlocks:
    def file(self, remote: Remote, tmp_path: Path) -> BlockFile:
        return BlockFile(tmp_path / "blocks" / "one", len(remote.data[0]), remote.files[0].open_random)

    @pytest.fixture
    def remote(self, s3: S3Server, bucket: Location) -> Remote:
        return Remote(bucket, count=1, size=5 * BLOCK + 1000)

    def fetch(self, file: BlockFile, begin: int, end: int) -> None:
        for read in file.missing(np.array([begin]), np.array([end]))[1]:
            file.fetch(*read)

    def test_only_the_blocks_of_a_range_are_fetched_in_one_request(
        self, s3: S3Server, remote: Remote, tmp_path: Path
    ) -> None:
        file = self.file(remote, tmp_path)
        self.fetch(file, BLOCK + 10, 3 * BLOCK + 10)
        assert file.array[BLOCK : 4 * BLOCK].tobytes() == remote.data[0][BLOCK : 4 * BLOCK]
        starts = np.arange(6) * BLOCK
        missing, reads = file.missing(starts, starts + 1)
        assert missing.tolist() == [0, 4, 5]
        assert reads == [(0, BLOCK), (4 * BLOCK, 5 * BLOCK + 1000)]
        assert s3.count("GET", "file-0") == 1

    def test_the_last_block_is_shorter(self, remote: Remote, tmp_path: Path) -> None:
        file = self.file(remote, tmp_path)
        self.fetch(file, 5 * BLOCK, 5 * BLOCK + 1000)
        assert file.array[5 * BLOCK :].tobytes() == remote.data[0][5 * BLOCK :]

    def test_another_opening_of_the_file_sees_what_is_there(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        one, two = self.file(remote, tmp_path), self.file(remote, tmp_path)
        self.fetch(one, 0, 10)
        self.fetch(two, 0, 10)
        assert two.array[:10].tobytes() == remote.data[0][:10]
        assert s3.count("GET", "file-0") == 1

    def test_forgotten_blocks_are_fetched_again(self, s3: S3Server, remote: Remote, tmp_path: Path) -> None:
        file = self.file(remote, tmp_path)
        self.fetch(file, 0, 10)
        file.forget(0, 10)
        self.fetch(file, 0, 10)
        assert s3.count("GET", "file-0") == 2

    def test_an_evicted_file_knows_it(self, remote: Remote, tmp_path: Path) -> None:
        file = self.file(remote, tmp_path)
        assert not file.is_evicted
        (tmp_path / "blocks" / "one").unlink()
        assert file.is_evicted

    def test_holes_take_no_space(self, remote: Remote, tmp_path: Path) -> None:
        file = self.file(remote, tmp_path)
        self.fetch(file, 0, 10)
        assert (tmp_path / "blocks" / "one").stat().st_blocks * 512 <= 2 * BLOCK


@pytest.mark.parametrize("text", ["plenty", "-3"])
def test_a_wrong_limit_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setenv("PING_LLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PING_LLM_CACHE_GB", text)
    with pytest.raises(PingLlmError, match="PING_LLM_CACHE_GB"):
        Cache.from_environment()


def test_without_a_limit_half_of_what_is_free_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PING_LLM_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.delenv("PING_LLM_CACHE_GB", raising=False)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0.3 * free < Cache.from_environment().limit_bytes < 0.7 * free


def test_what_is_configured_holds_for_the_processes_that_are_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PING_LLM_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("PING_LLM_CACHE_GB", "7")
    configure()
    assert Cache.from_environment() == Cache(folder=Path("elsewhere"), limit_bytes=7_000_000_000)
    configure(str(tmp_path), 0.5)
    script = "from ping_llm.storage.cache import Cache; c = Cache.from_environment(); print(c.folder, c.limit_bytes)"
    assert run_python(script).communicate()[0].split() == [str(tmp_path), "500000000"]
