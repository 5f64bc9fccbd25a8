"""The format "tool" of `sources.files`: any text that one of the `READERS` knows, in batches, in bounded memory.

A file is text in UTF-8 or, as PowerShell writes it, UTF-16, and one piece of work. `read_table` gives all of a file as
one table, for whoever wants no batches.
"""

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_TIME_US, SCHEMA
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.files import BLOCK_BYTES, Piece, Plan, RawBatch, open_text
from ping_llm.sources.formats import Row, Source, matching, module_of, rrd
from ping_llm.storage import locate

TABLE: Final = pa.schema(
    [
        pa.field("event_time", SCHEMA.field("event_time").type),
        pa.field("src_addr", pa.string()),
        pa.field("dst_addr", pa.string()),
        pa.field("rtt", pa.float64()),
    ]
)
"""Nulls: a time that is unknown, and the RTT of a packet without an answer."""

_BLOCK: Final = 1 << 20
_MAX_LINE: Final = 64 << 10
_MAX_JSON_LINE: Final = 256 << 20

_SUFFIXES: Final = frozenset(
    {".gz", ".bz2", ".zst", ".txt", ".log", ".out", ".json", ".jsonl", ".ndjson", ".xml", ".rrd", ".lp", ".csv"}
)


def is_tool(start: bytes) -> bool:
    return matching(next(_decoded(iter([start])))) is not None


def plan_tool(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    name = matching(_head(whole.path))
    labels = {**options.columns, **({"rtt_unit": options.rtt_unit} if options.rtt_unit else {})}
    return None, [replace(whole, columns=labels, understood=f"output of {name}")]


def read_tool(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row = 0
    rows = _apart(rows_of(piece.path, piece.columns))
    while some := list(islice(rows, batch_rows)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, TABLE, strict=True)]
        yield RawBatch(batch=pa.RecordBatch.from_arrays(arrays, schema=TABLE), first_row=first_row)
        first_row += len(some)


def read_table(path: Path | str, labels: Mapping[str, str] | None = None) -> pa.Table:
    """All measurements of a file, as `TABLE` has them. `labels`: see `Source`."""
    piece = Piece(path=str(path), format="tool", columns=dict(labels or {}), bytes=0)
    return pa.Table.from_batches((raw.batch for raw in read_tool(piece, 1 << 20, strict=False)), schema=TABLE)


def rows_of(path: str, labels: Mapping[str, str]) -> Iterator[Row]:
    """The measurements of a file as its reader says them."""
    head = _head(path)
    name = matching(head)
    if name is None:
        raise PingLlmError(f"{path}: none of the known tools writes such a file")
    lines = rrd.dumped(locate(path).local) if head.startswith(rrd.MAGIC.decode()) else _lines(path)
    found = False
    try:
        for row in module_of(name).rows(lines, Source(name=_stem(locate(path).name), labels=labels)):
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


def _stem(name: str) -> str:
    while (path := Path(name)).suffix.lower() in _SUFFIXES:
        name = path.stem
    return name


# From bytes to lines.


def _blocks(path: str, size: int) -> Iterator[bytes]:
    with open_text(path) as content:
        while block := content.read(size):
            yield block


def _decoded(blocks: Iterator[bytes]) -> Iterator[str]:
    first = next(blocks, b"")
    encoding = "utf-16" if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield decoder.decode(first)
    for block in blocks:
        yield decoder.decode(block)


def _head(path: str) -> str:
    return next(_decoded(_blocks(path, BLOCK_BYTES)))


def _lines(path: str) -> Iterator[str]:
    """Lines with their ends. JSON may be one line as a whole; of anything else, a line that long is left out."""
    held = ""
    limit = 0
    for text in _decoded(_blocks(path, _BLOCK)):
        limit = limit or (_MAX_JSON_LINE if text.lstrip()[:1] in ("{", "[") else _MAX_LINE)
        *whole, held = (held + text).split("\n")
        yield from (line + "\n" for line in whole if len(line) <= limit)
        if len(held) > limit:
            if limit == _MAX_JSON_LINE:
                raise PingLlmError(f"{path}: a line of more than {limit >> 20} MB: ask for a shorter time range")
            held = held[-1:]
    if held:
        yield held
