"""Numbers as text: on the page, and (by the same rules, in static/chart.js) in its charts."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Literal

Style = Literal["number", "percent", "count"]

COUNTS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))  # tokens and parameters are counted in billions
SI: Final = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))  # before a unit
UNKNOWN: Final = "–"


def number(value: float | None, style: Style = "number") -> str:
    """Three or four significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if style == "percent":
        percent = 100 * value
        return f"{_trimmed(percent, 0 if abs(percent) >= 100 else 1 if abs(percent) >= 1 else 2)} %"
    if style == "count":
        return short(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return _trimmed(value, max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0)


def percent(value: float | None) -> str:
    return number(value, "percent")


def _trimmed(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def short(value: float | None, prefixes: Sequence[tuple[float, str]] = COUNTS, between: str = "") -> str:
    """Three digits and a prefix: 12.5k, 112M."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, prefix in prefixes:
        if abs(value) >= size * 0.9995:
            digits = f"{value / size:.3g}" if abs(value) < 999.5 * size else f"{value / size:,.0f}"
            return f"{digits}{between}{prefix}"
    return f"{value:.3g}"


def duration(time: timedelta | float | None) -> str:
    """A number and a unit. Numbers are seconds."""
    if time is None:
        return UNKNOWN
    seconds = time.total_seconds() if isinstance(time, timedelta) else time
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
