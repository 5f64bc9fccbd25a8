"""What several commands share: options, and how results are printed."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ping_llm.console import out
from ping_llm.errors import PingLlmError

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
    from ping_llm.measurements import SCHEMA

    names = {}
    for pair in pairs or []:
        column, separator, name = pair.partition("=")
        if not separator or column not in SCHEMA.names or not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME with a column of {', '.join(SCHEMA.names)}")
        names[column] = name
    return names


def print_json(value: Any) -> None:
    out.print(json.dumps(value), soft_wrap=True, markup=False)
