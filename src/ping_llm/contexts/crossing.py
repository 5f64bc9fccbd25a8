"""Contexts that cross sources: beside what its own source measured, a context holds what others measured to the same
destinations. From it the language model learns what a source never saw.

Most of what a source measures is repeated: the same few destinations again and again. In contexts that cross, nearly
all repetitions give way to measurements of the same destinations by others, each pair once, from about the same time.
They come from rows by destination (`ping-llm prepare --by destination`). What a context holds is still a pure function
of the step, and candidates are exchanged one for one, so that the plan, which knows sizes only, holds.

Importing this loads (or compiles) the kernel.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.contexts.plan import SAMPLES, Mode, Samples
from ping_llm.core.compiled import kernel, part_of_kernels, types
from ping_llm.core.draws import below, extend, log_uniform, uniform
from ping_llm.core.randomness import Ints, Purpose
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.reader import Picked, RowReader

_REPLACED_SHARE: Final = 0.9
"""Of repetitions."""
_MOST_DESTINATIONS: Final = 16
_TRIES: Final = 4
"""To find a pair that the context does not have yet."""
_REPLACED, _PLACE, _SPREAD, _SHIFT = range(4)  # what is drawn

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
        given_up, row, tries = _choose(samples, first, position, rank, read.time_s, read.destination, self._table)
        if not len(row):
            return drawn, read, source
        self._reader.check(np.unique(row))
        sample = np.repeat(np.arange(len(samples.row)), np.diff(first))
        every = np.tile(given_up, _TRIES)
        is_timed = samples.mode[sample[every]] != Mode.NONE
        other = self._reader.pick(np.tile(row, _TRIES), np.arange(len(every) + 1), tries.ravel(), is_timed)
        is_new = _is_first(sample[every], np.tile(row, _TRIES), other.destination)
        is_new &= (other.destination != source[every]).any(axis=1)
        first_new = is_new.reshape(_TRIES, -1).argmax(axis=0) * len(row) + np.arange(len(row))
        taken = np.flatnonzero(is_new[first_new])
        some, of = given_up[taken], first_new[taken]
        time_s, rtt_ms, destination = read.time_s.copy(), read.rtt_ms.copy(), read.destination.copy()
        source, position = source.copy(), position.copy()
        time_s[some], rtt_ms[some] = other.time_s[of], other.rtt_ms[of]
        source[some], destination[some] = other.destination[of], self.rows.column("source")[row[taken]]
        position[some] = -1 - tries.ravel()[of]
        # Candidates are in time order; where no times are read, the order does not matter.
        order = np.lexsort((np.where(samples.mode[sample] == Mode.NONE, 0, time_s), sample))
        drawn = first, position[order], rank[order], words[order], timed[order]
        return drawn, Picked(time_s[order], rtt_ms[order], destination[order]), source[order]


def _is_first(sample: Ints, rows: Ints, sources: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Whether a pair is the first of its kind in its sample."""
    halves = sources.view(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0], rows, sample))
    columns = [sample[order], rows[order], *halves[order].T]
    found = np.ones(len(order), dtype=np.bool_)
    found[order[1:]] = np.any([np.diff(column) != 0 for column in columns], axis=0)
    return found


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
    returns=types.Tuple((_I64, _I64, types.int64[:, ::1])),
)
def _choose(samples: Any, first: Any, position: Any, rank: Any, time_s: Any, destination: Any, table: Any) -> Any:
    """Which candidates may give way, to something of which row by destination, and positions there to try."""
    given_up, row = np.empty(len(position), dtype=np.int64), np.empty(len(position), dtype=np.int64)
    at = np.empty((_TRIES, len(position)), dtype=np.int64)
    total = 0
    high, low = np.zeros(_MOST_DESTINATIONS, dtype=np.uint64), np.zeros(_MOST_DESTINATIONS, dtype=np.uint64)
    entry, place = np.zeros(_MOST_DESTINATIONS, dtype=np.int64), np.zeros(_MOST_DESTINATIONS, dtype=np.int64)
    _, _, _, rows, counts, begins, ends = table
    used_as = np.empty(np.diff(first).max(), dtype=np.int64)
    for s in range(len(samples.key)):
        begin, count = first[s], first[s + 1] - first[s]
        if not samples.crossing[s] or count < 2:
            continue
        key, timed = extend(samples.key[s], Purpose.CROSSING), samples.mode[s] != Mode.NONE
        for i in range(count):  # those that are used first come first
            used_as[rank[begin + i] if samples.shrinkable[s] else i] = begin + i
        known = replaced = 0
        for n in range(count):
            i = used_as[n]
            h, l = _number(destination, i, 0), _number(destination, i, 8)  # noqa: E741
            d = 0
            while d < known and (high[d] != h or low[d] != l):
                d += 1
            if d == known:
                if known < _MOST_DESTINATIONS:
                    when = time_s[i] if timed else 0
                    high[d], low[d] = h, l
                    entry[d] = e = _find(table, np.uint64(samples.family[s]), h, l, when)
                    if e >= 0 and timed:
                        place[d] = (when - begins[e]) * counts[e] // (ends[e] - begins[e] + 1)
                    elif e >= 0:
                        place[d] = below(extend(extend(key, _PLACE), d), counts[e])
                    known += 1
                continue
            word = extend(key, position[i])
            if uniform(extend(word, _REPLACED)) >= _REPLACED_SHARE:
                continue
            d = replaced % known
            replaced += 1
            if entry[d] >= 0:
                given_up[total], row[total] = i, rows[entry[d]]
                spread = log_uniform(extend(word, _SPREAD), counts[entry[d]])
                for t in range(_TRIES):
                    where = place[d] - spread + below(extend(extend(word, _SHIFT), t), 2 * spread)
                    at[t, total] = where % counts[entry[d]]
                total += 1
    return given_up[:total].copy(), row[:total].copy(), at[:, :total].copy()
