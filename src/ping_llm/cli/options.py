"""What commands share: options, reading measurements, printing results, and writing files."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
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
    from ping_llm.sources.columns import InputOptions
    from ping_llm.sources.files import Reading

# Input.
MeasurementFiles = Annotated[list[str], Argument(help="Measurement files, folders or globs.")]
History = Annotated[
    list[str] | None, Option("--history", help="Known measurements: a file, folder or quoted glob; may be repeated.")
]
HowToRead = Any
"""How to read measurements: an `InputOptions`. `expanded` replaces it by the options of `input_options`."""
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
OutputTable = Annotated[Path | None, Option("--output", "-o", help="Save all to a .csv or .parquet file.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the existing contents of the output folder.")]
Json = Annotated[bool, Option("--json", help="Print the result as one line of JSON.")]

_QUICKLY_READ_BYTES = 10 << 20  # smaller inputs are read in one step: no progress to show


def expanded(command: Callable[..., None], parameter: str, make: Callable[..., Any]) -> Callable[..., None]:
    """A command in which a parameter, if it has it, is replaced by the options from which `make` makes its value."""
    signature, options = inspect.signature(command), inspect.signature(make).parameters
    if parameter not in signature.parameters:
        return command

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        value = make(**{name: values.pop(name) for name in options})
        command(**values, **{parameter: value})

    own = [options.values() if name == parameter else [one] for name, one in signature.parameters.items()]
    keywords = [option.replace(kind=option.KEYWORD_ONLY) for option in chain.from_iterable(own)]
    wrapped.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    return wrapped


def input_options(
    columns: Annotated[
        list[str] | None,
        Option(help="Name of a column in your files, such as rtt=latency_ms; may be repeated.", metavar="COLUMN=NAME"),
    ] = None,
    rtt_unit: Annotated[str | None, Option(help="Unit of RTTs: s, ms, us or ns.", show_default="as found")] = None,
    delimiter: Annotated[
        str | None, Option(help="Separator of columns: a character, or `tab`.", show_default="as found")
    ] = None,
    date_order: Annotated[
        str | None, Option(help="Order of dates such as 03/04/2024: dmy or mdy.", show_default="as found")
    ] = None,
    decimal: Annotated[
        str | None, Option(help="Decimal sign of RTTs: comma or point.", show_default="as found")
    ] = None,
    nodes: Annotated[
        str | None, Option(help="File that describes nodes: name, address, latitude, longitude, as.")
    ] = None,
    allow_bad_rows: Annotated[
        bool, Option("--allow-bad-rows", help="Continue even if many rows cannot be used.")
    ] = False,
) -> "InputOptions":
    from ping_llm.sources.columns import InputOptions

    names = {}
    for pair in columns or []:
        column, _, name = pair.partition("=")
        if not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME, such as rtt=latency_ms")
        names[column] = name
    return InputOptions(
        columns=names,
        rtt_unit=rtt_unit,
        delimiter={"tab": "\t", "\\t": "\t", "space": " "}.get(delimiter or "", delimiter),
        date_order=date_order,
        decimal=decimal,
        nodes=nodes,
        allow_bad_rows=allow_bad_rows,
    )


def read_measurements(files: Sequence[str] | None, how: "InputOptions") -> "MeasurementSet":
    """The measurements of files, after two lines about how they were read; without files, an empty set."""
    from ping_llm.rows.measurement_set import read_observations, table_observations
    from ping_llm.sources.files import expand

    if not files:
        return table_observations(None)
    is_long = sum(file.size() or 0 for file in expand(files)) > _QUICKLY_READ_BYTES  # a pipe has no size
    with progress("reading") if is_long else nullcontext(no_progress) as advance:
        measured = read_observations(files, options=how, on_progress=advance)
    if measured.reading:
        tell(measured.reading)
    return measured


def as_read(measured: "MeasurementSet") -> dict[str, Any]:
    """How measurements were read, for the JSON of a result."""
    return {"reading": measured.reading.to_json()} if measured.reading else {}


def tell(reading: "Reading") -> None:
    """Print how the input was read on standard error."""
    for line in reading.lines:
        err.print(line, markup=False)


def show(value: Any, json_output: bool, *texts: Any) -> None:
    """Print the result of a command: as one line of JSON, or as lines of text and rich tables."""
    with explained("cannot write to standard output", OSError):
        for text in [json.dumps(value, default=str)] if json_output else texts:
            out.print(text, soft_wrap=isinstance(text, str), markup=False, crop=False)


def as_table(texts: list[str], numbers: list[str], rows: list[list[str]], caption: str | None = None) -> Table:
    """Columns of text, then of numbers. Long cells are folded, not cut: two cut addresses may look the same."""
    columns = [Column(name, overflow="fold") for name in texts]
    columns += [Column(name, justify="right", no_wrap=True, overflow="fold") for name in numbers]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


# Output files: checked before anything is computed, and written whole or not at all.


def check_folder(folder: Path, option: str) -> None:
    """Fail unless `folder` exists or can be made. `option` is how the user gave it."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise PingLlmError(f"{option}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise PingLlmError(f"{option}: {nearest} cannot be written to")


def check_file(path: Path | None, *suffixes: str) -> None:
    """Fail unless the file of `--output`, if given, can be written and its name has one of these suffixes."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise PingLlmError(f"--output {path}: the name must end with {' or '.join(suffixes)}")
    if path.is_dir():
        raise PingLlmError(f"--output {path}: there is a folder of that name")
    check_folder(path.parent, f"--output {path}")


def write_table(table: "pa.Table", path: Path, what: str = "") -> None:
    """Write CSV or Parquet, by the suffix of the name. With `what`, report how many of these were written."""
    import pyarrow.parquet as pq
    from pyarrow import csv

    with explained(f"cannot write to {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as unfinished:
            (csv.write_csv if path.suffix == ".csv" else pq.write_table)(table, unfinished)
    if what:
        err.print(f"wrote {len(table):,} {what} to {path}", markup=False)
