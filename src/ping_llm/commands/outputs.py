"""What commands write: looked at before anything is computed, and written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ping_llm.errors import PingLlmError

if TYPE_CHECKING:
    import pyarrow as pa


def check_folder(folder: Path, said: str) -> None:
    """That `folder` is one, or can become one. `said` is how the user gave it."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise PingLlmError(f"{said}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise PingLlmError(f"{said}: {nearest} cannot be written to")


def check_table(path: Path | None) -> None:
    """That a table can be written there, if anywhere."""
    if path is None:
        return
    if path.suffix not in {".csv", ".parquet"}:
        raise PingLlmError(f"--output {path}: the name must end with .csv or .parquet")
    if path.is_dir():
        raise PingLlmError(f"--output {path}: there is a folder of that name")
    check_folder(path.parent, f"--output {path}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes one line."""
    try:
        yield
    except OSError as error:
        raise PingLlmError(f"cannot write to {path}: {error.strerror or error}") from error


def write_table(table: "pa.Table", path: Path) -> None:
    """As the ending of the name says."""
    import pyarrow.parquet as pq
    from pyarrow import csv

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            (csv.write_csv if path.suffix == ".csv" else pq.write_table)(table, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
