"""Sorting of random keys: by the first bits into buckets, which leaves little to do."""

from typing import Any, Final

from ping_llm.compiled import part_of_kernels

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
