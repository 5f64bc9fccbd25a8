"""Counter-based random numbers: each is a function of its key, not of what was drawn before.

Every choice in the pipeline is drawn from a key such as (seed, epoch, sample, purpose). So any batch can be made alone,
in any order and in any process, with the same result. The hash is that of splitmix64. NumPy's generators are not used,
since their streams may change between releases, and a run must be reproducible for years. `draws.py` has the same draws
for compiled kernels.
"""

from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: splitmix64's increment."""


class Purpose(IntEnum):
    """What a number is drawn for, as part of its key. Changing a value would change the batches of all runs."""

    EPOCH_ORDER = 1
    MODE = 2
    WINDOW_SIZE = 3
    WINDOW_OFFSET = 4
    UNTIMED_SHARE = 5
    SAMPLE = 6
    MEASUREMENT = 7
    SEQUENCE_ORDER = 8
    FIELD_ORDER = 9


def mix64(value: Any) -> Any:
    """splitmix64's finaliser: a bijection of 64-bit words whose output bits look random. Also compiled, in `draws.py`.

    Arithmetic is modulo 2^64; NumPy warns of that for single numbers, unless in `np.errstate(over="ignore")`.
    """
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key(*parts: Any) -> Words:
    """One 64-bit word from whole numbers (or arrays of them, which broadcast)."""
    word = np.asarray(np.uint64(0))
    for part in parts:
        word = extend(word, part)
    return word


def extend(word: Words, part: Any) -> Words:
    """The word for a key that is one part longer: `extend(key(a, b), c)` is `key(a, b, c)`."""
    with np.errstate(over="ignore"):
        return np.asarray(mix64((word ^ np.asarray(part).astype(np.uint64)) + GOLDEN))


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from random words. Also compiled."""
    return (words >> np.uint64(11)) * np.float64(2.0**-53)


def permute(words: Words, size: Any, position: Any) -> Ints:
    """The image of each position under a random permutation of range(size). `words` are the keys of the permutations.

    The permutation is a Feistel network over the smallest power of two that holds the range, with cycle walking. Any
    element can be computed alone, so sampling k numbers without replacement is to permute the first k positions.
    """
    from ping_llm.core.draws import permute_each  # importing Numba takes half a second

    columns = words, np.asarray(size, dtype=np.int64), np.asarray(position, dtype=np.int64)
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    flat_words, sizes, positions = (np.array(np.broadcast_to(column, shape)).reshape(-1) for column in columns)
    result = np.empty(len(positions), dtype=np.int64)
    permute_each(flat_words, sizes, positions, result)
    return result.reshape(shape)


# 32-bit words of NumPy or JAX, for use within models. Integer arithmetic is the same on every machine.

_GOLDEN_32: Final = 0x9E3779B9


def hash32(words: Any) -> Any:
    """A bijection of 32-bit words (Wellons' triple32) whose output bits all depend on all input bits."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> 14)


def hash_with(words: Any, number: int) -> Any:
    """Another hash of the same words for each number."""
    return hash32(words + np.uint32(number * _GOLDEN_32 & 0xFFFFFFFF))


def unit_interval(words: Any) -> Any:
    """Uniform in (0, 1): multiples of 2^-23 and a half, never an end."""
    return ((words >> 9).astype(np.float32) + 0.5) * np.float32(2.0**-23)
