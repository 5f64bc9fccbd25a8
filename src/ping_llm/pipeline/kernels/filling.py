"""How many measurements each context uses, so that sequences are as full as can be and never too full."""

from typing import Any, Final

import numpy as np

from ping_llm.compiled import Array, column, kernel, part_of_kernels, types
from ping_llm.pipeline.contexts import ABSOLUTE, DELTA1, DELTA4, FAILED_SAVES
from ping_llm.pipeline.kernels.units import NONE, PARTIAL, bare_tokens, least_tokens
from ping_llm.rows.format import LONG_GAP_S
from ping_llm.tokens.rtt_code import TOO_LONG_US

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
