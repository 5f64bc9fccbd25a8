"""Random numbers that are looked up, not consumed: each is a function of the seed, a purpose and a place.

Nothing here depends on what was drawn before, so any part of a world or of its measurements can be made on its own.
"""

import hashlib

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A generator of its own for every (seed, purpose, index). The index is the top word of the counter, so that the
    generators of one purpose cannot overlap."""
    key = np.frombuffer(_digest(seed, purpose), np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))


def salt(seed: int, purpose: str) -> np.uint64:
    """The start of a chain of `mixed` words."""
    return np.uint64(np.frombuffer(_digest(seed, purpose), np.uint64)[0])


def mixed(word: Words | np.uint64, value: Words | np.uint64) -> Words:
    """Folds a value into a word: the finaliser of SplitMix64, which passes the usual tests on consecutive values."""
    with np.errstate(over="ignore"):
        x = np.asarray(value * _GOLDEN + word, np.uint64)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def uniform(words: Words) -> Floats:
    """In [0, 1)."""
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, np.float64)


def normal(words: Words) -> Floats:
    """Standard normal, by Box and Muller from two words derived from each one."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(mixed(words, np.uint64(1)))))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(mixed(words, np.uint64(2)))), np.float64)


def spread_out(count: int, dimensions: int, shift: Floats) -> Floats:
    """[dimensions, count] numbers in [0, 1) of which every prefix is evenly spread (Roberts' R-sequence).

    A handful of sources make a large part of all measurements. Placing the largest ones at random would make two seeds
    differ by whose luck they had; placed evenly, each seed is a different Internet with the same statistics.
    """
    root = 1.0
    for _ in range(50):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return np.asarray((shift[:, None] + steps[:, None] * np.arange(1.0, count + 1)) % 1.0, np.float64)


def _digest(seed: int, purpose: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
