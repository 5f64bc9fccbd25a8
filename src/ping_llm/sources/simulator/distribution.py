"""Random numbers that are looked up, not consumed: each is a function of the seed, a purpose and a place.

Nothing here depends on what was drawn before, so any part of a world or of its measurements can be made on its own.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ping_llm.core.randomness import GOLDEN, Words, mix64, uniform

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A generator of its own for every (seed, purpose, index). The index is the top word of the counter, so that the
    generators of one purpose cannot overlap."""
    key = np.frombuffer(_digest(seed, purpose), np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))


def salt(seed: int, purpose: str) -> np.uint64:
    """The start of a chain of `mixed` words."""
    return np.uint64(np.frombuffer(_digest(seed, purpose), np.uint64)[0])


def mixed(word: Words | np.uint64, value: Words | np.uint64) -> Words:
    """Folds a value into a word with splitmix64."""
    with np.errstate(over="ignore"):
        return np.asarray(mix64(value * GOLDEN + word), np.uint64)


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


# The exact distribution of a measurement: failed or not, and if not, a floor plus a mixture of log-normal delays.


@dataclass(frozen=True)
class Distribution:
    """What is true of n measurements before they are made.

    Everything but `failed_probability` is conditional on an answer. RTTs and probabilities broadcast against the n
    measurements: `truth.quantile([[0.1], [0.9]])` has shape [2, n].
    """

    failed_probability: Floats
    floor_ms: Floats
    weight: tuple[Floats, ...]  # of each component; they add up to 1
    log_median: tuple[Floats, ...]  # of each component: ln of the median delay above the floor, in ms
    sigma: tuple[float, ...]  # of each component's logarithm

    def __len__(self) -> int:
        return len(self.floor_ms)

    def cdf(self, rtt_ms: npt.ArrayLike) -> Floats:
        """P(RTT ≤ rtt_ms)."""
        return self._cdf_above(self._log_above_floor(rtt_ms))

    def log_pdf(self, rtt_ms: npt.ArrayLike) -> Floats:
        """Natural logarithm of the density per millisecond; -inf at or below the floor."""
        log_above = self._log_above_floor(rtt_ms)
        total = np.full(np.shape(log_above), -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for weight, log_median, sigma in self._components():
                z = (log_above - log_median) / sigma
                term = np.log(weight) - 0.5 * z**2 - np.log(sigma * np.sqrt(2.0 * np.pi)) - log_above
                total = np.logaddexp(total, np.where(np.isneginf(log_above), -np.inf, term))
        return np.asarray(total, np.float64)

    def quantile(self, q: npt.ArrayLike) -> Floats:
        """The RTT that a share q of the answers stay below, by bisection to the precision of a float."""
        q = np.asarray(q, np.float64)
        if not ((q >= 0) & (q <= 1)).all():
            raise ValueError("a quantile lies between 0 and 1")
        shape = np.broadcast_shapes(q.shape, self.floor_ms.shape)
        reach = 9.0 * max(self.sigma)  # beyond nine standard deviations a float holds no probability
        low = np.broadcast_to(np.minimum.reduce(self.log_median) - reach, shape)
        high = np.broadcast_to(np.maximum.reduce(self.log_median) + reach, shape)
        for _ in range(52):
            middle = (low + high) / 2.0
            below = self._cdf_above(middle) < q
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        found = self.floor_ms + np.exp((low + high) / 2.0)
        return np.asarray(np.where(q == 0, self.floor_ms, np.where(q == 1, np.inf, found)), np.float64)

    def median(self) -> Floats:
        return self.quantile(0.5)

    def mean(self) -> Floats:
        return sum((w * np.exp(m + s**2 / 2.0) for w, m, s in self._components()), self.floor_ms)

    def sample(self, rng: np.random.Generator) -> Floats:
        """An RTT for each of the n measurements."""
        return self._rtt(rng.random(len(self)), rng)

    def draw(self, rng: np.random.Generator) -> Floats:
        """An outcome for each of the n measurements: an RTT, or NaN where it failed."""
        chance = rng.random(len(self))
        failed = chance < self.failed_probability
        # Given that it did not fail, what is left of the chance is uniform again: one number serves both choices.
        with np.errstate(divide="ignore"):  # the probability may be 1
            chance = (chance - self.failed_probability) / (1.0 - self.failed_probability)
        rtt = self._rtt(chance, rng)
        rtt[failed] = np.nan
        return rtt

    def _rtt(self, chance: Floats, rng: np.random.Generator) -> Floats:
        log_median, sigma = self.log_median[0].copy(), np.full(len(self), self.sigma[0])
        passed = self.weight[0]
        for index in range(1, len(self.weight)):
            later = chance >= passed
            np.copyto(log_median, self.log_median[index], where=later)
            np.copyto(sigma, self.sigma[index], where=later)
            passed = passed + self.weight[index]
        return np.asarray(self.floor_ms + np.exp(log_median + sigma * rng.standard_normal(len(self))), np.float64)

    def _components(self) -> Iterator[tuple[Floats, Floats, float]]:
        return zip(self.weight, self.log_median, self.sigma, strict=True)

    def _cdf_above(self, log_above: Floats) -> Floats:
        """P(ln(RTT - floor) ≤ log_above)."""
        return sum((w * normal_cdf((log_above - m) / s) for w, m, s in self._components()), np.zeros(()))

    def _log_above_floor(self, rtt_ms: npt.ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.maximum(np.asarray(rtt_ms, np.float64) - self.floor_ms, 0.0)), np.float64)


# Hart's rational approximation as West arranged it ("Better approximations to cumulative normal functions", 2005):
# off by less than 1e-15, several times as fast as calling math.erfc on every element.
_NUMERATOR = (
    3.52624965998911e-02,
    0.700383064443688,
    6.37396220353165,
    33.912866078383,
    112.079291497871,
    221.213596169931,
    220.206867912376,
)
_DENOMINATOR = (
    8.83883476483184e-02,
    1.75566716318264,
    16.064177579207,
    86.7807322029461,
    296.564248779674,
    637.333633378831,
    793.826512519948,
    440.413735824752,
)
_FAR = 7.07106781186547


def normal_cdf(z: npt.ArrayLike) -> Floats:
    z = np.asarray(z, np.float64)
    size = np.minimum(np.abs(z), 38.0)  # beyond, the tail is less than the smallest float
    near = np.minimum(size, _FAR)
    with np.errstate(under="ignore"):
        bell = np.exp(-0.5 * size**2)
        tail = bell * np.polyval(_NUMERATOR, near) / np.polyval(_DENOMINATOR, near)
        fraction = size + 1.0 / (size + 2.0 / (size + 3.0 / (size + 4.0 / (size + 0.65))))
        tail = np.where(size > _FAR, bell / (fraction * 2.506628274631), tail)
    return np.asarray(np.where(z > 0, 1.0 - tail, tail), np.float64)
