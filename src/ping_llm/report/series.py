"""A curve of any length as few points that look the same: smoothed, and thinned with its extremes kept."""

import itertools
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_BUCKETS: Final = 300
"""Places on the page at which a curve may differ: a chart is about twice as many pixels wide."""


def smoothed(values: Floats, window: int) -> Floats:
    """The mean over a centred window of what is finite in it.

    At the beginning, where a loss falls fast, the window shrinks on both sides: a one-sided mean would start too low.
    At the end it only loses its right half, so that the last point is no single step.
    """
    if window <= 1 or not len(values):
        return values
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    place = np.arange(len(values))
    half = window // 2
    begin = place - np.minimum(place, half)
    end = place + np.minimum(np.minimum(place, half), len(values) - 1 - place) + 1
    counted = count[end] - count[begin]
    mean = (total[end] - total[begin]) / np.maximum(counted, 1)
    return np.where(counted > 0, mean, np.nan)


def smoothing_window(points: int) -> int:
    """A fiftieth of the run."""
    return max(1, points // 50)


def thinned(x: Floats, y: Floats, buckets: int = _BUCKETS) -> tuple[Floats, Floats]:
    """At most four points a bucket of x: the first, the lowest, the highest and the last, in order.

    What is not finite is kept as a gap: one NaN where a run of them was.
    """
    if len(x) <= 4 * buckets:
        kept = np.arange(len(x))
    else:
        edges = np.linspace(0, len(x), buckets + 1).astype(np.int64)
        kept = np.unique(np.concatenate([_notable(y, a, b) for a, b in itertools.pairwise(edges) if b > a]))
    broken = ~np.isfinite(y[kept])
    repeated = np.concatenate([[False], broken[1:] & broken[:-1]]) if len(kept) else broken
    kept = kept[~repeated]
    return x[kept], np.where(np.isfinite(y[kept]), y[kept], np.nan)


def _notable(y: Floats, begin: int, end: int) -> npt.NDArray[np.int64]:
    part = y[begin:end]
    finite = np.isfinite(part)
    if not finite.any():
        return np.array([begin])
    found = {
        0,
        len(part) - 1,
        int(np.argmin(np.where(finite, part, np.inf))),
        int(np.argmax(np.where(finite, part, -np.inf))),
    }
    if not finite.all():
        found.add(int(np.argmin(finite)))  # that there is a gap
    return begin + np.array(sorted(found))


def spread(points: int, most: int) -> list[int]:
    """So many indices, evenly spaced, the first and the last among them: the lines of a table."""
    return np.unique(np.linspace(0, points - 1, min(points, most)).round().astype(int)).tolist() if points else []
