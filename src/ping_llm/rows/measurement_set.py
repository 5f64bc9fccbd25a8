"""Measurements as columns of numbers, from measurement files or from prepared rows.

Every address becomes the number of a node. Nodes are numbered in the order of their addresses, IPv4 first, so that the
numbers do not depend on how the measurements were ordered or cut into files.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.addresses import ADDRESS_BYTES, AddressColumn, format_address
from ping_llm.core.console import Advance
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import validate
from ping_llm.core.observations import Ints, Observations
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import ProbeRow
from ping_llm.sources import files
from ping_llm.sources.files import OPTIONAL_WITHOUT_TIME, Piece
from ping_llm.storage import Location

BATCH_ROWS: Final = 1_000_000
"""Measurements in work at once; the memory beyond the result grows with it."""


@dataclass(frozen=True, kw_only=True)
class MeasurementSet:
    """Measurements and the addresses of their nodes: `nodes[observations.source[i]]` is who sent the i-th."""

    nodes: tuple[str, ...]
    observations: Observations
    """In time order; measurements of one time are in the order of the input."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many could not be used, by reason (see `measurements.DROP_REASONS`)."""


def joined(sets: Sequence[MeasurementSet]) -> MeasurementSet:
    """Several sets as one, in time order, with one number for each address."""
    if len(sets) == 1:
        return sets[0]
    number: dict[str, int] = {}
    empty = np.zeros(0, dtype=np.int64)
    columns: list[list[Any]] = [[empty], [empty], [np.zeros(0)], [np.zeros(0, np.float32)]]
    for one in sets:
        ids, known = [number.setdefault(node, len(number)) for node in one.nodes], one.observations
        ends = np.array(ids, dtype=np.int64)[[known.source, known.destination]]
        for column, more in zip(columns, (*ends, known.time_s, known.rtt_ms), strict=True):
            column.append(more)
    source, destination, time_s, rtt_ms = map(np.concatenate, columns)
    together = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    return MeasurementSet(nodes=tuple(number), observations=together.take(np.argsort(time_s, kind="stable")))


@dataclass(frozen=True, kw_only=True)
class _Part:
    time_us: Ints
    source: AddressColumn
    destination: AddressColumn
    rtt_ms: npt.NDArray[np.float32]
    is_timed: bool = True


def read_observations(
    inputs: Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    on_progress: Advance | None = None,
) -> MeasurementSet:
    """The measurements of files, folders or globs, of every kind that `ping-llm prepare` and `import atlas` take.

    `columns` gives the files' names of schema columns that have other names there. Files without a column of times are
    taken, too: all times are then NaN. `on_progress` is told how many measurements were read.
    """
    parts: list[_Part] = []
    dropped: Counter[str] = Counter()
    for piece in _pieces(files.expand([str(i) for i in inputs]), columns or {}):
        for raw in files.read(piece, BATCH_ROWS):
            dropped += raw.dropped
            _add(raw.batch, parts, dropped)
            if on_progress is not None:
                on_progress(raw.batch.num_rows)
    return _some(parts, dropped)


def table_observations(table: pa.Table | None) -> MeasurementSet:
    """The measurements of a table whose columns have the schema's names; None: no measurements."""
    parts: list[_Part] = []
    dropped: Counter[str] = Counter()
    if table is None:
        return _joined(parts, dropped)
    for batch in table.to_batches():
        _add(batch, parts, dropped)
    return _some(parts, dropped)


def _add(batch: pa.RecordBatch, parts: list[_Part], dropped: Counter[str]) -> None:
    is_timed = "event_time" in batch.schema.names
    if not is_timed:
        batch = batch.append_column("event_time", pa.array(np.zeros(batch.num_rows, dtype=np.int64)))
    valid = validate(batch)
    dropped.update(valid.dropped)
    if len(valid):
        ends = {"source": valid.src, "destination": valid.dst}
        parts.append(_Part(time_us=valid.time_us, **ends, rtt_ms=valid.rtt_ms, is_timed=is_timed))


def _some(parts: list[_Part], dropped: Counter[str]) -> MeasurementSet:
    if not parts:
        raise PingLlmError(f"no usable measurement in the input; dropped: {dict(dropped) or 'none, it is empty'}")
    if len({part.is_timed for part in parts}) > 1:
        raise PingLlmError("some of the files have a column of times, others have not: give times for all or for none")
    return _joined(parts, dropped)


def _pieces(paths: list[Location], columns: Mapping[str, str]) -> Iterator[Piece]:
    """All files are looked at before the first is read."""
    described = []
    for path in paths:
        if path.suffix in {".gz", ".bz2"} and path.name.count(".") == 1:  # daily Atlas dumps: ping-2024-05-01T0000.bz2
            described.append([Piece(path=str(path), format="atlas", columns={}, bytes=path.size())])
        else:
            described.append(files.describe(path, columns, BATCH_ROWS, OPTIONAL_WITHOUT_TIME)[1])
    for pieces in described:
        yield from pieces


def rows_observations(
    folder: Path | str | Location, split: str, *, on_progress: Advance | None = None, batch_rows: int = BATCH_ROWS
) -> MeasurementSet:
    """The measurements of one split of prepared rows. `on_progress` is told how many were read."""
    parts: list[_Part] = []
    with RowSet(folder, split) as rows:
        if on_progress is not None:
            on_progress(0, total=rows.info.measurements)
        for family in ADDRESS_BYTES:
            chosen = np.flatnonzero(rows.column("family") == family)
            batch = np.cumsum(rows.column("count")[chosen], dtype=np.int64) // batch_rows
            for some in np.split(chosen, np.flatnonzero(np.diff(batch)) + 1):
                if len(some):
                    rows.fetch(some)
                    parts.append(_of_rows([rows[row] for row in some.tolist()], rows.column("source")[some]))
                    if on_progress is not None:
                        on_progress(len(parts[-1].time_us))
    return _joined(parts, {})


def _of_rows(rows: list[ProbeRow], sources: npt.NDArray[np.uint8]) -> _Part:
    """The measurements of rows of one family."""
    families = np.full(len(rows), rows[0].family, dtype=np.uint8)
    number = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
    return _Part(
        time_us=np.concatenate([row.time_us for row in rows]),
        source=AddressColumn(families=families, packed=sources, codes=number),
        destination=_distinct(rows[0].family, np.concatenate([row.destinations for row in rows])),
        rtt_ms=np.concatenate([row.rtt_ms for row in rows]),
    )


def _distinct(family: int, packed: npt.NDArray[np.uint8]) -> AddressColumn:
    """A table of the distinct addresses among many of one family."""
    width = ADDRESS_BYTES[family]
    buffer = pa.py_buffer(np.ascontiguousarray(packed[:, :width]))
    encoded = pa.Array.from_buffers(pa.binary(width), len(packed), [None, buffer]).dictionary_encode()
    table = np.zeros((len(encoded.dictionary), 16), dtype=np.uint8)
    table[:, :width] = np.frombuffer(encoded.dictionary.buffers()[1], np.uint8, table.shape[0] * width).reshape(
        -1, width
    )
    return AddressColumn(
        families=np.full(len(table), family, dtype=np.uint8), packed=table, codes=encoded.indices.to_numpy()
    )


def _joined(parts: list[_Part], dropped: Mapping[str, int]) -> MeasurementSet:
    if not parts:
        nothing = np.zeros(0)
        ids = np.zeros(0, dtype=np.int64)
        empty = Observations(source=ids, destination=ids, time_s=nothing, rtt_ms=nothing.astype(np.float32))
        return MeasurementSet(nodes=(), observations=empty, dropped=dict(dropped))
    nodes, ids = _numbered([p.source for p in parts] + [p.destination for p in parts])
    source, destination = np.split(ids, 2)
    time_us = np.concatenate([p.time_us for p in parts])
    rtt_ms = np.concatenate([p.rtt_ms for p in parts])
    if (time_us[1:] < time_us[:-1]).any():
        order = np.argsort(time_us, kind="stable")
        time_us, source, destination, rtt_ms = (c[order] for c in (time_us, source, destination, rtt_ms))
    time_s = time_us / 1e6 if parts[0].is_timed else np.full(len(time_us), np.nan)
    observations = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    return MeasurementSet(nodes=nodes, observations=observations, dropped=dict(dropped))


def _numbered(columns: list[AddressColumn]) -> tuple[tuple[str, ...], Ints]:
    """The distinct addresses that occur, in order, and the number of each address of all columns, end to end."""
    occurs = np.concatenate([np.bincount(c.codes, minlength=len(c.families)) > 0 for c in columns])
    families = np.concatenate([c.families for c in columns])[occurs]
    packed = np.concatenate([c.packed for c in columns])[occurs]
    halves = packed.view(">u8").astype(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0], families))
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (np.diff(families[order]) != 0) | (np.diff(halves[order], axis=0) != 0).any(axis=1)

    number = np.full(len(occurs), -1)
    number[np.flatnonzero(occurs)[order]] = np.cumsum(is_new) - 1
    starts = np.cumsum([0] + [len(c.families) for c in columns])
    ids = np.concatenate([number[start:][c.codes] for start, c in zip(starts, columns, strict=False)])
    first = order[is_new]
    texts = zip(families[first].tolist(), packed[first], strict=True)
    return tuple(format_address(family, address.tobytes()) for family, address in texts), ids
