"""A curve of any length as few points that look the same: smoothed, and thinned with its extremes kept."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

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


# From values to places and labels: linear and logarithmic axes.

Style = Literal["number", "percent", "count"]

_MOST_DECADES: Final = 1e15
"""What is smaller than the largest value by more than this lies on the lower edge of a logarithmic axis."""
_STEPS: Final = (1, 2, 2.5, 5, 10)
COUNTS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Of tokens and parameters, which are counted in billions."""
SI: Final = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
"""Before a unit."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values from `low` to `high` lie at 0 to 1."""

    low: float
    high: float
    log: bool = False
    style: Style = "number"

    @classmethod
    def over(
        cls, values: Floats, *, log: bool = False, from_zero: bool = False, style: Style = "number", room: float = 0.04
    ) -> "Scale":
        """All finite values (of a logarithm: positive ones), with a little room, and with zero if that is asked."""
        seen = values[np.isfinite(values) & ((values > 0) | (not log))]
        if not len(seen):
            return cls(low=0.1 if log else 0.0, high=1.0, log=log, style=style)
        low, high = float(seen.min()), float(seen.max())
        if log:
            low = max(low, high / _MOST_DECADES)
            margin = max((high / low) ** room, 1.02) if room else 1.0
            return cls(low=low / margin, high=high * margin if high > low else low * 1.1, log=True, style=style)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        margin = room * (high - low)
        if high <= low:
            margin = abs(low) * 0.1 or 0.5
        return cls(low=low if from_zero and low == 0 else low - margin, high=high + margin, style=style)

    def place(self, values: Floats) -> Floats:
        if self.log:
            positive = values > 0  # of a NaN, false
            values = np.where(positive, np.log(np.where(positive, np.maximum(values, self.low), 1.0)), np.nan)
            low, high = math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return (values - low) / max(high - low, 1e-300)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values, about so many."""
        found = _log_ticks(self.low, self.high, about) if self.log else _linear_ticks(self.low, self.high, about)
        return [tick for tick in found if tick == int(tick)] if self.style == "count" else found

    def label(self, value: float) -> str:
        return shown(value, self.style)


def _linear_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / max(about, 1)
    if not math.isfinite(rough) or rough <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * s for s in _STEPS if size * s >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    if high < 4 * low:  # too short for powers of ten
        return _linear_ticks(low, high, about)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) <= about + 1:
            break
    return found[:: max(1, -(-len(found) // (about + 2)))]


def shown(value: float | None, style: Style = "number") -> str:
    """A number as it may stand on an axis, in a table or in a tooltip. script.js does the same."""
    if value is None or not math.isfinite(value):
        return "–"
    if style == "percent":
        percent = 100 * value
        return f"{_trimmed(percent, 0 if abs(percent) >= 100 else 1 if abs(percent) >= 1 else 2)} %"
    if style == "count":
        return short(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return _trimmed(value, max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0)


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def short(value: float | None, prefixes: Sequence[tuple[float, str]] = COUNTS, between: str = "") -> str:
    """Three digits and a prefix: 12.5k, 112M."""
    if value is None or not math.isfinite(value):
        return "–"
    for size, prefix in prefixes:
        if abs(value) >= size * 0.9995:
            digits = f"{value / size:.3g}" if abs(value) < 999.5 * size else f"{value / size:,.0f}"
            return f"{digits}{between}{prefix}"
    return f"{value:.3g}"
