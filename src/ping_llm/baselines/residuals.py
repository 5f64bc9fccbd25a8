"""A point prediction becomes a distribution: the errors it made on held-out training data, put around it.

Errors are those of ln RTT, counted in bins that are fine near zero (a hundredth of a per cent) and wide far out. A
little of a Cauchy distribution of the same spread is mixed in, so that no RTT has probability zero. Errors are centred:
the median of the distribution is the point itself. To correct its bias instead would change the surprise by 0.05 bits
either way, and the answers themselves for the worse as often as for the better.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from ping_llm.baselines.interface import Floats, Ints
from ping_llm.distribution import RttDistribution
from ping_llm.measurements import MAX_RTT_MS

_OUTWARD: Final = np.geomspace(1e-4, 17.0, 120)
EDGES: Final = np.concatenate([-_OUTWARD[::-1], _OUTWARD])
"""Edges of the bins of ln(measured / predicted): a factor of 24 million either way, zero in the middle of a bin."""

FEWEST: Final = 50
"""A bucket with fewer errors than this borrows the errors of the next one."""

_CAUCHY_SHARE: Final = 0.01
_CAUCHY_ERRORS: Final = 5.0


def cumulative(errors: Floats) -> Floats:
    """P(error <= edge) for every edge: 0 at the first, 1 at the last, strictly rising, and a half at no error."""
    errors = errors - np.median(errors) if len(errors) else errors
    spread = float(np.median(np.abs(errors))) if len(errors) else 0.5
    cauchy = np.diff(np.arctan(EDGES / max(spread, 1e-3)))
    counts, _ = np.histogram(np.clip(errors, EDGES[0], EDGES[-1]), bins=EDGES)
    mass = counts + (_CAUCHY_SHARE * len(errors) + _CAUCHY_ERRORS) * cauchy / cauchy.sum()
    total = np.concatenate([[0.0], np.cumsum(mass)])
    return np.asarray(total / total[-1])


def cumulative_by_bucket(errors: Floats, bucket: Ints, buckets: int) -> Floats:
    """One row for each bucket. Buckets are ordered by how much is known, and borrow from the side where it is less."""
    count = np.bincount(bucket, minlength=buckets)
    enough = np.flatnonzero(count >= FEWEST)
    rows = []
    for number in range(buckets):
        nearest = enough[np.argmin(np.abs(enough - number))] if len(enough) else None
        rows.append(cumulative(errors if nearest is None else errors[bucket == nearest]))
    return np.stack(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class PointWithResiduals(RttDistribution):
    """A baseline's answer: its point, times what measurements were of such points in the past; ten minutes at most."""

    point_ms: Floats
    """What the baseline itself predicts, and the median."""
    bucket: Ints
    cumulative: Floats
    """[buckets, edges]: P(error <= edge)"""

    _SHARED: ClassVar[frozenset[str]] = frozenset({"cumulative"})

    def _cdf(self, rtt_ms: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            error = np.log(rtt_ms / self.point_ms[:, None])
        until = self._each_bucket(error, lambda row, errors: np.interp(errors, EDGES, row))
        return np.where(rtt_ms < MAX_RTT_MS, until, 1.0)

    def _quantile(self, level: Floats) -> Floats:
        error = self._each_bucket(level, lambda row, levels: np.interp(levels, row, EDGES))
        return np.minimum(self.point_ms[:, None] * np.exp(error), MAX_RTT_MS)

    def _each_bucket(self, values: Floats, look_up: Callable[[Floats, Floats], Floats]) -> Floats:
        result = np.empty(values.shape)
        for number, row in enumerate(self.cumulative):
            mine = self.bucket == number
            result[mine] = look_up(row, values[mine])
        return result
