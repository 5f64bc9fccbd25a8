"""A point prediction becomes a distribution: the errors it made on held-out training data, put around it.

Errors are those of ln RTT, counted in bins that are fine near zero (a hundredth of a per cent) and wide far out. A
little of a Cauchy distribution of the same spread is mixed in, so that no RTT has probability zero.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ping_llm.baselines.interface import MIN_RTT_MS, Floats, Ints

_OUTWARD: Final = np.geomspace(1e-4, 15.0, 120)
EDGES: Final = np.concatenate([-_OUTWARD[::-1], _OUTWARD])
"""Edges of the bins of ln(measured / predicted): a factor of three million either way, zero in the middle of a bin."""

FEWEST: Final = 50
"""A bucket with fewer errors than this borrows the errors of the next one."""

_CAUCHY_SHARE: Final = 0.01
_CAUCHY_ERRORS: Final = 5.0


def cumulative(errors: Floats) -> Floats:
    """P(error <= edge) for every edge: 0 at the first, 1 at the last, and strictly rising."""
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


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A distribution for each question: P(failed), and of the RTT if it did not fail."""

    point_ms: Floats
    """What the baseline itself predicts; `quantile(0.5)` also corrects its bias."""
    p_failed: Floats
    bucket: Ints
    cumulative: Floats

    def quantile(self, level: float) -> Floats:
        """The RTT in ms that is not exceeded with this probability."""
        error = np.array([np.interp(level, row, EDGES) for row in self.cumulative])
        return np.asarray(self.point_ms * np.exp(error[self.bucket]))

    def cdf(self, rtt_ms: Any) -> Floats:
        """P(RTT <= rtt_ms) for each question: the probability of a bin of RTTs is the difference at its ends."""
        rtt = np.broadcast_to(np.asarray(rtt_ms, dtype=np.float64), self.point_ms.shape)
        error = np.log(np.maximum(rtt, MIN_RTT_MS * 1e-3) / self.point_ms)
        result = np.empty(len(error))
        for number, row in enumerate(self.cumulative):
            mine = self.bucket == number
            result[mine] = np.interp(error[mine], EDGES, row)
        return np.where(rtt > 0, result, 0.0)
