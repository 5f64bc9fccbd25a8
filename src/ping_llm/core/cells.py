"""Times and RTTs from the cells of a table, in the many ways people write them, a whole column at a time.

Times may be timestamps of any unit, naive (taken as UTC) or with a zone, epoch numbers, or text of either kind; RTTs
may be text, with a unit (`7.1 ms`) and a decimal comma. `Spelling` holds what the cells alone do not tell. A cell that
cannot be read is flagged; only a column of a wrong *type* raises an error (`TypeError`).
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TIMEOUT_TEXT: Final = frozenset(
    ("*", "timeout", "timed out", "request timed out.", "lost", "failed", "unreachable", "no reply")
)
MISSING_TEXT: Final = TIMEOUT_TEXT | {"", "-", "null", "none", "na", "n/a"}
"""What an empty cell is spelled as in text columns. For an RTT it means that the probe failed."""

_PER_MILLISECOND: Final = {"s": 1e-3, "ms": 1.0, "us": 1e3, "ns": 1e6}
UNITS: Final = {
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds", "millis"), "ms"),
    **dict.fromkeys(("us", "µs", "μs", "usec", "usecs", "microsecond", "microseconds", "micros"), "us"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ns", "nsec", "nsecs", "nanosecond", "nanoseconds", "nanos"), "ns"),
}
"""Spellings of units of time."""


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a table writes its values, where a cell alone is ambiguous."""

    rtt_unit: str = "ms"
    decimal_comma: bool = False
    date_order: str | None = None
    """Order of dates such as 03/04/2024: `dmy` or `mdy`. With points always `dmy`, with the year first `ymd`."""
    time_unit: str | None = None
    """Unit of epoch numbers; None: inferred from their size."""


PLAIN: Final = Spelling()


# RTTs.

_NINES: Final = tuple(10.0**digits - 1 for digits in range(4, 10))
"""9999, 99999, … stand for a timeout where they would be an RTT of ten seconds or more: no tool waits so long."""


def rtt_milliseconds(column: Any, spelling: Spelling = PLAIN, name: str = "rtt") -> tuple[Floats, Flags]:
    """The RTT in each cell; NaN where there is none, with a flag for NaN and for text that is no number."""
    per_ms = _PER_MILLISECOND[spelling.rtt_unit]
    column, missing = _cells(column)
    if pa.types.is_duration(column.type):
        nanoseconds = column.cast(pa.duration("ns")).cast(pa.int64())
        return _floats(nanoseconds) / _PER_MILLISECOND["ns"], np.zeros(len(column), dtype=bool)
    if not is_text(column.type) and not is_number(column.type):
        raise TypeError(f"column {name} has type {column.type}; expected numbers (milliseconds)")
    if is_text(column.type) and spelling.decimal_comma:
        column = pc.replace_substring(_ungrouped(column, "."), ",", ".")
    try:  # the common case: every cell a number, or none
        values = _floats(column)
        scale: Any = per_ms
    except pa.ArrowInvalid:
        values, units = split_units(_ungrouped(column, ","))
        of_units = [_PER_MILLISECOND[UNITS[unit]] if unit in UNITS else np.nan for unit in units.categories]
        scale = np.array([*of_units, per_ms])[units.codes]  # the last is that of cells without a unit
    rtts = values if np.ndim(scale) == 0 and scale == 1 else values / scale
    late = rtts >= _NINES[0]
    if late.any():
        rtts = np.where(late & np.isin(values, _NINES), -1.0, rtts)
    return rtts, np.isnan(rtts) & ~missing


@dataclass(frozen=True)
class CellUnits:
    """The unit in each cell: an index into `categories`, or -1 for none."""

    categories: list[str]
    codes: npt.NDArray[np.int32]


def _ungrouped(text: Any, sign: str) -> Any:
    """Without the sign between thousands, as in 1,234,567.8."""
    grouped = pc.match_substring_regex(text, rf"^[-+]?[0-9]{{1,3}}([{sign}][0-9]{{3}})+([^0-9{sign}][^{sign}]*)?$")
    return pc.if_else(grouped, pc.replace_substring(text, sign, ""), text)


# `7.1 ms`, `7.1 ± 0.4`, `7.1 (0.4)`; and of `1.2/7.1/9.8 ms` (least, mean, largest, perhaps the deviation) the mean.
_NUMBER_AND_UNIT: Final = (
    r"^(?P<number>[-+]?[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)(?:\s*(?:±|\+/?-)\s*[0-9.]+|\s*\([±]?[0-9.]+\))?"
    r"\s*(?P<unit>[a-zA-Zµμ]*)$"
)
_OF_PING: Final = r"^[0-9.]+/([0-9.]+)(?:/[0-9.]+){1,2}(\s*[a-z]*)$"


def split_units(text: Any) -> tuple[Floats, CellUnits]:
    """Numbers (NaN where there is none) and units of cells such as `7.1 ms`."""
    parts = pc.extract_regex(pc.replace_substring_regex(text, _OF_PING, r"\1\2"), _NUMBER_AND_UNIT)
    number, unit = (pc.struct_field(parts, field) for field in ("number", "unit"))
    number = pc.if_else(pc.match_substring_regex(number, "[0-9]"), number, pa.scalar(None, number.type))
    encoded = pc.if_else(pc.equal(unit, ""), pa.scalar(None, unit.type), pc.utf8_lower(unit)).dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return _floats(number), CellUnits(encoded.dictionary.to_pylist(), codes)


# Times.

_EPOCH_TICKS: Final = {1e11: 1, 1e14: 10**3, 1e17: 10**6, np.inf: 10**9}
"""Ticks per second of epoch numbers below a bound: seconds up to the year 5138, then milli-, micro-, nanoseconds."""

_TICKS_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def time_microseconds(column: Any, spelling: Spelling = PLAIN, name: str = "event_time") -> tuple[Ints, Flags, Flags]:
    """Microseconds since 1970 of each value, with flags for the missing and for the unusable ones."""
    column, missing = _cells(column)
    kind, bad = column.type, np.zeros(len(column), dtype=bool)
    bounds = _EPOCH_TICKS if spelling.time_unit is None else {np.inf: _TICKS_PER_SECOND[spelling.time_unit]}
    if pa.types.is_timestamp(kind):
        micros = _rescaled(_integers(column), _TICKS_PER_SECOND[kind.unit])
    elif pa.types.is_integer(kind):  # integers stay integers: a float has 53 bits, nanoseconds need 61
        numbers = _integers(column)
        micros = np.select([numbers < bound for bound in bounds], [_rescaled(numbers, t) for t in bounds.values()])
    elif is_text(kind) or is_number(kind):
        try:  # the common case, in one pass: every cell a number, or none
            micros, bad = _epoch_floats(_floats(column), bounds)
        except pa.ArrowInvalid:
            micros, bad = _times_of_text(column, spelling.date_order, bounds)
    elif pa.types.is_date(kind):
        micros = column.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    else:
        raise TypeError(f"column {name} has type {kind}; expected a timestamp, epoch seconds or ISO 8601 text")
    return micros, missing, bad & ~missing


def _rescaled(ticks: Ints, per_second: int) -> Ints:
    """Whole microseconds. Times that overflow become negative, which no valid time is."""
    if per_second >= 10**6:
        return ticks // (per_second // 10**6)
    factor = 10**6 // per_second
    return np.where((ticks >= 0) & (ticks <= np.iinfo(np.int64).max // factor), ticks, -1) * factor


def _epoch_floats(values: Floats, bounds: dict[float, int] = _EPOCH_TICKS) -> tuple[Ints, Flags]:
    bad = ~np.isfinite(values)
    usable = np.where(bad, 0.0, values)
    scale = np.select([usable <= bound for bound in bounds], [1e6 / ticks for ticks in bounds.values()])
    with np.errstate(over="ignore"):  # infinity is clipped like any other time too far away
        return np.round(np.clip(usable * scale, -1, 9e18)).astype(np.int64), bad


DATE: Final = (
    r"^(?P<a>[0-9]{1,4})(?P<separator>[-./ ])(?P<b>[0-9]{1,2}|[A-Za-z]{3})[-./ ](?P<c>[0-9]{1,4})"
    r"(?:[T ,]\s*(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]{1,9}))?)?"
    r"\s*(?P<half>[AaPp][Mm])?\s*(?:Z|z|UTC|GMT|(?P<sign>[-+])(?P<zone_hour>[0-9]{2}):?(?P<zone_minute>[0-9]{2})?)?)?$"
)
"""A date in figures, alone or with a time of day, and perhaps a zone."""
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def _times_of_text(text: Any, date_order: str | None, bounds: dict[float, int]) -> tuple[Ints, Flags]:
    """Dates and times of the usual form all at once, any other cell by itself."""
    parts = pc.extract_regex(text, DATE)

    def part(name: str) -> Any:
        return pc.struct_field(parts, name)

    def figure(name: str) -> Ints:
        cells = part(name)
        return _integers(pc.if_else(pc.match_substring_regex(cells, "^[0-9]+$"), cells, "0"))

    def says(name: str, value: str) -> Flags:
        return pc.equal(pc.utf8_lower(part(name)), value).fill_null(False).to_numpy(zero_copy_only=False)

    first, middle, last = (figure(name) for name in "abc")
    digits = pc.utf8_length(part("a")).fill_null(0).to_numpy(zero_copy_only=False)
    by_name = pc.index_in(pc.utf8_lower(part("b")), pa.array(_MONTHS, part("b").type)).fill_null(-1)
    named = by_name.to_numpy(zero_copy_only=False)
    year_first, day_first = digits == 4, (named >= 0) | says("separator", ".") | (date_order == "dmy")
    year = np.where(year_first, first, np.where(last < 100, last + 2000, last))
    month = np.where(named >= 0, named + 1, np.where(year_first | day_first, middle, first))
    day = np.where(year_first, last, np.where(day_first, first, middle))

    hour, minute, second = (figure(name) for name in ("hour", "minute", "second"))
    fraction = pc.utf8_slice_codeunits(pc.utf8_rpad(part("fraction"), 6, "0"), 0, 6).cast(pa.int64(), safe=False)
    is_pm, is_am = says("half", "pm"), says("half", "am")
    bad = (hour > np.where(is_pm | is_am, 12, 23)) | (minute > 59) | (second > 59)
    hour = np.where(is_pm | is_am, hour % 12 + 12 * is_pm, hour)
    east = np.where(says("sign", "-"), -1, 1) * (figure("zone_hour") * 60 + figure("zone_minute"))

    bad |= (month < 1) | (month > 12) | (digits == 3) | ~(year_first | day_first | (date_order == "mdy"))
    months = ((np.clip(year, 1, 9999) - 1970) * 12 + np.clip(month, 1, 12) - 1).astype("datetime64[M]")
    days_of_month = ((months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")).astype(np.int64)
    bad |= (day < 1) | (day > days_of_month)
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    seconds = days * 86_400 + hour * 3600 + (minute - east) * 60 + second
    micros = seconds * 1_000_000 + fraction.fill_null(0).to_numpy(zero_copy_only=False)

    other = parts.is_null().to_numpy(zero_copy_only=False)
    if other.any():
        rest, bad[other] = _parse_each(text.filter(pa.array(other)), lambda cell: _time_from_text(cell, bounds))
        micros[other] = rest
    return np.where(bad, 0, micros), bad


def _time_from_text(text: str, bounds: dict[float, int]) -> int:
    try:
        number = float(text)
    except ValueError:
        moment = _moment(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return int(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond
    micros, bad = _epoch_floats(np.array([number]), bounds)
    if bad[0]:
        raise ValueError(text)
    return int(micros[0])


_WRITTEN_OUT: Final = (
    *("%a %b %d %H:%M:%S %Y", "%a %d %b %Y %H:%M:%S", "%b %d %Y %H:%M:%S", "%b %d %Y %I:%M:%S %p"),
    *("%b %d %Y %H:%M", "%b %d %Y %I:%M %p", "%d %b %Y %H:%M:%S", "%b %d %Y"),
)
"""Times with the name of the month, without commas and zone."""


def _moment(text: str) -> datetime:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text)
    plain = re.sub(r"\b([A-Z][a-z]{2})[a-z]+\b", r"\1", re.sub(r" (?:UTC|GMT|[+-]0000)\b|,", "", text))
    for form in _WRITTEN_OUT:
        with contextlib.suppress(ValueError):
            return datetime.strptime(plain, form).replace(tzinfo=UTC)
    raise ValueError(text)


def _parse_each(cells: Any, parse: Callable[[str], int]) -> tuple[Ints, Flags]:
    """Cell by cell; 0 and a flag for what cannot be parsed."""
    values, bad = np.zeros(len(cells), dtype=np.int64), np.zeros(len(cells), dtype=bool)
    for i, cell in enumerate(cells.to_pylist()):
        if cell is not None:
            try:
                values[i] = parse(cell)
            except (ValueError, OverflowError):
                bad[i] = True
    return values, bad


# Both.


def _cells(column: Any) -> tuple[Any, Flags]:
    """A column without dictionary encoding, its text trimmed and empty cells null; and a mask of the null cells."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        absent = pc.is_in(pc.utf8_lower(text), pa.array(sorted(MISSING_TEXT), pa.large_string()))
        column = pc.if_else(absent, pa.scalar(None, text.type), text)
    elif pa.types.is_null(column.type):  # in a file where every probe failed, for instance
        column = column.cast(pa.float64())
    return column, column.is_null().to_numpy(zero_copy_only=False)


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _floats(column: Any) -> Floats:
    return column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)


def _integers(column: Any) -> Ints:
    return column.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
