"""Numbers as smooth features: sines and cosines at several scales, so that a matrix can read near and far alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.distribution import CODE_MS, Floats, RttDistribution, search_rows
from ping_llm.models.lm.transformer import Sums
from ping_llm.prior.worlds import Batch

# mypy: disallow-untyped-calls=False


_VALUE_SCALES: Final = 0.5 * 2.0 ** (np.arange(19) / 2)
"""Radians for each unit of ln RTT: from 0.5, which tells a whole range apart, to 256, which tells 0.1 % apart."""
_MIDDLE: Final = 3.5
"""ln of 33 ms."""
_AGE_SCALES: Final = 0.25 * 2.0 ** np.arange(6)
_AGE_UNIT_S: Final = 10.0
_DAY_S: Final = 86_400.0
_CYCLES_S: Final = np.array([_DAY_S, _DAY_S / 2, 7 * _DAY_S])

VALUE_FEATURES: Final = 2 * len(_VALUE_SCALES) + 1
TIME_FEATURES: Final = 2 * len(_AGE_SCALES) + 2 * len(_CYCLES_S) + 2


def value_features(log_rtt: jax.Array) -> jax.Array:
    value = (jnp.clip(log_rtt, -4.0, 9.0) - _MIDDLE)[..., None]
    return jnp.concatenate([*_waves(value, _VALUE_SCALES), value / 2], axis=-1)


def time_features(age_s: jax.Array) -> jax.Array:
    """Of seconds before the question: how long ago, and at what time of its day and week. All 0 where it is unknown.

    The hour is the question's own: what hour it is where, no measurement says.
    """
    known = (age_s >= 0)[..., None]
    age = jnp.maximum(age_s, 0.0)[..., None]
    long_ago = jnp.log1p(age / _AGE_UNIT_S)
    cycle = _waves(2 * np.pi * (age % _CYCLES_S) / _CYCLES_S, np.ones(1))
    features = jnp.concatenate([*_waves(long_ago, _AGE_SCALES), *cycle, long_ago / 8, jnp.ones_like(age)], axis=-1)
    return jnp.where(known, features, 0.0)


def _waves(value: jax.Array, scales: npt.NDArray[np.floating[Any]]) -> tuple[jax.Array, jax.Array]:
    angle = value * jnp.asarray(scales, jnp.float32)
    return jnp.sin(angle), jnp.cos(angle)


# The grid of ln RTT on which distributions are predicted.
#
# Bins are equally wide in ln RTT, 2 % for 512 of them. A value between the centres of two bins belongs to both, by
# how near it is to each, so that a certain prediction is exact to a fraction of a bin: what a bin's probability
# stands for is a triangle over its neighbours, and the density is the straight line from centre to centre.

LEAST_MS: Final = 0.05
MOST_MS: Final = 2000.0


@dataclass(frozen=True)
class Bins:
    count: int

    @property
    def width(self) -> float:
        return float(np.log(MOST_MS / LEAST_MS)) / self.count

    @property
    def centres(self) -> Floats:
        return np.log(LEAST_MS) + self.width * (np.arange(self.count) + 0.5)

    def between(self, log_rtt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin whose centre is at or below each value, and how far it is on the way to the next. Both ends hold."""
        at = jnp.clip((log_rtt - np.log(LEAST_MS)) / self.width - 0.5, 0.0, self.count - 1.0)
        lower = jnp.minimum(at.astype(jnp.int32), self.count - 2)
        return lower, at - lower


# What the model answers: a mixture of bins, and of narrow kernels around what was measured before.
#
# Bins are 2 % wide, and a quiet pair repeats itself to a few per mille. So a question also points at measurements of
# its context: "about what this one took", more or less exactly. How much of the answer is in the bins, and how much
# in each precision, is for the model to say. A small model (4 layers of 192, 1,000 steps) that may point is at 2.49
# nats where the pair was measured before and at 5.03 elsewhere, one that may not at 3.02 and 5.13.
#
#     choice    log shares of the bins and of each precision
#     pointed   log shares of the context's measurements
#     kernel    Laplace, of a fixed width in ln RTT for each precision
#
# For prediction, all of it is put on a grid of finer bins.

# mypy: disallow-untyped-calls=False


KERNEL_WIDTHS: Final = (0.0015, 0.006, 0.025, 0.1, 0.3)
PRECISIONS: Final = len(KERNEL_WIDTHS)
FINE: Final = 4096
"""Bins of the grid, 0.26 % each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Answers:
    bin_logits: jax.Array
    """[contexts, questions, bins]"""
    failure_logit: jax.Array
    """[contexts, questions]"""
    choice: jax.Array
    """[contexts, questions, 1 + precisions], log shares"""
    pointed: jax.Array
    """[contexts, questions, context], log shares"""
    context_log_rtt: jax.Array
    """[contexts, context]"""

    @property
    def bins(self) -> Bins:
        return Bins(self.bin_logits.shape[-1])

    def log_density(self, log_rtt: jax.Array) -> jax.Array:
        """Of one ln RTT for each question, in bins: 0 where it is spread evenly over one of them."""
        lower, share = self.bins.between(log_rtt)
        log_bins = self.bin_logits - jax.nn.logsumexp(self.bin_logits, axis=-1, keepdims=True)
        ends = jnp.stack([_at(log_bins, lower), _at(log_bins, lower + 1)], axis=-1)
        of_bins = jax.nn.logsumexp(ends, axis=-1, b=jnp.stack([1 - share, share], axis=-1))
        distance = jnp.abs(log_rtt[:, :, None] - self.context_log_rtt[:, None])
        parts = [of_bins]
        for width in KERNEL_WIDTHS:
            near = jax.nn.logsumexp(self.pointed - distance / width, axis=-1)
            parts.append(near + np.log(self.bins.width / (2 * width)))
        return jax.nn.logsumexp(self.choice + jnp.stack(parts, axis=-1), axis=-1)

    def probabilities(self) -> jax.Array:
        """[contexts, questions, fine bins]"""
        fine = Bins(FINE)
        share = jnp.exp(self.choice)
        found = share[..., :1] * (jax.nn.softmax(self.bin_logits, axis=-1) @ _refined(self.bins, fine))
        lower, part = fine.between(self.context_log_rtt)
        for precision, width in enumerate(KERNEL_WIDTHS):
            weight = jnp.exp(self.pointed) * share[..., 1 + precision, None]
            at_places = jax.vmap(_spread)(weight, lower, part)
            found += _convolved(at_places, _laplace(width, fine))
        return found / jnp.sum(found, axis=-1, keepdims=True)


def _at(columns: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(columns, places[..., None], axis=-1)[..., 0]


def _refined(coarse: Bins, fine: Bins) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """From probabilities of bins to those of finer ones, along the straight lines between the coarse centres."""
    at = np.clip((fine.centres - coarse.centres[0]) / coarse.width, 0, coarse.count - 1)
    near = np.maximum(1 - np.abs(at - np.arange(coarse.count)[:, None]), 0)
    return (near * fine.width / coarse.width).astype(np.float32)


def _spread(weight: jax.Array, lower: jax.Array, part: jax.Array) -> jax.Array:
    """[questions, FINE]: weights of the context's measurements, at their places."""
    empty = jnp.zeros((weight.shape[0], FINE))
    return empty.at[:, lower].add(weight * (1 - part)).at[:, lower + 1].add(weight * part)


def _laplace(width: float, fine: Bins) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Shares of the bins around the middle one: odd many, until nothing is left."""
    reach = min(int(np.ceil(12 * width / fine.width)), FINE // 4)
    edge = (np.arange(-reach, reach + 2) - 0.5) * fine.width / width
    until = np.where(edge < 0, np.exp(np.minimum(edge, 0)) / 2, 1 - np.exp(-np.maximum(edge, 0)) / 2)
    share = np.diff(until)
    return (share / share.sum()).astype(np.float32)


def _convolved(columns: jax.Array, kernel: np.ndarray[tuple[int], np.dtype[np.float32]]) -> jax.Array:
    size = FINE + len(kernel) - 1
    product = jnp.fft.rfft(columns, size) * np.fft.rfft(kernel, size).astype(np.complex64)
    reach = len(kernel) // 2
    return jnp.maximum(jnp.fft.irfft(product, size)[..., reach : reach + FINE], 0.0)


# The completer's answer: ln RTT has a density that is a straight line from bin centre to bin centre (see `bins`).
#
# So every number is exact: distribution function and quantiles come from quadratic equations, not from sampling.
#
# In training, an RTT outside of the bins was one of the first or last bin. Half of that bin's probability therefore
# lies beyond its centre, and falls off as a power of the RTT. And a little is spread evenly over all bins, so that no
# RTT is impossible: one that was not expected at all has a surprise of 27 bits.

_ANYWHERE: Final = 1e-4
"""Probability that is spread over all bins."""

_FALL: Final = 1.5
"""Power of the RTT by which probability falls off outside of the bins; above 1, so that there is a mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BinDistribution(RttDistribution):
    probability: npt.NDArray[np.floating[Any]]
    """[n, bins], each row sums to 1."""

    def __post_init__(self) -> None:
        if np.ndim(self.probability) != 2 or len(self.probability) != len(self.p_failed):
            raise ValueError(f"{len(self.p_failed)} questions, but probabilities {np.shape(self.probability)}")

    @property
    def bins(self) -> Bins:
        return Bins(self.probability.shape[1])

    @property
    def mean(self) -> Floats:
        """Exact: of the triangles around the centres, less the outer half of the first and last, plus the tails."""
        width, centres = self.bins.width, np.exp(self.bins.centres)
        whole = (2 * np.sinh(width / 2) / width) ** 2 * centres
        whole[0] += centres[0] * (_FALL / (_FALL + 1) / 2 - _half_triangle(-width))
        whole[-1] += centres[-1] * (_FALL / (_FALL - 1) / 2 - _half_triangle(width))
        return np.asarray(self._corners @ whole)

    def _cdf(self, rtt_ms: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            at = (np.log(rtt_ms) - self.bins.centres[0]) / self.bins.width
        last = self.bins.count - 1
        inside = np.clip(at, 0.0, last)
        corner = np.minimum(inside.astype(np.int64), last - 1)
        share = inside - corner
        row = np.arange(len(self))[:, None]
        left, right = self._corners[row, corner], self._corners[row, corner + 1]
        until = self._until[row, corner] + left * (share - share**2 / 2) + right * share**2 / 2
        until = np.where(at < 0, until * np.exp(_FALL * self.bins.width * np.minimum(at, 0.0)), until)
        beyond = self._corners[:, -1:] / 2 * np.exp(-_FALL * self.bins.width * np.maximum(at - last, 0.0))
        return np.where(at > last, 1.0 - beyond, until)

    def _quantile(self, level: Floats) -> Floats:
        row = np.broadcast_to(np.arange(len(self))[:, None], level.shape)
        corner = np.clip(search_rows(self._until, row, level) - 1, 0, self.bins.count - 2)
        left, right = self._corners[row, corner], self._corners[row, corner + 1]
        rest = np.maximum(level - self._until[row, corner], 0.0)
        root = np.sqrt(np.maximum(left**2 + 2 * (right - left) * rest, 0.0))
        at = corner + np.clip(2 * rest / (left + root), 0.0, 1.0)
        found = np.exp(self.bins.centres[0] + at * self.bins.width)
        lower, upper = self._until[:, :1], self._corners[:, -1:] / 2
        found *= np.minimum(level / lower, 1.0) ** (1 / _FALL)
        with np.errstate(divide="ignore"):
            found *= np.maximum(upper / (1.0 - level), 1.0) ** (1 / _FALL)
        return np.minimum(found, CODE_MS[-1])

    @cached_property
    def _corners(self) -> Floats:
        """Probabilities of the bins, each also the density of ln RTT at the centre, in bins."""
        return (1 - _ANYWHERE) * self.probability.astype(np.float64) + _ANYWHERE / self.bins.count

    @cached_property
    def _until(self) -> Floats:
        """The distribution function at the centres."""
        halves = self._corners / 2
        return np.cumsum(halves, axis=1) + np.pad(np.cumsum(halves, axis=1)[:, :-1], ((0, 0), (1, 0)))


def averaged(distributions: Sequence[BinDistribution]) -> BinDistribution:
    """The mixture of several distributions of the same questions."""
    return BinDistribution(
        p_failed=np.mean([d.p_failed for d in distributions], axis=0),
        probability=np.mean([d.probability for d in distributions], axis=0),
    )


def _half_triangle(width: float) -> float:
    """The integral of exp over the half of a triangle from its top at 0 down to `width`, of which the area is 1/2."""
    return float(np.expm1(width) - width) / width**2


# What training minimises: the surprise of RTTs and of failures.


def loss_sums(answers: Answers, batch: Batch) -> Sums:
    """Sums, not means, so that parts of a batch add up exactly. RTTs count by their density, in bins."""
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    density = answers.log_density(batch["question_log_rtt"])
    of_rtt = -jnp.sum(jnp.where(answered, density, 0.0))
    logit = answers.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    return {
        "objective": of_rtt + of_failure,
        "cross_entropy": of_rtt + of_failure,
        "rtt_entropy": of_rtt,
        "failure_entropy": of_failure,
        "answered": jnp.sum(answered, dtype=jnp.int32),
        "targets": jnp.sum(counts, dtype=jnp.int32),
    }
