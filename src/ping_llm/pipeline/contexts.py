"""Contexts: what of a row's history a model gets to see at once.

A row of n measurements gives a few contexts an epoch, its *units*. Each has a window of the history (log-uniform in
size, so that minutes and months are seen equally often), a timestamp mode and a field order per measurement. A row that
fits whole is used whole.

    full      every measurement has its time; they are in time order
    partial   some lose their time; these are put in random places among the others, which stay in time order
    none      no times; random order
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.pipeline.randomness import Ints, Purpose, Words, below, bits, extend, log_uniform, permute, uniform
from ping_llm.rows.format import LONG_GAP_S
from ping_llm.tokens.encode import FIELD_ORDERS, TimeKind, token_counts

Flags = npt.NDArray[np.bool_]


class Mode(IntEnum):
    FULL = 0
    PARTIAL = 1
    NONE = 2


MODE_SHARES: Final = (0.4, 0.3, 0.3)
UNTIMED_SHARES: Final = (0.1, 0.9)
"""In partial mode each measurement loses its time with a probability that is uniform in this range."""

_BARE = {family: int(token_counts(family, False, TimeKind.NONE)) for family in (4, 6)}
_TIME_TOKENS = {kind: int(token_counts(4, False, kind)) - _BARE[4] for kind in TimeKind}
_FAILED_SAVES = _BARE[4] - int(token_counts(4, True, TimeKind.NONE))
LONGEST_MEASUREMENT: Final = _BARE[6] + _TIME_TOKENS[TimeKind.ABSOLUTE]


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How rows become contexts. Part of what a data state is checked against."""

    measurements_per_context: int = 30
    max_contexts: int = 16
    length: int = 1024
    """Tokens of a sequence, and so the most that a context may have."""

    def per_row(self, counts: Any) -> Ints:
        """Contexts that rows of these sizes give in an epoch."""
        per_context = self.measurements_per_context
        return np.minimum(-(-np.asarray(counts, dtype=np.int64) // per_context), self.max_contexts)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What the index knows of each row that matters for sizes."""

    count: npt.NDArray[Any]
    failed: npt.NDArray[Any]
    long_gaps: npt.NDArray[Any]
    family: npt.NDArray[Any]

    def take(self, rows: Any) -> "RowFacts":
        return RowFacts(
            count=self.count[rows].astype(np.int64),
            failed=self.failed[rows].astype(np.int64),
            long_gaps=self.long_gaps[rows].astype(np.int64),
            family=self.family[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Units:
    """Contexts before their measurements are read: everything that follows from index and key."""

    row: Ints
    number: Ints
    """The unit's number in the epoch: its identity for all random choices."""
    key: Words
    family: npt.NDArray[np.uint8]
    mode: npt.NDArray[np.uint8]
    start: Ints
    """First measurement of the window in its row."""
    size: Ints
    """Measurements in the window."""
    whole: npt.NDArray[np.bool_]
    """The window is the whole row, because that fits."""
    most: Ints
    """Tokens that using the whole window could take at most."""
    likely: Ints
    """Tokens that it will probably take. A whole number, so that sums are exact on every machine."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: Any) -> "Units":
        return Units(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def draw_units(seed_key: Any, row: Ints, number: Ints, facts: RowFacts, settings: ContextSettings) -> Units:
    """Draw mode and window of each unit, and work out its size in tokens. `facts` are those of the unit's row."""
    word = extend(seed_key, number)
    mode = np.searchsorted(np.cumsum(MODE_SHARES)[:2], uniform(extend(word, Purpose.MODE)), side="right").astype(
        np.uint8
    )
    most_of_row, likely_of_row = _tokens(facts, facts.count, mode, facts.long_gaps)
    whole = most_of_row <= settings.length
    size = np.where(whole, facts.count, log_uniform(extend(word, Purpose.WINDOW_SIZE), facts.count))
    start = below(extend(word, Purpose.WINDOW_OFFSET), facts.count - size + 1)
    most, likely = _tokens(facts, size, mode, np.minimum(facts.long_gaps, size))
    return Units(
        row=row,
        number=number,
        key=word,
        family=facts.family,
        mode=mode,
        start=start,
        size=size,
        whole=whole,
        most=most,
        likely=np.where(whole, likely_of_row, likely),
    )


def _tokens(facts: RowFacts, size: Ints, mode: Any, long_gaps: Ints) -> tuple[Ints, Ints]:
    """Most and likely tokens of `size` consecutive measurements of each row.

    With all times kept, every gap is one of the row's, and the index counts the long ones. Where times are lost, gaps
    merge, and any of them may become long.
    """
    delta1, delta4 = _TIME_TOKENS[TimeKind.DELTA1], _TIME_TOKENS[TimeKind.DELTA4]
    bare = np.where(facts.family == 6, _BARE[6], _BARE[4]) * size
    first = _TIME_TOKENS[TimeKind.ABSOLUTE] - delta1
    gaps = long_gaps * size // facts.count
    full_most = first + delta1 * size + (delta4 - delta1) * long_gaps
    full_likely = first + delta1 * size + (delta4 - delta1) * gaps
    partial_most = _TIME_TOKENS[TimeKind.ABSOLUTE] + delta4 * (size - 1)
    partial_likely = np.where(size == 1, _TIME_TOKENS[TimeKind.ABSOLUTE] // 2, first + (delta1 + 1) * size // 2)
    exact_failed = np.where(size == facts.count, facts.failed, 0) * _FAILED_SAVES
    likely_failed = facts.failed * size // facts.count * _FAILED_SAVES
    most = bare + np.select([mode == Mode.FULL, mode == Mode.PARTIAL], [full_most, partial_most], 0) - exact_failed
    likely = bare + np.select([mode == Mode.FULL, mode == Mode.PARTIAL], [full_likely, partial_likely], 0)
    return most, likely - likely_failed


def largest_increase(units: Units) -> Ints:
    """The most tokens that each measurement after the first adds to a context.

    Its own, with a long delta. Its successor's delta only gets shorter. If it becomes the first one, it takes over the
    absolute time, and the one that had it gets a delta instead. So k measurements have at most
    `first_measurement + (k - 1) * largest_increase` tokens. (In partial mode the absolute time may be added late.)
    """
    timed = _TIME_TOKENS[TimeKind.DELTA4]
    return np.where(units.family == 6, _BARE[6], _BARE[4]) + np.where(units.mode == Mode.NONE, 0, timed)


def late_absolute_time(units: Units) -> Ints:
    """Tokens that the first timed measurement of a partial context can add on top of the largest increase."""
    late = _TIME_TOKENS[TimeKind.ABSOLUTE] - _TIME_TOKENS[TimeKind.DELTA4]
    return np.where(units.mode == Mode.PARTIAL, late, 0)


def first_measurement(units: Units) -> Ints:
    """The most tokens that a context of a single measurement can have."""
    timed = _TIME_TOKENS[TimeKind.ABSOLUTE]
    return np.where(units.family == 6, _BARE[6], _BARE[4]) + np.where(units.mode == Mode.NONE, 0, timed)


def candidate_limit(units: Units, length: int) -> Ints:
    """The most measurements of its window that a unit can use: as many as fit a sequence if all failed."""
    shortest = np.where(units.family == 6, _BARE[6], _BARE[4]) - _FAILED_SAVES
    return np.minimum(units.size, length // shortest)


def draw_positions(units: Units, counts: Ints, in_part: Flags) -> tuple[Ints, Ints, Ints]:
    """`counts[i]` measurements of unit i's window, drawn without replacement.

    For each: its unit, its position in the row, and its rank: the first k ranks are a sample of size k. They come by
    unit and in time order. Of a unit that is not used `in_part` all are wanted, and all have rank 0.
    """
    unit = np.repeat(np.arange(len(units)), counts)
    nth = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    position, rank = units.start[unit] + nth, np.zeros_like(nth)
    words = extend(units.key, Purpose.SAMPLE)
    all_drawn = counts == units.size

    some = np.flatnonzero((in_part & ~all_drawn)[unit])
    chosen = unit[some]
    drawn = permute(words[chosen], units.size[chosen], nth[some])
    order = np.argsort(chosen << 40 | drawn)  # rows have fewer than 2^40 measurements
    position[some] = units.start[chosen] + drawn[order]
    rank[some] = nth[some][order]

    every = np.flatnonzero((in_part & all_drawn)[unit])  # here only the ranks are drawn: a plain shuffle
    chosen = unit[every]
    order = np.argsort(chosen << 32 | bits(extend(words[chosen], nth[every]), 0, 32).astype(np.int64), kind="stable")
    rank[every[order]] = nth[every]
    return unit, position, rank


def measurement_words(units: Units, unit: Ints, position: Ints) -> Words:
    """One random word for each measurement of a context. Its parts decide what is drawn for the measurement."""
    return extend(extend(units.key, Purpose.MEASUREMENT)[unit], position)


def keeps_time(units: Units, unit: Ints, words: Words) -> Flags:
    """Whether each measurement carries its time."""
    low, high = UNTIMED_SHARES
    share = low + (high - low) * uniform(extend(units.key, Purpose.UNTIMED_SHARE))
    # The probability of losing the time, as a bound for 16 random bits: 0 keeps all times, 2^16 keeps none.
    bound = np.select([units.mode == Mode.FULL, units.mode == Mode.PARTIAL], [0, share * 2**16], 2**16).astype(
        np.uint64
    )
    return bits(words, 0, 16) >= bound[unit]


def count_tokens(units: Units, unit: Ints, time_s: Ints, timed: Flags, failed: Flags) -> Ints:
    """Tokens of each context, for measurements given by unit and in time order. Agrees with `arrange`."""
    which = np.flatnonzero(timed)
    kind = np.zeros(len(unit), dtype=np.int64)
    kind[which] = _time_kinds(unit[which], time_s[which])[0]
    tokens = token_counts(units.family[unit], failed, kind)
    return np.bincount(unit, weights=tokens, minlength=len(units)).astype(np.int64)


def _time_kinds(unit: Ints, time_s: Ints) -> tuple[Ints, Ints]:
    """Kind and value of consecutive timed measurements: absolute for the first of a context, else a delta."""
    value = np.diff(time_s, prepend=0)
    kind = np.where(value <= LONG_GAP_S, TimeKind.DELTA1, TimeKind.DELTA4).astype(np.int64)
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    kind[first] = TimeKind.ABSOLUTE
    value[first] = time_s[first]
    return kind, value


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the measurements of contexts are written: an order, and what is said of their times."""

    order: Ints
    """Indices of the measurements, context by context, in the order in which they are written."""
    time_kind: npt.NDArray[np.uint8]
    time_value: Ints
    field_order: npt.NDArray[np.uint8]


def arrange(unit: Ints, words: Words, time_s: Ints, timed: Flags) -> Arrangement:
    """Order measurements (given by unit and in time order) by their mode, and choose the kind of each time.

    A random place is drawn for each measurement. The places that fall to timed ones are then given to the timed ones in
    time order. With all timed that is time order, with none timed a plain shuffle: the three modes are one rule.
    """
    order = np.argsort(unit << 32 | bits(words, 16, 32).astype(np.int64), kind="stable")
    order[timed[order]] = np.flatnonzero(timed)

    kind = np.full(len(unit), TimeKind.NONE, dtype=np.uint8)
    value = np.zeros(len(unit), dtype=np.int64)
    which = np.flatnonzero(timed[order])
    kind[which], value[which] = _time_kinds(unit[order[which]], time_s[order[which]])
    field_order = (bits(words[order], 48, 16) * np.uint64(len(FIELD_ORDERS)) >> np.uint64(16)).astype(np.uint8)
    return Arrangement(order=order, time_kind=kind, time_value=value, field_order=field_order)
