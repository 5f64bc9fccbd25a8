"""Reading prepared rows: the index of a split, whole rows, and the check that files are what the manifest says.

`RowSet` gives access to a split's bytes, wherever they are (docs/storage.md has the measurements behind this):

    local          shards are mapped where they lie
    remote, whole  copied to the cache by `fetch_ahead`, verified by the manifest's checksum, and mapped
    remote, parts  fetched in blocks when rows need them, each row verified by its own checksum

A whole copy is used if there is one, so processes need not agree on anything. Batches do not need whole rows: the
compiled code of `reader.py` picks single measurements out of the mapped bytes.
"""

import math
import resource
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordReader

from ping_llm.core.console import Advance, err, progress
from ping_llm.core.errors import PingLlmError, explained, one_line
from ping_llm.core.files import file_sha256
from ping_llm.rows import format as layout
from ping_llm.rows.format import LONG_GAP_S, Bytes, CorruptRecordError, Ints, ProbeRow, decode_row
from ping_llm.rows.manifest import INDEX_SCHEMA, INDEX_TYPES, Manifest, SplitInfo, index_fault
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import LIMIT_VARIABLE, BlockFile, Cache
from ping_llm.tasks.pool import map_in_order

READS_AT_ONCE: Final = 32
WHOLE_FILES_AT_ONCE: Final = 8
_SHARE_OF_LIMIT: Final = 0.9  # a dataset of at most this share of the cache is fetched whole


class CorruptRowError(PingLlmError):
    """A row of a shard is damaged. `row` is its number in the split."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:  # it crosses process boundaries
        return type(self), (str(self), self.row)


class RowSet:
    """One split of a prepared dataset. Opening it reads the manifest; index and rows are read on demand."""

    def __init__(self, folder: Path | str | Location, split: str = "train", *, cache: Cache | None = None) -> None:
        self.folder = locate(folder)
        self.split = split
        splits = Manifest.load(folder).splits
        if split not in splits:
            raise PingLlmError(f"{folder} has no split {split!r}, only {', '.join(splits)}")
        self.info: SplitInfo = splits[split]
        self.sweep_every_s = 2.0  # how often to look whether what is mapped was evicted from the cache
        self._cache = None if self.folder.is_local else cache or Cache.from_environment()
        self._whole: dict[int, tuple[Bytes, int]] = {}
        self._parts: dict[int, BlockFile] = {}
        self._pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="rows")  # without threads until it is used
        self._swept = time.monotonic()
        self._fetched_bytes = math.inf  # since the cache was last looked through
        self._warned = False
        _allow_open_files(4 * len(self.info.shards))
        found = {file.name: file.size() for file in self.folder.list()}
        for name, (size, _) in self.info.files.items():
            path = self.folder / name
            if name not in found:
                raise PingLlmError(f"{path} is missing; prepare the rows again or restore the file")
            if found[name] != size:
                raise PingLlmError(
                    f"{path} has {found[name]:,} bytes, but the manifest says {size:,}: it was damaged or replaced"
                )

    def __len__(self) -> int:
        return self.info.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._whole.clear()
        self._parts.clear()

    # -- the index

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the index, mapped rather than copied. Sources have shape (rows, 16)."""
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """The index, mapped. Its checksum and its numbers are checked here, because kernels trust them."""
        path = self._index_path()
        with explained(f"cannot read {path}", OSError, pa.ArrowException):
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            table.validate(full=True)
        if table.schema != INDEX_SCHEMA:
            raise PingLlmError(f"{path} has other columns than this version of ping-llm reads; prepare the rows again")
        if len(table) != self.info.rows:
            raise PingLlmError(f"{path} does not match the manifest: {len(table)} rows, not {self.info.rows}")
        if any(column.num_chunks > 1 or column.null_count for column in table.columns):
            raise PingLlmError(f"{path} is not an index that `ping-llm prepare` wrote; prepare the rows again")
        columns = {
            name: np.frombuffer(table[name].chunk(0).buffers()[1] if len(table) else b"", dtype=kind, count=len(table))
            for name, kind in INDEX_TYPES.items()
        }
        if fault := index_fault(columns, self.info):
            raise PingLlmError(f"{path} is damaged: {fault}; prepare the rows again or restore the file")
        return columns | {"source": columns["source"].view(np.uint8).reshape(-1, 16)}

    def _index_path(self) -> Path:
        name, expected = self.info.index_file, self.info.index_sha256
        path = self._local(name)
        if self._cache is not None and file_sha256(path) != expected:  # the local copy is damaged
            self._cache.forget(expected)
            path = self._local(name)
        if file_sha256(path) != expected:
            where = self.folder / name
            raise PingLlmError(f"{where}: checksum mismatch: the index was damaged or is of another dataset")
        return path

    def _local(self, name: str) -> Path:
        """The file itself, or its copy in the cache."""
        if self._cache is None:
            return self.folder.local / name
        size, sha256 = self.info.files[name]
        return self._cache.whole(self.folder / name, size=size, sha256=sha256)

    # -- whole rows

    def __getitem__(self, row: int) -> ProbeRow:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        is_retry = False
        while True:
            self.fetch(np.array([row]))
            try:
                return decode_row(self.record(row))
            except CorruptRecordError as error:
                if is_retry or not self.forget(row):  # what is damaged may be the local copy
                    raise self.corrupt(row, str(error)) from error
                is_retry = True

    def record(self, row: int) -> bytes:
        """The bytes of a row's record, from the mapped shard, without the block headers in between."""
        (begin,), (end,) = self._extent(np.array([row]))
        return layout.without_block_headers(self.shard_bytes(int(self.column("shard")[row])), begin, end)

    def corrupt(self, row: int, reason: str) -> CorruptRowError:
        """The error that says what is wrong with a row, and where it is."""
        file = self.info.shards[int(self.column("shard")[row])].file
        return CorruptRowError(f"{self.folder / file}, row {self.column('position')[row]}: {reason}", row)

    # -- the bytes of shards: files that are mapped or, in an object store, whole copies or blocks in the cache

    def shard_bytes(self, shard: int) -> Bytes:
        """The shard, mapped. Bytes that were not fetched are zero."""
        self._open(shard)
        return self._whole[shard][0] if shard in self._whole else self._parts[shard].array

    def is_verified(self, shard: int) -> bool:
        """Whether all its bytes were checked before, so that checking the headers of long rows is enough."""
        self._open(shard)
        return shard in self._whole

    def _open(self, shard: int) -> None:
        if shard in self._whole or shard in self._parts:
            return
        info = self.info.shards[shard]
        if self._cache is None:
            self._whole[shard] = _mapped(self.folder.local / info.file)
            return
        with suppress(FileNotFoundError):  # removed just now
            if (path := self._cache.find(size=info.bytes, sha256=info.sha256)) is not None:
                self._whole[shard] = _mapped(path)
                return
        source = self.folder / info.file
        self._parts[shard] = BlockFile(self._cache.blocks_path(info.sha256), info.bytes, source.open_random)

    def fetch(self, rows: Ints) -> Ints:
        """Bring the bytes of rows to this machine; returns the rows that were not here before."""
        if self._cache is None:
            return rows[:0]
        self._sweep(self._cache)
        begin, end = self._extent(rows)
        shards = self.column("shard")[rows]
        came = [rows[:0]]
        reads: list[tuple[BlockFile, int, int]] = []
        for shard in np.unique(shards).tolist():
            if self.is_verified(shard):
                continue
            part = self._parts[shard]
            chosen = np.flatnonzero(shards == shard)
            missing, ranges = part.missing(begin[chosen], end[chosen])
            came.append(rows[chosen[missing]])
            reads += [(part, *read) for read in ranges]
        if reads:
            self._make_room(self._cache, sum(end - begin for _, begin, end in reads))
            for done in [self._pool.submit(part.fetch, begin, end) for part, begin, end in reads]:
                done.result()
        return np.concatenate(came)

    def forget(self, row: int) -> bool:
        """Drop the local copy of a damaged row, so that it is fetched again; False if there is no other copy."""
        if self._cache is None:
            return False
        shard = int(self.column("shard")[row])
        if shard in self._whole:
            del self._whole[shard]
            self._cache.forget(self.info.shards[shard].sha256)
        else:
            (begin,), (end,) = self._extent(np.array([row]))
            self._parts[shard].forget(int(begin), int(end))
        return True

    def _extent(self, rows: Ints) -> tuple[Ints, Ints]:
        """Where rows begin and end in their shards' files."""
        offset, size = (self.column(name)[rows].astype(np.int64) for name in ("offset", "size"))
        return layout.physical(offset), layout.physical(offset + size - 1) + 1

    def _make_room(self, cache: Cache, needed: int) -> None:
        """Keep the cache below its limit. Scanning it is slow, so that is done once per hundredth of the limit."""
        step = cache.limit_bytes // 100
        if self._fetched_bytes + needed >= step:
            cache.make_room(max(needed, 10 * step))  # other processes fetch at the same time
            self._fetched_bytes = 0
        else:
            self._fetched_bytes += needed
        if needed > cache.limit_bytes // 4 and not self._warned:
            self._warned = True
            warnings.warn(
                f"one batch needs {needed / 1e6:,.0f} MB of {self.folder}, and the cache may hold "
                f"{cache.limit_bytes / 1e6:,.0f} MB: much will be fetched again and again. "
                f"Raise {LIMIT_VARIABLE} (data_cache_gb)",
                stacklevel=2,
            )

    def _sweep(self, cache: Cache) -> None:
        """Unmap what was evicted from the cache: its space is free only when nobody has it mapped."""
        if time.monotonic() - self._swept < self.sweep_every_s:
            return
        self._swept = time.monotonic()
        for shard in [shard for shard, part in self._parts.items() if part.is_evicted]:
            self._parts.pop(shard).close()
        for shard, (_, inode) in list(self._whole.items()):
            info = self.info.shards[shard]
            path = cache.find(size=info.bytes, sha256=info.sha256)
            if path is None or path.stat().st_ino != inode:
                del self._whole[shard]

    # -- checking everything

    def verify(self, advance: Advance) -> Iterator[str]:
        """Read everything and yield each fault found, with its file. `advance` is called with the bytes checked."""
        try:
            _ = self._columns
        except PingLlmError as error:
            yield str(error)
            return
        for number, shard in enumerate(self.info.shards):
            local = self._local(shard.file)
            if is_damaged := file_sha256(local) != shard.sha256:
                yield f"{self.folder / shard.file}: checksum mismatch: the shard was damaged or is of another dataset"
            faults = self._faults(number, local)
            yield from islice(faults, 1) if is_damaged else faults  # of a shard that is damaged, one example will do
            advance(shard.bytes)

    def _faults(self, shard: int, local: Path) -> Iterator[str]:
        """What in a shard cannot be read or contradicts the index."""
        path, entries = self.folder / self.info.shards[shard].file, np.flatnonzero(self.column("shard") == shard)
        try:
            stored = ArrayRecordReader(str(local), "readahead_buffer_size:0,max_parallelism:0").num_records()
        except RuntimeError as error:
            yield f"{path}: {one_line(error)}"
            return
        if stored != len(entries):
            yield f"{path}: holds {stored} rows, but the index names {len(entries)}"
            return
        for number in entries.tolist():
            try:
                row = self[number]
            except PingLlmError as error:
                yield str(error)
                continue
            found = {
                "count": len(row),
                "source": row.source.ljust(16, b"\0").hex(),
                "failed": int(np.isnan(row.rtt_ms).sum()),
                "long_gaps": int((np.diff(row.time_us // 1_000_000) > LONG_GAP_S).sum()),
                "family": row.family,
                "first_time_us": int(row.time_us[0]),
                "last_time_us": int(row.time_us[-1]),
            }
            for name, value in found.items():
                stored = self.column(name)[number]
                expected = stored.tobytes().hex() if name == "source" else int(stored)
                if value != expected:
                    yield str(self.corrupt(number, f"{name} is {value}, but the index says {expected}"))
                    break


def _mapped(path: Path) -> tuple[Bytes, int]:
    """A plain array over the map (slicing `np.memmap` itself takes ten times as long), and the file's inode."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")), path.stat().st_ino


def fetch_ahead(splits: list[tuple[Location, SplitInfo]], cache: Cache) -> None:
    """Copy to the cache those remote splits that fit as a whole. Parts of the others are fetched later."""
    left = int(cache.limit_bytes * _SHARE_OF_LIMIT)
    missing = []
    for folder, info in splits:
        size = sum(size for size, _ in info.files.values())
        if size > left:
            err.print(
                f"{folder} has {size / 1e9:.3g} GB of rows, more than the cache holds ({cache.limit_bytes / 1e9:.3g} "
                f"GB): they are fetched in parts, as they are needed. {LIMIT_VARIABLE} (data_cache_gb) sets the limit",
                markup=False,
            )
            continue
        left -= size
        files = [(folder / shard.file, shard.bytes, shard.sha256) for shard in info.shards]
        missing += [file for file in files if cache.find(size=file[1], sha256=file[2]) is None]
    if not missing:
        return

    def fetch(file: tuple[Location, int, str]) -> int:
        source, size, sha256 = file
        cache.whole(source, size=size, sha256=sha256)
        return size

    total = sum(size for _, size, _ in missing)
    err.print(f"fetching {total / 1e6:,.1f} MB of rows to {cache.folder}", markup=False)
    with progress("fetching rows (bytes)", total=total) as advance, ThreadPoolExecutor(WHOLE_FILES_AT_ONCE) as pool:
        for size in map_in_order(pool, fetch, missing, window=2 * WHOLE_FILES_AT_ONCE):
            advance(size)


def _allow_open_files(count: int) -> None:
    """Raise the limit on open files, usually 1024: every mapped file takes descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft != resource.RLIM_INFINITY and needed > soft:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
