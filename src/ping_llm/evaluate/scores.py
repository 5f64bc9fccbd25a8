"""How good predictions are."""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def point_scores(predicted_ms: Floats, rtt_ms: Floats) -> dict[str, float]:
    """Errors of predicted RTTs, over the measurements that were answered."""
    error = np.abs(predicted_ms - rtt_ms)
    relative = error / rtt_ms
    return {
        "mae": float(np.mean(error)),
        "median_ae": float(np.median(error)),
        "median_re": float(np.median(relative)),
        "p90_re": float(np.quantile(relative, 0.9)),
    }


def bits(log_likelihood: Floats) -> float:
    """Mean surprise a measurement, in bits."""
    return float(-np.mean(log_likelihood) / np.log(2))


def coverage(low_ms: Floats, high_ms: Floats, rtt_ms: npt.NDArray[Any]) -> float:
    """Share of measurements inside their interval."""
    return float(np.mean((rtt_ms >= low_ms) & (rtt_ms <= high_ms)))
