"""Charts: their lines, reduced to few points that look the same, and the tables behind them; then the charts of a
training (one run, or several over each other) and of an evaluation.

static/chart.js draws a chart in the browser, from the JSON of `Chart.spec`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from ping_llm.core.rtt import Floats
from ping_llm.evaluate.scores import ORACLE
from ping_llm.report.formatting import Style, number
from ping_llm.report.run import Run, StoredEvaluation

Kind = Literal["line", "faint", "dots", "dashed", "quiet"]
"""`faint`: values before smoothing. `dots`: joined by a line. `quiet`: one of many in the background."""

_BUCKETS: Final = 300  # a chart is about twice as many pixels wide
_MAX_TABLE_ROWS: Final = 40
_MAX_FAINT_RUNS: Final = 3  # with more runs, single steps are not drawn
_SPIKY: Final = 15.0  # the axis is logarithmic if the maximum is this many times the median
_SMALLEST_ERROR: Final = 1e-4  # of exact predictions, on a logarithmic axis


def smoothed(values: Floats, window: int) -> Floats:
    """The mean of the finite values in a centred window.

    At the beginning, where a loss falls fast, the window shrinks on both sides: a one-sided mean would start too low.
    At the end it only loses its right half, so that the last point is not a single step.
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

    A run of values that are not finite becomes one NaN, which is drawn as a gap.
    """
    if len(x) <= 4 * buckets:
        kept = np.arange(len(x))
    else:
        edges = np.linspace(0, len(x), buckets + 1).astype(np.int64)
        finite = np.isfinite(y)
        low, high = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
        kept = np.unique(
            [
                (a, b - 1, a + np.argmin(low[a:b]), a + np.argmax(high[a:b]), a + np.argmin(finite[a:b]))
                for a, b in itertools.pairwise(edges)
            ]
        )
    broken = ~np.isfinite(y[kept])
    repeated = np.concatenate([[False], broken[1:] & broken[:-1]]) if len(kept) else broken
    kept = kept[~repeated]
    return x[kept], np.where(np.isfinite(y[kept]), y[kept], np.nan)


def spread(points: int, most: int) -> list[int]:
    """At most so many evenly spaced indices, including the first and the last: the rows of a table."""
    return np.unique(np.linspace(0, points - 1, min(points, most)).round().astype(int)).tolist() if points else []


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    x: Floats
    y: Floats
    colour: int = 1  # of the palette in style.css, from 1 on
    kind: Kind = "line"
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    unit: str  # what the vertical axis shows, in words
    lines: Sequence[Line]  # the first lies on top
    x_unit: str = "step"
    style: Style = "number"
    x_style: Style = "count"
    from_zero: bool = False
    log_y: bool = False
    marks: Sequence[tuple[float, str]] = ()  # vertical lines with labels
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    diagonal: bool = False  # draw x = y
    note: str = ""
    wide: bool = False  # with buttons that switch between linear and logarithmic axes

    @property
    def legend(self) -> list[Line]:
        return [line for line in self.lines if line.in_legend]

    @property
    def description(self) -> str:
        """For screen readers."""
        values = [(line.name, line.y[np.isfinite(line.y)]) for line in self.legend]
        shown = ((name, number(y[0], self.style), number(y[-1], self.style)) for name, y in values if len(y))
        ends = [f"{name} from {first} to {last}" for name, first, last in shown]
        return f"{self.title}, {self.unit}, by {self.x_unit}: {'; '.join(ends) or 'no values'}"

    @property
    def tables(self) -> list[tuple[list[Line], list[int]]]:
        """Lines with the same x share a table: the lines, and the indices of the points that it shows."""
        groups: dict[bytes, list[Line]] = {}
        for line in self.lines:
            groups.setdefault(line.x.tobytes(), []).append(line)
        return [(lines, spread(len(lines[0].x), _MAX_TABLE_ROWS)) for x, lines in groups.items() if x]

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


def _json(value: float) -> float | int | None:
    """Rounded to five digits, null if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")


def training_charts(runs: Sequence[Run]) -> list[Chart]:
    if not any(run.steps_done for run in runs):
        return []
    columns: list[tuple[str, str, str, Style]] = [
        ("Speed", f"real {runs[0].words.token}s per second", "real_tokens_per_s", "count"),
        ("Waiting for data", "share of the time of the last 20 steps", "data_wait_fraction", "percent"),
        ("Model FLOPs utilisation", "share of the device's peak", "mfu", "percent"),
        ("Gradient norm", "before clipping", "grad_norm", "number"),
        ("Learning rate", "by the schedule", "learning_rate", "number"),
        ("Padding", "share of the positions of a batch", "padding", "percent"),
    ]
    last = float(max(run.steps_done for run in runs))
    resumed = {session.first_step for session in runs[0].sessions[1:]} - {0} if len(runs) == 1 else set()
    common: dict[str, Any] = {"x_range": (0.0, last), "marks": [(step, "resumed") for step in sorted(resumed)]}
    charts = [_loss(runs, common)]
    for title, unit, column, style in columns:
        every = np.concatenate([run.curves[column] for run in runs])
        every = every[np.isfinite(every)]
        if not len(every):  # such as the utilisation of an unknown device
            continue
        spiky = bool(every.min() > 0 and every.max() > _SPIKY * np.median(every))
        unit += ", logarithmic" if spiky else ""
        lines = _lines(runs, column, title.lower(), smooth=column in ("grad_norm", "padding"))
        axis: dict[str, Any] = {"from_zero": not spiky, "log_y": spiky}
        charts.append(Chart(title=title, unit=unit, lines=lines, style=style, **axis, **common))
    return charts


def _loss(runs: Sequence[Run], common: Mapping[str, Any]) -> Chart:
    several = len(runs) > 1
    evaluated = [
        Line(
            name=f"{run.label}, evaluation" if several else "evaluation",
            x=run.curves["evaluated_at"],
            y=run.curves["eval_loss"],
            colour=colour if several else 2,
            kind="dots",
            in_legend=not several,
        )
        for colour, run in enumerate(runs, 1)
        if len(run.curves["eval_loss"])
    ]
    trained = _lines(runs, "loss", "training", smooth=True)
    unit = f"cross entropy, nats per {runs[0].words.question}" + ("; dots: evaluation" if several and evaluated else "")
    return Chart(title="Loss", unit=unit, lines=evaluated + trained, wide=True, **common)


def _lines(runs: Sequence[Run], column: str, label: str, *, smooth: bool) -> list[Line]:
    """Means over a window and, unless there are too many runs, the single steps behind them."""
    several = len(runs) > 1
    lines = []
    for colour, run in enumerate(runs, 1):
        window, name = run.window if smooth else 1, run.label if several else label
        each_step = Line(name=name, x=run.curves["step"], y=run.curves[column], colour=colour)
        lines.append(replace(each_step, y=smoothed(each_step.y, window)))
        if window > 1 and len(runs) <= _MAX_FAINT_RUNS:
            each = f"{run.label}, each step" if several else "each step"
            lines.append(replace(each_step, name=each, kind="faint", in_legend=not several))
    return lines


def evaluation_charts(found: StoredEvaluation, protocol: str, ranked: Sequence[str]) -> list[Chart]:
    """Errors and calibration, with the models, the best baseline and the truth highlighted.

    There are no charts if the file has no curves: `ping-llm evaluate --json` prints only scores.
    """
    models = found.models or [found.model]
    baselines = [name for name in ranked if name not in models and name != ORACLE]
    looks: dict[str, dict[str, Any]] = {name: {"colour": colour} for colour, name in enumerate(models, 1)}
    looks |= {name: {"colour": 5, "name": f"{found.title(name)}, best baseline"} for name in baselines[:1]}
    looks |= {ORACLE: {"colour": 3, "kind": "dashed"}}
    looks |= {name: {"colour": 7, "kind": "quiet", "in_legend": False} for name in baselines[1:]}
    share, errors, inside = np.array(found.shares), [], []
    for predictor, look in looks.items():
        curves = found.curves.get(protocol, {}).get(predictor, {})
        error, covered = (np.array(curves.get(name, [])) for name in ("relative_error", "inside"))
        if len(error) == len(covered) == len(share) > 0:
            inside.append(Line(**{"name": found.title(predictor), "x": share, "y": covered, **look}))
            errors.append(replace(inside[-1], y=np.maximum(error, _SMALLEST_ERROR)))
    if not errors:
        return []
    common: dict[str, Any] = {"style": "percent", "x_style": "percent", "x_range": (0.0, 1.0)}
    common["note"] = "Grey: the other baselines."
    return [
        Chart(
            title="Errors",
            unit="relative error that this share of answers stays below; lower is better",
            x_unit="share of answers",
            lines=errors,
            log_y=True,
            **common,
        ),
        Chart(
            title="Calibration",
            unit="share of RTTs inside; nearer the diagonal is better",
            x_unit="probability of the predicted interval",
            lines=inside,
            y_range=(0.0, 1.0),
            diagonal=True,
            **common,
        ),
    ]
