"""Measurements become Parquet files that appear all together, at the end, or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.storage import Location, MissingError

PATTERN: Final = "measurements-*.parquet"
STAGING: Final = ".importing"

ROWS_PER_GROUP: Final = 1 << 17
"""Readers take a row group as one task; this is about what DuckDB writes itself. 1 MB on disk."""


@contextmanager
def staged_output(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden folder inside `output`; the Parquet files left in it are moved to `output` when all went well.

    A staging folder left by an import that was killed is cleared by the next one.
    """
    if output.exists() and not output.is_dir():
        raise PingLlmError(f"{output}: is a file; the output must be a folder")
    if not overwrite and next(output.glob(PATTERN), None):
        raise PingLlmError(f"{output}: already holds measurements; choose another folder or overwrite them")
    existed = output.exists()
    staging = output / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with _only_import(staging):
            for leftover in staging.iterdir():
                leftover.unlink()
            try:
                yield staging
                _publish(staging, output)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise PingLlmError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, as it should be after an import
                output.rmdir()


@contextmanager
def _only_import(staging: Path) -> Iterator[None]:
    """A lock that ends with this process, however it ends."""
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PingLlmError(f"{staging.parent}: another import is writing to this folder") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _publish(staging: Path, output: Path) -> None:
    """Move the files. The first one arrives last and leaves first, so that a set that has it is complete."""
    for old in sorted(output.glob(PATTERN)):
        old.unlink()
    for staged in sorted(staging.glob(f"{PATTERN}.tmp"), reverse=True):
        staged.replace(output / staged.stem)


class MeasurementWriter:
    """Batches of any size become Parquet files of `rows_per_file` rows, whose bytes do not depend on those sizes."""

    def __init__(self, folder: Path, *, rows_per_file: int) -> None:
        self._folder = folder
        self._rows_per_file = rows_per_file
        self._waiting: list[Any] = []
        self._rows_waiting = 0
        self._file: Any = None
        self._rows_in_file = 0
        self.names: list[str] = []

    def __enter__(self) -> "MeasurementWriter":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None and self._rows_waiting:
            self._write_group(self._rows_waiting)
        if self._file is not None:
            self._file.close()

    def write(self, batch: Any) -> None:
        self._waiting.append(batch)
        self._rows_waiting += batch.num_rows
        while self._rows_waiting >= (rows := self._rows_of_next_group()):
            self._write_group(rows)

    def _rows_of_next_group(self) -> int:
        room = self._rows_per_file - self._rows_in_file if self._file is not None else self._rows_per_file
        return min(ROWS_PER_GROUP, room)

    def _write_group(self, rows: int) -> None:
        waiting = pa.Table.from_batches(self._waiting, schema=SCHEMA)
        self._waiting = waiting.slice(rows).to_batches()
        self._rows_waiting -= rows
        if self._file is None:
            self._file = self._next_file()
        # One contiguous chunk: page boundaries could otherwise follow those of the batches.
        self._file.write_table(waiting.slice(0, rows).combine_chunks(), row_group_size=rows)
        self._rows_in_file += rows
        if self._rows_in_file == self._rows_per_file:
            self._file.close()
            self._file = None

    def _next_file(self) -> Any:
        self.names.append(f"measurements-{len(self.names):05d}.parquet")
        self._rows_in_file = 0
        return pq.ParquetWriter(
            self._folder / f"{self.names[-1]}.tmp",
            SCHEMA,
            compression="zstd",
            use_dictionary=["src_addr", "dst_addr"],
            dictionary_pagesize_limit=16 << 20,  # the default gives up on dictionaries above 1 MiB
        )


# The ledger of an import file by file: for each input file a small JSON file that says what became of it.
#
# It is written after the Parquet file that it vouches for, so an input without an entry, with another size or time than
# its entry has, or whose Parquet file is not there as it was, is simply imported again.

FOLDER: Final = "ledger"

REQUESTS_AT_ONCE: Final = 16

PARSER: Final = 1
"""Raised when the same input gives other measurements than before; older entries are then imported again."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    input: str
    bytes: int
    modified_ns: int
    packets: str
    parser: int
    output: str | None = None
    """The Parquet file; there is none if the input held no ping, or could not be read."""
    output_bytes: int = 0
    sha256: str | None = None
    results: int = 0
    measurements: int = 0
    failed: int = 0
    dropped: dict[str, int]
    examples: dict[str, str]
    seconds: float
    error: str | None = None
    """Why the input could not be read. It is tried again by the next import."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str, where: Location) -> Self:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PingLlmError(f"{where} is not an entry of this program's ledger: {error}; delete it") from error


def entry_name(input_name: str) -> str:
    return f"{input_name}.json"


def output_name(input_name: str) -> str:
    return f"{input_name}.parquet"


def write_entry(output: Location, name: str, entry: LedgerEntry) -> None:
    (output / FOLDER / entry_name(name)).write_text(json.dumps(entry.to_json(), indent=1) + "\n")


def read_entries(output: Location, names: Iterable[str]) -> dict[str, LedgerEntry]:
    """The entries of those inputs that have one, by name."""
    there = {file.name for file in (output / FOLDER).list()}
    known = [name for name in names if entry_name(name) in there]

    def read(name: str) -> LedgerEntry | None:
        where = output / FOLDER / entry_name(name)
        try:
            return LedgerEntry.from_json(where.read_text(), where)
        except MissingError:
            return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        entries = threads.map(read, known)
        return {name: entry for name, entry in zip(known, entries, strict=True) if entry is not None}


def packets_of(output: Location) -> str | None:
    """What the entries say about `--packets`, which must be the same for all files of a folder."""
    for file in (output / FOLDER).list():
        return LedgerEntry.from_json(file.read_text(), file).packets
    return None
