"""From tokens back to measurements, for any sequence of tokens.

A model may generate anything, and a context may be cut anywhere, so decoding never raises an error: it returns every
measurement before the first fault, and describes the fault: where it is, what was found, and what was expected.
"""

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt
from rich.text import Text

from ping_llm.core.measurements import format_address
from ping_llm.core.rtt import decode_rtt
from ping_llm.tokens import BYTES_AFTER, FIELDS, FIRST_BYTE, ROLES_OF, VOCABULARY_SIZE, Role, TimeKind

Tokens = npt.NDArray[np.integer[Any]] | Iterable[SupportsIndex]


class Fault(StrEnum):
    """What can be wrong with a sequence."""

    UNKNOWN_TOKEN = "unknown token"
    RESERVED_TOKEN = "reserved token"
    BEFORE_START = "token before the first measurement"
    BYTE_FOR_ROLE = "byte outside a field"
    ROLE_FOR_BYTE = "field cut short"
    REPEATED_FIELD = "field twice in a measurement"
    MISSING_FIELD = "measurement without all its fields"
    FAMILY_MISMATCH = "source and destination of different families"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The first token of a sequence that is not allowed at its position."""

    fault: Fault
    position: int
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.fault} at token {self.position}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True, kw_only=True)
class DecodedMeasurement:
    """One measurement as decoded from its tokens."""

    start: int
    length: int
    order: tuple[str, ...]
    """Names of the fields as they were written."""
    family: int
    source: str
    destination: str
    failed: bool
    rtt_ms: float | None
    """None if the probe failed."""
    rtt_code: int | None
    """As written: a model may generate a code that the encoder never writes, and that has a value all the same."""
    time_kind: TimeKind
    time_value: int | None
    """The value of the time field: Unix seconds, or seconds since the previous timed measurement."""
    time_s: int | None
    """Unix seconds, if known: from an absolute time, or from deltas since one."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What the tokens of one context say."""

    measurements: tuple[DecodedMeasurement, ...]
    truncated: int = 0
    """Tokens of a last measurement that is valid so far but not complete."""
    problem: Problem | None = None
    """The fault at which decoding stopped. The measurement it lies in, and all after it, are not given back."""

    @property
    def end(self) -> int:
        """Position after the last measurement: where a truncated or malformed tail begins."""
        return self.measurements[-1].start + self.measurements[-1].length if self.measurements else 0


_FIELD_OF: Final = {role: field for field, roles in ROLES_OF.items() for role in roles}
_FAMILY_OF: Final = {Role.SRC_IPV4: 4, Role.SRC_IPV6: 6, Role.DST_IPV4: 4, Role.DST_IPV6: 6}
_TIME_KINDS: Final = dict(zip(ROLES_OF["time"], (TimeKind.ABSOLUTE, TimeKind.DELTA1, TimeKind.DELTA4), strict=True))
_REQUIRED: Final = {"source", "destination", "result"}

_Fields = dict[str, tuple[Role, bytes]]


class _MalformedError(Exception):
    """Ends the reading of a measurement: the fault, its position, and what was expected there."""


def decode(tokens: Tokens) -> Decoded:
    """The measurements of one context. Any integers will do; only what is not a row of integers is a TypeError."""
    ids = [operator.index(token) for token in (tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)]
    measurements: list[DecodedMeasurement] = []
    start, time_s = 0, None  # the time of the previous timed measurement
    while start < len(ids):
        try:
            fields, end = _read_fields(ids, start)
        except _MalformedError as error:
            fault, position, expected = error.args
            token = ids[position]
            if not 0 <= token < VOCABULARY_SIZE:  # wrong everywhere, which says more than that it is wrong here
                fault = Fault.UNKNOWN_TOKEN
            elif token == Role.THROUGHPUT_START:
                fault = Fault.RESERVED_TOKEN
            problem = Problem(fault=fault, position=position, found=_token_name(token), expected=expected)
            return Decoded(measurements=tuple(measurements), problem=problem)
        if end > len(ids) or not fields.keys() >= _REQUIRED:
            return Decoded(measurements=tuple(measurements), truncated=len(ids) - start)
        measurements.append(_measurement(fields, start, end, time_s))
        if "time" in fields:
            time_s = measurements[-1].time_s
        start = end
    return Decoded(measurements=tuple(measurements))


def _token_name(token: int) -> str:
    """The token as a person would call it: `SRC_IPV4`, `byte 192`."""
    if FIRST_BYTE <= token < VOCABULARY_SIZE:
        return f"byte {token - FIRST_BYTE}"
    return Role(token).name if 0 <= token < FIRST_BYTE else f"id {token}"


def _read_fields(ids: list[int], start: int) -> tuple[_Fields, int]:
    """The fields of the measurement that starts here, as written, and where it ends: beyond the tokens, if one is cut
    off."""
    if ids[start] != Role.MEASUREMENT_START:  # only at the very beginning: later ones start where one was found
        raise _MalformedError(Fault.BEFORE_START, start, Role.MEASUREMENT_START.name)
    fields: _Fields = {}
    position = start + 1
    while position < len(ids) and not (ids[position] == Role.MEASUREMENT_START and fields.keys() >= _REQUIRED):
        role = _field_role(ids[position], position, fields)
        begin, position = position + 1, position + 1 + BYTES_AFTER[role]
        for at in range(begin, min(position, len(ids))):
            if not FIRST_BYTE <= ids[at] < VOCABULARY_SIZE:
                expected = f"byte {at - begin + 1} of the {position - begin} after {role.name}"
                raise _MalformedError(Fault.ROLE_FOR_BYTE, at, expected)
        fields[_FIELD_OF[role]] = role, bytes(token - FIRST_BYTE for token in ids[begin:position])
    return fields, position


def _field_role(token: int, position: int, fields: _Fields) -> Role:
    """The token as a role, if a field that the measurement still lacks can begin with it."""
    if token not in _FIELD_OF or _FIELD_OF[Role(token)] in fields:
        fault = Fault.REPEATED_FIELD if token in _FIELD_OF else Fault.BYTE_FOR_ROLE
        choices = [f"a {name}" for name in FIELDS if name not in fields]
        if fields.keys() >= _REQUIRED:
            choices.append(Role.MEASUREMENT_START.name)
        expected = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        raise _MalformedError(Fault.MISSING_FIELD if token == Role.MEASUREMENT_START else fault, position, expected)
    role = Role(token)
    for other, _ in fields.values():
        family = _FAMILY_OF.get(other)
        if family and _FAMILY_OF.get(role, family) != family:
            raise _MalformedError(Fault.FAMILY_MISMATCH, position, f"an IPv{family} {_FIELD_OF[role]}")
    return role


def _measurement(fields: _Fields, start: int, end: int, previous_time_s: int | None) -> DecodedMeasurement:
    (source_role, source), (_, destination), (result_role, result) = (fields[name] for name in FIELDS[:3])
    family = _FAMILY_OF[source_role]
    code = None if result_role is Role.FAILED else int.from_bytes(result, "big")
    kind, value, time_s = TimeKind.NONE, None, None
    if "time" in fields:
        time_role, time = fields["time"]
        kind = _TIME_KINDS[time_role]
        value = int.from_bytes(time, "big", signed=kind is TimeKind.ABSOLUTE)
        since = 0 if kind is TimeKind.ABSOLUTE else previous_time_s
        time_s = None if since is None else since + value
    return DecodedMeasurement(
        start=start,
        length=end - start,
        order=tuple(fields),
        family=family,
        source=format_address(family, source),
        destination=format_address(family, destination),
        failed=code is None,
        rtt_ms=None if code is None else float(decode_rtt(code)),
        rtt_code=code,
        time_kind=kind,
        time_value=value,
        time_s=time_s,
    )


# Decoded tokens for people, a measurement a line, and for programs, as JSON.

_STYLES: Final = {"source": "cyan", "destination": "blue", "result": "green", "time": "magenta"}


def render(shown: Decoded | Tokens) -> Text:
    """One line for each measurement, its fields in the order as written, and one for a tail that is none.

    Every line begins with the position of its first token. Print it with `soft_wrap=True`, else lines are cut to the
    width of the terminal.
    """
    decoded = shown if isinstance(shown, Decoded) else decode(shown)
    digits = len(str(decoded.end))
    lines = []
    for measurement in decoded.measurements:
        line = Text.assemble((f"{measurement.start:>{digits}}", "dim"))
        for name in measurement.order:
            style = "bold red" if name == "result" and measurement.failed else _STYLES[name]
            line.append("  ").append(_in_words(measurement, name), style=style)
        lines.append(line)
    tail = Text.assemble((f"{decoded.end:>{digits}}", "dim"), "  ")
    if decoded.truncated:
        count = f"{decoded.truncated} token{'s' if decoded.truncated > 1 else ''}"
        lines.append(tail.append(f"... truncated: {count} of an incomplete measurement", style="yellow"))
    if decoded.problem:
        lines.append(tail.append(f"!!! malformed: {decoded.problem}", style="bold red"))
    return Text("\n").join(lines)


def _in_words(measurement: DecodedMeasurement, field: str) -> str:
    if field in ("source", "destination"):
        return f"from {measurement.source}" if field == "source" else f"to {measurement.destination}"
    if field == "result":  # a code is a whole number of microseconds, so three digits are exact
        return "failed" if measurement.failed else f"{measurement.rtt_ms:.3f} ms"
    if measurement.time_kind is not TimeKind.ABSOLUTE:
        return f"+{measurement.time_value}s"
    date = _calendar(measurement.time_s)
    return f"at {date:%Y-%m-%d %H:%M:%S} UTC" if date else f"at {measurement.time_value} s"


def _calendar(time_s: int | None) -> datetime | None:
    """The time as a date, if it is known and within the calendar's range: eight bytes can hold times far beyond."""
    try:
        return None if time_s is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=time_s)
    except OverflowError:
        return None


def as_json(decoded: Decoded) -> list[dict[str, Any]]:
    """One dictionary for each line that `render` writes; `kind` says what it is."""
    entries: list[dict[str, Any]] = []
    for measurement in decoded.measurements:
        date = _calendar(measurement.time_s)
        entry = {"kind": "measurement", **asdict(measurement), "order": list(measurement.order)}
        entry |= {"time_kind": measurement.time_kind.name.lower(), "time": date.isoformat() if date else None}
        entries.append(entry)
    if decoded.truncated:
        entries.append({"kind": "truncated", "start": decoded.end, "length": decoded.truncated})
    if decoded.problem:
        entries.append({"kind": "malformed", "start": decoded.end, **asdict(decoded.problem)})
    return entries
