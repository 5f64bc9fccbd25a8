"""What the completer outputs: a mixture of bins of ln RTT, and of narrow kernels around RTTs copied from the context.

Bins are equally wide in ln RTT, 2 % for 512 of them. A value between the centres of two bins belongs to both, by how
near it is to each: a bin's probability stands for a triangle over its neighbours, and the density is the straight line
from centre to centre. So a certain prediction is exact to a fraction of a bin.

A quiet pair repeats itself to a few per mille, though. So a question also points at measurements of its context, the
pointer (or copy) mechanism of language models: "about what this one took", in one of several precisions. How much of
the answer is in the bins and how much in each precision is for the model to say. A small model (4 layers of 192, 1,000
steps) with pointers is at 2.49 nats where the pair was measured before and at 5.03 elsewhere, without them at 3.02 and
5.13. For prediction, all of it is put on a grid of finer bins.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.distribution import CODE_MS, Floats, RttDistribution, search_rows

# mypy: disallow-untyped-calls=False

MIN_MS: Final = 0.05
MAX_MS: Final = 2000.0
KERNEL_WIDTHS: Final = (0.0015, 0.006, 0.025, 0.1, 0.3)
"""Of the Laplace kernel of each precision, in ln RTT."""
PRECISIONS: Final = len(KERNEL_WIDTHS)
FINE: Final = 4096
"""Bins of the grid, 0.26 % each."""

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bins:
    count: int

    @property
    def width(self) -> float:
        return float(np.log(MAX_MS / MIN_MS)) / self.count

    @property
    def centres(self) -> Floats:
        return np.log(MIN_MS) + self.width * (np.arange(self.count) + 0.5)

    def between(self, log_rtt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin whose centre is at or below each value, and how far it is on the way to the next. Both ends hold."""
        at = jnp.clip((log_rtt - np.log(MIN_MS)) / self.width - 0.5, 0.0, self.count - 1.0)
        lower = jnp.minimum(at.astype(jnp.int32), self.count - 2)
        return lower, at - lower


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Mixture:
    bin_logits: jax.Array
    """[contexts, questions, bins]"""
    failure_logit: jax.Array
    """[contexts, questions]"""
    log_share: jax.Array
    """[contexts, questions, 1 + precisions]: of the bins, and of each precision"""
    pointer_log_share: jax.Array
    """[contexts, questions, context]: of the context's measurements"""
    context_log_rtt: jax.Array
    """[contexts, context]"""

    @property
    def bins(self) -> Bins:
        return Bins(self.bin_logits.shape[-1])

    def log_density(self, log_rtt: jax.Array) -> jax.Array:
        """Of one ln RTT for each question, in bins: 0 where it is spread evenly over one of them."""
        lower, share = self.bins.between(log_rtt)
        log_bins = self.bin_logits - jax.nn.logsumexp(self.bin_logits, axis=-1, keepdims=True)
        ends = jnp.take_along_axis(log_bins, jnp.stack([lower, lower + 1], axis=-1), axis=-1)
        parts = [jax.nn.logsumexp(ends, axis=-1, b=jnp.stack([1 - share, share], axis=-1))]
        distance = jnp.abs(log_rtt[:, :, None] - self.context_log_rtt[:, None])
        for width in KERNEL_WIDTHS:
            near = jax.nn.logsumexp(self.pointer_log_share - distance / width, axis=-1)
            parts.append(near + np.log(self.bins.width / (2 * width)))
        return jax.nn.logsumexp(self.log_share + jnp.stack(parts, axis=-1), axis=-1)

    def probabilities(self) -> jax.Array:
        """[contexts, questions, fine bins]"""
        fine = Bins(FINE)
        share = jnp.exp(self.log_share)
        found = share[..., :1] * (jax.nn.softmax(self.bin_logits, axis=-1) @ _refined(self.bins, fine))
        lower, part = fine.between(self.context_log_rtt)
        for precision, width in enumerate(KERNEL_WIDTHS):
            weight = jnp.exp(self.pointer_log_share) * share[..., 1 + precision, None]
            found += _convolved(jax.vmap(_on_grid)(weight, lower, part), _laplace(width, fine))
        return found / jnp.sum(found, axis=-1, keepdims=True)


def _refined(coarse: Bins, fine: Bins) -> Singles:
    """From probabilities of bins to those of finer ones, along the straight lines between the coarse centres."""
    at = np.clip((fine.centres - coarse.centres[0]) / coarse.width, 0, coarse.count - 1)
    near = np.maximum(1 - np.abs(at - np.arange(coarse.count)[:, None]), 0)
    return (near * fine.width / coarse.width).astype(np.float32)


def _on_grid(weight: jax.Array, lower: jax.Array, part: jax.Array) -> jax.Array:
    """[questions, FINE]: weights of the context's measurements, each shared by the two bins around its RTT."""
    empty = jnp.zeros((weight.shape[0], FINE))
    return empty.at[:, lower].add(weight * (1 - part)).at[:, lower + 1].add(weight * part)


def _laplace(width: float, fine: Bins) -> Singles:
    """Shares of the bins around the middle one: odd many, until nothing is left."""
    reach = min(int(np.ceil(12 * width / fine.width)), FINE // 4)
    edge = (np.arange(-reach, reach + 2) - 0.5) * fine.width / width
    until = np.where(edge < 0, np.exp(np.minimum(edge, 0)) / 2, 1 - np.exp(-np.maximum(edge, 0)) / 2)
    share = np.diff(until)
    return (share / share.sum()).astype(np.float32)


def _convolved(columns: jax.Array, kernel: Singles) -> jax.Array:
    size = FINE + len(kernel) - 1
    product = jnp.fft.rfft(columns, size) * np.fft.rfft(kernel, size).astype(np.complex64)
    reach = len(kernel) // 2
    return jnp.maximum(jnp.fft.irfft(product, size)[..., reach : reach + FINE], 0.0)


def loss_sums(mixture: Mixture, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What training minimises, the negative log-likelihood of RTTs (by their density, in bins) and of failures.

    Sums, not means, so that parts of a batch add up exactly.
    """
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    of_rtt = -jnp.sum(jnp.where(answered, mixture.log_density(batch["question_log_rtt"]), 0.0))
    logit = mixture.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    return {
        "objective": of_rtt + of_failure,
        "cross_entropy": of_rtt + of_failure,
        "rtt_entropy": of_rtt,
        "failure_entropy": of_failure,
        "answered": jnp.sum(answered, dtype=jnp.int32),
        "targets": jnp.sum(counts, dtype=jnp.int32),
    }


# The distribution of an answer. Distribution function and quantiles come from quadratic equations, not from sampling.
#
# In training, an RTT outside of the bins was one of the first or last bin. Half of that bin's probability therefore
# lies beyond its centre, and falls off as a power of the RTT. And a little is spread evenly over all bins, so that no
# RTT is impossible: one that was not expected at all has 27 bits.

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
        halves = np.cumsum(self._corners / 2, axis=1)
        return halves + np.pad(halves[:, :-1], ((0, 0), (1, 0)))


def _half_triangle(width: float) -> float:
    """The integral of exp over the half of a triangle from its top at 0 down to `width`, of which the area is 1/2."""
    return float(np.expm1(width) - width) / width**2
