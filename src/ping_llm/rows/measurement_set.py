"""Measurements as columns of numbers, from measurement files, from tables, or from prepared rows.

Every address becomes the number of a node. Nodes are numbered in the order of their addresses, IPv4 first, so that the
numbers do not depend on how the measurements were ordered or cut into files.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError, extras_needed
from ping_llm.core.measurements import ADDRESS_BYTES, AddressColumn, ValidMeasurements, format_address, validate
from ping_llm.core.rtt import Ints, Observations
from ping_llm.rows.format import ProbeRow
from ping_llm.sources import files
from ping_llm.sources.files import OPTIONAL_WITHOUT_TIME, Piece
from ping_llm.storage import Location

BATCH_ROWS: Final = 1_000_000  # measurements in work at once; the memory beyond the result grows with it

_NOBODY: Final = np.zeros(0, dtype=np.int64)
NOTHING: Final = Observations(
    source=_NOBODY, destination=_NOBODY, time_s=np.zeros(0), rtt_ms=np.zeros(0, dtype=np.float32)
)


@dataclass(frozen=True, kw_only=True)
class MeasurementSet:
    """Measurements and the addresses of their nodes: `nodes[observations.source[i]]` is who sent the i-th."""

    nodes: tuple[str, ...]
    observations: Observations  # in time order; measurements of one time are in the order of the input
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many could not be used, by reason (see `measurements.DROP_REASONS`)."""


def joined(sets: Sequence[MeasurementSet]) -> MeasurementSet:
    """Several sets as one, in time order, with one number for each address."""
    if len(sets) == 1:
        return sets[0]
    number: dict[str, int] = {}
    parts = [NOTHING]
    for one in sets:
        ids = np.array([number.setdefault(node, len(number)) for node in one.nodes], dtype=np.int64)
        known = one.observations
        parts.append(replace(known, source=ids[known.source], destination=ids[known.destination]))
    together = Observations(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(NOTHING)})
    in_order = together.take(np.argsort(together.time_s, kind="stable"))
    return MeasurementSet(nodes=tuple(number), observations=in_order)


def read_observations(
    inputs: Sequence[str | Path], *, columns: Mapping[str, str] | None = None, on_progress: Advance = no_progress
) -> MeasurementSet:
    """The measurements of files, folders or globs, of every kind that `ping-llm prepare` and `import atlas` take.

    `columns` gives the files' names of schema columns that have other names there. Files without a column of times are
    taken, too: all times are then NaN. `on_progress` is told how many measurements were read.
    """
    dropped: Counter[str] = Counter()
    # All files are looked at before the first is read.
    pieces: list[Piece] = []
    for path in files.expand([str(i) for i in inputs]):
        if path.suffix in {".gz", ".bz2"} and path.name.count(".") == 1:  # daily Atlas dumps: ping-2024-05-01T0000.bz2
            pieces.append(Piece(path=str(path), format="atlas", columns={}, bytes=path.size()))
        else:
            pieces += files.describe(path, columns or {}, BATCH_ROWS, OPTIONAL_WITHOUT_TIME)[1]

    def batches() -> Iterable[pa.RecordBatch]:
        for piece in pieces:
            for raw in files.read(piece, BATCH_ROWS):
                dropped.update(+raw.dropped)
                yield raw.batch
                on_progress(raw.batch.num_rows)

    return _checked(batches(), dropped)


def table_observations(table: pa.Table | None) -> MeasurementSet:
    """The measurements of a table whose columns have the schema's names; None: no measurements."""
    return _joined([], {}) if table is None else _checked(table.to_batches(), Counter())


def _checked(batches: Iterable[pa.RecordBatch], dropped: Counter[str]) -> MeasurementSet:
    parts: list[ValidMeasurements] = []
    timed: set[bool] = set()
    for batch in batches:
        if "event_time" in batch.schema.names and batch.column("event_time").null_count == batch.num_rows:
            batch = batch.drop_columns(["event_time"])  # the tool does not write times
        is_timed = "event_time" in batch.schema.names
        if not is_timed:
            batch = batch.append_column("event_time", pa.array(np.zeros(batch.num_rows, dtype=np.int64)))
        valid = validate(batch)
        dropped.update(valid.dropped)
        if len(valid):
            parts.append(valid)
            timed.add(is_timed)
    if not parts:
        raise PingLlmError(f"no usable measurement in the input; dropped: {dict(dropped) or 'none, it is empty'}")
    if len(timed) > 1:
        raise PingLlmError("some of the files have a column of times, others have not: give times for all or for none")
    return _joined(parts, dropped, is_timed=timed.pop())


def rows_observations(
    folder: Path | str | Location, split: str, *, on_progress: Advance = no_progress, batch_rows: int = BATCH_ROWS
) -> MeasurementSet:
    """The measurements of one split of prepared rows. `on_progress` is told how many were read."""
    with extras_needed("reading prepared rows"):
        from ping_llm.rows.dataset import RowSet

    parts: list[ValidMeasurements] = []
    with RowSet(folder, split) as rows:
        on_progress(0, total=rows.info.measurements)
        for family in ADDRESS_BYTES:
            chosen = np.flatnonzero(rows.column("family") == family)
            batch = np.cumsum(rows.column("count")[chosen], dtype=np.int64) // batch_rows
            for some in np.split(chosen, np.flatnonzero(np.diff(batch)) + 1):
                if len(some):
                    rows.fetch(some)
                    parts.append(_of_rows([rows[row] for row in some.tolist()], family, rows.column("source")[some]))
                    on_progress(len(parts[-1]))
    return _joined(parts, {})


def _of_rows(rows: list[ProbeRow], family: int, sources: npt.NDArray[np.uint8]) -> ValidMeasurements:
    width, counts = ADDRESS_BYTES[family], [len(row) for row in rows]
    packed = np.concatenate([row.destinations for row in rows])
    fixed = pa.Array.from_buffers(pa.binary(width), len(packed), [None, pa.py_buffer(packed)])
    distinct = fixed.dictionary_encode()
    words = np.frombuffer(distinct.dictionary.buffers()[1], np.uint8, len(distinct.dictionary) * width)
    table = np.pad(words.reshape(-1, width), ((0, 0), (0, 16 - width)))

    def addresses(packed: npt.NDArray[np.uint8], codes: npt.NDArray[Any]) -> AddressColumn:
        return AddressColumn(families=np.full(len(packed), family, dtype=np.uint8), packed=packed, codes=codes)

    return ValidMeasurements(
        time_us=np.concatenate([row.time_us for row in rows]),
        src=addresses(sources, np.repeat(np.arange(len(rows), dtype=np.int32), counts)),
        dst=addresses(table, distinct.indices.to_numpy()),
        family=np.full(len(packed), family, dtype=np.uint8),
        rtt_ms=np.concatenate([row.rtt_ms for row in rows]),
    )


def _joined(parts: list[ValidMeasurements], dropped: Mapping[str, int], *, is_timed: bool = True) -> MeasurementSet:
    if not parts:
        return MeasurementSet(nodes=(), observations=NOTHING, dropped=dict(dropped))
    nodes, ids = _numbered([p.src for p in parts] + [p.dst for p in parts])
    source, destination = np.split(ids, 2)
    time_us = np.concatenate([p.time_us for p in parts])
    time_s = time_us / 1e6 if is_timed else np.full(len(time_us), np.nan)
    rtt_ms = np.concatenate([p.rtt_ms for p in parts])
    observations = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    if (time_us[1:] < time_us[:-1]).any():
        observations = observations.take(np.argsort(time_us, kind="stable"))
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
