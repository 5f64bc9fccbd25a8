"""What several commands share: options, and how results are printed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ping_llm.core.console import out
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    import pyarrow as pa

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default="all cores")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder already holds.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(help="Your name of a column, as rtt=latency_ms; may be repeated.", metavar="COLUMN=NAME"),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences in a global batch.")]
Length = Annotated[int, typer.Option(min=64, help="Tokens in a sequence.")]
AnyCheckpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="A run or an exported model.", show_default="the completer of the package"),
]
LanguageCheckpoint = Annotated[
    Path, typer.Option("--checkpoint", help="A run that trained a language model, or an exported one.")
]
History = Annotated[
    list[str] | None,
    typer.Option("--history", help="Known measurements: a file, folder or quoted glob; may be repeated."),
]


def renamed(pairs: list[str] | None) -> dict[str, str]:
    """The files' names of columns of the schema."""
    from ping_llm.core.measurements import SCHEMA

    names = {}
    for pair in pairs or []:
        column, separator, name = pair.partition("=")
        if not separator or column not in SCHEMA.names or not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME with a column of {', '.join(SCHEMA.names)}")
        names[column] = name
    return names


def print_json(value: Any) -> None:
    out.print(json.dumps(value), soft_wrap=True, markup=False)


# What commands write: looked at before anything is computed, and written whole or not at all.


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
