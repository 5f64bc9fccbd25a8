"""Measurement files of any accepted format: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).

To add a format: a line in `FORMATS`, and a module with two functions (those of CSV, below, are short):

    plan_NAME(whole, renamed, piece_rows, optional)   rows (None where only reading tells) and pieces of a file
    read_NAME(piece, batch_rows, strict)              the `RawBatch`es of a piece
"""

import contextlib
import csv
import glob
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ping_llm.core.errors import MeasurementError, PingLlmError, one_line
from ping_llm.core.measurements import SCHEMA, parse_column, rtt_milliseconds, time_microseconds
from ping_llm.sources import ROWS_FILE, SPLIT_FILE, WORLD_FILE
from ping_llm.storage import Location, locate
from ping_llm.storage.location import split_pattern


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of measurement file."""

    module: str
    suffixes: tuple[str, ...]
    magic: bytes | None = None  # first bytes that tell the format whatever the file is called


FORMATS: Final = {
    "parquet": Format(module=__name__, suffixes=(".parquet", ".pq"), magic=b"PAR1"),
    "csv": Format(module=__name__, suffixes=(".csv", ".tsv")),
    "atlas": Format(module="ping_llm.sources.atlas.chunks", suffixes=(".json", ".jsonl", ".ndjson")),
    "tool": Format(module="ping_llm.sources.formats.adapter", suffixes=(".rrd",)),  # of `formats.READERS`
}

SERVERS: Final = ("prometheus+http://", "prometheus+https://", "atlas:")
"""What begins like this is not the name of a file: see `remote`."""

_KNOWN_NAMES: Final = ".parquet, .csv, .tsv, .json, .jsonl, what ping tools write; text also as .gz or .bz2"

COLUMN_NAMES: Final = {
    "event_time": ("event_time", "timestamp", "time"),
    "src_addr": ("src_addr", "source", "src"),
    "dst_addr": ("dst_addr", "destination", "dst"),
    "ip_version": ("ip_version", "af"),
    "rtt": ("rtt", "rtt_avg", "rtt_ms"),
}
"""Names under which a file may have the columns of the schema, best first."""

OPTIONAL_COLUMNS: Final = frozenset({"ip_version"})
OPTIONAL_WITHOUT_TIME: Final = OPTIONAL_COLUMNS | {"event_time"}  # for readers to whom a table of RTTs is enough


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file as it was when the work was planned; size and time tell whether it is still the same."""

    path: str
    format: str
    bytes: int
    mtime_ns: int
    measurements: int | None  # known without reading for Parquet only


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one file that is read by one task."""

    path: str
    format: str
    columns: dict[str, str]  # the file's name of each schema column
    bytes: int
    row_groups: tuple[int, int] | None = None
    first_row: int = 0


Plan = tuple[int | None, list[Piece]]


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Rows as they stand in the file, under the schema's names."""

    batch: pa.RecordBatch
    first_row: int  # number of the batch's first row in the file, counted from 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that the reader itself could not make sense of, and that are not in the batch."""


def expand(patterns: Iterable[str]) -> list[Location]:
    """The files that the given paths, folders and globs name, sorted, each once. They may be local or remote."""
    found: dict[str, Location] = {}
    for pattern in patterns:
        if pattern.lower().startswith(SERVERS):
            from ping_llm.sources.remote import download

            found.update({str(path): locate(path) for path in download(pattern)})
            continue
        where = locate(pattern)
        if where.is_dir():
            matches = _files_of(where)
        elif not (matches := [where] if where.exists() else _matching(where)):
            raise PingLlmError(f"no input file matches {pattern!r}")
        found.update({str(file): file for file in matches})
    if not found:
        raise PingLlmError("no input file was given, or the server has nothing of that time")
    return [found[name] for name in sorted(found)]


def _files_of(folder: Location) -> list[Location]:
    files = {file.name: file for file in folder.list()}
    if SPLIT_FILE in files:
        raise PingLlmError(f"the folder {folder} is a split: what may be learned from is in {folder / 'train'}")
    if measured := [files[name] for name in files.keys() - {WORLD_FILE, ROWS_FILE} if _format_by_name(name)]:
        return measured
    if logs := [file for file in files.values() if _is_of_tool(file)]:
        return logs
    raise PingLlmError(f"the folder {folder} holds no measurement file ({_KNOWN_NAMES})")


def _is_of_tool(path: Location) -> bool:
    from ping_llm.sources.formats import adapter

    with _readable(path):
        return adapter.format_of(path) is not None


def _matching(pattern: Location) -> list[Location]:
    if pattern.is_local:
        found = glob.glob(pattern.path, recursive=True)  # noqa: PTH207
        return [locate(path) for path in sorted(found) if Path(path).is_file()]
    folder, rest = split_pattern(pattern.path)
    if not glob.has_magic(rest):
        return []
    if not folder:
        raise PingLlmError(f"{pattern}: the name of the bucket must be written out")
    return Location(scheme=pattern.scheme, path=folder).glob(rest)


def describe(
    path: Location | Path, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> tuple[InputFile, list[Piece]]:
    """Look at a file (not at its measurements): what it is, and the pieces to read it in.

    `optional` columns need not be there.
    """
    with _readable(path):
        stat = locate(path).stat()
        kind = _format_of(locate(path))
        whole = Piece(path=str(path), format=kind, columns={}, bytes=stat.size)
        measurements, pieces = _function("plan", kind)(whole, renamed, piece_rows, optional)
    file = InputFile(path=str(path), format=kind, bytes=stat.size, mtime_ns=stat.mtime_ns, measurements=measurements)
    return file, pieces


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    with _readable(piece.path):
        yield from _function("read", piece.format)(piece, batch_rows, strict)


def find_columns(
    names: list[str], renamed: Mapping[str, str], path: str, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> dict[str, str]:
    """The file's name of each schema column: what the user said, else the first of the usual names that is there."""
    chosen = {}
    for column in SCHEMA.names:
        candidates = (renamed[column],) if column in renamed else COLUMN_NAMES[column]
        match = next((name for name in candidates if name in names), None)
        if match is not None:
            chosen[column] = match
        elif column not in optional or column in renamed:
            raise PingLlmError(
                f"{path}: no column {' or '.join(repr(c) for c in candidates)} (the file has: {', '.join(names)}); "
                f"name yours with --columns {column}=NAME"
            )
    return chosen


def _function(task: str, format: str) -> Any:
    return getattr(importlib.import_module(FORMATS[format].module), f"{task}_{format}")


def _format_of(path: Location) -> str:
    with contextlib.closing(path.open_random()) as file:
        start = bytes(file.read_at(4, 0))
    if not start:
        raise PingLlmError(f"{path} is empty")
    if found := next((name for name, kind in FORMATS.items() if kind.magic == start), None):
        return found
    if _is_of_tool(path):
        return "tool"
    if (found := _format_by_name(path.name)) and found != "tool":
        return found
    raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES})")


def _format_by_name(name: str) -> str | None:
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst"}:
        suffixes.pop()
    return next((name for name, kind in FORMATS.items() if suffixes and suffixes[-1] in kind.suffixes), None)


@contextlib.contextmanager
def _readable(path: str | Path | Location) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, TypeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise PingLlmError(f"cannot read {path}: {error.strerror}") from error
        raise MeasurementError(f"cannot read {path}: {one_line(error, 300)}") from error  # damaged


# CSV: comma, semicolon, tab or bar; plain or compressed. Every cell is read as text.

_COMPRESSED: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_DELIMITERS: Final = ",;\t|"
_BYTES_PER_ROW: Final = 60  # a short line; only sets how many rows a block gives, so a batch never exceeds its size
_HEADER_BYTES: Final = 65536


def plan_csv(whole: Piece, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str]) -> Plan:
    return None, [replace(whole, columns=find_columns(_header(whole.path)[0], renamed, whole.path, optional))]


def read_csv(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    bad_lines: list[str] = []  # since the last batch

    def on_bad_line(row: Any) -> str:
        bad_lines.append(f"line {row.number}: malformed_row ({row.actual_columns} cells, not {row.expected_columns})")
        return "error" if strict else "skip"

    names, delimiter = _header(piece.path)
    chosen = list(piece.columns.values())
    first_row = 0
    try:
        reader = arrow_csv.open_csv(
            _open_text(piece.path),
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


def _open_text(path: str) -> pa.NativeFile:
    """The text, decompressed as the name says."""
    where = locate(path)
    source = path if where.is_local else where.open_stream()
    return pa.input_stream(source, compression=_COMPRESSED.get(where.suffix.lower()))


def _header(path: str) -> tuple[list[str], str]:
    """Column names and delimiter, from the first line."""
    with _open_text(path) as stream:
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


# Parquet.

_READERS: Any = {"event_time": time_microseconds, "rtt": rtt_milliseconds, "ip_version": rtt_milliseconds}
_FETCHED_AHEAD: Final = 256 << 20
"""Of a remote file, pieces up to this size are fetched in a few large requests; longer ones block by block."""


def plan_parquet(whole: Piece, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str]) -> Plan:
    """Pieces of whole row groups with about `piece_rows` rows each."""
    with pq.ParquetFile(_parquet_file(whole.path)) as file:
        metadata = file.metadata
        columns = find_columns(file.schema_arrow.names, renamed, whole.path, optional)
        for column, name in columns.items():  # refuse wrong types before any work is done, not in the middle of it
            _READERS.get(column, parse_column)(pa.array([], file.schema_arrow.field(name).type), repr(name))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    pieces = []
    first = first_row = 0
    while first < len(groups):
        last, rows, size = first, 0, 0
        while last < len(groups) and (rows == 0 or rows + groups[last].num_rows <= piece_rows):
            rows, size, last = rows + groups[last].num_rows, size + groups[last].total_byte_size, last + 1
        pieces.append(replace(whole, columns=columns, bytes=size, row_groups=(first, last), first_row=first_row))
        first, first_row = last, first_row + rows
    return metadata.num_rows, pieces


def read_parquet(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    addresses = [piece.columns["src_addr"], piece.columns["dst_addr"]]
    first_row = piece.first_row
    # One thread: the caller runs several tasks side by side. Addresses come dictionary-encoded, as they are stored.
    ahead = locate(piece.path).is_remote and piece.bytes <= _FETCHED_AHEAD
    buffer = {"pre_buffer": True} if ahead else {"pre_buffer": False, "buffer_size": 1 << 20}
    with pq.ParquetFile(_parquet_file(piece.path), read_dictionary=addresses, **buffer) as file:
        groups = list(range(*piece.row_groups)) if piece.row_groups else None
        names = list(piece.columns.values())
        for batch in file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False):
            yield RawBatch(batch=batch.select(names).rename_columns(list(piece.columns)), first_row=first_row)
            first_row += batch.num_rows


def _parquet_file(path: str) -> Any:
    where = locate(path)
    return where.open_random() if where.is_remote else where.local
