"""A chart as a figure: title, legend, picture, the table behind it, and what the tooltip needs, as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ping_llm.report.chart import Chart, Line
from ping_llm.report.markup import Content, Markup, details, element, table
from ping_llm.report.plot import colour, plot
from ping_llm.report.scales import shown
from ping_llm.report.series import spread, thinned

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
