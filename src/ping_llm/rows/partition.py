"""Shuffle files between the two steps of preparation: measurements cut into buckets by the hash of their source.

Step one writes a *run* for each of its tasks: its measurements, family by family, in the order of their buckets. Step
two reads a range of buckets from every run, which is one span of bytes for each family. There are always 4096 buckets,
whatever the input: how many of them make a shard is decided when the total is known, so the shards do not depend on how
the input was cut into files.

A run file is: for each family, 4097 bucket offsets (int64, counted in measurements); then for each family its
measurements, one after the other. Within a bucket they keep the order of the input, so a run does not depend on how its
task was cut into batches.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.addresses import AddressColumn, source_hash
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import ValidMeasurements
from ping_llm.rows.format import HEADER, TIME_UNITS_US, SourceRuns, measurement_bytes

BUCKETS: Final = 4096
_BUCKET_SHIFT: Final = np.uint64(64 - 12)
FAMILIES: Final = (4, 6)

COLUMNS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    4: (("src", "<u4"), ("time", "<i8"), ("dst", "<u4"), ("rtt", "<f4")),
    6: (("src", "<u8"), ("src_low", "<u8"), ("time", "<i8"), ("dst", "<u8"), ("dst_low", "<u8"), ("rtt", "<f4")),
}
"""Columns by family. Addresses are numbers here, because numbers are what sorts fast: one for IPv4, two for IPv6."""

RECORDS: Final = {family: np.dtype(list(columns)) for family, columns in COLUMNS.items()}
"""A measurement as stored: 20 bytes with IPv4 addresses, 44 with IPv6."""

HEADER_BYTES: Final = len(FAMILIES) * (BUCKETS + 1) * 8

_BATCH_ROWS: Final = 131_072
"""Spans of many runs are joined up to about this size: DuckDB handles few large batches faster than many small ones."""

MERGED_AT_ONCE: Final = 128
"""Files open at a time while runs are joined."""

Offsets = npt.NDArray[np.int64]
"""Shape (families, buckets + 1)."""


def write_run(path: Path, measurements: ValidMeasurements) -> None:
    """Write a batch as one run."""
    bucket_of_source = (source_hash(measurements.src.families, measurements.src.packed) >> _BUCKET_SHIFT).astype(
        np.uint16
    )
    buckets = bucket_of_source[measurements.src.codes]
    offsets = np.zeros((len(FAMILIES), BUCKETS + 1), dtype="<i8")
    with path.open("wb") as file:
        file.seek(HEADER_BYTES)
        for number, family in enumerate(FAMILIES):
            chosen = np.flatnonzero(measurements.family == family)
            order = chosen[np.argsort(buckets[chosen], kind="stable")]
            np.cumsum(np.bincount(buckets[chosen], minlength=BUCKETS), out=offsets[number, 1:])
            columns = [
                *_address_numbers(measurements.src, order, family),
                measurements.time_us[order],
                *_address_numbers(measurements.dst, order, family),
                measurements.rtt_ms[order],
            ]
            records = np.empty(len(order), dtype=RECORDS[family])
            for (name, _), column in zip(COLUMNS[family], columns, strict=True):
                records[name] = column
            file.write(records.data)
        file.seek(0)
        file.write(offsets.data)


def merge_runs(parts: Sequence[Path], path: Path) -> None:
    """Join the runs of successive batches into one, as if they had been one batch."""
    while len(parts) > MERGED_AT_ONCE:
        parts = [_joined(parts[start : start + MERGED_AT_ONCE]) for start in range(0, len(parts), MERGED_AT_ONCE)]
    _merge(parts, path)


def _joined(parts: Sequence[Path]) -> Path:
    path = parts[0].with_suffix(".joined.run")
    _merge(parts, path)
    for part in parts:
        part.unlink()
    return path


def _merge(parts: Sequence[Path], path: Path) -> None:
    with ExitStack() as stack, path.open("wb", buffering=1 << 20) as file:
        opened = [stack.enter_context(part.open("rb")) for part in parts]
        offsets = [read_offsets(part.read(HEADER_BYTES)) for part in opened]
        file.write(np.sum(offsets, axis=0, dtype="<i8").data)
        descriptors = [part.fileno() for part in opened]
        for number in range(len(FAMILIES)):
            positions = [byte_positions(one)[number].tolist() for one in offsets]
            for bucket in range(BUCKETS):
                for descriptor, begins in zip(descriptors, positions, strict=True):
                    start, end = begins[bucket], begins[bucket + 1]
                    if end > start:
                        file.write(os.pread(descriptor, end - start, start))


def read_offsets(header: bytes) -> Offsets:
    return np.frombuffer(header, dtype="<i8").reshape(len(FAMILIES), BUCKETS + 1)


def byte_positions(offsets: Offsets) -> Offsets:
    """Where each bucket of each family begins in the run file (and, shifted by one, where it ends)."""
    positions = np.empty_like(offsets)
    base = HEADER_BYTES
    for number, family in enumerate(FAMILIES):
        positions[number] = base + offsets[number] * RECORDS[family].itemsize
        base = int(positions[number, -1])
    return positions


def _address_numbers(column: AddressColumn, order: npt.NDArray[np.int64], family: int) -> list[npt.NDArray[Any]]:
    codes = column.codes[order]
    if family == 4:
        return [np.ascontiguousarray(column.packed[:, :4]).view(">u4")[:, 0].astype("<u4")[codes]]
    halves = np.ascontiguousarray(column.packed).view(">u8").astype("<u8")
    return [halves[:, 0][codes], halves[:, 1][codes]]


def address_bytes(numbers: list[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The inverse of the above: addresses in network byte order, shape (n, 4) or (n, 16)."""
    words = np.stack(numbers, axis=1)
    return words.astype(words.dtype.newbyteorder(">")).view(np.uint8)


def record_batches(stored: Iterable[bytes], family: int) -> Iterator[pa.RecordBatch]:
    """Bytes of one family's measurements, from any number of runs, as Arrow batches of a good size."""
    waiting: list[bytes] = []
    rows = 0
    for data in stored:
        waiting.append(data)
        rows += len(data) // RECORDS[family].itemsize
        if rows >= _BATCH_ROWS:
            yield _record_batch(waiting, family)
            waiting, rows = [], 0
    if rows:
        yield _record_batch(waiting, family)


def _record_batch(stored: list[bytes], family: int) -> pa.RecordBatch:
    records = np.frombuffer(b"".join(stored), dtype=RECORDS[family])
    names = [name for name, _ in COLUMNS[family]]
    return pa.RecordBatch.from_arrays([pa.array(np.ascontiguousarray(records[name])) for name in names], names=names)


def arrow_schema(family: int) -> pa.Schema:
    return pa.schema([(name, pa.from_numpy_dtype(np.dtype(kind))) for name, kind in COLUMNS[family]])


# Sorting a range of buckets by source and time, and cutting the sorted stream into rows.
#
# DuckDB sorts: in memory when the measurements fit its share of the limit, on disk when they do not (a source may have
# more measurements than fit in memory). The order is total (source, time, destination, RTT), so equal inputs give equal
# bytes whatever order they came in.

SORTED_BATCH_ROWS: Final = 500_000


def sorted_batches(
    batches: Iterator[pa.RecordBatch], family: int, *, memory_bytes: int, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """The measurements of one family in row order, in batches."""
    schema = arrow_schema(family)
    failures: list[Exception] = []
    unsorted = pa.RecordBatchReader.from_batches(  # noqa: F841 - DuckDB finds it by its name
        schema, _remembering(batches, failures)
    )
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": 1,
        "memory_limit": f"{max(memory_bytes >> 20, 64)}MB",
        "temp_directory": str(scratch),
        "preserve_insertion_order": False,
    }
    order = ", ".join(name for name, _ in COLUMNS[family])
    try:
        with duckdb.connect(config=settings) as connection:
            connection.execute("SET enable_progress_bar = false")
            yield from connection.sql(f"SELECT * FROM unsorted ORDER BY {order}").to_arrow_reader(SORTED_BATCH_ROWS)
    except duckdb.Error as error:
        raise (failures[0] if failures else _explained(error, scratch)) from error


def _remembering(batches: Iterator[pa.RecordBatch], failures: list[Exception]) -> Iterator[pa.RecordBatch]:
    """The same batches. DuckDB makes errors of its own of those that its input raises, so they are kept here."""
    try:
        yield from batches
    except Exception as error:
        failures.append(error)
        raise


def _explained(error: duckdb.Error, scratch: Path) -> Exception:
    if isinstance(error, duckdb.OutOfMemoryException):
        return PingLlmError(
            "sorting needs more memory, or more disk space for temporary files: raise --memory-limit-gb or use fewer "
            f"--workers ({' '.join(str(error).split())[:200]})"
        )
    if isinstance(error, duckdb.IOException):
        code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
        return OSError(code, os.strerror(code), str(scratch))
    return error


def cut_into_rows(batches: Iterator[pa.RecordBatch], family: int, max_row_bytes: int) -> Iterator[SourceRuns]:
    """Group sorted batches by source, cutting a source's history where its row would exceed `max_row_bytes`.

    What follows the last source boundary of a batch is carried over to the next one, except that whole rows are given
    out as soon as they are full: memory is bounded by a batch and a row.
    """
    carried: list[npt.NDArray[Any]] | None = None
    for batch in batches:
        columns = [batch.column(i).to_numpy(zero_copy_only=False) for i in range(batch.num_columns)]
        if carried is not None:
            columns = [np.concatenate([a, b]) for a, b in zip(carried, columns, strict=True)]
        counts, used = _row_counts(columns, family, max_row_bytes, final=False)
        if used:
            yield _runs(columns, family, counts)
        carried = [c[used:] for c in columns]
    if carried is not None and len(carried[0]):
        counts, _ = _row_counts(carried, family, max_row_bytes, final=True)
        yield _runs(carried, family, counts)


def _row_counts(
    columns: list[npt.NDArray[Any]], family: int, max_row_bytes: int, *, final: bool
) -> tuple[npt.NDArray[np.int64], int]:
    """Measurements of each row that is complete, and how many measurements these rows use.

    The last source may go on in the next batch, unless this one is `final`.
    """
    sources = columns[:1] if family == 4 else columns[:2]
    time = columns[len(sources)]
    changes = np.flatnonzero(np.any([s[1:] != s[:-1] for s in sources], axis=0)) + 1
    bounds = np.concatenate([[0], changes, [len(time)] if final else []]).astype(np.int64)
    closed = np.diff(bounds)
    capacities = _row_capacity(family, 4, max_row_bytes), _row_capacity(family, 8, max_row_bytes)

    counts = closed.tolist()
    for source in reversed(np.flatnonzero(closed > min(capacities)).tolist()):
        counts[source : source + 1] = _cut(time[bounds[source] : bounds[source + 1]], *capacities)
    if not final:
        counts += _cut(time[bounds[-1] :], *capacities, keep_below=max(capacities))
    return np.array(counts, dtype=np.int64), sum(counts)


def _cut(time: npt.NDArray[np.int64], narrow: int, wide: int, keep_below: int = 1) -> list[int]:
    """Lengths of one source's rows, until fewer than `keep_below` measurements are left.

    Where a row ends depends on the next `narrow` measurements only, so it does not matter how they were batched.
    """
    counts = []
    while len(time) >= keep_below:
        head = time[:narrow]
        counts.append(len(head) if _fits_narrow(head) else min(wide, len(head)))
        time = time[counts[-1] :]
    return counts


def _row_capacity(family: int, time_width: int, max_row_bytes: int) -> int:
    padding = 32  # alignment of the columns and of the record, at most
    return max(1, (max_row_bytes - HEADER.itemsize - padding) // measurement_bytes(family, time_width))


def _fits_narrow(time: npt.NDArray[np.int64]) -> bool:
    """Whether times are stored in 4 bytes each: see `format.encode_rows`."""
    offsets = time - time[0]
    unit = next(u for u in TIME_UNITS_US if not (offsets % u).any())
    return bool(offsets[-1] // unit < 2**32)


def _runs(columns: list[npt.NDArray[Any]], family: int, counts: npt.NDArray[np.int64]) -> SourceRuns:
    parts = 1 if family == 4 else 2
    starts = np.cumsum(counts) - counts
    return SourceRuns(
        family=family,
        sources=address_bytes([c[starts] for c in columns[:parts]]),
        starts=starts,
        counts=counts,
        time_us=columns[parts],
        destinations=address_bytes(columns[parts + 1 : -1]),
        rtt_ms=columns[-1],
    )
