"""Contexts that cross sources: beside what its own source measured, a context holds what others measured to the same
destinations. The language model can then learn from a destination what its source never saw.

In a share of the contexts, half of the candidates give way to measurements of a few *anchors*: destinations of some of
the other half. They come from rows by destination (`ping-llm prepare --by destination`), from about the time of their
anchor. What a context holds is still a pure function of the step, and candidates are exchanged one for one, so that the
plan, which knows sizes only, holds.

Importing this loads (or compiles) the kernel.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.contexts.plan import SAMPLES, Mode, Samples
from ping_llm.core.compiled import kernel, part_of_kernels, types
from ping_llm.core.draws import below, extend, uniform
from ping_llm.core.randomness import Ints, Purpose
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.reader import Picked, RowReader

_KEPT: Final = 0.5
_MOST_ANCHORS: Final = 3  # a power of two
_REPLACED, _ANCHOR, _PLACE, _SHIFT, _COUNT = range(1, 6)  # what is drawn

_I64, _U64, _U8 = types.int64[::1], types.uint64[::1], types.uint8[::1]

Drawn = tuple[Ints, Ints, npt.NDArray[np.int32], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]


class Destinations:
    """Rows by destination, found by address."""

    def __init__(self, rows: RowSet) -> None:
        self.rows, self._reader = rows, RowReader(rows)
        halves = rows.column("source").view(">u8").astype(np.uint64)
        first = rows.column("first_time_us")
        # Of one address, rows follow each other in time.
        order = np.lexsort((first, halves[:, 1], halves[:, 0], rows.column("family")))
        seconds = first[order] // 1_000_000, rows.column("last_time_us")[order] // 1_000_000
        self._table = (
            rows.column("family")[order].astype(np.uint64),
            np.ascontiguousarray(halves[order, 0]),
            np.ascontiguousarray(halves[order, 1]),
            order.astype(np.int64),
            rows.column("count")[order].astype(np.int64),
            *(np.ascontiguousarray(column, dtype=np.int64) for column in seconds),
        )

    def cross(
        self, samples: Samples, drawn: Drawn, read: Picked, source: npt.NDArray[np.uint8]
    ) -> tuple[Drawn, Picked, npt.NDArray[np.uint8]]:
        """The candidates of the samples, of which some cross: with the positions of what came from rows by destination
        negative, from -1 on. `source` [candidates, 16] is of each one."""
        first, position, rank, words, timed = drawn
        row, at = _choose(samples, first, position, rank, read.time_s, read.destination, self._table)
        some = np.flatnonzero(row >= 0)
        if not len(some):
            return drawn, read, source
        rows = row[some]
        self._reader.check(np.unique(rows))
        sample = np.repeat(np.arange(len(samples.row)), np.diff(first))
        is_timed = samples.mode[sample[some]] != Mode.NONE
        other = self._reader.pick(rows, np.arange(len(some) + 1), at[some], is_timed)
        is_other = (other.destination != source[some]).any(axis=1)
        some, rows, at = some[is_other], rows[is_other], at[some[is_other]]
        time_s, rtt_ms, destination = read.time_s.copy(), read.rtt_ms.copy(), read.destination.copy()
        source, position = source.copy(), position.copy()
        time_s[some], rtt_ms[some] = other.time_s[is_other], other.rtt_ms[is_other]
        source[some], destination[some] = other.destination[is_other], self.rows.column("source")[rows]
        position[some] = -1 - at
        # Candidates are in time order; where no times are read, the order does not matter.
        order = np.lexsort((np.where(samples.mode[sample] == Mode.NONE, 0, time_s), sample))
        drawn = first, position[order], rank[order], words[order], timed[order]
        return drawn, Picked(time_s[order], rtt_ms[order], destination[order]), source[order]


@part_of_kernels
def _number(addresses: Any, index: Any, begin: Any) -> Any:
    value = np.uint64(0)
    for i in range(8):
        value = value << np.uint64(8) | np.uint64(addresses[index, begin + i])
    return value


@part_of_kernels
def _find(table: Any, family: Any, high: Any, low: Any, time_s: Any) -> Any:
    """The entry of an address: the last of its rows that begins by then, else its first. -1: there is none."""
    families, highs, lows, _, _, begins, _ = table
    begin, end = 0, len(families)
    while begin < end:
        middle = (begin + end) >> 1
        f, h = families[middle], highs[middle]
        if f < family or (f == family and (h < high or (h == high and lows[middle] < low))):
            begin = middle + 1
        else:
            end = middle
    if begin == len(families) or families[begin] != family or highs[begin] != high or lows[begin] != low:
        return -1
    while (
        begin + 1 < len(families)
        and families[begin + 1] == family
        and highs[begin + 1] == high
        and lows[begin + 1] == low
        and begins[begin + 1] <= time_s
    ):
        begin += 1
    return begin


@kernel(
    *(SAMPLES, _I64, _I64, types.int32[::1], _I64, types.uint8[:, ::1]),
    types.Tuple((_U64, _U64, _U64, _I64, _I64, _I64, _I64)),
    returns=types.Tuple((_I64, _I64)),
)
def _choose(samples: Any, first: Any, position: Any, rank: Any, time_s: Any, destination: Any, table: Any) -> Any:
    """Row and position of what takes the place of each candidate; row -1: it stays."""
    row, at = np.full(len(position), -1, dtype=np.int64), np.zeros(len(position), dtype=np.int64)
    starts, entries = np.zeros(1 << _MOST_ANCHORS, dtype=np.int64), np.zeros(1 << _MOST_ANCHORS, dtype=np.int64)
    anchor = np.zeros(1 << _MOST_ANCHORS, dtype=np.int64)
    for s in range(len(samples.key)):
        begin, count = first[s], first[s + 1] - first[s]
        if not samples.crossing[s] or count < 2:
            continue
        key, timed = extend(samples.key[s], Purpose.CROSSING), samples.mode[s] != Mode.NONE
        anchors = min(1 << below(extend(key, _COUNT), _MOST_ANCHORS + 1), count >> 1)
        # Anchors are among those that are used first.
        for a in range(anchors):
            anchor[a] = begin + below(extend(extend(key, _ANCHOR), a), count)
        if samples.shrinkable[s]:
            for i in range(begin, begin + count):
                if rank[i] < anchors:
                    anchor[rank[i]] = i
        each = count // (2 * anchors) + 1
        for a in range(anchors):
            i = anchor[a]
            when = time_s[i] if timed else 0
            family = np.uint64(samples.family[s])
            entries[a] = e = _find(table, family, _number(destination, i, 0), _number(destination, i, 8), when)
            if e >= 0:
                word = extend(extend(key, _PLACE), a)
                _, _, _, _, counts, begins, ends = table
                place = (when - begins[e]) * counts[e] // (ends[e] - begins[e] + 1) if timed else below(word, counts[e])
                starts[a] = place - each + below(extend(extend(key, _SHIFT), a), each + 1)
        replaced = 0
        for i in range(begin, begin + count):
            is_anchor = False
            for a in range(anchors):
                is_anchor |= anchor[a] == i
            if is_anchor or uniform(extend(extend(key, _REPLACED), position[i])) < _KEPT:
                continue
            a = replaced % anchors
            where = starts[a] + replaced // anchors
            replaced += 1
            if entries[a] >= 0 and 0 <= where < table[4][entries[a]]:
                row[i], at[i] = table[3][entries[a]], where
    return row, at
