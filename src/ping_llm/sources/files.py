"""Measurement files of any accepted format: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).

To add a format: a line in `FORMATS`, and a module with two functions (those of Parquet, below, are short):

    plan_NAME(whole, options, piece_rows, optional)   rows (None where only reading tells) and pieces of a file
    read_NAME(piece, batch_rows, strict)              the `RawBatch`es of a piece
"""

import contextlib
import csv
import glob
import importlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

try:
    import lzma
except ModuleNotFoundError:  # Python may be built without
    lzma = None  # type: ignore[assignment]

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ping_llm.core.cells import PLAIN, Spelling
from ping_llm.core.errors import MeasurementError, PingLlmError, explained, one_line
from ping_llm.sources import NODES_FILE, ROWS_FILE, SPLIT_FILE, WORLD_FILE
from ping_llm.sources.columns import OPTIONAL_COLUMNS, InputOptions, find_columns, understand
from ping_llm.storage import Location, locate
from ping_llm.storage.location import split_pattern


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of measurement file."""

    module: str
    is_of: Callable[[bytes], object]
    """Whether a file that begins with these bytes (decompressed) is one."""
    suffixes: tuple[str, ...] = ()
    """Only choose among the files of a folder; what a file is, its content says."""


def _is_of_tool(start: bytes) -> bool:
    from ping_llm.sources.tools import is_tool

    return is_tool(start)


_JSON: Final = rb"^(?:\xef\xbb\xbf)?\s*"
FORMATS: Final = {
    "parquet": Format(module=__name__, is_of=re.compile(rb"PAR1").match, suffixes=(".parquet", ".pq")),
    "tool": Format(module="ping_llm.sources.tools", is_of=_is_of_tool, suffixes=(".rrd",)),
    "atlas": Format(
        module="ping_llm.sources.atlas_results",
        is_of=re.compile(_JSON + rb'[\[{].*?"(?:prb_id|msm_id|fw|msm_name)"\s*:', re.DOTALL).match,
        suffixes=(".json", ".jsonl", ".ndjson"),
    ),
    "objects": Format(
        module="ping_llm.sources.objects",
        is_of=re.compile(_JSON + rb'(?:\[?\s*\{\s*["}]|\[\s*\])').match,
    ),
    "csv": Format(  # any other text, in UTF-16, too, but not what spreadsheets write
        module="ping_llm.sources.tables",
        is_of=re.compile(rb"\xff\xfe|\xfe\xff|(?!PK)[^\0]*\Z").match,
        suffixes=(".csv", ".tsv"),
    ),
}
"""A file is of the first of these that it may be of."""

SERVERS: Final = ("prometheus+http://", "prometheus+https://", "atlas:")
"""What begins like this is not the name of a file: see `remote`."""

BLOCK_BYTES: Final = 1 << 16
"""Of a file, what tells its format and how it is to be read."""

_KNOWN_NAMES: Final = (
    "Parquet, CSV and other text tables, JSON, RIPE Atlas results, what ping tools write; "
    "also compressed with gzip, bzip2, zstd or xz"
)


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
    spelling: Spelling = PLAIN
    layout: Any = None  # of a text table
    understood: str = ""  # what the file was taken for, in words
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
    examples: Mapping[str, str] = field(default_factory=dict)
    """Of each reason, the first row that was dropped for it, in words."""


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


def distinct(paths: Iterable[Location]) -> tuple[list[Location], dict[str, str]]:
    """Files that have each a content of their own; and the others, each with the name of the one it is a copy of."""
    by_size: dict[int, list[Location]] = {}
    copies: dict[str, str] = {}
    for path in paths:
        alike = by_size.setdefault(path.size(), [])
        original = next((other for other in alike if _same_content(path, other)), None)
        if original is None:
            alike.append(path)
        else:
            copies[str(path)] = str(original)
    return sorted((path for alike in by_size.values() for path in alike), key=str), copies


def _same_content(one: Location, other: Location) -> bool:
    with readable(one), one.open_stream() as mine, other.open_stream() as theirs:
        while block := mine.read(1 << 20):
            if block != theirs.read(1 << 20):
                return False
    return True


def _files_of(folder: Location) -> list[Location]:
    files = {file.name: file for file in folder.list()}
    if SPLIT_FILE in files:
        raise PingLlmError(f"the folder {folder} is a split: what may be learned from is in {folder / 'train'}")
    if measured := [
        files[name] for name in files.keys() - {WORLD_FILE, ROWS_FILE, NODES_FILE} if _format_by_name(name)
    ]:
        return measured
    if logs := [file for file in files.values() if _is_log(file)]:
        return logs
    raise PingLlmError(f"the folder {folder} holds no measurement file ({_KNOWN_NAMES})")


def _is_log(path: Location) -> bool:
    with readable(path), open_text(str(path)) as stream:
        return _is_of_tool(stream.read(BLOCK_BYTES))


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
    path: Location | Path, options: InputOptions, piece_rows: int, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> tuple[InputFile, list[Piece]]:
    """Look at a file (not at its measurements): what it is, and the pieces to read it in.

    `optional` columns need not be there.
    """
    with readable(path):
        stat = locate(path).stat()
        kind = _format_of(locate(path))
        whole = Piece(path=str(path), format=kind, columns={}, bytes=stat.size)
        measurements, pieces = _function("plan", kind)(whole, options, piece_rows, optional)
    file = InputFile(path=str(path), format=kind, bytes=stat.size, mtime_ns=stat.mtime_ns, measurements=measurements)
    return file, pieces


def row_in_words(piece: Piece, raw: RawBatch, position: int, columns: Iterable[str] | None = None) -> str:
    """Where a row of a batch stands in its file, and its cells."""
    row = raw.first_row + position
    where = (
        f"line {row + 1 + piece.layout.skipped}"
        if piece.layout is not None and not piece.layout.is_matrix
        else f"row {row}"
    )
    names = [name for name in columns or raw.batch.schema.names if name in raw.batch.schema.names]
    return f"{where}: " + ", ".join(f"{name}={str(raw.batch.column(name)[position].as_py())[:60]}" for name in names)


_AT_FAULT: Final = {
    "missing_time": ("event_time",),
    "bad_time": ("event_time",),
    "bad_src_addr": ("src_addr",),
    "bad_dst_addr": ("dst_addr",),
    "family_mismatch": ("src_addr", "dst_addr"),
}


def examples_of(piece: Piece, raw: RawBatch, first_dropped: Mapping[str, int]) -> dict[str, str]:
    """Of each reason, the first row of a batch that was dropped for it."""
    found = {
        reason: row_in_words(piece, raw, position, _AT_FAULT.get(reason, ("rtt",)))
        for reason, position in first_dropped.items()
    }
    return {**found, **raw.examples}


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    with readable(piece.path):
        yield from _function("read", piece.format)(piece, batch_rows, strict)


def _function(task: str, format: str) -> Any:
    return getattr(importlib.import_module(FORMATS[format].module), f"{task}_{format}")


def _format_of(path: Location) -> str:
    with open_text(str(path)) as stream:
        start = stream.read(BLOCK_BYTES)
    if not start:
        raise PingLlmError(f"{path} is empty")
    if found := next((name for name, kind in FORMATS.items() if kind.is_of(start)), None):
        return found
    hint = ": of a spreadsheet, save the table as CSV" if start.startswith((b"PK", b"\xd0\xcf\x11\xe0")) else ""
    raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES}){hint}")


_CODECS: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ": "xz",
}
"""By the first bytes. Arrow knows all but xz."""

UNPACKING_ERRORS: Final = (OSError, EOFError, *((lzma.LZMAError,) if lzma else ()))


def open_text(path: str) -> pa.NativeFile:
    """The bytes of a file, decompressed; of what numpy has saved, those of a text table of the same numbers."""
    file = open_stored(locate(path))
    start = bytes(file.read(64))
    file.seek(0)
    if start.startswith(b"\x93NUMPY") or (start.startswith(b"PK\x03\x04") and b".npy" in start):
        return _array_as_text(file, path)
    return decompressed(file)


def _array_as_text(file: Any, path: str) -> pa.NativeFile:
    """The one array of two dimensions in a .npy or .npz file; names of as many nodes may be beside it."""
    with explained(f"cannot read {path}", ValueError, MemoryError), file:
        loaded = np.load(io.BytesIO(file.read()))
        arrays = [loaded] if isinstance(loaded, np.ndarray) else list(loaded.values())
    tables = [array for array in arrays if array.ndim == 2 and array.dtype.kind in "iuf"]
    if len(tables) != 1:
        raise PingLlmError(f"{path}: has {len(tables)} arrays of numbers in two dimensions, not one: save it alone")
    names = [array.tolist() for array in arrays if array.dtype.kind == "U" and array.shape == tables[0].shape[:1]]
    columns = {str(i): column for i, column in enumerate(tables[0].astype(np.float64).T)}
    if names and len(columns) == len(names[0]):
        columns = {"": names[0], **dict(zip(names[0], columns.values(), strict=True))}
    text = io.BytesIO()
    arrow_csv.write_csv(pa.table(columns), text, arrow_csv.WriteOptions(include_header=bool(names)))
    return pa.BufferReader(text.getvalue())


def open_stored(where: Location) -> Any:
    """The bytes of a file as they are."""
    return where.open_random() if where.is_local else where.open_stream()


def decompressed(file: Any) -> pa.NativeFile:
    start = bytes(file.read(6))
    file.seek(0)
    codec = next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)
    if codec == "xz":
        if lzma is None:
            raise PingLlmError("this Python was built without xz: decompress the file first")
        return pa.PythonFile(lzma.open(file), mode="r")
    return pa.input_stream(file, compression=codec)


def _format_by_name(name: str) -> str | None:
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst", ".xz"}:
        suffixes.pop()
    return next((name for name, kind in FORMATS.items() if suffixes and suffixes[-1] in kind.suffixes), None)


@contextlib.contextmanager
def readable(path: str | Path | Location) -> Iterator[None]:
    """What goes wrong becomes an error of one line."""
    try:
        yield
    except (*UNPACKING_ERRORS, pa.ArrowException, UnicodeDecodeError, csv.Error, TypeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise PingLlmError(f"cannot read {path}: {error.strerror}") from error
        raise MeasurementError(f"cannot read {path}: {one_line(error, 300)}") from error  # damaged


# Parquet.

_SAMPLE_ROWS: Final = 10_000
_FETCHED_AHEAD: Final = 256 << 20
"""Of a remote file, pieces up to this size are fetched in a few large requests; longer ones block by block."""


def plan_parquet(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    """Pieces of whole row groups with about `piece_rows` rows each."""
    with pq.ParquetFile(_parquet_file(whole.path)) as file:
        metadata, names = file.metadata, file.schema_arrow.names
        columns = find_columns(names, options.columns, whole.path, optional)
        chosen = list(columns.values())
        sample = next(file.iter_batches(_SAMPLE_ROWS, columns=chosen, use_threads=False), None)
        if sample is None:
            empty = [pa.array([], file.schema_arrow.field(name).type) for name in chosen]
            sample = pa.RecordBatch.from_arrays(empty, names=chosen)
        found = understand(names, {name: sample.column(name) for name in chosen}, options, whole.path, optional)
    whole = replace(whole, columns=columns, spelling=found.spelling, understood=found.said)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    pieces = []
    first = first_row = 0
    while first < len(groups):
        last, rows, size = first, 0, 0
        while last < len(groups) and (rows == 0 or rows + groups[last].num_rows <= piece_rows):
            rows, size, last = rows + groups[last].num_rows, size + groups[last].total_byte_size, last + 1
        pieces.append(replace(whole, bytes=size, row_groups=(first, last), first_row=first_row))
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
