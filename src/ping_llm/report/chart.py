"""What a chart shows: lines, axes, and the ways to look at them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ping_llm.report.markup import Content
from ping_llm.report.scales import Style
from ping_llm.report.series import Floats

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
