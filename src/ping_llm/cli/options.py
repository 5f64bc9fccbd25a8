"""What several commands share: options, reading measurements, printing results, and writing files."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from ping_llm.core.console import err, no_progress, out, progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa

    from ping_llm.rows.measurement_set import MeasurementSet

# Input.
MeasurementFiles = Annotated[list[str], Argument(help="Measurement files, folders or globs.")]
History = Annotated[
    list[str] | None, Option("--history", help="Known measurements: a file, folder or quoted glob; may be repeated.")
]
Columns = Annotated[
    list[str] | None, Option(help="Your name of a column, as rtt=latency_ms; may be repeated.", metavar="COLUMN=NAME")
]
Strict = Annotated[bool, Option("--strict", help="Stop at the first result or measurement that cannot be used.")]
AnyCheckpoint = Annotated[
    Path | None,
    Option("--checkpoint", help="A run or an exported model.", show_default="the completer of the package"),
]
LanguageCheckpoint = Annotated[Path, Option("--checkpoint", help="A run of a language model, or an exported one.")]

# Work.
Workers = Annotated[int | None, Option(min=1, help="Worker processes.", show_default="all cores")]
BatchSize = Annotated[int, Option(min=1, help="Sequences in a global batch.")]
Length = Annotated[int, Option(min=64, help="Tokens in a sequence.")]

# Output.
OutputFolder = Annotated[Path, Option("--output", "-o", help="Folder to write to.")]
OutputLocation = Annotated[str, Option("--output", "-o", help="Folder to write to; may be s3:// or gs://.")]
OutputTable = Annotated[Path | None, Option("--output", "-o", help="Write all to a .csv or .parquet file.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace what the output folder already holds.")]
Json = Annotated[bool, Option("--json", help="Print the result as one line of JSON.")]

_QUICKLY_READ_BYTES = 10 << 20  # less is read in one step, which a progress bar could not show


def renamed(pairs: list[str] | None) -> dict[str, str]:
    """The files' names of columns of the schema."""
    from ping_llm.core.measurements import SCHEMA

    names = {}
    for pair in pairs or []:
        column, _, name = pair.partition("=")
        if column not in SCHEMA.names or not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME with a column of {', '.join(SCHEMA.names)}")
        names[column] = name
    return names


def read_measurements(files: Sequence[str] | None, columns: list[str] | None) -> "MeasurementSet":
    """Measurements, after a line for each reason why some could not be used; none without files."""
    from ping_llm.rows.measurement_set import read_observations, table_observations
    from ping_llm.sources.files import expand

    names = renamed(columns)
    if not files:
        return table_observations(None)
    is_long = sum(file.size() or 0 for file in expand(files)) > _QUICKLY_READ_BYTES  # a device has no size
    with progress("reading") if is_long else nullcontext(no_progress) as advance:
        measured = read_observations(files, columns=names, on_progress=advance)
    for reason, count in measured.dropped.items():
        err.print(f"dropped {count:,} {reason}", markup=False)
    return measured


def show(value: Any, json_output: bool, *texts: Any) -> None:
    """The result of a command: as JSON (times and the like as text), or as lines of text and rich tables."""
    with explained("cannot write to standard output", OSError):
        for text in [json.dumps(value, default=str)] if json_output else texts:
            out.print(text, soft_wrap=isinstance(text, str), markup=False, crop=False)


def as_table(texts: list[str], numbers: list[str], rows: list[list[str]], caption: str | None = None) -> Table:
    """Columns of texts, then of numbers. What does not fit is folded: two cut addresses may look the same."""
    columns = [Column(name, overflow="fold") for name in texts]
    columns += [Column(name, justify="right", no_wrap=True, overflow="fold") for name in numbers]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


# What commands write: looked at before anything is computed, and written whole or not at all.


def check_folder(folder: Path, said: str) -> None:
    """That `folder` is one, or can become one. `said` is how the user gave it."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise PingLlmError(f"{said}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise PingLlmError(f"{said}: {nearest} cannot be written to")


def check_file(path: Path | None, *suffixes: str) -> None:
    """That the file of `--output`, if it is given, can be written, and that its name ends with one of these."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise PingLlmError(f"--output {path}: the name must end with {' or '.join(suffixes)}")
    if path.is_dir():
        raise PingLlmError(f"--output {path}: there is a folder of that name")
    check_folder(path.parent, f"--output {path}")


def write_table(table: "pa.Table", path: Path, what: str = "") -> None:
    """As the ending of the name says, and say so: that there were so many of `what`."""
    import pyarrow.parquet as pq
    from pyarrow import csv

    with explained(f"cannot write to {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as unfinished:
            (csv.write_csv if path.suffix == ".csv" else pq.write_table)(table, unfinished)
    if what:
        err.print(f"wrote {len(table):,} {what} to {path}", markup=False)
