"""What ping tools and monitoring systems write, as measurements: a module for each format, and a line in `READERS`.

A format's module has two functions:

    matches(head)               does a text that begins like this have the format? `head` is its first 64 KB
    rows(lines, source)         its measurements, from its lines

The content decides, never the name of the file. Whatever a reader meets that it cannot use, it leaves out; it raises a
`PingLlmError` if the file as a whole makes no sense. `adapter.py` turns the rows into batches, for every format alike.
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from types import ModuleType
from typing import Any, Final, NamedTuple

import orjson

from ping_llm.core.errors import PingLlmError, shown

READERS: Final = ("rrd", "mtr", "globalping", "scamper", "prometheus", "influx", "fping", "ping")
"""In the order in which they are asked."""


UNKNOWN: Final = "localhost"
"""Who pings, if nothing says so."""


class Row(NamedTuple):
    """A measurement as its file says it: names stand for addresses where the file has no addresses."""

    time_s: float | None
    src: str
    dst: str
    rtt_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is known of a file beside its content."""

    name: str  # of the file, without folder and suffixes
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the user says: the labels or fields that hold columns of the schema, and `rtt_unit`."""

    @cached_property
    def vantage(self) -> str:
        """Who pings, where the tool does not say: as the user says, else what names a host in the file's name."""
        return self.labels.get("src_addr") or vantage_in(self.name)

    def vantage_to(self, *targets: str) -> str:
        """Who pings these; a file that is called after its target does not say."""
        return UNKNOWN if self.vantage in targets and "src_addr" not in self.labels else self.vantage


def matching(head: str) -> str | None:
    """The format of a text that begins like this."""
    return next((name for name in READERS if module_of(name).matches(head)), None)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


_NO_HOST: Final = re.compile(
    r"(?:[fh]?ping\d?|mtr|smokeping|globalping|scamper|prometheus|blackbox|telegraf|influx|rrd|results?|output|upload"
    r"|stdout|log|data|dump|measurements?|history|query|range|to|from|[0-9T:.Z+-]*)",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}")


def vantage_in(name: str) -> str:
    """`fping-ams1.txt` was written at ams1, `ping.log` at localhost."""
    if address := _ADDRESS.search(name):
        return address[0]
    return "-".join(part for part in re.split(r"[-_ ~]+", name) if not _NO_HOST.fullmatch(part)) or UNKNOWN


# What several readers need.

_MAX_SUMMARY: Final = 10


def summary(time_s: float | None, src: str, dst: str, sent: int, received: int, rtt_ms: float | None) -> Iterator[Row]:
    """The packets of a report that has only their number and mean RTT: answered ones get the mean, lost ones none.

    Of more than ten packets, ten stand for all: the share of lost ones is kept to a tenth, and neither kind vanishes.
    """
    received = 0 if rtt_ms is None else max(0, min(received, sent))
    shown_packets = min(sent, _MAX_SUMMARY)
    answered = round(shown_packets * received / sent) if sent > 0 else 0
    if 0 < received < sent and shown_packets > 1:
        answered = min(max(answered, 1), shown_packets - 1)
    yield from (Row(time_s, src, dst, rtt_ms if number < answered else None) for number in range(shown_packets))


def number(value: Any) -> float | None:
    """A finite number, None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, bool) or found - found != 0 else found


def whole(value: Any) -> int:
    """A count, 0 for anything that is none."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 1e9 else 0


def text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def host_of(said: str) -> str:
    """The host of a target that may be written as a URL or with a port."""
    host = said.partition("://")[2].partition("/")[0] if "://" in said else said.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def moment(said: str) -> float | None:
    """Seconds since 1970 of ISO 8601 text (UTC unless it says otherwise) or of epoch seconds."""
    if (seconds := number(said)) is not None:
        return seconds
    try:
        found = datetime.fromisoformat(said)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def short(lines: Iterable[str], limit: int = 300) -> Iterator[str]:
    """The lines that ping tools may have written. In long ones, patterns would take long to find nothing."""
    return (line for line in lines if len(line) <= limit)


# ISO 8601 or epoch seconds; as `date` writes it; or a time of a day that nobody knows.
_ZONE: Final = r"(?:Z| ?(?:UTC|GMT)| ?[+-]\d\d:?\d\d)?"
_STAMP: Final = re.compile(
    rf"\[?(?P<iso>\d{{9,11}}(?:\.\d+)?|\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?{_ZONE})\]?:?\s+"
    rf"|\[?(?P<date>\w{{3}} +\w{{3}} +\d+ \d\d:\d\d:\d\d (?:(?:UTC|GMT) )?\d{{4}})\]?:?\s+"
    r"|\[?(?:(?:\w{3} +)?\w{3} +\d+ )?\d\d:\d\d:\d\d(?:\.\d+)?(?: \w+ \d{4})?(?:\]?:?\s+)(?=\S)"
)


def stamped(line: str) -> tuple[float | None, str]:
    """The time at the beginning of a line (`ping -D`, `fping -D`, `ts`, `date`), and the rest of it."""
    match = _STAMP.match(line)
    if match is None:
        return None, line
    rest = line[match.end() :]
    if match["iso"]:
        said = re.sub(r" ?(?:UTC|GMT)$", "Z", match["iso"].replace(",", "."))
        return moment(re.sub(r" (?=[+-]\d\d:?\d\d$)", "", said)), rest
    if match["date"]:
        try:
            said = re.sub("(?:UTC|GMT) ", "", match["date"])
            return datetime.strptime(said, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp(), rest
        except ValueError:
            return None, rest
    return None, rest


_MAX_DOCUMENT: Final = 256 << 20
_MAX_TRIES: Final = 100
_DAMAGED: Final = object()


def documents(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text: one on each line, one or several on many lines, or a list of them.

    A document on many lines ends with a line that begins with a bracket. Where the next one begins before that, it was
    cut off, and is left out.
    """
    held: list[str] = []
    size = tries = 0
    for line in lines:
        if held and line[0] == held[0][0] == "{":
            held.clear()
        if not held and not line.strip():
            continue
        tries, size = (tries, size) if held else (0, 0)
        held.append(line)
        size += len(line)
        if size > _MAX_DOCUMENT:
            raise PingLlmError(f"more than {_MAX_DOCUMENT >> 20} MB of JSON in one piece: ask for a shorter time range")
        if len(held) == 1 or (line[0] in "}]" and tries < _MAX_TRIES):  # each try reads all of it
            tries += 1
            if (found := _parsed(held)) is not _DAMAGED:
                held.clear()
                yield from _objects(found)
    if held:
        if (found := _parsed(held)) is _DAMAGED:
            raise PingLlmError(f"the JSON is cut off or damaged near its end: {shown(held[-1].strip(), 60)}")
        yield from _objects(found)


def _parsed(lines: list[str]) -> Any:
    try:
        return orjson.loads("".join(lines))
    except orjson.JSONDecodeError:
        return _DAMAGED


def _objects(found: Any) -> Iterator[dict[str, Any]]:
    yield from (one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict))


def listed(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none if it is not one."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    """An object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
