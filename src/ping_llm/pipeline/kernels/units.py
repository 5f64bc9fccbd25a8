"""Mode, window and size in tokens of contexts, from their numbers and the row index alone."""

from typing import Any, Final

import numpy as np

from ping_llm.compiled import Array, column, kernel, mapped, part_of_kernels, types
from ping_llm.pipeline.contexts import (
    ABSOLUTE,
    BARE_4,
    BARE_6,
    DELTA1,
    DELTA4,
    FAILED_SAVES,
    MODE_SHARES,
    Mode,
)
from ping_llm.pipeline.kernels.draws import below, extend, log_uniform, permute_run, uniform
from ping_llm.pipeline.randomness import Purpose

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
