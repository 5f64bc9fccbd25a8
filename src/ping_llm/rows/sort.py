"""Sorting a range of buckets by source and time, and cutting the sorted stream into rows.

DuckDB sorts: in memory when the measurements fit its share of the limit, on disk when they do not (a source may have
more measurements than fit in memory). The order is total (source, time, destination, RTT), so equal inputs give equal
bytes whatever order they came in.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.errors import PingLlmError
from ping_llm.rows import spill
from ping_llm.rows.format import HEADER, TIME_UNITS_US, SourceRuns, measurement_bytes

SORTED_BATCH_ROWS: Final = 500_000


def sorted_batches(
    batches: Iterator[pa.RecordBatch], family: int, *, memory_bytes: int, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """The measurements of one family in row order, in batches."""
    schema = spill.arrow_schema(family)
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
    order = ", ".join(name for name, _ in spill.COLUMNS[family])
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
        sources=spill.address_bytes([c[starts] for c in columns[:parts]]),
        starts=starts,
        counts=counts,
        time_us=columns[parts],
        destinations=spill.address_bytes(columns[parts + 1 : -1]),
        rtt_ms=columns[-1],
    )
