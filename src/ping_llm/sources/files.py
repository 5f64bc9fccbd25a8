"""Measurement files of any accepted kind: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).
"""

import contextlib
import glob
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.sources import ROWS_FILE, SPLIT_FILE, WORLD_FILE, formats
from ping_llm.sources.pieces import OPTIONAL_COLUMNS, InputFile, Piece, RawBatch
from ping_llm.storage import Location, locate
from ping_llm.storage.location import split_pattern


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
        raise PingLlmError(f"the folder {folder} is a split: what may be learnt of it is in {folder / 'train'}")
    wanted = [file for file in files if _format_by_name(file.name) and file.name not in {WORLD_FILE, ROWS_FILE}]
    if not wanted:
        raise PingLlmError(f"the folder {folder} holds no measurement file ({_KNOWN_NAMES})")
    return wanted


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
        measurements = None
        if kind == "parquet":
            measurements, pieces = formats.plan(str(path), renamed, piece_rows, optional)
        else:
            columns = formats.columns(str(path), renamed, optional) if kind == "csv" else {}
            pieces = [Piece(path=str(path), format=kind, columns=columns, bytes=stat.size)]
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error
    file = InputFile(path=str(path), format=kind, bytes=stat.size, mtime_ns=stat.mtime_ns, measurements=measurements)
    return file, pieces


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    try:
        yield from _READERS[piece.format](piece, batch_rows, strict)
    except (OSError, pa.ArrowException, TypeError) as error:
        raise unreadable(piece.path, error) from error


def unreadable(path: str | Path | Location, error: Exception) -> PingLlmError:
    reason = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).strip()
    return PingLlmError(f"cannot read {path}: {' '.join(reason.split())[:300]}")


_READERS: Final = {"parquet": formats.read_parquet, "csv": formats.read_csv, "atlas": formats.read_atlas}

_KNOWN_NAMES: Final = ".parquet, .csv, .tsv, .json, .jsonl; text also as .gz or .bz2"


def _format_by_name(name: str) -> str | None:
    suffixes = [s.lower() for s in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst"}:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in {".parquet", ".pq"}:
        return "parquet"
    if last in {".csv", ".tsv"}:
        return "csv"
    return "atlas" if last in {".json", ".jsonl", ".ndjson"} else None


def _format_of(path: Location) -> str:
    with contextlib.closing(path.open_random()) as file:
        if file.read_at(4, 0) == b"PAR1":
            return "parquet"
        if file.size() == 0:
            raise PingLlmError(f"{path} is empty")
    kind = _format_by_name(path.name)
    if kind is None:
        raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES})")
    return kind
