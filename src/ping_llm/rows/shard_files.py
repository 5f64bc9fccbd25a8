"""The bytes of a split's shards, wherever they are.

    local          mapped where they lie
    remote, whole  copied to the cache by `fetch_ahead`, verified by the manifest's checksum, and mapped
    remote, parts  fetched as rows ask for them, in blocks, each row verified by its own checksum

A global shuffle asks for rows all over the dataset, so it is soon wanted whole: if it fits the cache, it is fetched
whole and in large requests. If it does not, a cache of whole shards would hold little of what the next batch wants and
fetch 50 MB for a row of some KB; then only the blocks that hold the rows are fetched. A whole copy is used wherever
there is one, so processes need not agree on anything.
"""

import resource
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ping_llm.console import err, progress
from ping_llm.rows.manifest import SplitInfo
from ping_llm.storage import Location
from ping_llm.storage.blocks import BlockFile
from ping_llm.storage.cache import LIMIT_VARIABLE, Cache

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

READS_AT_ONCE: Final = 32
WHOLE_FILES_AT_ONCE: Final = 8
_SWEEP_S: Final = 2.0
_SHARE_OF_LIMIT: Final = 0.9
"""A dataset of at most this share of the cache is fetched whole."""


class ShardFiles(Protocol):
    def array(self, shard: int) -> Bytes:
        """The shard, mapped. Of parts that were not fetched the bytes are zero."""

    def fetch(self, shards: Ints, begin: Ints, end: Ints) -> Ints:
        """See that these byte ranges are here; which of them came only now?"""

    def is_verified(self, shard: int) -> bool:
        """Whether all its bytes were checked before, so that rows need no more than a look."""

    def forget(self, shard: int, begin: int, end: int) -> bool:
        """Drop the copy of a damaged range. Is there another to fetch?"""


def open_shards(folder: Location, info: SplitInfo, cache: Cache | None) -> ShardFiles:
    _allow_open_files(4 * len(info.shards))
    if folder.is_local:
        return LocalShards(folder, info)
    return RemoteShards(folder, info, cache or Cache.from_environment())


class LocalShards:
    def __init__(self, folder: Location, info: SplitInfo) -> None:
        self._paths = [folder.local / shard.file for shard in info.shards]
        self._arrays: dict[int, Bytes] = {}

    def array(self, shard: int) -> Bytes:
        if shard not in self._arrays:
            # A plain array over the map: slicing `np.memmap` itself takes ten times as long.
            self._arrays[shard] = np.asarray(np.memmap(self._paths[shard], dtype=np.uint8, mode="r"))
        return self._arrays[shard]

    def fetch(self, shards: Ints, begin: Ints, end: Ints) -> Ints:
        return np.zeros(0, dtype=np.int64)

    def is_verified(self, shard: int) -> bool:
        return True

    def forget(self, shard: int, begin: int, end: int) -> bool:
        return False


class RemoteShards:
    def __init__(self, folder: Location, info: SplitInfo, cache: Cache) -> None:
        self._folder = folder
        self._info = info
        self._cache = cache
        self._whole: dict[int, tuple[Bytes, int]] = {}
        self._parts: dict[int, BlockFile] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._swept = time.monotonic()
        self._fetched = cache.limit_bytes  # since the cache was last looked at: look at the first fetch
        self._warned = False

    def array(self, shard: int) -> Bytes:
        self._open(shard)
        return self._whole[shard][0] if shard in self._whole else self._parts[shard].array

    def is_verified(self, shard: int) -> bool:
        self._open(shard)
        return shard in self._whole

    def fetch(self, shards: Ints, begin: Ints, end: Ints) -> Ints:
        self._sweep()
        came: list[Ints] = []
        reads: list[tuple[BlockFile, int, int]] = []
        for shard in np.unique(shards).tolist():
            self._open(shard)
            if shard in self._whole:
                continue
            part = self._parts[shard]
            chosen = np.flatnonzero(shards == shard)
            blocks, owner = part.blocks(begin[chosen], end[chosen])
            missing = part.missing(blocks)
            came.append(chosen[np.unique(owner[missing])])
            reads += [(part, *read) for read in part.reads(np.unique(blocks[missing]))]
        if reads:
            self._read(reads)
        return np.concatenate(came) if came else np.zeros(0, dtype=np.int64)

    def _read(self, reads: list[tuple[BlockFile, int, int]]) -> None:
        wanted = sum(end - begin for _, begin, end in reads)
        for part in {id(part): part for part, _, _ in reads}.values():
            part.touch()
        self._make_room(wanted)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="rows")
        for done in [self._pool.submit(part.fetch, begin, end) for part, begin, end in reads]:
            done.result()

    def _make_room(self, wanted: int) -> None:
        """Looking through the cache takes a while, so it is done for every hundredth of it."""
        self._fetched += wanted
        step = self._cache.limit_bytes // 100
        if self._fetched >= step:
            self._cache.make_room(max(wanted, 10 * step))  # other processes fetch at the same time
            self._fetched = 0
        if wanted > self._cache.limit_bytes // 4 and not self._warned:
            self._warned = True
            warnings.warn(
                f"one batch needs {wanted / 1e6:,.0f} MB of {self._folder}, and the cache may hold "
                f"{self._cache.limit_bytes / 1e6:,.0f} MB: much will be fetched again and again. "
                f"Raise {LIMIT_VARIABLE} (data_cache_gb)",
                stacklevel=2,
            )

    def forget(self, shard: int, begin: int, end: int) -> bool:
        if shard in self._whole:
            del self._whole[shard]
            self._cache.forget(self._info.shards[shard].sha256)
        else:
            self._parts[shard].forget(begin, end)
        return True

    def _open(self, shard: int) -> None:
        if shard in self._whole or shard in self._parts:
            return
        info = self._info.shards[shard]
        path = self._cache.find(size=info.bytes, sha256=info.sha256)
        if path is not None:
            try:
                inode = path.stat().st_ino
                self._whole[shard] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")), inode
            except FileNotFoundError:  # removed just now
                path = None
        if path is None:
            source = self._folder / info.file
            self._parts[shard] = BlockFile(self._cache.blocks_path(info.sha256), info.bytes, source.open_random)

    def _sweep(self) -> None:
        """Let go of what was removed from the cache: its space is free only when nobody has it mapped."""
        if time.monotonic() - self._swept < _SWEEP_S:
            return
        self._swept = time.monotonic()
        for shard in [shard for shard, part in self._parts.items() if part.is_evicted]:
            self._parts.pop(shard).close()
        for shard, (_, inode) in list(self._whole.items()):
            info = self._info.shards[shard]
            path = self._cache.find(size=info.bytes, sha256=info.sha256)
            if path is None or path.stat().st_ino != inode:
                del self._whole[shard]


def fetch_ahead(splits: list[tuple[Location, SplitInfo]], cache: Cache) -> None:
    """Copy remote splits to the cache, each of them if it fits whole. The others are fetched in parts, later."""
    left = int(cache.limit_bytes * _SHARE_OF_LIMIT)
    wanted = []
    for folder, info in splits:
        size = sum(shard.bytes for shard in info.shards) + info.index_bytes
        if size > left:
            err.print(
                f"{folder} has {size / 1e9:.3g} GB of rows, more than the cache holds ({cache.limit_bytes / 1e9:.3g} "
                f"GB): they are fetched in parts, as they are needed. {LIMIT_VARIABLE} (data_cache_gb) sets the limit",
                soft_wrap=True,
                markup=False,
            )
            continue
        left -= size
        files = [(folder / shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        wanted += [file for file in files if cache.find(size=file[1], sha256=file[2]) is None]
    if not wanted:
        return
    total = sum(size for _, size, _ in wanted)
    err.print(f"fetching {total / 1e6:,.1f} MB of rows to {cache.folder}", soft_wrap=True, markup=False)
    with progress("fetching rows (bytes)", total=total) as advance, ThreadPoolExecutor(WHOLE_FILES_AT_ONCE) as pool:
        jobs = {pool.submit(cache.whole, source, size=size, sha256=sha): size for source, size, sha in wanted}
        try:
            for job in as_completed(jobs):
                job.result()
                advance(jobs[job])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _allow_open_files(count: int) -> None:
    """Every mapped file takes descriptors, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
