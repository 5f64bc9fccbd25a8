"""Contexts in NumPy, a column at a time: the specification of the compiled `contexts/plan.py` and `segments.py`.

The statistical tests are of these functions; `test_kernels.py` checks that the kernels do the same to the last bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ping_llm.contexts.plan import (
    ABSOLUTE,
    BARE_4,
    BARE_6,
    DELTA1,
    DELTA4,
    FAILED_SAVES,
    MODE_SHARES,
    Flags,
    Mode,
    RowFacts,
    Samples,
)
from ping_llm.contexts.segments import UNTIMED_SHARES
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.randomness import Ints, Purpose, Words, extend, uniform
from ping_llm.tokens import FIELD_ORDERS, LONGEST_DELTA1_S, RESULT_LAST, TimeKind, token_counts
from reference_randomness import below, bits, log_uniform, permute


def draw_samples(seed_key: Any, row: Ints, number: Ints, facts: RowFacts, settings: ContextSettings) -> Samples:
    """Draw mode and window of each sample, and work out its size in tokens. `facts` are those of all rows."""
    facts = RowFacts(*(column[row].astype(np.int64) for column in facts))
    word = extend(seed_key, number)
    crossing = uniform(extend(word, Purpose.CROSSING)) < settings.crossing
    # Of what others measured, gaps and failures are not known.
    facts = facts._replace(
        failed=np.where(crossing, 0, facts.failed), long_gaps=np.where(crossing, facts.count - 1, facts.long_gaps)
    )
    mode = np.searchsorted(np.cumsum(MODE_SHARES)[:2], uniform(extend(word, Purpose.MODE)), side="right").astype(
        np.uint8
    )
    most_of_row, likely_of_row = _tokens(facts, facts.count, mode, facts.long_gaps)
    whole = most_of_row <= settings.length
    size = np.where(whole, facts.count, log_uniform(extend(word, Purpose.WINDOW_SIZE), facts.count))
    start = below(extend(word, Purpose.WINDOW_OFFSET), facts.count - size + 1)
    most, likely = _tokens(facts, size, mode, np.minimum(facts.long_gaps, size))
    likely = np.where(whole, likely_of_row, likely)
    first = first_measurement(facts.family, mode)
    return Samples(
        row=row,
        number=number,
        key=word,
        family=facts.family.astype(np.uint8),
        mode=mode,
        start=start,
        size=size,
        whole=whole,
        max_tokens=most,
        min_tokens=np.minimum(first, most),
        target_tokens=np.where(likely > settings.length, settings.length * 85 // 100, likely),
        shrinkable=np.zeros(len(row), dtype=bool),
        crossing=crossing,
    )


def _tokens(facts: RowFacts, size: Ints, mode: Any, long_gaps: Ints) -> tuple[Ints, Ints]:
    """Most and likely tokens of `size` consecutive measurements of each row.

    With all times kept, every gap is one of the row's, and the index counts the long ones. Where times are lost, gaps
    merge, and any of them may become long.
    """
    bare = np.where(facts.family == 6, BARE_6, BARE_4) * size
    first = ABSOLUTE - DELTA1
    gaps = long_gaps * size // facts.count
    full_most = first + DELTA1 * size + (DELTA4 - DELTA1) * long_gaps
    full_likely = first + DELTA1 * size + (DELTA4 - DELTA1) * gaps
    partial_most = ABSOLUTE + DELTA4 * (size - 1)
    partial_likely = np.where(size == 1, ABSOLUTE // 2, first + (DELTA1 + 1) * size // 2)
    exact_failed = np.where(size == facts.count, facts.failed, 0) * FAILED_SAVES
    likely_failed = facts.failed * size // facts.count * FAILED_SAVES
    most = bare + np.select([mode == Mode.FULL, mode == Mode.PARTIAL], [full_most, partial_most], 0) - exact_failed
    likely = bare + np.select([mode == Mode.FULL, mode == Mode.PARTIAL], [full_likely, partial_likely], 0)
    return most, likely - likely_failed


def largest_increase(samples: Samples) -> Ints:
    """The most tokens that each measurement after the first adds to a context.

    Its own, with a long delta. Its successor's delta only gets shorter. If it becomes the first one, it takes over the
    absolute time, and the one that had it gets a delta instead. So k measurements have at most
    `first_measurement + (k - 1) * largest_increase` tokens. (In partial mode the absolute time may be added late.)
    """
    return np.where(samples.family == 6, BARE_6, BARE_4) + np.where(samples.mode == Mode.NONE, 0, DELTA4)


def late_absolute_time(samples: Samples) -> Ints:
    """Tokens that the first timed measurement of a partial context can add on top of the largest increase."""
    return np.where(samples.mode == Mode.PARTIAL, ABSOLUTE - DELTA4, 0)


def first_measurement(family: Any, mode: Any) -> Ints:
    """The most tokens that a context of a single measurement can have."""
    return np.where(family == 6, BARE_6, BARE_4) + np.where(mode == Mode.NONE, 0, ABSOLUTE)


def candidate_limit(samples: Samples, length: int) -> Ints:
    """The most measurements of its window that a sample can use: as many as fit a sequence if all failed."""
    shortest = np.where(samples.family == 6, BARE_6, BARE_4) - FAILED_SAVES
    return np.minimum(samples.size, length // shortest)


def draw_positions(samples: Samples, counts: Ints, in_part: Flags) -> tuple[Ints, Ints, Ints]:
    """`counts[i]` measurements of sample i's window, drawn without replacement.

    For each: its sample, its position in the row, and its rank: the first k ranks are a sample of size k. They come by
    sample and in time order. Of a sample that is not used `in_part` all are target_tokens, and all have rank 0.
    """
    sample = np.repeat(np.arange(len(samples.row)), counts)
    nth = np.arange(len(sample)) - np.repeat(np.cumsum(counts) - counts, counts)
    position, rank = samples.start[sample] + nth, np.zeros_like(nth)
    words = extend(samples.key, Purpose.SAMPLE)
    all_drawn = counts == samples.size

    some = np.flatnonzero((in_part & ~all_drawn)[sample])
    chosen = sample[some]
    drawn = permute(words[chosen], samples.size[chosen], nth[some])
    order = np.argsort(chosen << 40 | drawn)  # rows have fewer than 2^40 measurements
    position[some] = samples.start[chosen] + drawn[order]
    rank[some] = nth[some][order]

    every = np.flatnonzero((in_part & all_drawn)[sample])  # here only the ranks are drawn: a plain shuffle
    chosen = sample[every]
    order = np.argsort(chosen << 32 | bits(extend(words[chosen], nth[every]), 0, 32).astype(np.int64), kind="stable")
    rank[every[order]] = nth[every]
    return sample, position, rank


def measurement_words(samples: Samples, sample: Ints, position: Ints) -> Words:
    """One random word for each measurement of a context. Its parts decide what is drawn for the measurement."""
    return extend(extend(samples.key, Purpose.MEASUREMENT)[sample], position)


def keeps_time(samples: Samples, sample: Ints, words: Words) -> Flags:
    """Whether each measurement carries its time."""
    low, high = UNTIMED_SHARES
    share = low + (high - low) * uniform(extend(samples.key, Purpose.UNTIMED_SHARE))
    # The probability of losing the time, as a bound for 16 random bits: 0 keeps all times, 2^16 keeps none.
    bound = np.select([samples.mode == Mode.FULL, samples.mode == Mode.PARTIAL], [0, share * 2**16], 2**16).astype(
        np.uint64
    )
    return bits(words, 0, 16) >= bound[sample]


def count_tokens(samples: Samples, sample: Ints, time_s: Ints, timed: Flags, failed: Flags) -> Ints:
    """Tokens of each context, for measurements given by sample and in time order. Agrees with `arrange`."""
    which = np.flatnonzero(timed)
    kind = np.zeros(len(sample), dtype=np.int64)
    kind[which] = _time_kinds(sample[which], time_s[which])[0]
    tokens = token_counts(samples.family[sample], failed, kind)
    return np.bincount(sample, weights=tokens, minlength=len(samples.row)).astype(np.int64)


def _time_kinds(sample: Ints, time_s: Ints) -> tuple[Ints, Ints]:
    """Kind and value of consecutive timed measurements: absolute for the first of a context, else a delta."""
    value = np.diff(time_s, prepend=0)
    kind = np.where(value <= LONGEST_DELTA1_S, TimeKind.DELTA1, TimeKind.DELTA4).astype(np.int64)
    first = np.flatnonzero(np.diff(sample, prepend=-1))
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


def arrange(sample: Ints, words: Words, time_s: Ints, timed: Flags, result_last: Flags | None = None) -> Arrangement:
    """Order measurements (given by sample and in time order) by their mode, and choose the kind of each time.

    A random position is drawn for each measurement. The positions that fall to timed ones are then given to the timed
    ones in time order. With all timed that is time order, with none timed a plain shuffle: one rule for all modes.
    In samples that are `result_last`, fields have one order.
    """
    order = np.argsort(sample << 32 | bits(words, 16, 32).astype(np.int64), kind="stable")
    order[timed[order]] = np.flatnonzero(timed)

    kind = np.full(len(sample), TimeKind.NONE, dtype=np.uint8)
    value = np.zeros(len(sample), dtype=np.int64)
    which = np.flatnonzero(timed[order])
    kind[which], value[which] = _time_kinds(sample[order[which]], time_s[order[which]])
    field_order = (bits(words[order], 48, 16) * np.uint64(len(FIELD_ORDERS)) >> np.uint64(16)).astype(np.uint8)
    if result_last is not None:
        field_order[result_last[sample[order]]] = RESULT_LAST
    return Arrangement(order=order, time_kind=kind, time_value=value, field_order=field_order)
