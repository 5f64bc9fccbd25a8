"""The completer's answer: ln RTT has a density that is a straight line from bin centre to bin centre (see `bins`).

So every number is exact: distribution function and quantiles come from quadratic equations, not from sampling.

In training, an RTT outside of the bins was one of the first or last bin. Half of that bin's probability therefore lies
beyond its centre, and falls off as a power of the RTT. And a little is spread evenly over all bins, so that no RTT is
impossible: one that was not expected at all has a surprise of 27 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.completer.bins import Bins
from ping_llm.distribution import CODE_MS, Floats, RttDistribution, search_rows

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
