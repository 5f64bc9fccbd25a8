"""Step two of preparation: sort a range of buckets from all runs, cut it into rows, and write one shard per split.

DuckDB sorts: in memory if the measurements fit its share of the limit, otherwise on disk (a source may have more
measurements than fit in memory). The order is total (source, time, destination, RTT), so the same measurements give the
same bytes in whatever order they came.
"""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.core.files import file_sha256
from ping_llm.core.measurements import source_hash
from ping_llm.core.randomness import mix64, uniform
from ping_llm.rows import format as layout
from ping_llm.rows.format import Bytes, Ints, RowBatch, encode_rows
from ping_llm.rows.manifest import INDEX_SCHEMA, INDEX_TYPES, SPLITS, ShardInfo
from ping_llm.rows.partition import FAMILIES, RECORDS, Marker, Spans, Task, record_batches, span_reader
from ping_llm.storage import Location

SORTED_BATCH_ROWS: Final = 500_000
SORT_MEMORY_SHARE: Final = 0.5  # DuckDB's part of a worker's memory; the rest is for what goes in and comes out

_SPLIT_SALT: Final = np.uint64(0x5EED_0F_5B117)  # the bucket is cut from the same hash


def write_shard(task: Task[Spans]) -> Marker:
    """Sort a range of buckets, which lie in these spans of the runs, and write its rows, each to its source's split."""
    read_spans, memory = span_reader(task.work / "runs"), int(task.memory_bytes * SORT_MEMORY_SHARE)
    with task.temporary_folder() as scratch:
        writers = {split: ShardWriter(scratch / f"{split}-{task.number:05d}.arrayrecord") for split in SPLITS}
        copies = Counter[str]()
        for family in FAMILIES:
            unsorted = record_batches(read_spans(task.input[family]), family)
            batches = sorted_batches(unsorted, family, memory_bytes=memory, scratch=scratch)
            batches = without_copies(batches, copies)
            for rows in cut_into_rows(batches, family, task.settings.max_row_bytes):
                in_train = is_train(rows, task.settings.train_ratio)
                writers["train"].add(rows.take(in_train))
                writers["eval"].add(rows.take(~in_train))
        infos = {split: asdict(writer.close()) for split, writer in writers.items()}
        return task.finish(
            [path for writer in writers.values() for path in (writer.path, writer.index_path)],
            bytes_in=sum(span.end - span.start for spans in task.input.values() for span in spans),
            bytes_out=sum(info["bytes"] for info in infos.values()),
            dropped=copies,
            **infos,
        )


def is_train(rows: RowBatch, train_ratio: float) -> npt.NDArray[np.bool_]:
    """Which rows belong to the training split: a function of the source address alone."""
    families = np.full(len(rows.sources), rows.family, dtype=np.uint8)
    return uniform(mix64(source_hash(families, rows.sources) ^ _SPLIT_SALT)) < train_ratio


def sorted_batches(
    batches: Iterator[pa.RecordBatch], family: int, *, memory_bytes: int, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """The measurements of one family in row order, in batches."""
    failures: list[Exception] = []

    def remembering_failures() -> Iterator[pa.RecordBatch]:  # DuckDB replaces exceptions raised here by its own
        try:
            yield from batches
        except Exception as error:
            failures.append(error)
            raise

    names = RECORDS[family].names or ()
    schema = pa.schema([(name, pa.from_numpy_dtype(RECORDS[family][name])) for name in names])
    unsorted = pa.RecordBatchReader.from_batches(schema, remembering_failures())  # noqa: F841 - DuckDB finds it by name
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": 1,
        "memory_limit": f"{max(memory_bytes >> 20, 64)}MB",
        "temp_directory": str(scratch),
        "preserve_insertion_order": False,
    }
    with _disk_errors(scratch), duckdb.connect(config=settings) as connection:
        connection.execute("SET enable_progress_bar = false")
        query = f"SELECT * FROM unsorted ORDER BY {', '.join(names)}"
        try:
            yield from connection.sql(query).to_arrow_reader(SORTED_BATCH_ROWS)
        except duckdb.Error:
            if failures:
                raise failures[0] from None
            raise


def without_copies(batches: Iterator[pa.RecordBatch], dropped: Counter[str]) -> Iterator[pa.RecordBatch]:
    """Sorted measurements without exact copies, which are adjacent and counted as duplicates."""
    last: list[Any] | None = None
    for batch in batches:
        columns = [batch.column(i).to_numpy(zero_copy_only=False) for i in range(batch.num_columns)]
        columns = [column.view(np.uint32) if column.dtype == np.float32 else column for column in columns]
        is_first = last is None or any(column[0] != value for column, value in zip(columns, last, strict=True))
        is_new = np.append(is_first, np.logical_or.reduce([column[1:] != column[:-1] for column in columns]))
        last = [column[-1] for column in columns]
        if not is_new.all():
            dropped["duplicate"] += int(np.count_nonzero(~is_new))
            batch = batch.filter(pa.array(is_new))
        if len(batch):
            yield batch


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Errors of DuckDB and ArrayRecord (plain `RuntimeError`s) that mostly mean a full disk become `OSError`s."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise PingLlmError(
            "sorting needs more memory, or more disk space for temporary files: raise --memory-limit-gb or use fewer "
            f"--workers ({one_line(error)})"
        ) from error
    except (duckdb.IOException, RuntimeError) as error:
        code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def cut_into_rows(batches: Iterator[pa.RecordBatch], family: int, max_row_bytes: int) -> Iterator[RowBatch]:
    """Group sorted batches by source, cutting a source's history where its row would exceed `max_row_bytes`.

    What follows the last source boundary of a batch is carried over to the next one, except for rows that are full:
    memory is bounded by a batch and a row.
    """
    carried: list[npt.NDArray[Any]] | None = None
    for batch in batches:
        columns = [batch.column(i).to_numpy(zero_copy_only=False) for i in range(batch.num_columns)]
        if carried is not None:
            columns = [np.concatenate([a, b]) for a, b in zip(carried, columns, strict=True)]
        counts = _row_counts(columns, family, max_row_bytes, final=False)
        used = int(counts.sum())
        if used:
            yield _row_batch([c[:used] for c in columns], family, counts)
        carried = [c[used:] for c in columns]
    if carried is not None and len(carried[0]):
        yield _row_batch(carried, family, _row_counts(carried, family, max_row_bytes, final=True))


def _row_counts(columns: list[npt.NDArray[Any]], family: int, max_row_bytes: int, *, final: bool) -> Ints:
    """Measurements of each row that is complete. The last source may continue in the next batch, unless `final`."""
    sources = columns[:1] if family == 4 else columns[:2]
    time = columns[len(sources)]
    changes = np.flatnonzero(np.any([s[1:] != s[:-1] for s in sources], axis=0)) + 1
    bounds = np.concatenate([[0], changes, [len(time)] if final else []]).astype(np.int64)
    closed = np.diff(bounds)
    narrow, wide = layout.capacity(family, max_row_bytes)

    counts = closed.tolist()
    for source in reversed(np.flatnonzero(closed > wide).tolist()):
        counts[source : source + 1] = _cut(time[bounds[source] : bounds[source + 1]], narrow, wide)
    if not final:
        counts += _cut(time[bounds[-1] :], narrow, wide, keep_below=narrow)
    return np.array(counts, dtype=np.int64)


def _cut(time: Ints, narrow: int, wide: int, keep_below: int = 1) -> list[int]:
    """Lengths of one source's rows, until fewer than `keep_below` measurements are left.

    A row has room for `narrow` times of 4 bytes or `wide` ones of 8 (see `format.encode_rows`). Where it ends depends
    on the next `narrow` measurements only, so it does not matter how they were batched.
    """
    counts = []
    while len(time) >= keep_below:
        since_first = time[:narrow] - time[0]
        unit = next(u for u in layout.TIME_UNITS_US if not (since_first % u).any())
        counts.append(min(len(since_first), narrow if since_first[-1] // unit < 2**32 else wide))
        time = time[counts[-1] :]
    return counts


def _row_batch(columns: list[npt.NDArray[Any]], family: int, counts: Ints) -> RowBatch:
    numbers = 1 if family == 4 else 2
    sources = _address_bytes([c[np.cumsum(counts) - counts] for c in columns[:numbers]])
    return RowBatch(
        family=family,
        sources=np.pad(sources, ((0, 0), (0, 16 - sources.shape[1]))),
        counts=counts,
        time_us=columns[numbers],
        destinations=_address_bytes(columns[numbers + 1 : -1]),
        rtt_ms=columns[-1],
    )


def _address_bytes(numbers: list[npt.NDArray[Any]]) -> Bytes:
    """Addresses in network byte order, shape (n, 4) or (n, 16), from the numbers of `partition.RECORDS`."""
    words = np.stack(numbers, axis=1)
    return words.astype(words.dtype.newbyteorder(">")).view(np.uint8)


class ShardWriter:
    """Appends rows to a new ArrayRecord file. `close` checks it, describes it and writes its part of the index."""

    def __init__(self, path: Path) -> None:
        self.path, self.index_path = path, path.with_suffix(".index")
        self._writer = ArrayRecordWriter(str(path), layout.WRITER_OPTIONS)
        self._next_chunk = layout.FIRST_CHUNK
        self._entries: list[pa.Table] = []
        self._rows = 0

    def add(self, rows: RowBatch) -> None:
        if not len(rows.counts):
            return
        records, index = encode_rows(rows)
        with _disk_errors(self.path):
            for record in records:
                self._writer.write(record)
        index["shard"] = np.zeros(len(records))  # numbered when all shards are known
        index["position"] = self._rows + np.arange(len(records))
        index["offset"] = self._next_chunk + index["offset"]
        self._entries.append(index_table([index[name].astype(kind) for name, kind in INDEX_TYPES.items()]))
        self._next_chunk = int(index["offset"][-1] + index["size"][-1])
        self._rows += len(records)

    def close(self) -> ShardInfo:
        with _disk_errors(self.path):
            self._writer.close()
        index = pa.concat_tables(self._entries or [INDEX_SCHEMA.empty_table()]).combine_chunks()
        self._check(index["offset"].to_numpy().astype(np.int64))
        write_index(index, self.index_path)
        return ShardInfo(
            file=self.path.name,
            rows=self._rows,
            measurements=int(np.sum(index["count"].to_numpy(), dtype=np.int64)),
            failed=int(np.sum(index["failed"].to_numpy(), dtype=np.int64)),
            bytes=self.path.stat().st_size,
            sha256=file_sha256(self.path),
        )

    def _check(self, offsets: Ints) -> None:
        """Check that each record begins where the index says: ArrayRecord does not promise the layout we rely on."""
        file = np.memmap(self.path, dtype=np.uint8, mode="r")
        found = file[layout.physical(offsets[:, None] + np.arange(len(layout.MAGIC)))]
        if not (found == np.frombuffer(layout.MAGIC, dtype=np.uint8)).all():
            raise PingLlmError(
                f"{self.path}: this array_record release lays records out in a way this version of ping-llm does not "
                "know; install the array_record version named in the lock file"
            )


def index_table(columns: Sequence[npt.NDArray[Any]]) -> pa.Table:
    """An index of these columns, in the order of `INDEX_TYPES`. They are not copied."""
    arrays = [
        pa.Array.from_buffers(field.type, len(column), [None, pa.py_buffer(column)])
        for field, column in zip(INDEX_SCHEMA, columns, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def write_index(index: pa.Table, path: Path) -> None:
    """Uncompressed Arrow IPC: it is mapped, not read, so start-up touches only the columns it uses."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, index.schema) as writer:
        writer.write_table(index)


def read_index(path: Location) -> pa.Table:
    return pa.ipc.open_file(path.read_bytes()).read_all()


def join_indexes(parts: Iterable[pa.Table], rows: int, path: Path) -> None:
    """One index of all shards. Columns are gathered on disk: a large dataset's index may be larger than the memory."""
    if not rows:
        write_index(INDEX_SCHEMA.empty_table(), path)
        return
    columns = [_gathered(path.with_suffix(f".{name}"), np.dtype(kind), rows) for name, kind in INDEX_TYPES.items()]
    begin = 0
    for number, part in enumerate(parts):
        end = begin + len(part)
        for name, column in zip(INDEX_TYPES, columns, strict=True):
            column[begin:end] = np.frombuffer(part[name].chunk(0).buffers()[1], dtype=column.dtype, count=len(part))
        columns[0][begin:end] = number
        begin = end
    write_index(index_table(columns), path)


def _gathered(path: Path, kind: np.dtype[Any], rows: int) -> npt.NDArray[Any]:
    """A column on disk. Space is allocated first: writing to a map of a full disk would kill the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, rows * kind.itemsize)
    return np.memmap(path, dtype=kind, mode="r+", shape=rows)
