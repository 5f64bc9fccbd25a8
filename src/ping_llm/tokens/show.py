"""Decoded tokens for people, a measurement a line, and for programs, as JSON."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rich.text import Text

from ping_llm.tokens.decode import Decoded, DecodedMeasurement, Tokens, decode
from ping_llm.tokens.encode import TimeKind

_STYLES: Final = {"source": "cyan", "destination": "blue", "result": "green", "time": "magenta"}
_FAILED_STYLE: Final = "bold red"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def render(shown: Decoded | Tokens) -> Text:
    """One line for each measurement, its fields in the order as written, and one for a tail that is none.

    Every line begins with the position of its first token. Print it with `soft_wrap=True`, else lines are cut to the
    width of the terminal.
    """
    decoded = shown if isinstance(shown, Decoded) else decode(shown)
    digits = len(str(decoded.end))
    lines = [_line(measurement, digits) for measurement in decoded.measurements]
    tail = Text.assemble((f"{decoded.end:>{digits}}", "dim"), "  ")
    if decoded.truncated:
        count = f"{decoded.truncated} token{'s' if decoded.truncated > 1 else ''}"
        lines.append(tail.append(f"... truncated: {count} of an incomplete measurement", style="yellow"))
    if decoded.problem:
        lines.append(tail.append(f"!!! malformed: {decoded.problem}", style="bold red"))
    return Text("\n").join(lines)


def as_json(decoded: Decoded) -> list[dict[str, Any]]:
    """One dictionary for each line that `render` writes; `kind` says what it is."""
    entries = [_entry(measurement) for measurement in decoded.measurements]
    if decoded.truncated:
        entries.append({"kind": "truncated", "start": decoded.end, "length": decoded.truncated})
    if decoded.problem:
        problem = decoded.problem
        entries.append(
            {
                "kind": "malformed",
                "start": decoded.end,
                "fault": str(problem.fault),
                "position": problem.position,
                "found": problem.found,
                "expected": problem.expected,
            }
        )
    return entries


def _line(measurement: DecodedMeasurement, digits: int) -> Text:
    line = Text.assemble((f"{measurement.start:>{digits}}", "dim"))
    for name in measurement.order:
        style = _FAILED_STYLE if name == "result" and measurement.failed else _STYLES[name]
        line.append("  ").append(_field(measurement, name), style=style)
    return line


def _field(measurement: DecodedMeasurement, name: str) -> str:
    if name == "source":
        return f"from {measurement.source}"
    if name == "destination":
        return f"to {measurement.destination}"
    if name == "result":  # a code is a whole number of microseconds, so three digits are exact
        return "failed" if measurement.rtt_ms is None else f"{measurement.rtt_ms:.3f} ms"
    if measurement.time_kind is TimeKind.ABSOLUTE:
        date = _calendar(measurement.time_s)
        return f"at {date:%Y-%m-%d %H:%M:%S} UTC" if date else f"at {measurement.time_value} s"
    return f"+{measurement.time_value}s"


def _calendar(time_s: int | None) -> datetime | None:
    """The time as a date, if it is known and the calendar has it: eight bytes can say years that it has not."""
    try:
        return None if time_s is None else _EPOCH + timedelta(seconds=time_s)
    except OverflowError:
        return None


def _entry(measurement: DecodedMeasurement) -> dict[str, Any]:
    date = _calendar(measurement.time_s)
    return {
        "kind": "measurement",
        "start": measurement.start,
        "length": measurement.length,
        "order": list(measurement.order),
        "family": measurement.family,
        "source": measurement.source,
        "destination": measurement.destination,
        "failed": measurement.failed,
        "rtt_ms": measurement.rtt_ms,
        "rtt_code": measurement.rtt_code,
        "time_kind": measurement.time_kind.name.lower(),
        "time_value": measurement.time_value,
        "time_s": measurement.time_s,
        "time": date.isoformat() if date else None,
    }
