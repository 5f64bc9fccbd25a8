"""Text tables: the first block of a file tells its layout; Arrow reads the rest at full speed, every cell as text."""

import codecs
import csv
import io
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ping_llm.core.errors import MeasurementError, PingLlmError, explained
from ping_llm.sources.columns import OPTIONAL_IN_QUESTIONS, InputOptions, find_columns
from ping_llm.sources.contents import BLOCK_BYTES, open_text, readable
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.sources.layouts import Layout, cells_of, find_delimiter, look_at, triples

_FEW_LINES: Final = 10
_MOST_BYTES: Final = 16 << 20  # in which there must be so many lines
_BYTES_PER_ROW: Final = 60  # a short line; only sets how many rows a block gives, so a batch never exceeds its size


def plan_csv(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    lines, encoding = _first_lines(whole.path)
    layout, found = look_at(lines, options, whole.path, optional)
    layout = replace(layout, encoding=encoding)
    said = found.said + (f", {encoding}" if encoding != "utf-8" else "")
    return None, [replace(whole, columns=found.columns, spelling=found.spelling, layout=layout, understood=said)]


def _first_lines(path: str) -> tuple[list[str], str]:
    """And how the file is encoded: in UTF-8 or, as Windows writes it, in UTF-16 or (in the West) Windows-1252."""
    with open_text(path) as stream:
        start = stream.read(BLOCK_BYTES)
        while start.count(b"\n") < _FEW_LINES and len(start) < _MOST_BYTES and (more := stream.read(len(start))):
            start += more  # a wide matrix
        is_whole = not stream.read(1)
    encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    try:  # what was read may end in the middle of a character
        text = codecs.getincrementaldecoder(encoding)().decode(start, final=is_whole)
    except UnicodeDecodeError:
        encoding = "windows-1252"
        text = start.decode(encoding)
    lines = re.split("\r\n|\n|\r", text.removeprefix("\ufeff"))
    return lines if is_whole else lines[:-1] or lines, encoding


# Reading.


def read_csv(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    layout: Layout = piece.layout
    if layout.is_matrix:
        yield from _read_matrix(piece, layout, batch_rows)
        return
    bad_lines: list[tuple[int, str]] = []  # since the last batch

    def on_bad_line(row: Any) -> str:
        if row.text.startswith("#"):  # a comment
            return "skip"
        bad_lines.append((row.number, f"{row.actual_columns} cells, not {row.expected_columns}"))
        return "error" if strict else "skip"

    def dropped() -> dict[str, Any]:
        counted = Counter(malformed_row=len(bad_lines))
        examples = {"malformed_row": "line {}: {}".format(*bad_lines[0])} if bad_lines else {}
        return {"dropped": counted, "examples": examples}

    date = piece.columns.get("event_time")
    chosen = [*piece.columns.values(), *([layout.time_of_day] if layout.time_of_day else [])]
    first_row = 0
    try:
        for batch in _batches(piece, layout, chosen, batch_rows, on_bad_line):
            if layout.time_of_day:
                joined = pc.binary_join_element_wise(batch[date], batch[layout.time_of_day], " ")
                batch = batch.set_column(batch.schema.get_field_index(date), date, joined)
            batch = batch.select(list(piece.columns.values())).rename_columns(list(piece.columns))
            yield RawBatch(batch=batch, first_row=first_row, **dropped())
            first_row += batch.num_rows + len(bad_lines)
            bad_lines.clear()
    except pa.ArrowInvalid:
        if strict and bad_lines:
            number, problem = bad_lines[0]
            raise MeasurementError(f"{piece.path}, line {number}: malformed_row ({problem})") from None
        raise
    if bad_lines:  # after the last good one
        empty = pa.RecordBatch.from_pylist([], schema=pa.schema([(name, pa.string()) for name in piece.columns]))
        yield RawBatch(batch=empty, first_row=first_row, **dropped())


def _batches(
    piece: Piece, layout: Layout, chosen: list[str], batch_rows: int, on_bad_line: Callable[[Any], str]
) -> Iterator[pa.RecordBatch]:
    """Every cell of these columns as text.

    Arrow lets go of `on_bad_line` in a thread of its own, a moment after its reader is gone. That thread needs Python:
    if Python exited meanwhile, the process would abort. So this waits for it.
    """
    references = sys.getrefcount(on_bad_line)
    reader = arrow_csv.open_csv(
        _squeezed(_content(piece)) if layout.delimiter == " " else _content(piece),
        read_options=arrow_csv.ReadOptions(
            use_threads=False,
            block_size=max(1 << 16, batch_rows * _BYTES_PER_ROW),
            column_names=list(layout.names),
            skip_rows=layout.skipped,
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter="\t" if layout.delimiter == " " else layout.delimiter, invalid_row_handler=on_bad_line
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={name: pa.string() for name in chosen}, include_columns=chosen, strings_can_be_null=False
        ),
    )
    try:
        with reader:
            yield from reader
    finally:
        del reader
        given_up = time.monotonic() + 1.0
        while sys.getrefcount(on_bad_line) > references and time.monotonic() < given_up:
            time.sleep(0.0005)


def _content(piece: Piece) -> pa.NativeFile:
    """A text table in UTF-8."""
    stream, encoding = open_text(piece.path), piece.layout.encoding
    return stream if encoding == "utf-8" else pa.transcoding_input_stream(stream, encoding, "utf-8")


def _read_matrix(piece: Piece, layout: Layout, batch_rows: int) -> Iterator[RawBatch]:
    with _content(piece) as stream:
        lines = islice(io.TextIOWrapper(stream, "utf-8-sig", newline=""), layout.skipped, None)
        rows = (row for row in cells_of((line for line in lines if not line.startswith("#")), layout.delimiter) if row)
        first_row, measured = 0, triples(layout, rows)
        while some := list(islice(measured, batch_rows)):
            columns = (pa.array(column, pa.string()) for column in zip(*some, strict=True))
            yield RawBatch(batch=pa.record_batch(list(columns), list(piece.columns)), first_row=first_row)
            first_row += len(some)


class _Squeezed(io.RawIOBase):
    """Lines of cells that blanks separate, with one tab between cells."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._kept = stream, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block, end = None, 0
        while block is None or (block and not end):
            block = self._stream.read(max(1, len(buffer) - len(self._kept)))
            text = self._kept + block
            end = text.rfind(b"\n") + 1 if block and len(text) < len(buffer) else len(text)
            self._kept = text[end:]
        squeezed = re.sub(rb"[ \t]+", b"\t", re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", text[:end]))
        buffer[: len(squeezed)] = squeezed
        return len(squeezed)


def _squeezed(stream: pa.NativeFile) -> pa.NativeFile:
    return pa.PythonFile(io.BufferedReader(_Squeezed(stream), 1 << 20), mode="r")


def read_cells(path: str) -> tuple[list[str], list[list[str]]]:
    """A small text table with a header, whole."""
    with readable(path), open_text(path) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig").read().splitlines()
    rows = [row for row in cells_of(lines, find_delimiter(lines[:200])) if any(row)] if lines else []
    if not rows:
        raise PingLlmError(f"{path} is empty")
    return [cell.strip() for cell in rows[0]], rows[1:]


def read_table(path: Path) -> pa.Table:
    """A table of questions as it is, with all its columns; nodes are text."""
    with explained(f"cannot read {path}", OSError, pa.ArrowException, csv.Error):
        if path.suffix == ".parquet":
            return pq.read_table(path)
        lines, _ = _first_lines(str(path))
        if not any(lines):
            raise PingLlmError(f"cannot read {path}: it is empty")
        delimiter = find_delimiter(lines[:200])
        ends = find_columns(next(cells_of(lines, delimiter), []), {}, str(path), OPTIONAL_IN_QUESTIONS)
        kinds = {name: pa.string() for column, name in ends.items() if column in ("src_addr", "dst_addr")}
        return arrow_csv.read_csv(
            open_text(str(path)),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
            convert_options=arrow_csv.ConvertOptions(column_types=kinds),
        )
