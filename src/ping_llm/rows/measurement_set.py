"""Measurements as columns of numbers, from measurement files, from tables, or from prepared rows.

Every address or name becomes the number of a node. Nodes are numbered in the order of their addresses, IPv4 first and
names last, so that the numbers do not depend on how the measurements were ordered or cut into files.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError, explained, extras_needed
from ping_llm.core.geography import LocatedNodes, is_known, misplaced
from ping_llm.core.measurements import (
    ADDRESS_BYTES,
    NAMED,
    AddressColumn,
    ValidMeasurements,
    format_address,
    parse_nodes,
    validate,
)
from ping_llm.core.randomness import mix64
from ping_llm.core.rtt import Ints, Observations
from ping_llm.rows.format import ProbeRow
from ping_llm.sources import files
from ping_llm.sources.columns import (
    AS_FOUND,
    OPTIONAL_WITHOUT_TIME,
    InputOptions,
    check_rtts,
    find_columns,
    understand,
)
from ping_llm.sources.files import Piece, RawBatch, Reading
from ping_llm.sources.layouts import melted
from ping_llm.sources.nodes import (
    NO_NODES,
    Nodes,
    PositionReader,
    addresses_of,
    degrees_of,
    joined_with,
    read_nodes,
    shown_in_rows,
    shown_names,
)
from ping_llm.storage import Location, locate

BATCH_ROWS: Final = 1_000_000  # measurements in work at once; the memory beyond the result grows with it

_NOBODY: Final = np.zeros(0, dtype=np.int64)
NOTHING: Final = Observations(
    source=_NOBODY, destination=_NOBODY, time_s=np.zeros(0), rtt_ms=np.zeros(0, dtype=np.float32)
)


@dataclass(frozen=True, kw_only=True)
class MeasurementSet:
    """Measurements and their nodes: `nodes[observations.source[i]]` is who sent the i-th."""

    nodes: tuple[str, ...]
    """Addresses in their usual spelling, and names."""
    observations: Observations  # in time order; measurements of one time are in the order of the input
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many could not be used, by reason (see `measurements.DROP_REASONS`)."""
    reading: Reading | None = None
    described: Nodes = field(default_factory=dict)
    """What a nodes file says, by name."""

    def addresses_of(self, nodes: Sequence[str] | None = None) -> tuple[str, ...]:
        """What a model is told of nodes (None: all): addresses and positions, as far as they have any."""
        nodes = self.nodes if nodes is None else nodes
        if not self.described:
            return tuple(nodes)
        return LocatedNodes.of(addresses_of(nodes, self.described), degrees_of(nodes, self.described))


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
    described = {name: node for one in sets for name, node in one.described.items()}
    return MeasurementSet(nodes=tuple(number), observations=in_order, described=described)


def read_observations(
    inputs: Sequence[str | Path], *, options: InputOptions = AS_FOUND, on_progress: Advance = no_progress
) -> MeasurementSet:
    """The measurements of files, folders or globs, of every kind that `ping-llm prepare` and `import atlas` take.

    Files without times are taken, too: all times are then NaN. `on_progress` is told how many rows were read.
    """
    # All files are looked at before the first is read.
    pieces: list[Piece] = []
    paths, copies = files.distinct(files.expand([str(i) for i in inputs]))
    for path in paths:
        pieces += files.describe(path, options, BATCH_ROWS, OPTIONAL_WITHOUT_TIME)[1]

    def batches() -> Iterator[tuple[Piece, RawBatch]]:
        for piece in pieces:
            for raw in files.read(piece, BATCH_ROWS):
                yield piece, raw
                on_progress(raw.batch.num_rows)

    return _checked(batches(), options, [f"{copy} is a copy of {original}" for copy, original in copies.items()])


def table_observations(
    table: pa.Table | None, options: InputOptions = AS_FOUND, what: str = "the table"
) -> MeasurementSet:
    """The measurements of a table with columns as a file may have them; None: no measurements."""
    if table is None:
        return MeasurementSet(nodes=(), observations=NOTHING)
    names = table.column_names
    if len(set(names)) < len(names):
        raise PingLlmError(f"{what}: two columns are called {max(names, key=names.count)!r}: rename or drop one")
    with explained(what, TypeError):
        try:
            find_columns(names, options.columns, what, OPTIONAL_WITHOUT_TIME)
        except PingLlmError:
            if (matrix := melted(table)) is None:
                raise
            table, names = matrix, matrix.column_names
        sample = {name: table[name].slice(0, BATCH_ROWS).combine_chunks() for name in names}
        found = understand(names, sample, options, what, OPTIONAL_WITHOUT_TIME)
        piece = Piece(path=what, format="table", columns=found.columns, bytes=0, spelling=found.spelling)
        piece = replace(piece, understood=found.said)
        table = table.select(list(found.columns.values())).rename_columns(list(found.columns))
        starts = np.cumsum([0, *map(len, table.to_batches())]).tolist()
        raw = (RawBatch(batch=one, first_row=start) for one, start in zip(table.to_batches(), starts, strict=False))
        return _checked(((piece, one) for one in raw), options)


def _checked(
    batches: Iterable[tuple[Piece, RawBatch]], options: InputOptions, notes: Sequence[str] = ()
) -> MeasurementSet:
    parts: list[ValidMeasurements] = []
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    understood: dict[str, None] = {}
    timed: set[bool] = set()
    positions = PositionReader()
    for piece, raw in batches:
        understood[piece.understood or piece.format] = None
        batch = raw.batch
        if piece.format == "tool" and batch.column("event_time").null_count == batch.num_rows:
            batch = batch.drop_columns(["event_time"])  # the tool does not write times
        is_timed = "event_time" in batch.schema.names
        if not is_timed:
            batch = batch.append_column("event_time", pa.array(np.zeros(batch.num_rows, dtype=np.int64)))
        positions.add(batch)
        valid = validate(batch, piece.spelling)
        dropped.update(+raw.dropped + valid.dropped)
        if raw.examples or valid.first_dropped:
            examples = {**files.examples_of(piece, raw, valid.first_dropped), **examples}
        if len(valid):
            parts.append(valid)
            timed.add(is_timed)
    if len(timed) > 1:
        raise PingLlmError("some of the files have a column of times, others have not: give times for all or for none")
    is_timed = timed == {True}
    rows = sum(map(len, parts)) + dropped.total()
    nodes, known = _joined(parts, is_timed=is_timed)
    described = read_nodes(options.nodes) if options.nodes else NO_NODES
    names = shown_names(described)
    nodes, known = _renamed(nodes, known, lambda node: names.get(node, node))
    if options.nodes and nodes and described.keys().isdisjoint(nodes):
        notes = [*notes, f"{options.nodes} has none of the nodes"]
    if is_timed:
        known, dropped["duplicate"] = without_copies(known)
    described, doubts = _without_misplaced(nodes, known, joined_with(described, positions.nodes()))
    notes = [*notes, *doubts]
    failed = np.isnan(known.rtt_ms)
    begin_s, end_s = (float(known.time_s[0]), float(known.time_s[-1])) if is_timed and len(known) else (None, None)
    reading = Reading(
        understood=(*understood, *notes),
        rows=rows,
        used=len(known),
        timeouts=int(failed.sum()),
        nodes=len(nodes),
        names=int((parse_nodes(tuple(addresses_of(nodes, described)))[0] == NAMED).sum()),
        begin_s=begin_s,
        end_s=end_s,
        dropped=dict(+dropped),
        examples=examples,
    )
    reading.check(allow_bad_rows=options.allow_bad_rows)
    if not options.allow_bad_rows:
        check_rtts(known.rtt_ms, "ms", "the input")
    return MeasurementSet(
        nodes=nodes, observations=known, dropped=reading.dropped, reading=reading, described=described
    )


def _without_misplaced(nodes: Sequence[str], known: Observations, described: Nodes) -> tuple[Nodes, list[str]]:
    """What is known of nodes, without positions that measurements contradict, and a note of what is used."""
    if not described:
        return described, []
    positions = LocatedNodes.of(nodes, degrees_of(nodes, described)).positions
    answered, located = known.answered, is_known(positions)
    if not located.any():
        return described, []
    answered = answered.take(located[answered.source] & located[answered.destination])
    pairs = answered.take(np.lexsort((answered.rtt_ms, answered.unordered_pair)))
    _, first, count = np.unique(pairs.unordered_pair, return_index=True, return_counts=True)
    median = pairs.take(first + count // 2)
    wrong = [nodes[node] for node in misplaced(positions, median.source, median.destination, median.rtt_ms).tolist()]
    note = f"positions of {located.sum() - len(wrong):,} nodes"
    if not wrong:
        return described, [note]
    shown = ", ".join(wrong[:3]) + (", …" if len(wrong) > 3 else "")
    note += f" (not used, since light takes longer than was measured: the position of {len(wrong)} ({shown}))"
    return {**described, **{name: replace(described[name], latitude=None, longitude=None) for name in wrong}}, [note]


def without_copies(known: Observations) -> tuple[Observations, int]:
    """Measurements in time order, each once, and how many were exact copies of an earlier one: of its pair, time and
    result."""
    same_time = known.time_s[1:] == known.time_s[:-1]
    near = np.flatnonzero(np.append(same_time, False) | np.append(False, same_time))  # all others are no copies
    some = known.take(near)
    rtt = some.rtt_ms.astype(np.float32).view(np.uint32).astype(np.uint64)
    columns = (some.time_s.view(np.uint64), some.pair.astype(np.uint64), rtt)
    key = np.zeros(len(some), dtype=np.uint64)
    for column in columns:
        key = mix64(key ^ column)
    in_order = np.sort(key)  # five times as quick as finding the order, which is needed only of what may occur twice
    may_occur_twice = np.zeros(1 << 24, dtype=bool)  # by a key's upper bits
    may_occur_twice[in_order[1:][in_order[1:] == in_order[:-1]] >> np.uint64(40)] = True
    rows = np.flatnonzero(may_occur_twice[key >> np.uint64(40)])
    order = rows[np.argsort(key[rows], kind="stable")]
    is_copy = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    if not is_copy.any():
        return known, 0
    keep = np.ones(len(known), dtype=bool)
    keep[near[order[1:][is_copy]]] = False
    return known.take(keep), int(is_copy.sum())


def _renamed(
    nodes: tuple[str, ...], known: Observations, shown: Callable[[str], str]
) -> tuple[tuple[str, ...], Observations]:
    """Under other names, which may be the same for several nodes."""
    renamed = [shown(node) for node in nodes]
    if renamed == list(nodes):
        return nodes, known
    number: dict[str, int] = {}
    ids = np.array([number.setdefault(node, len(number)) for node in renamed], dtype=np.int64)
    return tuple(number), replace(known, source=ids[known.source], destination=ids[known.destination])


def rows_observations(
    folder: Path | str | Location, split: str, *, on_progress: Advance = no_progress, batch_rows: int = BATCH_ROWS
) -> MeasurementSet:
    """The measurements of one split of prepared rows. `on_progress` is told how many were read."""
    with extras_needed("reading prepared rows"):
        from ping_llm.rows.dataset import RowSet

    described, shown = shown_in_rows(locate(folder))
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
    nodes, known = _joined(parts)
    nodes, known = _renamed(nodes, known, shown)
    return MeasurementSet(nodes=nodes, observations=known, described=described)


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


def _joined(parts: list[ValidMeasurements], *, is_timed: bool = True) -> tuple[tuple[str, ...], Observations]:
    if not parts:
        return (), NOTHING
    nodes, ids = _numbered([p.src for p in parts] + [p.dst for p in parts])
    source, destination = np.split(ids, 2)
    time_us = np.concatenate([p.time_us for p in parts])
    time_s = time_us / 1e6 if is_timed else np.full(len(time_us), np.nan)
    rtt_ms = np.concatenate([p.rtt_ms for p in parts])
    observations = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    if (time_us[1:] < time_us[:-1]).any():
        observations = observations.take(np.argsort(time_us, kind="stable"))
    return nodes, observations


def _numbered(columns: list[AddressColumn]) -> tuple[tuple[str, ...], Ints]:
    """The distinct nodes that occur, in order, and the number of each node of all columns, end to end."""
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
    names = {stand_in: name for c in columns for stand_in, name in c.names.items()}
    texts = [
        names[address.tobytes()] if family == NAMED else format_address(family, address.tobytes())
        for family, address in zip(families[first].tolist(), packed[first], strict=True)
    ]
    if names:  # in the order of their letters, not of their hashes
        addresses = np.count_nonzero(families[first] != NAMED)
        order = np.append(np.arange(addresses), addresses + np.argsort(np.array(texts[addresses:], dtype=object)))
        ids, texts = np.argsort(order)[ids], [texts[i] for i in order.tolist()]
    return tuple(texts), ids
