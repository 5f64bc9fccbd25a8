"""A file of RIPE Atlas results becomes batches of measurements, in bounded memory.

bytes -> blocks (decompressed) -> chunks of whole lines, one result per line -> batches of measurements

What the file is (bzip2, gzip or plain; JSON lines or one JSON array) is detected from its content, not its name. The
API returns all results of a measurement as one array; `array_as_lines` cuts it up without parsing it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas.parse import Ping, Unusable, read_ping
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.storage import Location, locate
from ping_llm.tasks.pool import map_in_order


@dataclass(frozen=True, kw_only=True)
class ReadSizes:
    """Bytes in which a file is read."""

    chunk: int = 4 << 20  # one task of a worker: some 9,000 results, 50 ms of parsing. Larger only costs memory.
    block: int = 1 << 20
    result: int = 16 << 20
    """A result has a few hundred bytes. A line this long is another kind of file, and would fill the memory."""


DEFAULT_SIZES: Final = ReadSizes()


@dataclass(kw_only=True)
class Counts:
    """What became of results: each that was read is dropped, or in one measurement or several."""

    results: int = 0
    measurements: int = 0
    failed: int = 0  # measurements without an answer, which are among the measurements
    dropped: dict[str, int] = field(default_factory=dict)  # results that gave no measurement, by reason
    examples: dict[str, str] = field(default_factory=dict)
    """Where the first result dropped for each reason is, and what is wrong with it."""
    bytes: int = 0  # of the input, as stored

    def add(self, part: "Counts") -> None:
        for name in ("results", "measurements", "failed", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for reason, count in part.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.examples = part.examples | self.examples


class Chunk(NamedTuple):
    """Whole lines of a file."""

    file: str
    data: bytes
    first: int  # number of the first line, from 1. In a JSON array each element counts as a line.
    in_array: bool
    position: int  # bytes of the file, as stored, that were read up to here


IDS: Final = ("prb_id", "msm_id")
ATLAS_SCHEMA: Final = SCHEMA.append(pa.field("prb_id", pa.int64())).append(pa.field("msm_id", pa.int64()))
"""What Atlas results are read as: measurements, and the ids of probe and measurement."""


class ParsedChunk(NamedTuple):
    batch: pa.RecordBatch
    counts: Counts
    position: int


def parse_file(
    file: str,
    counts: Counts,
    *,
    each_packet: bool,
    strict: bool,
    sizes: ReadSizes = DEFAULT_SIZES,
    pool: Executor | None = None,
    window: int = 1,
) -> Iterator[ParsedChunk]:
    """The chunks of a file, parsed here or by a pool, at most `window` at a time, and added to the counts.

    The next chunk is always being read in a thread: decompression runs beside parsing. A file without any JSON is the
    wrong file, not one with many bad results.
    """
    parse = partial(parse_chunk, each_packet=each_packet, strict=strict)
    chunks = _read_ahead(read_chunks(file, sizes))
    for parsed in map(parse, chunks) if pool is None else map_in_order(pool, parse, chunks, window=window):
        counts.add(parsed.counts)
        yield parsed
    if counts.results and counts.dropped.get("malformed_json") == counts.results:
        raise PingLlmError(
            f"{file}: not RIPE Atlas JSON: expected one result per line or one array, "
            f"and none of {counts.results:,} is valid JSON"
        )


def _read_ahead(items: Iterator[Chunk]) -> Iterator[Chunk]:
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


def parse_chunk(chunk: Chunk, *, each_packet: bool, strict: bool = False) -> ParsedChunk:
    """A worker's task. Every result of the chunk is in its batch, or is counted as dropped."""
    counts = Counts()
    pings: list[Ping] = []
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
        try:
            pings.append(read_ping(orjson.loads(line), each_packet=each_packet))
            continue
        except orjson.JSONDecodeError as error:
            if not line.strip():
                continue
            reason, detail = "malformed_json", str(error)
        except Unusable as unusable:
            reason, detail = unusable.args
        where = f"{chunk.file} element {number}" if chunk.in_array else f"{chunk.file}:{number}"
        if strict:
            raise MeasurementError(f"{where}: {reason}: {detail}")
        counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
        counts.examples.setdefault(reason, f"{where}: {detail}")

    each = [(ping, number) for ping in pings for number in range(len(ping.rtts))]  # one for each measurement
    columns: tuple[list[Any], ...] = (
        # Packets of one result are a microsecond apart: two that took equally long are no copies of each other.
        [ping.time_us + number for ping, number in each],
        [ping.source for ping, _ in each],
        [ping.destination for ping, _ in each],
        [ping.ip_version for ping, _ in each],
        [ping.rtts[number] for ping, number in each],
        [ping.probe for ping, _ in each],
        [ping.measurement for ping, _ in each],
    )
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, ATLAS_SCHEMA, strict=True)]
    counts.results = len(pings) + sum(counts.dropped.values())
    counts.measurements, counts.failed = len(each), arrays[4].null_count
    return ParsedChunk(pa.RecordBatch.from_arrays(arrays, schema=ATLAS_SCHEMA), counts, chunk.position)


# The format "atlas" of `sources.files`: one measurement per result, its minimum RTT. (`ping-llm import atlas` can also
# keep every packet.)


_OF_ATLAS: Final = re.compile(rb'"(?:prb_id|msm_id|fw|msm_name)"\s*:')


def is_atlas(start: bytes) -> bool:
    text = start.removeprefix(_BYTE_ORDER_MARK).lstrip()
    return text[:1] in (b"[", b"{") and _OF_ATLAS.search(text) is not None


def plan_atlas(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    """The ids of probes and measurements may be the nodes: `src_addr=prb_id`, `dst_addr=msm_id`."""
    for column, name in options.columns.items():
        if name != column and (column not in ("src_addr", "dst_addr") or name not in IDS):
            raise PingLlmError(
                f"{whole.path}: in RIPE Atlas results, only src_addr and dst_addr may be others: prb_id or msm_id"
            )
    said = "RIPE Atlas results, of each the least RTT"
    return None, [replace(whole, columns=dict(options.columns), understood=said)]


def read_atlas(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row, batches, counts = 0, list[pa.RecordBatch](), Counts()
    parsed = parse_file(piece.path, Counts(), each_packet=False, strict=strict)
    for chunk in chain(parsed, [None]):  # None: the end
        if chunk is not None:
            batches.append(chunk.batch)
            counts.add(chunk.counts)
        if batches and (chunk is None or counts.measurements >= batch_rows):
            batch = pa.concat_batches(batches)
            chosen = {name: piece.columns.get(name, name) for name in SCHEMA.names}
            batch = batch.select(list(chosen.values())).rename_columns(list(chosen))
            dropped = Counter(counts.dropped)
            yield RawBatch(batch=batch, first_row=first_row, dropped=dropped, examples=counts.examples)
            first_row, batches, counts = first_row + counts.results, [], Counts()


# From a file to chunks.

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_COMPRESSED: Final = {b"BZh": "bz2", b"\x1f\x8b": "gzip"}
_FOREIGN: Final = {
    b"\xfd7zXZ": "xz-compressed",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
}
"""First bytes of files that people have, and that need another tool first."""


def read_chunks(path: Path | str | Location, sizes: ReadSizes = DEFAULT_SIZES) -> Iterator[Chunk]:
    """The results of a file. Raises a one-line error for a file that cannot be read to its end."""
    source, position = locate(path), 0

    def decompressed_blocks() -> Iterator[bytes]:
        nonlocal position
        try:
            with source.open_stream() as file:
                magic = file.read(8)
                file.seek(0)
                for kind in (kind for start, kind in _FOREIGN.items() if magic.startswith(start)):
                    raise PingLlmError(f"{path}: is {kind}; expected JSON, plain or compressed with bzip2 or gzip")
                codec = next((codec for start, codec in _COMPRESSED.items() if magic.startswith(start)), None)
                content = pa.input_stream(file, compression=codec)
                while block := content.read(sizes.block):
                    position = file.tell()
                    yield block
        except OSError as error:
            if error.errno is not None:
                raise PingLlmError(f"{source}: cannot be read: {error.strerror or error}") from error
            how = "cut off" if "Truncated" in str(error) else "damaged"  # Arrow's own errors have no number
            raise PingLlmError(
                f"{source}: the compressed data is {how} (read {position:,} of {source.size():,} bytes); "
                "download the file again"
            ) from error

    blocks = decompressed_blocks()
    head = b""
    for block in blocks:
        head += block
        if len(head.strip()) > len(_BYTE_ORDER_MARK):
            break
    head = head.removeprefix(_BYTE_ORDER_MARK)
    start = head.lstrip()[:8]
    if not start:
        raise PingLlmError(f"{path}: the file is empty")
    if start[:1] not in (b"[", b"{"):
        raise PingLlmError(f"{path}: not RIPE Atlas JSON: it starts with {start!r}, not with '{{' or '['")
    in_array = start[:1] == b"["
    lines: Iterable[bytes] = chain([head], blocks)
    if in_array:
        lines = array_as_lines(lines, str(path))

    first = 1
    parts: list[bytes] = []
    size = 0
    for part in lines:
        parts.append(part)
        size += len(part)
        if size >= sizes.chunk:
            data = b"".join(parts)
            end = data.rfind(b"\n") + 1
            if end:
                yield Chunk(str(path), data[:end], first, in_array, position)
                first += data.count(b"\n", 0, end)
            elif size > sizes.result:
                name = "element" if in_array else "line"
                raise PingLlmError(f"{path}: {name} {first:,} is over {sizes.result:,} bytes: not RIPE Atlas JSON")
            parts, size = [data[end:]], size - end
    if size:
        yield Chunk(str(path), b"".join(parts), first, in_array, position)


# A JSON array as lines. Only two facts are needed to cut it up: which brackets and commas stand outside strings, and
# how deep they are nested. Both are running sums over the bytes, so numpy finds them block by block at 300 MB/s.

_QUOTE, _COMMA, _OPEN, _CLOSE, _NEWLINE, _SPACE = b'",[]\n '

_MARKS: Final = bytes(byte in b'",[]{}' for byte in range(256))
_WITHOUT_NEWLINES: Final = bytes.maketrans(b"\n", b" ")

_NESTING: Final = np.zeros(256, dtype=np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1

_BACKSLASHES: Final = re.compile(rb"\\\\*")  # not rb"\\+", which is 20 times slower: it has no literal to search for


def array_as_lines(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The same bytes with each comma between elements turned into a newline, and each newline into a space.

    Several arrays one after the other (concatenated downloads) are fine. Brackets that do not match raise: after them
    nobody can tell where an element ends.
    """
    depth, in_string, elements = 0, 0, 0
    held = b""  # a backslash at the end of a block belongs to the character that follows
    for block in blocks:
        text = held + block
        held = b"\\" if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""
        text = text.removesuffix(held)
        data = np.frombuffer(bytearray(text).translate(_WITHOUT_NEWLINES), dtype=np.uint8)
        marks = np.flatnonzero(np.frombuffer(text.translate(_MARKS), dtype=bool))
        kinds = data[marks]
        quotes = kinds == _QUOTE
        escaped = [run.end() for run in _BACKSLASHES.finditer(text) if len(run[0]) % 2]
        if escaped:
            quotes &= ~np.isin(marks, escaped)
        strings = in_string + np.cumsum(quotes, dtype=np.int32)
        outside = strings & 1 == 0
        steps = _NESTING[kinds] * outside
        after = depth + np.cumsum(steps, dtype=np.int32)
        before = after - steps

        opening = (before == 0) & (steps != 0)
        closing = (after == 0) & (steps < 0)
        separating = outside & (before == 1) & (kinds == _COMMA)
        if np.any(kinds[opening] != _OPEN) or np.any(kinds[closing] != _CLOSE):
            raise PingLlmError(f"{name}: brackets do not match after element {elements:,}; download the file again")
        data[marks[opening]] = _SPACE
        data[marks[separating | closing]] = _NEWLINE

        elements += int(np.count_nonzero(separating | closing))
        if len(marks):
            depth, in_string = int(after[-1]), int(strings[-1]) & 1
        yield data.tobytes()
    if depth or in_string or held:
        raise PingLlmError(
            f"{name}: the array is cut off or damaged after element {elements:,}; download the file again"
        )
