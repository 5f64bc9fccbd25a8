"""JSON of any size becomes chunks of whole lines, one value each. In the format "objects", their fields are columns.

What the file is (compressed or plain; JSON lines, one JSON array, or objects over many lines) its content says, not its
name. Web APIs return lists as one array of any length; `array_as_lines` cuts it up without parsing it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError, shown
from ping_llm.sources.columns import OPTIONAL_WITHOUT_TIME, InputOptions, are_columns, understand
from ping_llm.sources.contents import UNPACKING_ERRORS, decompressed, open_stored, refuse_foreign
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.sources.layouts import melted
from ping_llm.storage import Location, locate

# The format "objects".

_SAMPLE_OBJECTS: Final = 1_000


def plan_objects(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    lines = (one for _, one in _rows(whole.path, options.columns) if one is not None)
    sample = list(islice(lines, _SAMPLE_OBJECTS))
    if not sample:
        raise PingLlmError(f"{whole.path}: holds no JSON object")
    names = list(dict.fromkeys(name for one in sample for name in one))
    found = understand(names, {name: column_of(sample, name) for name in names}, options, whole.path, optional)
    return None, [replace(whole, columns=found.columns, spelling=found.spelling, understood=f"JSON: {found.said}")]


def read_objects(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row, objects, bad = 0, list[dict[str, Any]](), list[int]()

    def batch() -> RawBatch:
        columns = {column: column_of(objects, name) for column, name in piece.columns.items()}
        examples = {"malformed_row": f"line {bad[0]}: no JSON object"} if bad else {}
        dropped = Counter(malformed_row=len(bad))
        return RawBatch(batch=pa.record_batch(columns), first_row=first_row, dropped=dropped, examples=examples)

    for number, one in _rows(piece.path, piece.columns):
        if one is not None:
            objects.append(one)
        elif strict:
            raise MeasurementError(f"{piece.path}, line {number}: malformed_row (no JSON object)")
        else:
            bad.append(number)
        if len(objects) >= batch_rows:
            yield batch()
            first_row, objects, bad = first_row + len(objects) + len(bad), [], []
    yield batch()


def _rows(path: str, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The rows in each line or element (None: it holds no JSON object), with its number."""
    for chunk in read_chunks(path, _SIZES):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
            if line.strip():
                try:
                    one = orjson.loads(line)
                except orjson.JSONDecodeError:
                    one = None
                yield from ((number, row) for row in (rows_of(one, columns) if isinstance(one, dict) else [None]))


def rows_of(document: dict[str, Any], columns: Mapping[str, str], depth: int = 3) -> list[dict[str, Any]]:
    """An object as one row, or as the rows of the table, of the matrix or of the list of objects in it.

    Fields of fields have names like `source.name`. In each row of a list is also what is said beside the list. The hops
    of a route are not measurements between its ends. `depth`: of lists in lists.
    """
    if not any(isinstance(value, dict | list) for value in document.values()):
        return [document]
    if (table := _table_in(document, columns)) is not None:
        return table
    row = _flat(document)
    lists = {name: value for name, value in row.items() if isinstance(value, list) and value and _all(value, dict)}
    beside = {name: value for name, value in row.items() if name not in lists}
    lists = {name: value for name, value in lists.items() if "hop" not in name.lower() and not _HOPS & value[0].keys()}
    if not lists or not depth or are_columns(list(beside), columns, OPTIONAL_WITHOUT_TIME):
        return [beside]

    def rows_in(name: str) -> Iterator[dict[str, Any]]:
        for one in (one for element in lists[name] for one in rows_of(element, columns, depth - 1)):
            yield {**beside, **{f"{name}.{key}": value for key, value in one.items()}}

    def promise(name: str) -> tuple[bool, int]:
        return are_columns(list(next(rows_in(name), ())), columns, OPTIONAL_WITHOUT_TIME), len(lists[name])

    return list(rows_in(max(lists, key=promise)))


_HOPS: Final = frozenset(("hop", "hop_number", "probe_ttl"))


def _flat(document: Mapping[str, Any], before: str = "", depth: int = 10) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in document.items():
        inner = isinstance(value, dict) and depth
        row |= _flat(value, f"{before}{name}.", depth - 1) if inner else {before + name: value}
    return row


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _table_in(document: Mapping[str, Any], columns: Mapping[str, str], depth: int = 3) -> list[dict[str, Any]] | None:
    """The rows of a table by columns or rows, or of a matrix, that an object is or has in a field."""
    inner = list(document.values())

    def make_rows(names: Iterable[str]) -> bool:
        return are_columns(list(names), columns, OPTIONAL_WITHOUT_TIME)

    def nested(names: Sequence[str], rows: Sequence[Any]) -> list[dict[str, Any]] | None:
        cells, index = [dict(zip(names, row, strict=False)) for row in rows], document.get("index")
        down = index if isinstance(index, list) and _all(index, str) else names
        return cells if make_rows(names) else _matrix_of(dict(zip(down, cells, strict=False)))

    if len(inner) > 1 and _all(inner, dict):
        if make_rows(document) and all(one.keys() == inner[0].keys() for one in inner):
            return [dict(zip(document, (one[key] for one in inner), strict=True)) for key in inner[0]]
        if (found := _matrix_of(document)) is not None:
            return found
        if all(make_rows(_flat(one)) for one in inner):
            return [_flat(one) for one in inner]
    if len(inner) > 1 and _all(inner, list) and make_rows(document) and len({len(one) for one in inner}) == 1:
        return [dict(zip(document, row, strict=True)) for row in zip(*inner, strict=True)]
    squares = [one for one in inner if isinstance(one, list) and one and _all(one, list)]
    names = [one for one in inner if isinstance(one, list) and one and _all(one, str)]
    if len(squares) == 1 and names and len(names[0]) == len(squares[0][0]):
        return nested(names[0], squares[0])
    fields = (_table_in(one, columns, depth - 1) for one in inner if isinstance(one, dict) and depth)
    return next((found for found in fields if found is not None), None)


def _matrix_of(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Of RTTs by source and destination, or of objects with an RTT, one row each."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    if not rows.keys() & set(names):
        return None
    cells = [cell for row in rows.values() for cell in row.values() if cell is not None]
    if cells and _all(cells, dict):
        pairs = [(a, b, _flat(cell)) for a, row in rows.items() for b, cell in row.items() if cell and a != b]
        if not all(are_columns(["src", "dst", *cell], {}, OPTIONAL_WITHOUT_TIME) for _, _, cell in pairs[:100]):
            return None
        return [
            cell if are_columns(list(cell), {}, OPTIONAL_WITHOUT_TIME) else {"source": a, "destination": b, **cell}
            for a, b, cell in pairs
        ]
    by_column = {name: pa.array([_text(row.get(name)) for row in rows.values()], pa.string()) for name in names}
    table = melted(pa.table({"": pa.array(list(rows), pa.string()), **by_column}))
    return None if table is None else table.to_pylist()


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def column_of(objects: Sequence[Any], name: str) -> Any:
    """A field of all objects: numbers if they all are, else text."""
    values = [one.get(name) for one in objects]
    kinds = {type(value) for value in values if value is not None}
    if kinds and (kinds <= {int, float} or kinds == {list}):
        numbers = pa.int64() if kinds == {int} else pa.float64()
        try:
            return pa.array(values, pa.list_(numbers) if kinds == {list} else numbers)
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
MAX_DOCUMENT: Final = 256 << 20
"""One JSON value, of which it must be read whole where measurements lie."""
_SIZES: Final = ReadSizes(result=MAX_DOCUMENT)


class Chunk(NamedTuple):
    """Whole lines of a file."""

    file: str
    data: bytes
    first: int  # number of the first line, from 1. In a JSON array each element counts as a line.
    in_array: bool
    position: int  # bytes of the file, as stored, that were read up to here


# From a file to chunks.

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


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
    if start[:1] not in (b"[", b"{"):
        refuse_foreign(str(path), head)
        raise PingLlmError(f"{path}: not RIPE Atlas JSON: it starts with {start!r}, not with '{{' or '['")
    in_array = start[:1] == b"["
    lines: Iterable[bytes] = chain([head], blocks)
    if in_array:
        lines = array_as_lines(lines, str(path))
    elif head.lstrip().partition(b"\n")[0].rstrip()[-1:] in (b"{", b"[", b",", b":"):  # not the end of an object
        lines = _as_lines(lines, str(path))

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


def _as_lines(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Objects that are written over many lines, each in one."""
    text = b""
    for block in blocks:
        text += block
        if len(text) > MAX_DOCUMENT:
            raise PingLlmError(
                f"{name}: more than {MAX_DOCUMENT >> 20} MB of JSON in one piece: write an object a line"
            )
    try:
        found = documents(iter(text.decode(errors="replace").splitlines(keepends=True)))
        yield from (orjson.dumps(one) + b"\n" for one in found)
    except PingLlmError as error:
        raise PingLlmError(f"{name}: {error}") from error


_MAX_TRIES: Final = 100


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
        if size > MAX_DOCUMENT:
            raise PingLlmError(f"more than {MAX_DOCUMENT >> 20} MB of JSON in one piece: ask for a shorter time range")
        if len(held) == 1 or (line[0] in "}]" and tries < _MAX_TRIES):  # each try reads all of it
            tries += 1
            if (found := _objects_in(held)) is not None:
                held.clear()
                yield from found
    if held:
        if (found := _objects_in(held)) is None:
            raise PingLlmError(f"the JSON is cut off or damaged near its end: {shown(held[-1].strip(), 60)}")
        yield from found


def _objects_in(lines: list[str]) -> list[dict[str, Any]] | None:
    """The objects of a JSON document, which is one or a list of them; None if it is none."""
    try:
        found = orjson.loads("".join(lines))
    except orjson.JSONDecodeError:
        return None
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]


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
