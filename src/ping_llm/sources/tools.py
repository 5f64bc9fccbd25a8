"""What ping tools and monitoring systems write, as measurements: the format "tool" of `sources.files`.

The content decides, never the name of the file. A file is text in UTF-8 or, as PowerShell writes it, UTF-16, and one
piece of work, read in bounded memory. To add a tool: a line in `READERS`, and two functions in the module it names

    is_NAME(head)               is a text that begins like this (its first 64 KB) of that tool?
    read_NAME(lines, source)    its measurements, from its lines

Whatever a reader meets that it cannot use, it leaves out; it raises a `PingLlmError` if the file as a whole makes no
sense.
"""

import codecs
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_TIME_US, SCHEMA
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.contents import BLOCK_BYTES, open_text
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.sources.objects import MAX_DOCUMENT
from ping_llm.storage import locate

READERS: Final = {
    "rrd": "monitoring",
    "mtr": "ping_tools",
    "globalping": "monitoring",
    "scamper": "ping_tools",
    "prometheus": "monitoring",
    "influx": "monitoring",
    "fping": "ping_tools",
    "ping": "ping_tools",
}
"""The module of each tool, in the order in which they are asked."""

_ANONYMOUS: Final = ("fping", "ping")
"""Tools that do not always say who pings: then the name of the file does."""

TABLE: Final = pa.schema(
    [
        pa.field("event_time", SCHEMA.field("event_time").type),
        pa.field("src_addr", pa.string()),
        pa.field("dst_addr", pa.string()),
        pa.field("rtt", pa.float64()),
    ]
)
"""Nulls: a time that is unknown, and the RTT of a packet without an answer."""


class Row(NamedTuple):
    """A measurement as its file says it: names stand for addresses where the file has no addresses."""

    time_s: float | None
    src: str
    dst: str
    rtt_ms: float | None


UNKNOWN: Final = "localhost"
"""Who pings, if nothing says so."""


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


# The format "tool".


def is_tool(start: bytes) -> bool:
    return tool_of(next(_decoded([start]))) is not None


def tool_of(head: str) -> str | None:
    """Which tool a text that begins like this is of."""
    return next((name for name in READERS if _function("is", name)(head)), None)


def _function(task: str, tool: str) -> Any:
    return getattr(importlib.import_module(f"ping_llm.sources.{READERS[tool]}"), f"{task}_{tool}")


def plan_tool(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    labels = {**options.columns, **({"rtt_unit": options.rtt_unit} if options.rtt_unit else {})}
    tool = tool_of(_head(whole.path))
    said = f"output of {tool}"
    if tool in _ANONYMOUS:
        said += f", sent by {Source(name=_stem(locate(whole.path).name), labels=labels).vantage!r} if it does not say"
    return None, [replace(whole, columns=labels, understood=said)]


def read_tool(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row = 0
    rows = _apart(_rows(piece.path, piece.columns))
    while some := list(islice(rows, batch_rows)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, TABLE, strict=True)]
        yield RawBatch(batch=pa.RecordBatch.from_arrays(arrays, schema=TABLE), first_row=first_row)
        first_row += len(some)


def _rows(path: str, labels: Mapping[str, str]) -> Iterator[Row]:
    """The measurements of a file as its reader says them."""
    from ping_llm.sources.monitoring import RRD_MAGIC, dumped

    head = _head(path)
    name = tool_of(head)
    if name is None:
        raise PingLlmError(f"{path}: none of the known tools writes such a file")
    lines = dumped(locate(path).local) if head.startswith(RRD_MAGIC) else _lines(path)
    found = False
    try:
        for row in _function("read", name)(lines, Source(name=_stem(locate(path).name), labels=labels)):
            found = True
            yield row
    except PingLlmError as error:
        raise error if path in str(error) else PingLlmError(f"{path}: {error}") from error
    if not found:
        raise PingLlmError(f"{path}: looks like what {name} writes, but has no measurement in it")


def _apart(rows: Iterator[Row]) -> Iterator[tuple[int | None, str, str, float | None]]:
    """With times in microseconds. Packets of one report are one apart, else equal ones would look like copies."""
    before, packets = None, 0
    for time_s, src, dst, rtt in rows:
        time_us = None if time_s is None or not 0 <= time_s * 1e6 < MAX_TIME_US else round(time_s * 1e6)
        packets = packets + 1 if (time_us, src, dst) == before else 0
        before = (time_us, src, dst)
        yield None if time_us is None else time_us + packets, src, dst, rtt


_SUFFIXES: Final = frozenset(
    (".gz", ".bz2", ".zst", ".txt", ".log", ".out", ".json", ".jsonl", ".ndjson", ".xml", ".rrd", ".lp", ".csv")
)


def _stem(name: str) -> str:
    while (path := Path(name)).suffix.lower() in _SUFFIXES:
        name = path.stem
    return name


# From bytes to lines.

_BLOCK: Final = 1 << 20
_MAX_LINE: Final = 64 << 10


def _blocks(path: str, size: int) -> Iterator[bytes]:
    with open_text(path) as content:
        while block := content.read(size):
            yield block


def _decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = None
    for block in blocks:
        if decoder is None:
            encoding = "utf-16" if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        yield decoder.decode(block)


def _head(path: str) -> str:
    return next(_decoded(_blocks(path, BLOCK_BYTES)), "")


def _lines(path: str) -> Iterator[str]:
    """Lines with their ends. JSON may be one line as a whole; of anything else, a line that long is left out."""
    held = ""
    limit = 0
    for text in _decoded(_blocks(path, _BLOCK)):
        limit = limit or (MAX_DOCUMENT if text.lstrip()[:1] in ("{", "[") else _MAX_LINE)
        *whole, held = (held + text).split("\n")
        yield from (line + "\n" for line in whole if len(line) <= limit)
        if len(held) > limit:
            if limit == MAX_DOCUMENT:
                raise PingLlmError(f"{path}: a line of more than {limit >> 20} MB: ask for a shorter time range")
            held = held[-1:]
    if held:
        yield held


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


def count(value: Any) -> int:
    """A whole number, 0 for anything that is none."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 1e9 else 0


def text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def listed(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none if it is not one."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    """An object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def moment(said: str) -> float | None:
    """Seconds since 1970 of ISO 8601 text (UTC unless it says otherwise) or of epoch seconds."""
    if (seconds := number(said)) is not None:
        return seconds
    try:
        found = datetime.fromisoformat(said)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
