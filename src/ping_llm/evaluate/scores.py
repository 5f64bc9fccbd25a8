"""How good predictions are, in a few numbers.

Errors are those of the predicted median, over the measurements that were answered. The surprise (NLL) is that of every
result, failures included, as an RTT code: a predictor that gives densities and one that gives codes can be compared.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.baselines.interface import MIN_RTT_MS, Floats, Observations
from ping_llm.distribution import RttDistribution

Scores = dict[str, float]

INTERVAL: Final = 0.9


def scores(predicted: RttDistribution | Floats, observed: Observations) -> Scores:
    """All scores of distributions; of mere RTTs, those of points only. NaN where there was nothing to score.

    mae, median_ae     mean and median absolute error, ms
    median_re, p90_re  relative error: the median, and what one in ten exceeds
    nll_bits           mean surprise of a result, bits
    crps               mean continuous ranked probability score of an RTT, ms
    coverage90         share of RTTs inside their 90 % intervals
    brier              mean squared error of P(failed)
    questions          how many there were
    """
    if not isinstance(predicted, RttDistribution):
        return point_scores(predicted, observed) | {"questions": len(observed)}
    rtt = observed.rtt_ms.astype(np.float64)
    failed = np.isnan(rtt)
    answered = predicted.take(~failed)
    low, high = answered.interval(INTERVAL)
    return {
        **point_scores(predicted.median, observed),
        "nll_bits": _mean(predicted.bits(rtt)),
        "crps": _mean(answered.crps(rtt[~failed])),
        "coverage90": _mean((low <= rtt[~failed]) & (rtt[~failed] <= high)),
        "brier": _mean((predicted.p_failed - failed) ** 2),
        "questions": len(observed),
    }


def point_scores(predicted_ms: Floats, observed: Observations) -> Scores:
    """Errors of predicted RTTs."""
    error, relative = errors(predicted_ms, observed)
    return {
        "mae": _mean(error),
        "median_ae": _quantile(error, 0.5),
        "median_re": _quantile(relative, 0.5),
        "p90_re": _quantile(relative, 0.9),
    }


def errors(predicted_ms: Floats, observed: Observations) -> tuple[Floats, Floats]:
    """Absolute and relative errors of the measurements that were answered."""
    answered = ~np.isnan(observed.rtt_ms)
    rtt = observed.rtt_ms[answered].astype(np.float64)
    error = np.abs(predicted_ms[answered] - rtt)
    return error, error / np.maximum(rtt, MIN_RTT_MS)


def _mean(values: npt.NDArray[Any]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _quantile(values: Floats, level: float) -> float:
    return float(np.quantile(values, level)) if len(values) else float("nan")
