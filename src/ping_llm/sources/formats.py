"""Measurements from Parquet files."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.atlas.report import Tally
from ping_llm.sources.atlas.stream import ParsedChunk, parse_chunk, read_ahead, read_chunks
from ping_llm.sources.pieces import Piece, RawBatch, find_columns
from ping_llm.storage import locate

_FETCHED_AHEAD: Final = 256 << 20
"""Of a remote file, pieces up to this size are fetched in a few large requests; longer ones block by block."""


def plan(path: str, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str]) -> tuple[int, list[Piece]]:
    """Rows in the file, and pieces of whole row groups with about `piece_rows` rows each."""
    with pq.ParquetFile(_source(path)) as file:
        metadata = file.metadata
        columns = find_columns(file.schema_arrow.names, renamed, path, optional)
        _check_types(file.schema_arrow, columns, path)
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        compressed = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    pieces = []
    first_group = first_row = 0
    while first_group < len(sizes):
        last_group, rows = first_group, 0
        while last_group < len(sizes) and (rows == 0 or rows + sizes[last_group] <= piece_rows):
            rows += sizes[last_group]
            last_group += 1
        pieces.append(
            Piece(
                path=path,
                format="parquet",
                columns=columns,
                bytes=sum(compressed[first_group:last_group]),
                row_groups=(first_group, last_group),
                first_row=first_row,
            )
        )
        first_group, first_row = last_group, first_row + rows
    return metadata.num_rows, pieces


def _source(path: str) -> Any:
    where = locate(path)
    return where.open_input() if where.is_remote else where.local


def _check_types(schema: pa.Schema, columns: Mapping[str, str], path: str) -> None:
    """Refuse a file of the wrong types before any work is done, not in the middle of it."""
    for column, name in columns.items():
        kind = schema.field(name).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
        number = pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_decimal(value)
        if column in {"src_addr", "dst_addr"}:
            fine, wanted = text, "text"
        elif column == "event_time":
            fine, wanted = text or number or pa.types.is_timestamp(value), "a timestamp, epoch seconds or ISO 8601 text"
        else:
            fine, wanted = text or number or pa.types.is_null(value), "numbers"
        if not fine:
            raise PingLlmError(f"{path}: column {name!r} has type {kind}; expected {wanted}")


def read_parquet(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    addresses = [piece.columns["src_addr"], piece.columns["dst_addr"]]
    first_row = piece.first_row
    # One thread: the caller runs several tasks side by side. Addresses come dictionary-encoded, as they are stored.
    ahead = locate(piece.path).is_remote and piece.bytes <= _FETCHED_AHEAD
    buffer = {"pre_buffer": True} if ahead else {"pre_buffer": False, "buffer_size": 1 << 20}
    with pq.ParquetFile(_source(piece.path), read_dictionary=addresses, **buffer) as file:
        groups = list(range(*piece.row_groups)) if piece.row_groups else None
        names = list(piece.columns.values())
        for batch in file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False):
            yield RawBatch(batch=batch.select(names).rename_columns(list(piece.columns)), first_row=first_row)
            first_row += batch.num_rows


# Measurements from CSV files (comma, semicolon, tab or bar; plain or compressed). Every cell is read as text.

_COMPRESSED: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_DELIMITERS: Final = ",;\t|"
_BYTES_PER_ROW: Final = 60  # a short line; only sets how many rows a block gives, so a batch never exceeds its size


def columns(path: str, renamed: Mapping[str, str], optional: frozenset[str]) -> dict[str, str]:
    names, _ = _header(path)
    return find_columns(names, renamed, path, optional)


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
        start = stream.read(65536)
    try:
        text = start.decode("utf-8-sig") if len(start) < 65536 else start.decode("utf-8-sig", errors="ignore")
    except UnicodeDecodeError as error:
        raise PingLlmError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = text.splitlines()
    if not lines or not lines[0].strip():
        raise PingLlmError(f"{path}: the first line must name the columns")
    delimiter = max(_DELIMITERS, key=lines[0].count)
    return next(csv.reader([lines[0]], delimiter=delimiter)), delimiter


def read_csv(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    bad_lines: list[str] = []  # since the last batch

    def on_bad_line(row: Any) -> str:
        bad_lines.append(f"line {row.number}: malformed_row ({row.actual_columns} cells, not {row.expected_columns})")
        return "error" if strict else "skip"

    first_row = 0
    try:
        for batch in _batches(piece, batch_rows, on_bad_line):
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


def _batches(piece: Piece, batch_rows: int, on_bad_line: Callable[[Any], str]) -> Iterator[pa.RecordBatch]:
    names, delimiter = _header(piece.path)
    chosen = list(piece.columns.values())
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
            yield batch.select(chosen).rename_columns(list(piece.columns))


# Measurements straight from RIPE Atlas JSON: one per result, its minimum RTT.
#
# (`ping-llm import atlas` can also keep every packet.)


def read_atlas(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    tally = Tally(file=piece.path, strict=strict)
    waiting: list[ParsedChunk] = []
    first_row = 0
    for chunk in read_ahead(read_chunks(piece.path)):
        parsed = parse_chunk(chunk, each_packet=False)
        tally.add(parsed)
        waiting.append(parsed)
        if sum(p.batch.num_rows for p in waiting) >= batch_rows:
            yield _joined(waiting, first_row)
            first_row += sum(p.results for p in waiting)
            waiting = []
    tally.finish()
    if waiting:
        yield _joined(waiting, first_row)


def _joined(chunks: list[ParsedChunk], first_row: int) -> RawBatch:
    dropped: Counter[str] = Counter()
    for chunk in chunks:
        dropped.update(chunk.dropped)
    return RawBatch(batch=pa.concat_batches([c.batch for c in chunks]), first_row=first_row, dropped=dropped)
