"""`ping-llm evaluate`: models beside the classical predictors, in tables, JSON and pictures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ping_llm.commands.options import Columns, Json, print_json, renamed
from ping_llm.commands.outputs import check_folder, writing
from ping_llm.console import err, out, progress
from ping_llm.errors import PingLlmError

if TYPE_CHECKING:
    from ping_llm.evaluate.split import Split
    from ping_llm.predict.predictor import Predictor
    from ping_llm.sources.observations import Measured


def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Runs or folders of trained models; `completer`, or none, is the one that comes with ping-llm.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A measurement file, folder or quoted glob, or a folder of `ping-llm split`; may be repeated.",
        ),
    ] = None,
    rows: Annotated[Path | None, typer.Option(help="Folder of probe rows instead.")] = None,
    protocols: Annotated[
        list[str] | None,
        typer.Option("--protocol", help="`unseen_pair`, `seen_pair` or `unseen_probe`.", show_default="all of them"),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each protocol, at most.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Another seed asks other questions.")] = 0,
    world: Annotated[Path | None, typer.Option(help="Folder of the simulated measurements: adds the truth.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw pictures into, one for each protocol.")] = None,
    columns: Columns = None,
    json_output: Json = False,
) -> None:
    """Compare models with the classical predictors on measurements that none of them has seen.

    Three protocols, reported apart because their errors differ by ten times: **unseen_pair**, known nodes that were
    never seen to measure each other; **seen_pair**, what a known pair measures later; **unseen_probe**, a source of
    which nothing was learnt, from what it measured before. What is asked depends on the addresses and times only, so
    all who evaluate the same measurements ask the same. Whatever is asked is hidden from everyone who answers.

    A model of your own must not have been trained on what is asked: split the measurements first, and train it on the
    part for training.

    Examples:

      ping-llm evaluate --data my_pings.csv

      ping-llm evaluate --data data/raw --world data/raw --plots data/plots

      ping-llm split 'data/raw/*.parquet' --output data/split      # then train on data/split/train, then

      ping-llm evaluate runs/ping-llm/my-run --data data/split --questions 5000 --json
    """
    from ping_llm.evaluate import evaluate as run
    from ping_llm.evaluate.plots import plot
    from ping_llm.evaluate.table import tables
    from ping_llm.predict.predictor import Predictor
    from ping_llm.report.evaluation_file import save_evaluation
    from ping_llm.sources.simulator import World

    if plots:
        check_folder(plots, f"--plots {plots}")
    asked = _only(_split_of(data or [], rows, renamed(columns)), protocols or [])
    predictors: dict[str, Any] = {}
    sources: dict[str, str | None] = {}
    chosen: list[str | None] = [*(models or [])] or [None]
    for where in chosen:
        predictor = Predictor.from_pretrained(where)
        _refuse_what_was_learnt(predictor, asked)
        name = predictor.name if predictor.name not in predictors else str(where)
        predictors[name], sources[name] = predictor, where
    truth = World.load(world) if world else None
    with progress("evaluating") as advance:
        found = run(asked, predictors, questions=questions, seed=seed, oracle=truth, advance=advance)
    written = []
    with writing(plots or Path("evaluation.json")):
        written += save_evaluation(found, sources)  # for `ping-llm report`
        written += plot(found, plots) if plots else []
    for path in written:
        err.print(f"wrote {path}", markup=False)
    if json_output:
        print_json(found.to_json())
    else:
        out.print(tables(found))


def _split_of(data: Sequence[str], rows: Path | None, columns: dict[str, str]) -> "Split":
    from ping_llm.evaluate.split import split
    from ping_llm.evaluate.write_split import read_split
    from ping_llm.sources import SPLIT_FILE
    from ping_llm.sources.observations import read_observations

    if bool(data) == bool(rows):
        raise PingLlmError("say what to evaluate on: either --data with measurement files, or --rows with a folder")
    folders = [Path(name) for name in data if (Path(name) / SPLIT_FILE).exists()]
    if folders and len(data) > 1:
        raise PingLlmError(f"{folders[0]} is a split: give it alone as --data")
    if folders:
        return read_split(folders[0])
    with progress("reading") as advance:
        measured = _of_rows(rows) if rows else read_observations(data, columns=columns, on_progress=advance)
    for reason, count in measured.dropped.items():
        err.print(f"dropped {count:,} {reason}", markup=False)
    return split(measured)


def _of_rows(folder: Path) -> "Measured":
    """All measurements of prepared rows, whichever of their own splits they are in."""
    from ping_llm.baselines import NodeIds, Observations
    from ping_llm.rows.manifest import Manifest
    from ping_llm.sources.observations import Measured, rows_observations

    ids = NodeIds()
    parts = []
    for name in Manifest.load(folder).splits:
        measured = rows_observations(folder, name)
        number, known = ids.ids(measured.nodes), measured.observations
        parts.append((number[known.source], number[known.destination], known.time_s, known.rtt_ms))
    source, destination, time_s, rtt_ms = (np.concatenate(column) for column in zip(*parts, strict=True))
    together = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    return Measured(nodes=tuple(str(node) for node in ids.of), observations=together)


def _only(split: "Split", protocols: Sequence[str]) -> "Split":
    """The split with the questions of these protocols; none means all."""
    missing = [name for name in protocols if name not in split.questions]
    if missing:
        raise PingLlmError(f"there is no question of {', '.join(missing)}, only of {', '.join(split.questions)}")
    if not protocols:
        return split
    return replace(split, questions={name: split.questions[name] for name in split.questions if name in protocols})


def _refuse_what_was_learnt(predictor: "Predictor", split: "Split") -> None:
    from ping_llm.evaluate.split import trained_on

    name = predictor.name
    try:
        learnt = predictor.learnt_from()
    except PingLlmError as error:
        raise PingLlmError(f"cannot check that {name} was not trained on what is asked: {error}") from error
    compromised: Counter[str] = Counter()
    for measured in learnt:
        compromised.update({protocol: count for protocol, count in trained_on(measured, split).items() if count})
    if compromised:
        counts = ", ".join(f"{count:,} questions of {protocol}" for protocol, count in compromised.items())
        raise PingLlmError(
            f"{name} was trained on what would be asked ({counts}): train it on the part that `ping-llm split` writes"
            + _still_possible([protocol for protocol in split.questions if protocol not in compromised])
        )


def _still_possible(protocols: Sequence[str]) -> str:
    return f", or ask only for {' '.join(f'--protocol {name}' for name in protocols)}" if protocols else ""
