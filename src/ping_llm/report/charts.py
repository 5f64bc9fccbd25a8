"""What a chart shows: its lines as few points that look the same, and the table behind it.

static/chart.js draws a chart in the browser, from what `Chart.spec` gives it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ping_llm.report.formatting import Style, number

Floats = npt.NDArray[np.float64]
Kind = Literal["line", "faint", "dots", "dashed", "quiet"]
"""`faint`: what a smoothed line was made from. `dots`: joined by a line. `quiet`: one of many in the background."""

_BUCKETS: Final = 300
"""Positions at which a curve may differ: a chart is about twice as many pixels wide."""
_MAX_TABLE_ROWS: Final = 40


def smoothing_window(points: int) -> int:
    """A fiftieth of the run."""
    return max(1, points // 50)


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
    at = np.arange(len(values))
    before = np.minimum(at, window // 2)
    begin, end = at - before, at + np.minimum(before, len(values) - 1 - at) + 1
    counted = count[end] - count[begin]
    mean = (total[end] - total[begin]) / np.maximum(counted, 1)
    return np.where(counted > 0, mean, np.nan)


def thinned(x: Floats, y: Floats, buckets: int = _BUCKETS) -> tuple[Floats, Floats]:
    """At most four points per bucket of x: the first, the lowest, the highest and the last, in order.

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
    lowest, highest = np.argmin(np.where(finite, part, np.inf)), np.argmax(np.where(finite, part, -np.inf))
    gap = [] if finite.all() else [np.argmin(finite)]
    return begin + np.unique([0, len(part) - 1, lowest, highest, *gap])


def spread(points: int, most: int) -> list[int]:
    """At most so many indices, evenly spaced, the first and the last among them: the rows of a table."""
    return np.unique(np.linspace(0, points - 1, min(points, most)).round().astype(int)).tolist() if points else []


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    x: Floats
    y: Floats
    colour: int = 1
    """Of the palette in style.css, from 1 on."""
    kind: Kind = "line"
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    unit: str
    """What the vertical axis shows, in words."""
    lines: Sequence[Line]
    """The first lies on top."""
    x_unit: str = "step"
    style: Style = "number"
    x_style: Style = "count"
    from_zero: bool = False
    log_y: bool = False
    can_switch: bool = False
    """Between linear and logarithmic axes, by buttons."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines with a word each: where something happened."""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    diagonal: bool = False
    """Where both axes would say the same."""
    note: str = ""
    wide: bool = False

    @property
    def legend(self) -> list[Line]:
        return [line for line in self.lines if line.in_legend]

    @property
    def description(self) -> str:
        """For those who hear the page."""
        values = [(line.name, line.y[np.isfinite(line.y)]) for line in self.legend]
        ends = [f"{name} from {self._text(y[0])} to {self._text(y[-1])}" for name, y in values if len(y)]
        return f"{self.title}, {self.unit}, by {self.x_unit}: {'; '.join(ends) or 'no values'}"

    def _text(self, value: float) -> str:
        return number(float(value), self.style)

    @property
    def tables(self) -> list[Table]:
        """Lines with the same x share a table."""
        groups: list[list[Line]] = []
        for line in self.lines:
            same = next((group for group in groups if np.array_equal(group[0].x, line.x)), None)
            groups.append([line]) if same is None else same.append(line)
        return [self._table(group) for group in groups if len(group[0].x)]

    def _table(self, group: Sequence[Line]) -> Table:
        x = group[0].x
        shown = spread(len(x), _MAX_TABLE_ROWS)
        some = f" ({len(shown)} of {len(x):,} rows)" if len(shown) < len(x) else ""
        rows = [[_exactly(x[i]), *(self._text(line.y[i]) for line in group)] for i in shown]
        head = [self.x_unit, *(line.name for line in group)]
        return Table(caption=f"{self.title}: {self.unit}{some}", head=head, rows=rows)

    @property
    def spec(self) -> dict[str, Any]:
        """The JSON that static/chart.js draws."""
        return {
            "x": {"label": self.x_unit, "format": self.x_style, "range": self.x_range},
            "y": {"format": self.style, "range": self.y_range, "log": self.log_y, "fromZero": self.from_zero},
            "marks": self.marks,
            "diagonal": self.diagonal,
            "series": [
                {"name": line.name, "kind": line.kind, "colour": line.colour}
                | {axis: [*map(_json, v.tolist())] for axis, v in zip("xy", thinned(line.x, line.y), strict=True)}
                for line in self.lines
            ],
        }


def _exactly(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def _json(value: float) -> float | int | None:
    """Five digits, null for what is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")
