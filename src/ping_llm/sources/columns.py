"""Which columns of a table are a measurement's, and how its cells are written: found by looking at names and cells.

Whatever a table comes from (a text file, Parquet, JSON, a data frame), `understand` gets its column names and its first
rows. What it cannot tell it does not guess: dates that may be of two months, and RTTs of no plausible size, are errors
that name the option to write.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.cells import (
    DATE,
    UNITS,
    Spelling,
    is_number,
    is_text,
    rtt_milliseconds,
    split_units,
    time_microseconds,
)
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA, parse_column


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_END_WORDS: Final = words(
    "addr address ip ip_addr ip_address host hostname node name id region location site city country zone datacenter"
)


def _end_names(first: str, *roles: str) -> tuple[str, ...]:
    """The names of a column of sources, or of destinations: a role, perhaps with a word for what is named."""
    names = [first]
    for some in map(words, roles):
        names += [*some, *(f"{role}_{word}" for word in _END_WORDS for role in some)]
        names += [f"{word}_{role}" for word in ("ip", "node", "host") for role in some]
    return tuple(names)


_RTT_WORDS: Final = words(
    "rtt latency delay ping ping_time round_trip_time roundtrip_time round_trip roundtrip response_time rtts latencies "
    "latenz laufzeit antwortzeit latence latencia latenza"
)


def _rtt_names(word: str, *kinds: str) -> list[str]:
    """`rtt_avg`, `avg_rtt`, …"""
    return [name for kind in kinds for name in (f"{word}_{kind}", f"{kind}_{word}")]


COLUMN_NAMES: Final = {
    "event_time": words(
        "event_time timestamp time ts datetime date_time epoch unix_time unixtime time_utc timestamp_utc utc utc_time "
        "when measured_at created_at recorded_at start_time start measurement_time test_time dtime date "
        "zeitstempel zeit horodatage datum uhrzeit fecha hora heure"
    ),
    "src_addr": _end_names(
        "src_addr",
        "source src from",
        "sender sending origin probe prb unit agent client vantage_point vantage observer monitor local",
        "saddr srcaddr quelle origine origen origem von a",
    ),
    "dst_addr": _end_names(
        "dst_addr",
        "destination dst to dest",
        "target receiver receiving responder server peer remote",
        "daddr dstaddr ziel destino destinazione nach b",
    ),
    "ip_version": words("ip_version af address_family ip_family ipv"),
    "rtt": (
        *(name for word in _RTT_WORDS for name in (word, *_rtt_names(word, "avg", "average", "mean"))),
        *words("avg average mean avg_time mean_time average_time"),
        *(name for word in _RTT_WORDS for name in _rtt_names(word, "median", "p50")),
        *words("median p50"),
        *(name for word in _RTT_WORDS for name in _rtt_names(word, "min", "minimum")),
        *words("min minimum"),
    ),
}
"""Names that a column may have, best first: in small letters, with `_` between words, and without a unit."""

OPTIONAL_COLUMNS: Final = frozenset({"ip_version"})
OPTIONAL_WITHOUT_TIME: Final = OPTIONAL_COLUMNS | {"event_time"}  # for readers to whom a table of RTTs is enough
OPTIONAL_IN_QUESTIONS: Final = OPTIONAL_WITHOUT_TIME | {"rtt"}

STATED_RANGE_MS: Final = (0.005, 20_000.0)
"""What the median RTT of a table may be if its unit is known: from within a rack to beyond the patience of any tool."""
ASSUMED_RANGE_MS: Final = (0.5, 5_000.0)
"""The same if nobody said that it is milliseconds: outside, it is as likely that they are something else."""


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What a user says about measurements, in place of what would be found by looking at them."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """The table's names of columns of the schema."""
    rtt_unit: str | None = None
    delimiter: str | None = None
    date_order: str | None = None
    decimal: str | None = None
    """What stands before the decimals of RTTs: `comma` or `point`."""
    nodes: str | None = None
    """A file that says of names what addresses they have (`sources/nodes.py`)."""
    allow_bad_rows: bool = False
    """Go on although many rows are unusable, or RTTs are not of a plausible size."""

    def __post_init__(self) -> None:
        if unknown := self.columns.keys() - set(SCHEMA.names):
            raise PingLlmError(
                f"columns: there is no {sorted(unknown)[0]!r} to be named, but {', '.join(SCHEMA.names)}"
            )
        if self.rtt_unit is not None and self.rtt_unit not in ("s", "ms", "us", "ns"):
            raise PingLlmError(f"the unit of RTTs {self.rtt_unit!r}: write s, ms, us or ns")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise PingLlmError(f"the delimiter {self.delimiter!r}: write one character")
        if self.date_order is not None and self.date_order not in ("dmy", "mdy"):
            raise PingLlmError(f"the order of dates {self.date_order!r}: write dmy or mdy")
        if self.decimal is not None and self.decimal not in ("comma", "point"):
            raise PingLlmError(f"the sign before decimals {self.decimal!r}: write comma or point")


AS_FOUND: Final = InputOptions()


@dataclass(frozen=True, kw_only=True)
class Understood:
    """The columns of a table that make measurements, and how to read their cells."""

    columns: dict[str, str]
    """The table's name of each column of the schema."""
    spelling: Spelling
    said: str
    """In words."""


def understand(
    names: Sequence[str],
    sample: Mapping[str, Any],
    options: InputOptions,
    what: str,
    optional: frozenset[str] = OPTIONAL_COLUMNS,
) -> Understood:
    """`sample` has some cells of each column, as Arrow arrays. `what` is what the table is called in errors."""
    columns = find_columns(names, options.columns, what, optional)
    if is_list((cells := sample[columns["rtt"]]).type):
        sample = {**sample, columns["rtt"]: cells.flatten()}
    # Wrong types are refused before any work is done, not in the middle of it.
    for column, check in _CHECKS.items():
        if column in columns:
            check(sample[columns[column]].slice(0, 0), name=repr(columns[column]))
    unit, source = _rtt_unit(columns["rtt"], sample[columns["rtt"]], options, is_ours=_is_ours(columns, sample))
    comma = _has_decimal_comma(sample[columns["rtt"]], unit, options, what)
    time = sample[columns["event_time"]] if "event_time" in columns else None
    order = options.date_order or (None if time is None else _date_order(time, what))
    time_unit = None if time is None else split_unit(columns["event_time"])[1]
    if time is not None and not time_unit and not options.allow_bad_rows:
        _refuse_days(time, what)
    spelling = Spelling(rtt_unit=unit, decimal_comma=comma, date_order=order, time_unit=time_unit)
    values, _ = rtt_milliseconds(sample[columns["rtt"]], spelling)
    if not options.allow_bad_rows:
        check_rtts(values, unit, what, is_stated=source != "assumed")
    said = [f"{word} {columns[column]!r}" for column, word in _WORDS.items() if column in columns]
    said.append(f"RTT {columns['rtt']!r} in {unit} ({source})" + (" with decimal commas" if comma else ""))
    if order is not None:
        said.append({"dmy": "days before months", "mdy": "months before days"}[order])
    return Understood(columns=columns | position_columns(names), spelling=spelling, said=", ".join(said))


_POSITION: Final = re.compile(
    r"(?:(?P<before>[a-z]+)_)?(?:location_|geo_|gps_)?(?:(?P<latitude>lat|latitude)|lon|lng|long|longitude)"
    r"(?:_(?P<after>[a-z]+))?"
)


def position_columns(names: Sequence[str]) -> dict[str, str]:
    """Columns of the latitude and longitude of nodes, as `src_latitude`, `dst_longitude` and so on; as `latitude` and
    `longitude` if the name does not say of which end they are."""
    found: dict[str, str] = {}
    for name in names:
        match = _POSITION.fullmatch(split_unit(name)[0])
        if match is None or (match["before"] and match["after"]):
            continue
        role = match["before"] or match["after"] or ""
        ends = [end for end in ("src", "dst") if role and role in COLUMN_NAMES[f"{end}_addr"]]
        if bool(role) == bool(ends):
            found.setdefault("_".join([*ends, "latitude" if match["latitude"] else "longitude"]), name)
    pairs = [[f"{end}latitude", f"{end}longitude"] for end in ("src_", "dst_", "")]
    return {name: found[name] for pair in pairs if set(pair) <= found.keys() for name in pair}


_CHECKS: Final[Mapping[str, Callable[..., Any]]] = {
    "event_time": time_microseconds,
    "src_addr": parse_column,
    "dst_addr": parse_column,
    "ip_version": rtt_milliseconds,
    "rtt": rtt_milliseconds,
}
_WORDS: Final = {"event_time": "time", "src_addr": "source", "dst_addr": "destination"}


def find_columns(
    names: Sequence[str], renamed: Mapping[str, str], what: str, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> dict[str, str]:
    """The table's name of each schema column: what the user said, else the first of the usual names that is there."""
    taken = {wanted.strip().lower() for wanted in renamed.values()}
    free = [name for name in names if name.strip().lower() not in taken]
    # A field of a field (`a.MinRTT`, `stats.rtt.avg`) is found by its own name if not by the whole.
    ends = {split_unit(end)[0]: name for name in reversed(free) for end in _ends_of(name)}
    usual = ends | {split_unit(name)[0]: name for name in reversed(free)}
    chosen = {}
    for column in SCHEMA.names:
        if column in renamed:
            wanted = renamed[column]
            same = [name for name in names if name.strip().lower() == wanted.strip().lower()]
            match = wanted if wanted in names else next(iter(same), None)
        else:
            match = next((usual[name] for name in COLUMN_NAMES[column] if name in usual), None)
        if match is not None:
            chosen[column] = match
        elif column in renamed or column not in optional:
            missing = repr(renamed.get(column, column))
            missing += "" if column in renamed else " or of another usual name"
            has = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
            remedy = f"name yours with --columns {column}=NAME"
            if usual.keys() >= {"latitude", "longitude"} and usual.keys().isdisjoint(COLUMN_NAMES["rtt"]):
                remedy += ", or give a table of nodes as --nodes"
            if column == "src_addr" and all(
                not usual.keys().isdisjoint(COLUMN_NAMES[one]) for one in ("dst_addr", "rtt")
            ):
                remedy += ", or add one that says who pings"
            if column == "event_time" and not renamed:
                remedy += " (predict, suggest and evaluate do without times)"
            raise PingLlmError(f"{what}: no column {missing} (it has: {has}); {remedy}")
    return chosen


def are_columns(names: Sequence[str], renamed: Mapping[str, str], optional: frozenset[str] = OPTIONAL_COLUMNS) -> bool:
    try:
        return bool(find_columns(names, renamed, "", optional))
    except PingLlmError:
        return False


def _ends_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1)]


def question_columns(names: Sequence[str], what: str = "the questions") -> dict[str, str]:
    """The same of a table of pairs, which needs neither times nor RTTs."""
    return find_columns(names, {}, what, OPTIONAL_IN_QUESTIONS)


_UNIT: Final = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_BRACKETED: Final = re.compile(rf"^(.*?)[\s_]*[(\[{{<]\s*(?:in\s+)?({_UNIT})\s*[)\]}}>]$", re.IGNORECASE)
_SUFFIXED: Final = re.compile(rf"^(.+?)(?:[\s_.,/-]+(?:in[\s_]+)?)({_UNIT})$", re.IGNORECASE)


def split_unit(name: str) -> tuple[str, str | None]:
    """`RTT (ms)` or `rtt_us`: the name as it is looked up, and the unit if it has one."""
    text = re.sub(r"^[a-z]_(?=[A-Z])", "", name.strip().strip("\ufeff\"'#@ "))  # `a_MinRTT` of a table with an alias
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)
    if len(text) > 1 and text.lower() in UNITS:  # `ms` is an RTT; `s` may be anything
        return "rtt", UNITS[text.lower()]
    found = _BRACKETED.match(text) or _SUFFIXED.match(text)
    base, unit = (found[1], UNITS[found[2].lower()]) if found else (text, None)
    return re.sub(r"[^a-z0-9]+", "_", base.lower()).strip("_"), unit


def is_list(kind: Any) -> bool:
    """Whether each cell may hold several values: the RTTs of several packets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


# How cells are written.


def _rtt_unit(name: str, cells: Any, options: InputOptions, *, is_ours: bool) -> tuple[str, str]:
    """The unit of RTTs without one in their cell, and who says so."""
    if options.rtt_unit is not None:
        return options.rtt_unit, "given"
    if unit := split_unit(name)[1]:
        return unit, "its name"
    if is_text(cells.type):
        units = split_units(pc.replace_substring(pc.utf8_trim_whitespace(cells.cast(pa.large_string())), ",", "."))[1]
        if named := [unit for unit in units.categories if unit in UNITS]:
            return UNITS[named[0]], "its cells"
    return "ms", "as our schema has it" if is_ours else "assumed"


def _is_ours(columns: Mapping[str, str], sample: Mapping[str, Any]) -> bool:
    """Whether the table is one that we write: `rtt` is in milliseconds then."""
    needed = (SCHEMA.field(name) for name in ("event_time", "rtt"))
    return all(columns.get(one.name) == one.name and sample[one.name].type == one.type for one in needed)


def _has_decimal_comma(cells: Any, unit: str, options: InputOptions, what: str) -> bool:
    """Whether 12,5 is twelve and a half. 12,345 may also be twelve thousand: whichever is a plausible RTT."""
    if not is_text(cells.type):
        return False
    if options.decimal is not None:
        return options.decimal == "comma"

    def having(pattern: str) -> Any:
        return cells.filter(pc.match_substring_regex(cells, rf"^\s*[-+]?{pattern}\s*[a-zµμA-Z]*\s*$").fill_null(False))

    commas = having("[0-9.]*[0-9](,[0-9]+)+")
    if len(commas) <= len(having("[^,]*[0-9]\\.[0-9]+")):
        return False
    grouped = having("[1-9][0-9]{0,2}(,[0-9]{3})+")
    if len(grouped) < len(commas):
        return True
    if len(having("[0-9]+(,[0-9]{3}){2,}")):
        return False
    medians = {
        comma: np.nanmedian(rtt_milliseconds(grouped, Spelling(rtt_unit=unit, decimal_comma=comma))[0])
        for comma in (True, False)
    }
    low, high = ASSUMED_RANGE_MS
    plausible = [comma for comma, median in medians.items() if low <= median <= high]
    if len(plausible) != 1:
        raise PingLlmError(
            f"{what}: RTTs like {grouped[0].as_py().strip()} may have a comma before decimals or between thousands: "
            "write --decimal comma or point"
        )
    return plausible[0]


def _date_order(cells: Any, what: str) -> str | None:
    """Whether days or months come first, in dates that do not say it themselves."""
    if not is_text(cells.type):
        return None
    parts = pc.extract_regex(pc.utf8_trim_whitespace(cells.cast(pa.large_string())), DATE).drop_null()
    rows = zip(*(pc.struct_field(parts, name).to_pylist() for name in ("a", "separator", "b")), strict=True)
    unclear = [(a, separator, b) for a, separator, b in rows if len(a) <= 2 and separator != "." and b.isdigit()]
    if not unclear:
        return None
    day_first, month_first = (any(int(row[at]) > 12 for row in unclear) for at in (0, 2))
    if day_first == month_first:
        a, separator, b = unclear[0]
        problem = "are of both kinds" if day_first else "may begin with the day or with the month"
        raise PingLlmError(f"{what}: dates like {a}{separator}{b}{separator}… {problem}: write --date-order dmy or mdy")
    return "dmy" if day_first else "mdy"


_SPREADSHEET_DAYS: Final = (36_526, 73_050)
"""2000 to 2099, in days since 1900. Seconds of a trace would begin near 0."""


def _refuse_days(cells: Any, what: str) -> None:
    low, high = _SPREADSHEET_DAYS
    if is_text(cells.type):
        cells = cells.filter(pc.match_substring_regex(cells, r"^\s*[3-7][0-9]{4}([.,][0-9]+)?\s*$").fill_null(False))
        cells = pc.replace_substring(pc.utf8_trim_whitespace(cells), ",", ".").cast(pa.float64())
    if is_number(cells.type) and len(cells.drop_null()):
        least, most = (value.as_py() for value in pc.min_max(cells).values())
        if low <= least and most <= high:
            raise PingLlmError(
                f"{what}: times like {least:g} look like days since 1900, as spreadsheets keep them: give the column a "
                "format of date and time there, and save the table again (or --allow-bad-rows: they are seconds)"
            )


def check_rtts(rtt_ms: Any, unit: str, what: str, *, is_stated: bool = True) -> None:
    """An error if RTTs are not of a size that networks have, if read as this unit."""
    answered = rtt_ms[(rtt_ms > 0) & (rtt_ms < 1e12)]
    if not len(answered):
        return
    median = float(np.median(answered))
    low, high = STATED_RANGE_MS if is_stated else ASSUMED_RANGE_MS
    if not low <= median <= high:
        ms = f"{median:,.0f}" if median >= 100 else f"{median:.2g}"
        doubt = f"which is implausible for {unit}" if is_stated else "and no unit is given"
        raise PingLlmError(
            f"{what}: the median RTT would be {ms} ms, {doubt}: say --rtt-unit us, ms or s (or --allow-bad-rows)"
        )
