"""What an Atlas import leaves on disk: Parquet files, which appear whole or not at all, and a ledger of the inputs."""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas.chunks import InputCounts
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


def write_measurements(batches: Iterable[Any], folder: Path, *, rows_per_file: int = sys.maxsize) -> list[str]:
    """Writes Parquet files of `rows_per_file` rows, whose bytes do not depend on how the batches are cut.

    Returns their names; until they are published, the files have the suffix .tmp.
    """
    names: list[str] = []
    waiting = SCHEMA.empty_table()
    room = 0  # rows that the open file still takes
    with ExitStack() as open_file:
        for batch in chain(batches, [None]):  # None: the end
            if batch is not None:
                waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], schema=SCHEMA)])
            while len(waiting):
                rows = min(ROWS_PER_GROUP, room or rows_per_file)
                if len(waiting) < rows:
                    if batch is not None:
                        break
                    rows = len(waiting)
                if not room:
                    open_file.close()
                    names.append(f"measurements-{len(names):05d}.parquet")
                    writer = open_file.enter_context(_parquet_writer(folder / f"{names[-1]}.tmp"))
                    room = rows_per_file
                # One contiguous chunk: page boundaries could otherwise follow those of the batches.
                writer.write_table(waiting.slice(0, rows).combine_chunks(), row_group_size=rows)
                waiting = waiting.slice(rows)
                room -= rows
    return names


def _parquet_writer(path: Path) -> Any:
    # The default gives up on dictionaries above 1 MiB.
    dictionaries: dict[str, Any] = {"use_dictionary": ["src_addr", "dst_addr"], "dictionary_pagesize_limit": 16 << 20}
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", **dictionaries)


# The ledger of an import file by file: for each input file a small JSON file that says what became of it.
#
# It is written after the Parquet file that it vouches for, so an input without an entry, with another size or time than
# its entry has, or whose Parquet file is not there as it was, is simply imported again.

LEDGER: Final = "ledger"

REQUESTS_AT_ONCE: Final = 16

PARSER_VERSION: Final = 1
"""Raised when the same input gives other measurements than before; older entries are then imported again."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    input: str
    bytes: int
    modified_ns: int
    packets: str
    parser: int = PARSER_VERSION
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

    @classmethod
    def of(cls, counts: InputCounts, **more: Any) -> Self:
        columns = asdict(counts) | {
            name: dict(sorted(getattr(counts, name).items())) for name in ("dropped", "examples")
        }
        return cls(input=columns.pop("file"), **columns, **more)

    @property
    def counts(self) -> InputCounts:
        shared = {field.name: getattr(self, field.name) for field in fields(InputCounts) if field.name != "file"}
        return InputCounts(file=self.input, **shared)

    def write(self, output: Location, name: str) -> None:
        (output / LEDGER / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Location) -> Self:
        try:
            return cls(**json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise PingLlmError(f"{file} is not an entry of this program's ledger: {error}; delete it") from error


def read_entries(output: Location, names: Iterable[str]) -> dict[str, LedgerEntry]:
    """The entries of those inputs that have one, by name."""
    files = {file.name.removesuffix(".json"): file for file in (output / LEDGER).list()}
    known = [name for name in names if name in files]

    def read(name: str) -> LedgerEntry | None:
        try:
            return LedgerEntry.read(files[name])
        except MissingError:
            return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        entries = threads.map(read, known)
        return {name: entry for name, entry in zip(known, entries, strict=True) if entry is not None}
