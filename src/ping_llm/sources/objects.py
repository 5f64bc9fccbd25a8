"""JSON of any size becomes chunks of whole lines, one value each. In the format "objects", their fields are columns.

What the file is (compressed or plain; JSON lines or one JSON array) its content says, not its name. Web APIs return
lists as one array of any length; `array_as_lines` cuts it up without parsing it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.columns import InputOptions, understand
from ping_llm.sources.files import UNPACKING_ERRORS, Piece, Plan, RawBatch, decompressed, open_stored
from ping_llm.storage import Location, locate

# The format "objects".

_SAMPLE_OBJECTS: Final = 1_000


def plan_objects(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    lines = (one for _, one in _objects(whole.path) if isinstance(one, dict))
    sample = list(islice(lines, _SAMPLE_OBJECTS))
    if not sample:
        raise PingLlmError(f"{whole.path}: holds no JSON object")
    names = list(dict.fromkeys(name for one in sample for name in one))
    found = understand(names, {name: column_of(sample, name) for name in names}, options, whole.path, optional)
    return None, [
        replace(whole, columns=found.columns, spelling=found.spelling, understood=f"JSON objects: {found.said}")
    ]


def read_objects(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row, objects, bad = 0, list[dict[str, Any]](), list[int]()

    def batch() -> RawBatch:
        columns = {column: column_of(objects, name) for column, name in piece.columns.items()}
        examples = {"malformed_row": f"line {bad[0]}: no JSON object"} if bad else {}
        dropped = Counter(malformed_row=len(bad))
        return RawBatch(batch=pa.record_batch(columns), first_row=first_row, dropped=dropped, examples=examples)

    for number, one in _objects(piece.path):
        if isinstance(one, dict):
            objects.append(one)
        elif strict:
            raise MeasurementError(f"{piece.path}, line {number}: malformed_row (no JSON object)")
        else:
            bad.append(number)
        if len(objects) >= batch_rows:
            yield batch()
            first_row, objects, bad = first_row + len(objects) + len(bad), [], []
    yield batch()


def _objects(path: str) -> Iterator[tuple[int, Any]]:
    """What each line or element holds (None: no JSON), with its number."""
    for chunk in read_chunks(path):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
            if line.strip():
                try:
                    yield number, orjson.loads(line)
                except orjson.JSONDecodeError:
                    yield number, None


def column_of(objects: Sequence[Any], name: str) -> Any:
    """A field of all objects: numbers if they all are, else text."""
    values = [one.get(name) for one in objects]
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        try:
            return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([value if value is None or isinstance(value, str) else str(value) for value in values], pa.string())


@dataclass(frozen=True, kw_only=True)
class ReadSizes:
    """Bytes in which a file is read."""

    chunk: int = 4 << 20  # one task of a worker: some 9,000 results, 50 ms of parsing. Larger only costs memory.
    block: int = 1 << 20
    result: int = 16 << 20
    """A result has a few hundred bytes. A line this long is another kind of file, and would fill the memory."""


DEFAULT_SIZES: Final = ReadSizes()


class Chunk(NamedTuple):
    """Whole lines of a file."""

    file: str
    data: bytes
    first: int  # number of the first line, from 1. In a JSON array each element counts as a line.
    in_array: bool
    position: int  # bytes of the file, as stored, that were read up to here


# From a file to chunks.

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_FOREIGN: Final = {b"PK\x03\x04": "a zip archive", b"PAR1": "a Parquet file"}
"""First bytes of files that people have, and that need another tool first."""


def read_chunks(path: Path | str | Location, sizes: ReadSizes = DEFAULT_SIZES) -> Iterator[Chunk]:
    """The results of a file. Raises a one-line error for a file that cannot be read to its end."""
    source, position = locate(path), 0

    def decompressed_blocks() -> Iterator[bytes]:
        nonlocal position
        try:
            with open_stored(source) as file:
                content = decompressed(file)
                while block := content.read(sizes.block):
                    position = file.tell()
                    yield block
        except UNPACKING_ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None:  # Arrow's own errors have no number
                raise PingLlmError(f"{source}: cannot be read: {error.strerror or error}") from error
            how = "cut off" if "Truncated" in str(error) or isinstance(error, EOFError) else "damaged"
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
    for kind in (kind for magic, kind in _FOREIGN.items() if head.startswith(magic)):
        raise PingLlmError(f"{path}: is {kind}; expected JSON, plain or compressed")
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
                raise PingLlmError(f"{path}: {name} {first:,} is over {sizes.result:,} bytes: not JSON of measurements")
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
