"""The draws of `randomness.py` for use within kernels: the same numbers, compiled."""

from typing import Any, Final

import numpy as np

from ping_llm.core import randomness
from ping_llm.core.compiled import Array, kernel, part_of_kernels, types
from ping_llm.core.randomness import GOLDEN

mix64 = part_of_kernels(randomness.mix64)
uniform: Any = part_of_kernels(randomness.uniform)

_FEW_BITS: Final = np.uint64(5)
_MANTISSA: Final = (1 << 52) - 1
_HALF: Final = 1022 << 52

_ONE: Final = np.uint64(1)  # a word and a Python int would become a float


@part_of_kernels
def extend(word: Any, part: Any) -> Any:
    """The word for a key that is one part longer."""
    return mix64((word ^ np.uint64(part)) + GOLDEN)


@part_of_kernels
def below(word: Any, bound: Any) -> Any:
    """A whole number in [0, bound)."""
    return min(np.int64(uniform(word) * bound), bound - 1)


@part_of_kernels
def log_uniform(word: Any, largest: Any) -> Any:
    """A whole number in [1, largest], log-uniform: P(≤ x) = ln(x + 1) / ln(largest + 1).

    Library versions of `exp` and `log` differ in the last bit between processors, and a window that differs between two
    hosts would be another batch. These are made of additions and multiplications, which IEEE 754 fixes to the last bit.
    """
    drawn = np.int64(_exp2(uniform(word) * _log2(np.float64(largest + 1))))
    return min(max(drawn, 1), largest)


@part_of_kernels
def _log2(value: Any) -> Any:
    bits = np.float64(value).view(np.int64)
    exponent = (bits >> 52) - 1022
    mantissa = np.int64((bits & _MANTISSA) | _HALF).view(np.float64)
    root = 0.7071067811865476
    ratio = (mantissa - root) / (mantissa + root)  # at most 0.172 in size, so that the series is short
    square, total = ratio * ratio, 0.0
    for term in range(21, -1, -2):
        total = total * square + 1.0 / term
    return exponent - 0.5 + total * ratio * 2.8853900817779268  # 2 / ln 2


@part_of_kernels
def _exp2(value: Any) -> Any:
    whole = np.floor(value)
    rest, total = (value - whole) * 0.6931471805599453, 1.0
    for term in range(18, 9, -1):  # two loops: LLVM would not unroll one so long, and then not vectorise it
        total = total * rest / term + 1.0
    for term in range(9, 0, -1):
        total = total * rest / term + 1.0
    return total * np.int64((np.int64(whole) + 1023) << 52).view(np.float64)


@part_of_kernels
def permutation_width(size: Any) -> Any:
    """The network permutes a range of 2^width numbers, the smallest that holds `size`."""
    last, bits = max(size - 1, 1), 0
    while last > 0:
        last >>= 1
        bits += 1
    return np.uint64(bits)


@part_of_kernels
def _shuffled(word: Any, width: Any, value: Any, pairs: Any) -> Any:
    """The image of a number under a keyed bijection of [0, 2^width): a Feistel network, two rounds at a time.

    A hash of each half of the number is added to the other half in turn. The halves may have different widths.
    """
    low_bits = width >> _ONE
    low_mask, high_mask = (_ONE << low_bits) - _ONE, (_ONE << (width - low_bits)) - _ONE
    high, low, salt = value >> low_bits, value & low_mask, word
    for _ in range(pairs):
        salt += GOLDEN
        high = (high + mix64(low ^ salt)) & high_mask
        salt += GOLDEN
        low = (low + mix64(high ^ salt)) & low_mask
    return high << low_bits | low


@part_of_kernels
def permute_run(word: Any, size: Any, begin: Any, result: Any) -> None:
    """The images of `begin` and the following numbers under a random permutation of range(size), by cycle walking."""
    width = permutation_width(size)
    few = width < _FEW_BITS  # these need 24 rounds, not 8, until every pair of positions is equally likely (tested)
    if few:
        for i in range(len(result)):
            result[i] = _shuffled(word, width, np.uint64(begin + i), 12)
    else:
        for i in range(len(result)):  # vectorised: the first step of all; those that land outside continue below
            result[i] = _shuffled(word, width, np.uint64(begin + i), 4)
    for i in range(len(result)):
        while result[i] >= size:
            result[i] = _shuffled(word, width, np.uint64(result[i]), 12 if few else 4)


@kernel(types.uint64[::1], types.int64[::1], types.int64[::1], types.int64[::1])
def permute_each(words: Array, sizes: Array, positions: Array, result: Array) -> None:
    for i in range(len(result)):
        permute_run(words[i], sizes[i], positions[i], result[i : i + 1])
