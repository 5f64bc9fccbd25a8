"""Sorting of random keys: by the first bits into buckets, which leaves little to do."""

from typing import Any, Final

import numpy as np

from ping_llm.batches.contexts import ABSOLUTE, DELTA1, DELTA4, FAILED_SAVES, UNTIMED_SHARES
from ping_llm.batches.kernels.planning import FULL, NONE, PARTIAL, bare_tokens, least_tokens
from ping_llm.core.compiled import Array, column, kernel, part_of_kernels, types
from ping_llm.core.distribution import TOO_LONG_US
from ping_llm.core.draws import extend, permutation_width, permute_run, uniform
from ping_llm.core.randomness import Purpose
from ping_llm.rows.format import LONG_GAP_S

_FEW: Final = 12
"""So many are sorted faster without buckets."""


@part_of_kernels
def sort_random(keys: Any, spare: Any, ends: Any, count: Any, bits: Any) -> None:
    """Sort `keys[:count]`, numbers that are about equally likely anywhere below 2^bits.

    `spare` has room for as many keys, and `ends` for twice as many buckets as there are keys.
    """
    if count > _FEW:
        width = 4
        while 1 << width < count:
            width += 1
        shift = max(bits - width, 0)
        ends[: (1 << width) + 1] = 0
        for i in range(count):
            spare[i] = keys[i]
            ends[(keys[i] >> shift) + 1] += 1
        for bucket in range(1 << width):
            ends[bucket + 1] += ends[bucket]
        for i in range(count):
            bucket = spare[i] >> shift
            keys[ends[bucket]] = spare[i]
            ends[bucket] += 1
    for i in range(1, count):
        key, at = keys[i], i
        while at > 0 and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            at -= 1
        keys[at] = key


# Which measurements of their windows contexts may use, and what is drawn for each of them.

_SAMPLE: Final = int(Purpose.SAMPLE)
_MEASUREMENT: Final = int(Purpose.MEASUREMENT)
_UNTIMED_SHARE: Final = int(Purpose.UNTIMED_SHARE)

_LEAST_UNTIMED: Final = UNTIMED_SHARES[0]
_UNTIMED_RANGE: Final = UNTIMED_SHARES[1] - UNTIMED_SHARES[0]

_U32: Final = np.uint64(32)
_LOW_16: Final = np.uint64(0xFFFF)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_NUMBER: Final = (1 << 20) - 1
"""Keys that are sorted end in the number of the measurement among those of its context."""


@part_of_kernels
def untimed_bound(key: Any, mode: Any) -> Any:
    """A measurement whose first 16 random bits are below this loses its time: 0 keeps all times, 2^16 keeps none."""
    if mode == FULL:
        return np.uint64(0)
    if mode == PARTIAL:
        share = _LEAST_UNTIMED + _UNTIMED_RANGE * uniform(extend(key, _UNTIMED_SHARE))
        return np.uint64(share * 2.0**16)
    return np.uint64(1 << 16)


@kernel(
    column(types.uint64),
    column(types.uint8),
    column(types.uint8),
    column(types.int64),
    column(types.int64),
    column(types.bool_),
    types.int64,
    returns=types.Tuple(
        (
            column(types.int64),
            column(types.int64),
            column(types.int32),
            column(types.uint64),
            column(types.bool_),
        )
    ),
)
def sample(key: Array, family: Array, mode: Array, start: Array, size: Array, elastic: Array, length: Any) -> Any:
    """Candidates of each unit: as many measurements of its window as fit a sequence if all failed.

    Gives where each unit's candidates begin and, by unit and in time order, their positions in the row, ranks, random
    words and whether they keep their time. The first k ranks are a sample of size k, drawn without replacement. Of a
    unit that is not elastic all are wanted, and all have rank 0.
    """
    units = len(key)
    first = np.zeros(units + 1, dtype=np.int64)
    most = 0
    for u in range(units):
        count = min(size[u], length // (bare_tokens(family[u]) - FAILED_SAVES))
        first[u + 1] = first[u] + count
        most = max(most, count)
    position = np.empty(first[units], dtype=np.int64)
    rank = np.zeros(first[units], dtype=np.int32)
    words = np.empty(first[units], dtype=np.uint64)
    timed = np.empty(first[units], dtype=np.bool_)
    keys, spare = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    ends = np.empty(2 * most + 17, dtype=np.int64)

    for u in range(units):
        begin, count = first[u], first[u + 1] - first[u]
        if elastic[u] and count < size[u]:
            permute_run(extend(key[u], _SAMPLE), size[u], 0, keys[:count])
            for i in range(count):
                keys[i] = keys[i] << 20 | i
            sort_random(keys, spare, ends, count, 20 + np.int64(permutation_width(size[u])))
            for i in range(count):
                position[begin + i] = start[u] + (keys[i] >> 20)
                rank[begin + i] = keys[i] & _NUMBER
        else:
            for i in range(count):
                position[begin + i] = start[u] + i
            if elastic[u]:  # here only the ranks are drawn: a plain shuffle
                word = extend(key[u], _SAMPLE)
                for i in range(count):
                    keys[i] = np.int64(extend(word, i) & _LOW_32) << 20 | i
                sort_random(keys, spare, ends, count, 52)
                for i in range(count):
                    rank[begin + (keys[i] & _NUMBER)] = i
        word, bound = extend(key[u], _MEASUREMENT), untimed_bound(key[u], mode[u])
        for i in range(begin, begin + count):
            words[i] = extend(word, position[i])
            timed[i] = (words[i] & _LOW_16) >= bound
    return first, position, rank, words, timed


# How many measurements each context uses, so that sequences are as full as can be and never too full.

_GROWTH_ROUNDS: Final = 3
"""Each round fills all but a fifth of what is still open (a long delta is that much longer than a usual one)."""

SOUND: Final = -1


@part_of_kernels
def count_tokens(used: Any, bare: Any, mode: Any, rank: Any, time_s: Any, timed: Any, rtt_ms: Any) -> Any:
    """Tokens of a context that uses the candidates of rank below `used`."""
    tokens = 0
    if mode == NONE:
        for i in range(len(rank)):
            tokens += np.int64(rank[i] < used) * (bare - np.int64(np.isnan(rtt_ms[i])) * FAILED_SAVES)
        return tokens
    previous, is_first = np.int64(0), True
    for i in range(len(rank)):
        if rank[i] < used:
            tokens += bare - np.int64(np.isnan(rtt_ms[i])) * FAILED_SAVES
            if timed[i]:
                if is_first:
                    tokens += ABSOLUTE
                else:
                    tokens += DELTA1 if time_s[i] - previous <= LONG_GAP_S else DELTA4
                previous, is_first = time_s[i], False
    return tokens


@part_of_kernels
def _largest_increase(family: Any, mode: Any) -> Any:
    """The most tokens that each measurement after the first adds to a context.

    Its own, with a long delta. Its successor's delta only gets shorter. If it becomes the first one, it takes over the
    absolute time, and the one that had it gets a delta instead.
    """
    return bare_tokens(family) + (0 if mode == NONE else DELTA4)


@part_of_kernels
def _late_absolute_time(mode: Any) -> Any:
    """Tokens that the first timed measurement of a partial context can add on top of the largest increase."""
    return ABSOLUTE - DELTA4 if mode == PARTIAL else 0


@kernel(
    column(types.int32),
    column(types.uint8),
    column(types.uint8),
    column(types.int64),
    column(types.bool_),
    column(types.int64),
    types.int64,
    column(types.int64),
    column(types.int32),
    column(types.int64),
    column(types.bool_),
    column(types.float32),
    column(types.int64),
    column(types.int32),
    returns=types.int64,
)
def fill(
    sequence: Array,
    family: Array,
    mode: Array,
    most: Array,
    elastic: Array,
    wanted: Array,
    length: Any,
    first: Array,
    rank: Array,
    time_s: Array,
    timed: Array,
    rtt_ms: Array,
    counts: Array,
    tokens: Array,
) -> Any:
    """Measurements and tokens of each unit: all of its window, or for an elastic one as many as still fit.

    Elastic units first share what the others leave open in proportion to what was planned for them. Then one in each
    sequence grows while another measurement of any length fits; at last one that may just fit is tried.

    Gives the number of a unit whose data cannot be what the index says, or `SOUND`.
    """
    for i in range(len(rtt_ms)):
        if np.float64(rtt_ms[i]) * 1000.0 >= TOO_LONG_US:
            return np.searchsorted(first, i, side="right") - 1
    units, begin = len(sequence), 0
    while begin < units:
        end = begin + 1
        while end < units and sequence[end] == sequence[begin]:
            end += 1

        spare, still_open, all_wanted = length, length, 0
        for u in range(begin, end):
            counts[u], tokens[u] = first[u + 1] - first[u], 0
            if elastic[u]:
                spare -= least_tokens(family[u], mode[u], most[u])
                all_wanted += wanted[u]
            else:
                a, b = first[u], first[u + 1]
                tokens[u] = count_tokens(
                    1, bare_tokens(family[u]), mode[u], rank[a:b], time_s[a:b], timed[a:b], rtt_ms[a:b]
                )
                if tokens[u] > most[u]:
                    return u
                still_open -= tokens[u]
                spare -= tokens[u]
        for u in range(begin, end):
            if elastic[u]:
                share = np.int64(spare * (wanted[u] / all_wanted)) // _largest_increase(family[u], mode[u])
                counts[u] = min(max(1 + share, 1), counts[u])
                a, b = first[u], first[u + 1]
                tokens[u] = count_tokens(
                    counts[u], bare_tokens(family[u]), mode[u], rank[a:b], time_s[a:b], timed[a:b], rtt_ms[a:b]
                )
                still_open -= tokens[u]

        for turn in range(_GROWTH_ROUNDS + 1):
            growing, room = -1, 0
            for u in range(begin, end):
                left = first[u + 1] - first[u] - counts[u]
                if elastic[u] and left > room:
                    growing, room = u, left
            if growing < 0:
                break
            u = growing
            more = max(still_open - _late_absolute_time(mode[u]), 0) // _largest_increase(family[u], mode[u])
            more = min(max(more, 1) if turn == _GROWTH_ROUNDS else more, room)
            if more > 0:
                a, b = first[u], first[u + 1]
                new = count_tokens(
                    counts[u] + more, bare_tokens(family[u]), mode[u], rank[a:b], time_s[a:b], timed[a:b], rtt_ms[a:b]
                )
                if new - tokens[u] <= still_open:
                    still_open -= new - tokens[u]
                    counts[u] += more
                    tokens[u] = new
        if still_open < 0:
            return begin
        begin = end
    return SOUND
