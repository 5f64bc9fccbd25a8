"""`ping-llm predict`: RTTs that were not measured, from those that were."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ping_llm.commands.options import AnyCheckpoint, Columns, History, Json, renamed
from ping_llm.commands.outputs import check_table, write_table
from ping_llm.console import err, out, progress
from ping_llm.errors import PingLlmError

if TYPE_CHECKING:
    import pyarrow as pa

    from ping_llm.sources.observations import Measured

_LINES_SHOWN = 25
_MOST_QUESTIONS = 1_000_000


def predict(
    history: History = None,
    src: Annotated[list[str] | None, typer.Option(help="Source address; may be repeated.")] = None,
    dst: Annotated[list[str] | None, typer.Option(help="Destination address; may be repeated.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="File of questions instead: src_addr, dst_addr, and event_time if it matters.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every source of the history to every destination.")] = False,
    time: Annotated[
        str | None, typer.Option(help="When, such as 2024-05-01T12:00:00Z.", show_default="after the whole history")
    ] = None,
    checkpoint: AnyCheckpoint = None,
    quantiles: Annotated[str, typer.Option(help="Levels to print, separated by commas.")] = "0.05,0.5,0.95",
    context: Annotated[int, typer.Option(min=8, help="Measurements that an answer may look at.")] = 512,
    votes: Annotated[int, typer.Option(min=1, help="Answers to average: a little better, and so much slower.")] = 1,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="A context for every question, not for eight together."),
    ] = False,
    columns: Columns = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all answers to a .csv or .parquet file.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Predict RTTs that were not measured, from measurements that were.

    Works without any training: the completer that comes with ping-llm was trained on simulated Internets only and reads
    your measurements as context. Of addresses it only sees which share a prefix, so private ones and stand-ins will do.
    Every answer is a distribution: its quantiles, and the chance that the measurement fails.

    Of a long history, the completer looks at what says most about the pair: earlier measurements of it, then
    measurements of either end with others, nearest first, then pairs that stand in for it. A language model
    (`--checkpoint` of your own run) looks at the latest measurements of the source.

    Examples:

      ping-llm predict --history my_pings.csv --src 192.0.2.1 --dst 198.51.100.7

      ping-llm predict --history my_pings.csv --matrix --output predicted.csv

      ping-llm predict --history 'data/*.parquet' --questions wanted.csv --time 2024-05-01T12:00Z --json
    """
    from ping_llm.predict.predictor import Predictor
    from ping_llm.predict.tables import answers_table, asked_of
    from ping_llm.sources.observations import read_observations, table_observations

    levels = _levels(quantiles)
    check_table(output)
    names = renamed(columns)
    with progress("reading") as advance:
        known = read_observations(history, columns=names, on_progress=advance) if history else table_observations(None)
    for reason, count in known.dropped.items():
        err.print(f"dropped {count:,} {reason}", markup=False)
    table = _asked(src or [], dst or [], questions, known if matrix else None, time)
    asked, nodes = asked_of(table, known.nodes)
    predictor = Predictor.from_pretrained(
        checkpoint, context=context, votes=votes, questions_per_context=1 if thorough else 8
    )
    with progress("predicting", total=len(asked)) as advance:
        answered = answers_table(table, predictor.in_parts(known.observations, asked, nodes, advance), levels)
    if output:
        write_table(answered, output)
    if json_output:
        out.print(json.dumps({"predictions": answered.to_pylist()}, default=str), soft_wrap=True, markup=False)
    elif not output or len(asked) <= _LINES_SHOWN:
        _show(answered, levels)
    if output:
        err.print(f"wrote {len(asked):,} predictions to {output}", markup=False)


def _levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        levels = [2.0]
    if not all(0 < level < 1 for level in levels):
        raise PingLlmError(f"--quantiles {text!r}: write levels between 0 and 1 such as 0.1,0.5,0.9")
    return levels


def _asked(
    src: list[str], dst: list[str], questions: Path | None, known: "Measured | None", time: str | None
) -> "pa.Table":
    import pyarrow as pa

    ways = [bool(src or dst), questions is not None, known is not None]
    if sum(ways) != 1 or bool(src) != bool(dst):
        raise PingLlmError("say what to predict: --src with --dst, or --questions FILE, or --matrix")
    if known is not None and not len(known.observations):
        raise PingLlmError("--matrix is of the sources and destinations of the history: give --history")
    if questions is not None:
        table = _read_questions(questions)
    else:
        if known is not None:
            o = known.observations
            src, dst = ([known.nodes[node] for node in np.unique(column)] for column in (o.source, o.destination))
        pairs = [(one, other) for one in src for other in dst if one != other or known is None]
        if len(pairs) > _MOST_QUESTIONS:
            raise PingLlmError(
                f"that are {len(pairs):,} pairs, more than {_MOST_QUESTIONS:,}: name some by --src and --dst"
            )
        table = pa.table({"src_addr": [p[0] for p in pairs], "dst_addr": [p[1] for p in pairs]})
    if time is not None:
        if "event_time" in table.column_names:
            raise PingLlmError("the questions have times of their own: leave --time out")
        table = table.append_column("event_time", pa.array([time] * table.num_rows))
    return table


def _read_questions(path: Path) -> "pa.Table":
    """A file of questions as it is: all its columns come back with the answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import csv

    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        text = csv.ConvertOptions(column_types=dict.fromkeys(("src_addr", "source", "src"), pa.string()))
        return csv.read_csv(path, convert_options=text)
    except (OSError, pa.ArrowException) as error:
        raise PingLlmError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error


def _show(table: "pa.Table", levels: list[float]) -> None:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="RTTs in ms, if the measurement does not fail")
    for name in ("source", "destination"):
        shown.add_column(name)
    for name in (*(f"{level:.4g} quantile" if level != 0.5 else "median" for level in levels), "P(failed)"):
        shown.add_column(name, justify="right")
    rows: list[dict[str, Any]] = table.slice(0, _LINES_SHOWN).to_pylist()
    ends = table.column_names
    source = next(name for name in ends if name in {"src_addr", "source", "src"})
    destination = next(name for name in ends if name in {"dst_addr", "destination", "dst"})
    for row in rows:
        values = [f"{row[f'{level:g}']:.2f}" for level in levels]
        shown.add_row(row[source], row[destination], *values, f"{row['p_failed']:.1%}")
    out.print(shown)
    if table.num_rows > _LINES_SHOWN:
        out.print(f"… and {table.num_rows - _LINES_SHOWN:,} more: --output FILE writes all, --json prints all")
