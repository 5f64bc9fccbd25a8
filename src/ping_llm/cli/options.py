"""What several commands share: options, reading measurements, printing results, and writing files."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
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
    from ping_llm.sources.columns import InputOptions, Reading

# Input.
MeasurementFiles = Annotated[list[str], Argument(help="Measurement files, folders or globs.")]
History = Annotated[
    list[str] | None, Option("--history", help="Known measurements: a file, folder or quoted glob; may be repeated.")
]
HowToRead = Any
"""How measurements are to be read: `InputOptions`, for which `with_input` gives a command options."""
_INPUT_OPTIONS: dict[str, Any] = {
    "columns": Annotated[
        list[str] | None,
        Option(help="Your name of a column, as rtt=latency_ms; may be repeated.", metavar="COLUMN=NAME"),
    ],
    "rtt_unit": Annotated[str | None, Option(help="Unit of RTTs: s, ms, us or ns.", show_default="as found")],
    "delimiter": Annotated[str | None, Option(help="Of cells: a character, or `tab`.", show_default="as found")],
    "date_order": Annotated[str | None, Option(help="Of 03/04/2024: dmy or mdy.", show_default="as found")],
    "decimal": Annotated[str | None, Option(help="Before decimals of RTTs: comma or point.", show_default="as found")],
    "nodes": Annotated[str | None, Option(help="File of what names are: name, address, latitude, longitude, as.")],
    "allow_bad_rows": Annotated[bool, Option("--allow-bad-rows", help="Go on although many rows cannot be used.")],
}
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


def with_input(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `how`, if it has one, is made of the options that say how to read measurements."""
    signature = inspect.signature(command)
    if "how" not in signature.parameters:
        return command

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        from ping_llm.sources.columns import InputOptions

        given = {name: values.pop(name) for name in _INPUT_OPTIONS}
        given["columns"] = _renamed(given["columns"])
        given["delimiter"] = {"tab": "\t", "\\t": "\t", "space": " "}.get(given["delimiter"], given["delimiter"])
        command(**values, how=InputOptions(**given))

    parameters: list[inspect.Parameter] = []
    for name, own in signature.parameters.items():
        if name != "how":
            parameters.append(own.replace(kind=own.KEYWORD_ONLY))
            continue
        for option, kind in _INPUT_OPTIONS.items():
            default = False if option == "allow_bad_rows" else None
            parameters.append(inspect.Parameter(option, own.KEYWORD_ONLY, annotation=kind, default=default))
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped


def _renamed(pairs: list[str] | None) -> dict[str, str]:
    """The files' names of columns of the schema."""
    names = {}
    for pair in pairs or []:
        column, _, name = pair.partition("=")
        if not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME, such as rtt=latency_ms")
        names[column] = name
    return names


def read_measurements(files: Sequence[str] | None, how: "InputOptions") -> "MeasurementSet":
    """Measurements, after two lines about what was read; none without files."""
    from ping_llm.rows.measurement_set import read_observations, table_observations
    from ping_llm.sources.files import expand

    if not files:
        return table_observations(None)
    is_long = sum(file.size() or 0 for file in expand(files)) > _QUICKLY_READ_BYTES  # a device has no size
    with progress("reading") if is_long else nullcontext(no_progress) as advance:
        measured = read_observations(files, options=how, on_progress=advance)
    if measured.reading:
        tell(measured.reading)
    return measured


def as_read(measured: "MeasurementSet") -> dict[str, Any]:
    """The same for the JSON of a result."""
    return {"reading": measured.reading.to_json()} if measured.reading else {}


def tell(reading: "Reading") -> None:
    """What was understood of the input, on standard error."""
    for line in reading.lines:
        err.print(line, markup=False)


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
