"""Which units of a block share a sequence, and in which order."""

from typing import Any

import numpy as np

from ping_llm.compiled import Array, column, kernel, part_of_kernels, types
from ping_llm.pipeline.kernels.draws import permute_run
from ping_llm.pipeline.kernels.units import least_tokens

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
