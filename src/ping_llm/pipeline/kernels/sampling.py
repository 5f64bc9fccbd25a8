"""Which measurements of their windows contexts may use, and what is drawn for each of them."""

from typing import Any, Final

import numpy as np

from ping_llm.compiled import Array, column, kernel, part_of_kernels, types
from ping_llm.pipeline.contexts import FAILED_SAVES, UNTIMED_SHARES
from ping_llm.pipeline.kernels.draws import extend, permutation_width, permute_run, uniform
from ping_llm.pipeline.kernels.sorting import sort_random
from ping_llm.pipeline.kernels.units import FULL, PARTIAL, bare_tokens
from ping_llm.pipeline.randomness import Purpose

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
