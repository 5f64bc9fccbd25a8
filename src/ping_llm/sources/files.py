"""Measurement files of any accepted kind: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).
"""

import glob
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from ping_llm.errors import PingLlmError
from ping_llm.sources import ROWS_FILE, SPLIT_FILE, WORLD_FILE, atlas_files, csv_files, parquet_files
from ping_llm.sources.pieces import OPTIONAL_COLUMNS, InputFile, Piece, RawBatch


def expand(patterns: Iterable[str]) -> list[Path]:
    """The files that the given paths, folders and globs name, sorted, each once."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            if (path / SPLIT_FILE).exists():
                raise PingLlmError(f"the folder {pattern} is a split: what may be learnt of it is in {path / 'train'}")
            matches = [p for p in sorted(path.iterdir()) if p.is_file() and _format_by_name(p)]
            matches = [p for p in matches if p.name not in {WORLD_FILE, ROWS_FILE}]
            if not matches:
                raise PingLlmError(f"the folder {pattern} holds no measurement file ({_KNOWN_NAMES})")
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]  # noqa: PTH207
            if not matches:
                raise PingLlmError(f"no input file matches {pattern!r}")
        found.update({str(p): p for p in matches})
    if not found:
        raise PingLlmError("no input file was given")
    return [found[name] for name in sorted(found)]


def describe(
    path: Path, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> tuple[InputFile, list[Piece]]:
    """Look at a file (not at its measurements): what it is, and the pieces to read it in.

    `optional` columns need not be there.
    """
    try:
        stat = path.stat()
        kind = _format_of(path)
        measurements = None
        if kind == "parquet":
            measurements, pieces = parquet_files.plan(path, renamed, piece_rows, optional)
        else:
            columns = csv_files.columns(path, renamed, optional) if kind == "csv" else {}
            pieces = [Piece(path=str(path), format=kind, columns=columns, bytes=stat.st_size)]
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error
    file = InputFile(
        path=str(path), format=kind, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, measurements=measurements
    )
    return file, pieces


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    try:
        yield from _READERS[piece.format](piece, batch_rows, strict)
    except (OSError, pa.ArrowException, TypeError) as error:
        raise unreadable(piece.path, error) from error


def unreadable(path: str | Path, error: Exception) -> PingLlmError:
    reason = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).strip()
    return PingLlmError(f"cannot read {path}: {' '.join(reason.split())[:300]}")


_READERS: Final = {"parquet": parquet_files.read, "csv": csv_files.read, "atlas": atlas_files.read}

_KNOWN_NAMES: Final = ".parquet, .csv, .tsv, .json, .jsonl; text also as .gz or .bz2"


def _format_by_name(path: Path) -> str | None:
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst"}:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in {".parquet", ".pq"}:
        return "parquet"
    if last in {".csv", ".tsv"}:
        return "csv"
    return "atlas" if last in {".json", ".jsonl", ".ndjson"} else None


def _format_of(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    if path.stat().st_size == 0:
        raise PingLlmError(f"{path} is empty")
    kind = _format_by_name(path)
    if kind is None:
        raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES})")
    return kind
