"""Measurements become Parquet files that appear all together, at the end, or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.errors import PingLlmError
from ping_llm.measurements import SCHEMA

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
