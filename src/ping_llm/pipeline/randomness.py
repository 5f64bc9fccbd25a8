"""Random numbers that are a function of their key, not of what was drawn before.

Every choice in the pipeline is drawn from a key such as (seed, epoch, unit, purpose). So any batch can be made alone,
in any order, in any process, and comes out the same. NumPy's own generators are not used: their streams may change
between releases, and a run must be reproducible for years.
"""

from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.addresses import mix64

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS: Final = 8
_ROUNDS_BELOW_32: Final = 24
"""Rounds of the Feistel network. Small ranges need more until every pair of places is equally likely (tested)."""


class Purpose(IntEnum):
    """What a number is drawn for. Values are part of the contract: another value is another draw."""

    EPOCH_ORDER = 1
    MODE = 2
    WINDOW_SIZE = 3
    WINDOW_OFFSET = 4
    UNTIMED_SHARE = 5
    SAMPLE = 6
    MEASUREMENT = 7
    SEQUENCE_ORDER = 8


def key(*parts: Any) -> Words:
    """One 64-bit word from whole numbers (or arrays of them, which broadcast)."""
    word = np.asarray(np.uint64(0))
    for part in parts:
        word = extend(word, part)
    return word


def extend(word: Words, part: Any) -> Words:
    """The word for a key that is one part longer: `extend(key(a, b), c)` is `key(a, b, c)`."""
    with np.errstate(over="ignore"):
        return np.asarray(mix64((word ^ np.asarray(part).astype(np.uint64)) + _GOLDEN))


def bits(words: Words, first: int, count: int) -> Words:
    """`count` bits of each word from bit `first` on: several small draws from one word."""
    return (words >> np.uint64(first)) & np.uint64((1 << count) - 1)


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from random words."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(words: Words, bound: Any) -> Ints:
    """Whole numbers in [0, bound) from random words. The bias, bound / 2^53, is far below what could be noticed."""
    return np.minimum((uniform(words) * bound).astype(np.int64), np.asarray(bound) - 1)


def log_uniform(words: Words, most: Any) -> Ints:
    """Whole numbers in [1, most], small and large sizes equally likely: P(x or less) = ln(x + 1) / ln(most + 1).

    NumPy's `exp` and `log` differ in the last bit between processors, and a window that differs between two hosts would
    be another batch. These are made of additions and multiplications, which IEEE 754 fixes to the last bit.
    """
    most = np.asarray(most, dtype=np.int64)
    drawn = _exp2(uniform(words) * _log2((most + 1).astype(np.float64)))
    return np.clip(drawn.astype(np.int64), 1, most)


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
            salt = words + np.uint64(turn + 1) * _GOLDEN
            if turn % 2 == 0:
                mixed = mix64(low ^ salt)
                high = (high + mixed) & high_mask
            else:
                mixed = mix64(high ^ salt)
                low = (low + mixed) & low_mask
    return high << low_bits | low
