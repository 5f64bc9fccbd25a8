"""What a chart shows: lines, axes, and the ways to look at them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from ping_llm.report.markup import Content, Markup, details, element, table
from ping_llm.report.scales import Floats, Scale, Style, shown, spread, thinned

Kind = Literal["line", "faint", "dots", "dashed", "quiet"]


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    x: Floats
    y: Floats
    colour: int = 1
    """Of the palette in style.css, from 1 on."""
    kind: Kind = "line"
    """`faint`: what a smoothed line was made from. `dots`: joined by a line. `quiet`: one of many in the background."""
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True)
class View:
    """One of the ways to look at a chart."""

    label: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    unit: str
    """What the vertical axis says, in words."""
    lines: Sequence[Line]
    x_unit: str = "step"
    style: Style = "number"
    x_style: Style = "count"
    from_zero: bool = False
    views: Sequence[View] = field(default=(View(),))
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines with a word each: where something happened."""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    diagonal: bool = False
    """Where both axes would say the same."""
    note: Content = None


# Lines as SVG that fills whatever width there is, with labels that keep their size.
#
# The picture is stretched (`preserveAspectRatio="none"`, strokes that do not scale), ticks are text placed in per cent:
# so a chart is as readable on a phone as on a wide screen, without any script.

_WIDTH, _HEIGHT = 2000, 1000
_ORDER: Final[dict[Kind, int]] = {"quiet": 0, "faint": 1, "dashed": 2, "line": 3, "dots": 4}
"""What is drawn later lies on top."""


def colour(line: Line) -> str:
    """As a style."""
    return f"--colour:var(--series-{(line.colour - 1) % 8 + 1})"


def _scales(chart: Chart, lines: Sequence[Line], view: View) -> tuple[Scale, Scale]:
    xs = np.concatenate([line.x for line in lines]) if lines else np.empty(0)
    ys = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
    if chart.x_range and not view.log_x:
        x = Scale(low=chart.x_range[0], high=chart.x_range[1], style=chart.x_style)
    else:
        x = Scale.over(xs, log=view.log_x, style=chart.x_style, room=0)
    if chart.y_range:
        return x, Scale(low=chart.y_range[0], high=chart.y_range[1], style=chart.style)
    return x, Scale.over(ys, log=view.log_y, from_zero=chart.from_zero, style=chart.style)


def plot(chart: Chart, lines: Sequence[Line], view: View, *, hidden: bool) -> Markup:
    x, y = _scales(chart, lines, view)
    x_ticks, y_ticks = x.ticks(6), y.ticks(5)
    grid = [_straight(0, _up(y, t), _WIDTH, _up(y, t), "grid") for t in y_ticks]
    marks = [(_along(x, at), word) for at, word in chart.marks if 0 <= x.place(np.array([at]))[0] <= 1]
    drawn = [_path(line, x, y) for line in sorted(lines, key=lambda line: _ORDER[line.kind])]
    picture = element(
        "svg",
        grid,
        _straight(0, _HEIGHT, _WIDTH, 0, "diagonal") if chart.diagonal else None,
        [_straight(at, 0, at, _HEIGHT, "mark") for at, _ in marks],
        drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_described(chart, lines),
    )
    return element(
        "div",
        picture,
        [_tick("y", 100 * _up(y, t) / _HEIGHT, y.label(t)) for t in y_ticks],
        [_tick("x", 100 * _along(x, t) / _WIDTH, x.label(t), spare=i % 2 == 1) for i, t in enumerate(x_ticks)],
        _words([(at / _WIDTH, word) for at, word in marks]),
        class_="view",
        data_view=view.label,
        data_x=json.dumps([x.low, x.high, x.log]),
        data_y=json.dumps([y.low, y.high, y.log]),
        hidden=hidden,
    )


def _path(line: Line, x: Scale, y: Scale) -> list[Markup]:
    along = x.place(line.x) * _WIDTH
    up = (1 - y.place(line.y)) * _HEIGHT
    style = colour(line)
    parts, dots, pen = [], [], "M"
    for a, b in zip(along.tolist(), up.tolist(), strict=True):
        if not math.isfinite(a) or not math.isfinite(b):
            pen = "M"
            continue
        parts.append(f"{pen}{a:.0f} {b:.0f}")
        dots.append(f"M{a:.0f} {b:.0f}h0")
        pen = "L"
    drawn = [element("path", d="".join(parts), class_=f"curve {line.kind}", style=style)] if parts else []
    if dots and (line.kind == "dots" or len(dots) == 1):  # a stretched circle would be none; the end of a stroke is
        drawn.append(element("path", d="".join(dots), class_="dots", style=style))
    return drawn


def _straight(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("path", d=f"M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}", class_=kind)


def _along(scale: Scale, value: float) -> float:
    return float(scale.place(np.array([value]))[0]) * _WIDTH


def _up(scale: Scale, value: float) -> float:
    return (1 - float(scale.place(np.array([value]))[0])) * _HEIGHT


def _tick(axis: str, percent: float, label: str, *, spare: bool = False) -> Markup:
    side = "left" if axis == "x" else "top"
    kind = f"tick {axis}" + (" spare" if spare else "")
    return element("span", label, class_=kind, style=f"{side}:{percent:.2f}%", aria_hidden="true")


def _words(marks: Sequence[tuple[float, str]]) -> list[Markup]:
    """Beside their lines, where there is room for them."""
    words: list[Markup] = []
    free = 0.0
    for share, word in sorted(marks):
        if share >= free:
            kind = "mark late" if share > 0.8 else "mark"
            words.append(element("span", word, class_=kind, style=f"left:{100 * share:.2f}%"))
            free = share + 0.1
    return words


def _described(chart: Chart, lines: Sequence[Line]) -> str:
    """For those who hear the page."""
    parts = []
    for line in lines:
        finite = line.y[np.isfinite(line.y)]
        if line.in_legend and len(finite):
            ends = f"{shown(float(finite[0]), chart.style)} to {shown(float(finite[-1]), chart.style)}"
            parts.append(f"{line.name} from {ends}")
    return f"{chart.title}, {chart.unit}, by {chart.x_unit}: {'; '.join(parts) or 'no values'}"


# A chart as a figure: title, legend, picture, the table behind it, and what the tooltip needs, as JSON.

_TABLE_LINES: Final = 40


def draw(chart: Chart, *, wide: bool = False) -> Markup:
    """The figure: title, legend, picture, and the table behind it."""
    lines = [_thin(line) for line in chart.lines]
    views = [plot(chart, lines, view, hidden=i > 0) for i, view in enumerate(chart.views)]
    legend = [_legend(line) for line in lines if line.in_legend]
    return element(
        "figure",
        element(
            "figcaption",
            element("div", element("h3", chart.title), element("p", chart.unit, class_="unit")),
            _switch(chart) if len(chart.views) > 1 else None,
        ),
        element("ul", legend, class_="legend") if len(legend) > 1 else None,
        element(
            "div",
            views,
            element("div", class_="cross", hidden=True),
            element("div", class_="tip", hidden=True, role="status"),
            class_="plot",
            tabindex=0,
            role="group",
            aria_label=f"{chart.title}: arrow keys read the values",
        ),
        element("p", chart.x_unit, class_="x-unit"),
        details("Data", element("div", _table(chart), class_="tables"), class_="data"),
        element("p", chart.note, class_="note") if chart.note else None,
        data_block(_for_script(chart, lines)),
        class_="chart wide" if wide else "chart",
    )


def data_block(value: Any) -> Markup:
    """JSON inside a page: nothing in it can end the element or begin another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json">{text}</script>')


def _thin(line: Line) -> Line:
    x, y = thinned(line.x, line.y)
    return replace(line, x=x, y=y)


def _legend(line: Line) -> Markup:
    return element("li", element("span", class_=f"key {line.kind}", style=colour(line)), line.name)


def _switch(chart: Chart) -> Markup:
    buttons = [
        element("button", view.label, type="button", data_show=view.label, aria_pressed="true" if i == 0 else "false")
        for i, view in enumerate(chart.views)
    ]
    return element("div", buttons, class_="switch", role="group", aria_label=f"Scale of {chart.title}")


def _table(chart: Chart) -> Content:
    """Lines with the same x share a table."""
    groups: list[list[Line]] = []
    for line in chart.lines:
        same = [group for group in groups if np.array_equal(group[0].x, line.x)]
        same[0].append(line) if same else groups.append([line])
    return [_lines_of(chart, group) for group in groups if len(group[0].x)] or element("p", "There are none.")


def _lines_of(chart: Chart, group: Sequence[Line]) -> Markup:
    x = group[0].x
    rows = [
        [_exactly(x[i]), *(shown(float(line.y[i]), chart.style) for line in group)]
        for i in spread(len(x), _TABLE_LINES)
    ]
    names = [line.name for line in group]
    some = f" ({len(rows)} of {len(x):,} lines)" if len(rows) < len(x) else ""
    return table([chart.x_unit, *names], rows, caption=f"{chart.title}: {chart.unit}{some}", class_="numbers")


def _exactly(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def _for_script(chart: Chart, lines: Sequence[Line]) -> dict[str, Any]:
    named = [line for line in lines if len(line.x)]
    return {
        "x": chart.x_unit,
        "xStyle": chart.x_style,
        "style": chart.style,
        "lines": [
            {
                "name": line.name,
                "colour": (line.colour - 1) % 8 + 1,
                "kind": line.kind,
                "x": [_plain(value) for value in line.x.tolist()],
                "y": [_plain(value) for value in line.y.tolist()],
            }
            for line in named
        ],
    }


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")
