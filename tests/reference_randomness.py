"""Random numbers for many keys at once, in NumPy: the specification of `core/draws.py`."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.randomness import GOLDEN, Ints, Words, mix64, uniform

_ROUNDS: Final = 8
_ROUNDS_BELOW_32: Final = 24


def bits(words: Words, first: int, count: int) -> Words:
    """`count` bits of each word from bit `first` on: several small draws from one word."""
    return (words >> np.uint64(first)) & np.uint64((1 << count) - 1)


def below(words: Words, bound: Any) -> Ints:
    """Whole numbers in [0, bound) from random words. The bias, bound / 2^53, is far below what could be noticed."""
    return np.minimum((uniform(words) * bound).astype(np.int64), np.asarray(bound) - 1)


def log_uniform(words: Words, largest: Any) -> Ints:
    """Whole numbers in [1, largest], small and large sizes equally likely: P(≤ x) = ln(x + 1) / ln(largest + 1).

    NumPy's `exp` and `log` differ in the last bit between processors, and a window that differs between two hosts would
    be another batch. These are made of additions and multiplications, which IEEE 754 fixes to the last bit.
    """
    largest = np.asarray(largest, dtype=np.int64)
    drawn = _exp2(uniform(words) * _log2((largest + 1).astype(np.float64)))
    return np.clip(drawn.astype(np.int64), 1, largest)


def _log2(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mantissa, exponent = np.frexp(value)
    root = 0.7071067811865476
    ratio = (mantissa - root) / (mantissa + root)  # at most 0.172 in size, so that the series is short
    square, total = ratio * ratio, np.zeros_like(ratio)
    for term in range(21, -1, -2):
        total = total * square + 1.0 / term
    return exponent - 0.5 + total * ratio * 2.8853900817779268  # 2 / ln 2


def _exp2(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    whole = np.floor(value)
    rest, total = (value - whole) * 0.6931471805599453, np.ones_like(value)
    for term in range(18, 0, -1):
        total = total * rest / term + 1.0
    return np.ldexp(total, whole.astype(np.int32))


def permute(words: Words, size: Any, position: Any) -> Ints:
    """Where a random permutation of range(size) takes each position; `words` says which permutation, one for each.

    A Feistel network over the smallest power of two that holds the range, walked until it lands inside: any element of
    any permutation can be had alone, so that sampling without replacement is taking the first k positions.
    """
    words, size, start = np.broadcast_arrays(
        words, np.asarray(size, dtype=np.int64), np.asarray(position, dtype=np.int64)
    )
    shape = start.shape
    words, size, result = words.reshape(-1), size.reshape(-1), start.reshape(-1).astype(np.uint64)
    width = np.frexp(np.maximum(size - 1, 1).astype(np.float64))[1].astype(np.uint64)  # the range fits in 2^width
    for small, rounds in ((True, _ROUNDS_BELOW_32), (False, _ROUNDS)):
        outside = np.flatnonzero((width < 5) == small)
        while len(outside):
            result[outside] = _feistel(words[outside], width[outside], result[outside], rounds)
            outside = outside[result[outside] >= size[outside]]
    return result.astype(np.int64).reshape(shape)


def _feistel(words: Words, width: Words, value: Words, rounds: int) -> Words:
    """A keyed bijection of [0, 2^width): add to each part in turn a hash of the other. Their widths may differ."""
    one = np.uint64(1)
    low_bits = width >> one
    low_mask, high_mask = (one << low_bits) - one, (one << (width - low_bits)) - one
    high, low = value >> low_bits, value & low_mask
    with np.errstate(over="ignore"):
        for turn in range(rounds):
            salt = words + np.uint64(turn + 1) * GOLDEN
            if turn % 2 == 0:
                mixed = mix64(low ^ salt)
                high = (high + mixed) & high_mask
            else:
                mixed = mix64(high ^ salt)
                low = (low + mixed) & low_mask
    return high << low_bits | low
