"""Measurement files of any accepted format: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).

To add a format: a module with `plan` and `read` (`csv_files.py` is a short one), and a line in `FORMATS`.
"""

import contextlib
import glob
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

import pyarrow as pa

from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources import ROWS_FILE, SPLIT_FILE, WORLD_FILE
from ping_llm.storage import Location, locate
from ping_llm.storage.location import split_pattern


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of measurement file. Its module has two functions:

    plan(path, size, renamed, piece_rows, optional)   rows (None where only reading tells) and pieces of a file
    read(piece, batch_rows, strict)                   the `RawBatch`es of a piece
    """

    module: str
    suffixes: tuple[str, ...]
    magic: bytes | None = None
    """First bytes that tell the format whatever the file is called."""


FORMATS: Final = {
    "parquet": Format(module="ping_llm.sources.parquet_files", suffixes=(".parquet", ".pq"), magic=b"PAR1"),
    "csv": Format(module="ping_llm.sources.csv_files", suffixes=(".csv", ".tsv")),
    "atlas": Format(module="ping_llm.sources.atlas.chunks", suffixes=(".json", ".jsonl", ".ndjson")),
}

_KNOWN_NAMES: Final = ".parquet, .csv, .tsv, .json, .jsonl; text also as .gz or .bz2"

COLUMN_NAMES: Final = {
    "event_time": ("event_time", "timestamp", "time"),
    "src_addr": ("src_addr", "source", "src"),
    "dst_addr": ("dst_addr", "destination", "dst"),
    "ip_version": ("ip_version", "af"),
    "rtt": ("rtt", "rtt_avg", "rtt_ms"),
}
"""Names under which a file may have the columns of the schema, best first."""

OPTIONAL_COLUMNS: Final = frozenset({"ip_version"})
OPTIONAL_WITHOUT_TIME: Final = OPTIONAL_COLUMNS | {"event_time"}
"""For readers to whom a table of RTTs is enough."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file as it was when the work was planned; size and time tell whether it is still the same."""

    path: str
    format: str
    bytes: int
    mtime_ns: int
    measurements: int | None
    """Known without reading for Parquet only."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one file that is read by one task."""

    path: str
    format: str
    columns: dict[str, str]
    """The file's name of each schema column."""
    bytes: int
    row_groups: tuple[int, int] | None = None
    first_row: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        groups = value["row_groups"]
        return cls(**{**value, "row_groups": tuple(groups) if groups else None})


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Rows as they stand in the file, under the schema's names."""

    batch: pa.RecordBatch
    first_row: int
    """Number of the batch's first row in the file, counted from 0."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that the reader itself could not make sense of, and that are not in the batch."""


def expand(patterns: Iterable[str]) -> list[Location]:
    """The files that the given paths, folders and globs name, sorted, each once. They may be local or remote."""
    found: dict[str, Location] = {}
    for pattern in patterns:
        where = locate(pattern)
        if where.is_dir():
            matches = _files_of(where)
        elif where.exists():
            matches = [where]
        else:
            matches = _matching(where)
            if not matches:
                raise PingLlmError(f"no input file matches {pattern!r}")
        found.update({str(file): file for file in matches})
    if not found:
        raise PingLlmError("no input file was given")
    return [found[name] for name in sorted(found)]


def _files_of(folder: Location) -> list[Location]:
    files = folder.list()
    if any(file.name == SPLIT_FILE for file in files):
        raise PingLlmError(f"the folder {folder} is a split: what may be learned from is in {folder / 'train'}")
    measured = [file for file in files if _format_by_name(file.name) and file.name not in {WORLD_FILE, ROWS_FILE}]
    if not measured:
        raise PingLlmError(f"the folder {folder} holds no measurement file ({_KNOWN_NAMES})")
    return measured


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
    try:
        stat = locate(path).stat()
        kind = _format_of(locate(path))
        measurements, pieces = _module(kind).plan(str(path), stat.size, renamed, piece_rows, optional)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    file = InputFile(path=str(path), format=kind, bytes=stat.size, mtime_ns=stat.mtime_ns, measurements=measurements)
    return file, pieces


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    try:
        yield from _module(piece.format).read(piece, batch_rows, strict)
    except (OSError, pa.ArrowException, TypeError) as error:
        raise _unreadable(piece.path, error) from error


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


def _module(format: str) -> Any:
    return importlib.import_module(FORMATS[format].module)


def _format_of(path: Location) -> str:
    with contextlib.closing(path.open_random()) as file:
        start = bytes(file.read_at(4, 0))
    if not start:
        raise PingLlmError(f"{path} is empty")
    by_content = (name for name, kind in FORMATS.items() if kind.magic and start.startswith(kind.magic))
    if (found := next(by_content, None) or _format_by_name(path.name)) is None:
        raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES})")
    return found


def _format_by_name(name: str) -> str | None:
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst"}:
        suffixes.pop()
    return next((name for name, kind in FORMATS.items() if suffixes and suffixes[-1] in kind.suffixes), None)


def _unreadable(path: str | Path | Location, error: Exception) -> PingLlmError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error, 300)
    return PingLlmError(f"cannot read {path}: {reason}")
