"""Reading prepared rows: the index of a split, single rows, and the check that files are what the manifest says."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordReader

from ping_llm.console import Advance
from ping_llm.errors import PingLlmError
from ping_llm.rows.format import LONG_GAP_S, CorruptRecordError, ProbeRow, decode_row
from ping_llm.rows.manifest import Manifest, SplitInfo
from ping_llm.rows.shard import INDEX_SCHEMA, ShardInfo, file_sha256
from ping_llm.rows.shard_files import ShardFiles, open_shards
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import Cache

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
