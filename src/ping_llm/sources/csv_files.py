"""Measurements from CSV files (comma, semicolon, tab or bar; plain or compressed). Every cell is read as text."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv as arrow_csv

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.files import Piece, RawBatch, find_columns
from ping_llm.storage import locate

_COMPRESSED: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_DELIMITERS: Final = ",;\t|"
_BYTES_PER_ROW: Final = 60  # a short line; only sets how many rows a block gives, so a batch never exceeds its size
_HEADER_BYTES: Final = 65536


def plan(
    path: str, size: int, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str]
) -> tuple[None, list[Piece]]:
    columns = find_columns(_header(path)[0], renamed, path, optional)
    return None, [Piece(path=path, format="csv", columns=columns, bytes=size)]


def read(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    bad_lines: list[str] = []  # since the last batch

    def on_bad_line(row: Any) -> str:
        bad_lines.append(f"line {row.number}: malformed_row ({row.actual_columns} cells, not {row.expected_columns})")
        return "error" if strict else "skip"

    names, delimiter = _header(piece.path)
    chosen = list(piece.columns.values())
    first_row = 0
    try:
        reader = arrow_csv.open_csv(
            _open(piece.path),
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=max(1 << 16, batch_rows * _BYTES_PER_ROW), column_names=names, skip_rows=1
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=on_bad_line),
            convert_options=arrow_csv.ConvertOptions(
                column_types={name: pa.string() for name in chosen}, include_columns=chosen, strings_can_be_null=False
            ),
        )
        with reader:
            for batch in reader:
                batch = batch.select(chosen).rename_columns(list(piece.columns))
                yield RawBatch(batch=batch, first_row=first_row, dropped=Counter(malformed_row=len(bad_lines)))
                first_row += batch.num_rows + len(bad_lines)
                bad_lines.clear()
    except pa.ArrowInvalid:
        if strict and bad_lines:
            raise MeasurementError(f"{piece.path}, {bad_lines[0]}") from None
        raise
    if bad_lines:  # after the last good one
        empty = pa.RecordBatch.from_pylist([], schema=pa.schema([(name, pa.string()) for name in piece.columns]))
        yield RawBatch(batch=empty, first_row=first_row, dropped=Counter(malformed_row=len(bad_lines)))


def _open(path: str) -> pa.NativeFile:
    """The text, decompressed as the name says."""
    where = locate(path)
    if where.is_local:
        return pa.input_stream(path, compression="detect")
    stream = pa.PythonFile(where.open_stream(), mode="r")
    codec = _COMPRESSED.get(where.suffix.lower())
    return pa.CompressedInputStream(stream, codec) if codec else stream


def _header(path: str) -> tuple[list[str], str]:
    """Column names and delimiter, from the first line."""
    with _open(path) as stream:
        start = stream.read(_HEADER_BYTES)
    try:  # what was read may end in the middle of a character
        text = start.decode("utf-8-sig", errors="strict" if len(start) < _HEADER_BYTES else "ignore")
    except UnicodeDecodeError as error:
        raise PingLlmError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = text.splitlines()
    if not lines or not lines[0].strip():
        raise PingLlmError(f"{path}: the first line must name the columns")
    delimiter = max(_DELIMITERS, key=lines[0].count)
    return next(csv.reader([lines[0]], delimiter=delimiter)), delimiter
