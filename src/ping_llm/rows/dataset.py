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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordReader

from ping_llm.core.console import Advance, err, progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.rows.format import LONG_GAP_S, CorruptRecordError, ProbeRow, decode_row
from ping_llm.rows.manifest import INDEX_SCHEMA, Manifest, ShardInfo, SplitInfo
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import LIMIT_VARIABLE, BlockFile, Cache

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

READS_AT_ONCE: Final = 32
WHOLE_FILES_AT_ONCE: Final = 8
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
        if time.monotonic() - self._swept < self._cache.sweep_s:
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


# Reading prepared rows: the index of a split, single rows, and the check that files are what the manifest says.

# No read-ahead: rows are asked for in random order, and the default (16 MB a reader) would read far more than wanted.
_READER_OPTIONS: Final = "readahead_buffer_size:0,max_parallelism:0"


class RowSet:
    """One split of a prepared dataset. Opening it reads the manifest and maps the index; rows are read when asked for.

    >>> with RowSet(Path("data/probe_rows"), "train") as rows:
    ...     rows[0].source_address
    """

    def __init__(self, folder: Path | str | Location, split: str = "train", *, cache: Cache | None = None) -> None:
        self.folder = locate(folder)
        self.split = split
        self.manifest = Manifest.load(folder)
        if split not in self.manifest.splits:
            raise PingLlmError(f"{folder} has no split {split!r}, only {', '.join(self.manifest.splits)}")
        self.info: SplitInfo = self.manifest.splits[split]
        self._cache = cache or (Cache.from_environment() if self.folder.is_remote else None)
        sizes = {file.name: file.size() for file in self.folder.list()}
        for name, size in [
            *((s.file, s.bytes) for s in self.info.shards),
            (self.info.index_file, self.info.index_bytes),
        ]:
            _check_size(self.folder / name, sizes.get(name), size)
        self._readers: dict[int, Any] = {}

    @property
    def fingerprint(self) -> str:
        return self.info.fingerprint

    def __len__(self) -> int:
        return self.info.rows

    @cached_property
    def index(self) -> pa.Table:
        path = self._local(self.info.index_file, self.info.index_bytes, self.info.index_sha256)
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowException) as error:
            raise PingLlmError(f"cannot read {path}: {error}") from error
        if table.schema != INDEX_SCHEMA:
            raise PingLlmError(f"{path} has other columns than this version of ping-llm reads; prepare the rows again")
        if len(table) != self.info.rows:
            raise PingLlmError(f"{path} does not match the manifest: {len(table)} rows, not {self.info.rows}")
        return table

    @cached_property
    def shards(self) -> ShardFiles:
        """The shards' bytes, for reads that bypass ArrayRecord."""
        return open_shards(self.folder, self.info, self._cache)

    def _local(self, name: str, size: int, sha256: str) -> Path:
        """The file itself, or its copy in the cache."""
        if self._cache is None or self.folder.is_local:
            return self.folder.local / name
        return self._cache.whole(self.folder / name, size=size, sha256=sha256)

    def _shard(self, number: int) -> Path:
        shard = self.info.shards[number]
        return self._local(shard.file, shard.bytes, shard.sha256)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the index, mapped rather than copied. Sources have shape (rows, 16)."""
        if not len(self):
            return np.zeros((0, 16) if name == "source" else 0, dtype=np.uint8 if name == "source" else np.int64)
        column = self.index[name].chunk(0)
        if name == "source":
            return np.frombuffer(column.buffers()[1], dtype=np.uint8, count=16 * len(self)).reshape(-1, 16)
        return column.to_numpy()

    def __getitem__(self, row: int) -> ProbeRow:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        shard, position = int(self.column("shard")[row]), int(self.column("position")[row])
        path = self.folder / self.info.shards[shard].file
        try:
            return decode_row(self._reader(shard).read([position])[0])
        except (CorruptRecordError, RuntimeError, ValueError, IndexError) as error:
            raise PingLlmError(f"{path}, row {position}: {_one_line(error)}") from error

    def _reader(self, shard: int) -> Any:
        if shard not in self._readers:
            self._readers[shard] = ArrayRecordReader(str(self._shard(shard)), _READER_OPTIONS)
        return self._readers[shard]

    def verify(self, advance: Advance) -> Iterator[str]:
        """Read everything and yield each fault found, naming the file. `advance` is told the bytes checked."""
        index_path = self.folder / self.info.index_file
        local = self._local(self.info.index_file, self.info.index_bytes, self.info.index_sha256)
        if file_sha256(local) != self.info.index_sha256:
            yield f"{index_path}: checksum mismatch: the index was damaged or is of another dataset"
            return
        for number, shard in enumerate(self.info.shards):
            yield from self._verify_shard(number, shard)
            advance(shard.bytes)

    def _verify_shard(self, number: int, shard: ShardInfo) -> Iterator[str]:
        path = self.folder / shard.file
        damaged = file_sha256(self._shard(number)) != shard.sha256
        if damaged:
            yield f"{path}: checksum mismatch: the shard was damaged or is of another dataset"
        entries = np.flatnonzero(self.column("shard") == number)
        try:
            stored = self._reader(number).num_records()
        except RuntimeError as error:
            yield f"{path}: {_one_line(error)}"
            return
        if stored != len(entries):
            yield f"{path}: holds {stored} rows, but the index names {len(entries)}"
            return
        for row in entries.tolist():
            try:
                fault = self._disagreement(row)
            except PingLlmError as error:
                fault = str(error)
            if fault:
                yield fault
                if damaged:  # one example is enough where the whole file is in doubt
                    return

    def _disagreement(self, row: int) -> str | None:
        """How a row differs from its index entry."""
        decoded = self[row]
        found = {
            "count": len(decoded),
            "source": decoded.source.ljust(16, b"\0").hex(),
            "failed": int(np.isnan(decoded.rtt_ms).sum()),
            "long_gaps": int((np.diff(decoded.time_us // 1_000_000) > LONG_GAP_S).sum()),
            "family": decoded.family,
            "first_time_us": int(decoded.time_us[0]),
            "last_time_us": int(decoded.time_us[-1]),
        }
        for name, value in found.items():
            stored = self.column(name)[row]
            expected = stored.tobytes().hex() if name == "source" else int(stored)
            if value != expected:
                file = self.info.shards[int(self.column("shard")[row])].file
                position = int(self.column("position")[row])
                return f"{self.folder / file}, row {position}: {name} is {value}, but the index says {expected}"
        return None

    def close(self) -> None:
        for reader in self._readers.values():
            with suppress(RuntimeError):  # a reader that met damage says so again when it is closed
                reader.close()
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_size(path: Location, found: int | None, size: int) -> None:
    if found is None:
        raise PingLlmError(f"{path} is missing; prepare the rows again or restore the file")
    if found != size:
        raise PingLlmError(f"{path} has {found:,} bytes, but the manifest says {size:,}: it was damaged or replaced")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
