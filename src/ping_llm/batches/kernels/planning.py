"""Mode, window and size in tokens of contexts, from their numbers and the row index alone."""

from typing import Any, Final

import numpy as np

from ping_llm.batches.contexts import ABSOLUTE, BARE_4, BARE_6, DELTA1, DELTA4, FAILED_SAVES, MODE_SHARES, Mode
from ping_llm.core.compiled import Array, column, kernel, mapped, part_of_kernels, types
from ping_llm.core.draws import below, extend, log_uniform, permute_run, uniform
from ping_llm.core.randomness import Purpose

FULL: Final = int(Mode.FULL)
PARTIAL: Final = int(Mode.PARTIAL)
NONE: Final = int(Mode.NONE)

_NOT_FULL_FROM: Final = MODE_SHARES[0]
_NONE_FROM: Final = MODE_SHARES[0] + MODE_SHARES[1]

SIGNPOST_UNITS: Final = 16

_MODE: Final = int(Purpose.MODE)
_WINDOW_SIZE: Final = int(Purpose.WINDOW_SIZE)
_WINDOW_OFFSET: Final = int(Purpose.WINDOW_OFFSET)


@part_of_kernels
def bare_tokens(family: Any) -> Any:
    """Tokens of a measurement without a time that did not fail."""
    return BARE_6 if family == 6 else BARE_4


@part_of_kernels
def least_tokens(family: Any, mode: Any, most: Any) -> Any:
    """The most tokens that one measurement of a context can take."""
    return min(bare_tokens(family) + (0 if mode == NONE else ABSOLUTE), most)


@part_of_kernels
def _most_tokens(family: Any, mode: Any, size: Any, count: Any, failed: Any, long_gaps: Any) -> Any:
    """The most tokens that `size` consecutive measurements of a row can take.

    With all times kept, every gap is one of the row's, and the index counts the long ones. Where times are lost, gaps
    merge, and any of them may become long.
    """
    tokens = bare_tokens(family) * size
    if mode == FULL:
        tokens += ABSOLUTE + DELTA1 * (size - 1) + (DELTA4 - DELTA1) * long_gaps
    elif mode == PARTIAL:
        tokens += ABSOLUTE + DELTA4 * (size - 1)
    return tokens - (failed * FAILED_SAVES if size == count else 0)


@part_of_kernels
def _likely_tokens(family: Any, mode: Any, size: Any, count: Any, failed: Any, long_gaps: Any) -> Any:
    """The tokens that they will probably take. A whole number, so that sums are exact on every machine."""
    tokens = bare_tokens(family) * size
    if mode == FULL:
        tokens += ABSOLUTE + DELTA1 * (size - 1) + (DELTA4 - DELTA1) * (long_gaps * size // count)
    elif mode == PARTIAL:
        tokens += ABSOLUTE // 2 if size == 1 else ABSOLUTE - DELTA1 + (DELTA1 + 1) * size // 2
    return tokens - failed * size // count * FAILED_SAVES


@part_of_kernels
def _row_of(first_unit: Any, signposts: Any, number: Any) -> Any:
    """The row that a unit belongs to: the last one whose first unit does not come after it."""
    low, high = signposts[number // SIGNPOST_UNITS], signposts[number // SIGNPOST_UNITS + 1] + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if first_unit[middle] <= number:
            low = middle
        else:
            high = middle
    return low


@kernel(
    types.uint64,
    types.uint64,
    types.int64,
    types.int64,
    column(types.int64),
    column(types.int64),
    mapped(types.uint32),
    mapped(types.uint32),
    mapped(types.uint32),
    mapped(types.uint8),
    column(types.int64),
    column(types.int64),
    column(types.uint64),
    column(types.uint8),
    column(types.uint8),
    column(types.int64),
    column(types.int64),
    column(types.bool_),
    column(types.int64),
    column(types.int64),
)
def draw_units(
    epoch_key: Any,
    order_key: Any,
    begin: Any,
    length: Any,
    first_unit: Array,
    signposts: Array,
    row_count: Array,
    row_failed: Array,
    row_long_gaps: Array,
    row_family: Array,
    row: Array,
    number: Array,
    key: Array,
    family: Array,
    mode: Array,
    start: Array,
    size: Array,
    whole: Array,
    most: Array,
    likely: Array,
) -> None:
    """The units at places `begin` and after of an epoch's permutation: fills the columns from `row` on.

    `signposts` are the rows of every `SIGNPOST_UNITS`-th unit. In several passes, so that the compiler can draw for
    several units side by side.
    """
    units = first_unit[len(first_unit) - 1]
    permute_run(order_key, units, begin, number)
    for i in range(len(row)):
        row[i] = _row_of(first_unit, signposts, number[i])
        size[i] = row_count[row[i]]
    for i in range(len(row)):
        key[i] = extend(epoch_key, number[i])
        size[i] = log_uniform(extend(key[i], _WINDOW_SIZE), size[i])
    for i in range(len(row)):
        r, word = row[i], key[i]
        count, failed, long_gaps = np.int64(row_count[r]), np.int64(row_failed[r]), np.int64(row_long_gaps[r])
        drawn = uniform(extend(word, _MODE))
        m = FULL if drawn < _NOT_FULL_FROM else PARTIAL if drawn < _NONE_FROM else NONE
        f = row_family[r]
        whole[i] = _most_tokens(f, m, count, count, failed, long_gaps) <= length
        n = count if whole[i] else size[i]
        gaps = min(long_gaps, n)
        family[i], mode[i], size[i] = f, m, n
        start[i] = below(extend(word, _WINDOW_OFFSET), count - n + 1)
        most[i] = _most_tokens(f, m, n, count, failed, gaps)
        likely[i] = _likely_tokens(f, m, n, count, failed, gaps)


# Which units of a block share a sequence, and in which order.

_SEQUENCE_BITS = 24
"""A heap entry is a sequence's load and, below it, its number: of equally full ones the first comes first."""


@part_of_kernels
def _largest_first(values: Any) -> Any:
    """Indices of whole numbers, by counting: the largest first, equal ones in their order."""
    place = np.zeros(values.max() + 2, dtype=np.int64)
    for value in values:
        place[value] += 1
    total = 0
    for value in range(len(place) - 1, -1, -1):
        here, place[value] = place[value], total
        total += here
    order = np.empty(len(values), dtype=np.int64)
    for i in range(len(values)):
        order[place[values[i]]] = i
        place[values[i]] += 1
    return order


@part_of_kernels
def _replace_least(heap: Any, entry: Any) -> None:
    """Put an entry in the place of the least one."""
    at, size = 0, len(heap)
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = entry


@kernel(column(types.int64), types.int64, returns=column(types.int64))
def share_out(wanted: Array, sequences: Any) -> Any:
    """The sequence of each unit: the largest first, each to the sequence with the least in it so far."""
    heap = np.arange(sequences)
    result = np.empty(len(wanted), dtype=np.int64)
    for unit in _largest_first(wanted):
        result[unit] = heap[0] & ((1 << _SEQUENCE_BITS) - 1)
        _replace_least(heap, heap[0] + (wanted[unit] << _SEQUENCE_BITS))
    return result


@part_of_kernels
def _comes_before(unit: Any, other: Any, most: Any, whole: Any) -> Any:
    if whole[unit] != whole[other]:
        return whole[other]
    return most[unit] > most[other]


@kernel(
    types.uint64,
    types.int64,
    column(types.int64),
    column(types.int64),
    column(types.bool_),
    returns=types.UniTuple(column(types.int64), 2),
)
def order_by_sequence(order_key: Any, sequences: Any, sequence: Array, most: Array, whole: Array) -> Any:
    """Units by sequence, and where each sequence begins; windows before whole rows, then large before small.

    Shared out largest first, the first sequences would have few long contexts and the last ones many short. So the
    sequences are given other numbers, at random.
    """
    number = np.empty(sequences, dtype=np.int64)
    permute_run(order_key, sequences, 0, number)
    first = np.zeros(sequences + 1, dtype=np.int64)
    for old in sequence:
        first[number[old] + 1] += 1
    for i in range(sequences):
        first[i + 1] += first[i]

    order = np.empty(len(sequence), dtype=np.int64)
    filled = np.zeros(sequences, dtype=np.int64)
    for unit in range(len(sequence)):
        new = number[sequence[unit]]
        at = first[new] + filled[new]
        filled[new] += 1
        while at > first[new] and _comes_before(unit, order[at - 1], most, whole):
            order[at] = order[at - 1]
            at -= 1
        order[at] = unit
    return order, first


@kernel(
    column(types.int64),
    column(types.uint8),
    column(types.uint8),
    column(types.int64),
    types.int64,
    returns=column(types.bool_),
)
def choose_elastic(first: Array, family: Array, mode: Array, most: Array, length: Any) -> Any:
    """Units are made elastic, one after the other, until the sequence cannot overflow whatever the data are."""
    elastic = np.zeros(len(most), dtype=np.bool_)
    for sequence in range(len(first) - 1):
        begin, end = first[sequence], first[sequence + 1]
        tokens = most[begin:end].sum()
        for unit in range(begin, end):
            elastic[unit] = unit == begin or tokens > length
            tokens -= most[unit] - least_tokens(family[unit], mode[unit], most[unit])
    return elastic
