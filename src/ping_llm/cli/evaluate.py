"""`ping-llm split` and `ping-llm evaluate`: models beside the classical predictors, on what none of them has seen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ping_llm.cli.options import Columns, Json, Overwrite, check_folder, print_json, renamed, writing
from ping_llm.core.console import err, out, progress
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    from ping_llm.evaluate.split import Split
    from ping_llm.predict.predictor import Predictor
    from ping_llm.rows.measurement_set import MeasurementSet


def split(
    files: Annotated[list[str], typer.Argument(help="Measurement files, folders or globs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the parts to.")],
    held_out_pairs: Annotated[float, typer.Option(min=0, max=1, help="Share of the pairs that stay unseen.")] = 0.1,
    unseen_probes: Annotated[float, typer.Option(min=0, max=1, help="Share of the sources that stay unseen.")] = 0.05,
    later: Annotated[float, typer.Option(min=0, max=1, help="Share of the measurements after the cut in time.")] = 0.1,
    columns: Columns = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Divide measurements into what a model may learn and what it will be asked, so that `evaluate` is fair.

    Pairs and probes stay unseen by a hash of their addresses, so that the same measurements are always divided in the
    same way. Everything that is asked was measured after a cut in time, everything for training before it.

    Examples:

      ping-llm split 'data/raw/*.parquet' --output data/split

      ping-llm prepare --input data/split/train --output data/rows      # then train, then

      ping-llm evaluate runs/ping-llm/my-run --data data/split
    """
    from ping_llm.evaluate.split import SplitSettings
    from ping_llm.evaluate.split_folder import write_split
    from ping_llm.rows.measurement_set import read_observations

    settings = SplitSettings(held_out_pairs=held_out_pairs, unseen_probes=unseen_probes, later=later)
    with progress("reading") as advance:
        measured = read_observations(files, columns=renamed(columns), on_progress=advance)
    _say_dropped(measured)
    found = write_split(measured, output, settings, overwrite=overwrite)
    asked = {protocol: len(questions) for protocol, questions in found.questions.items()}
    train, everything = len(found.train), len(measured.observations)
    if json_output:
        print_json({"train": train, "history": len(found.history), "questions": asked, "unused": found.unused})
        return
    out.print(f"{train:,} of {everything:,} measurements are for training, in {output}/train")
    for protocol, count in asked.items():
        out.print(f"  {protocol:12} {count:,} questions")


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
    which nothing was learned, from what it measured before. What is asked depends on the addresses and times only, so
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
    from ping_llm.evaluate.scores import save_evaluation, tables
    from ping_llm.predict.predictor import Predictor
    from ping_llm.sources.simulator import World

    if plots:
        check_folder(plots, f"--plots {plots}")
    asked = _only(_split_of(data or [], rows, renamed(columns)), protocols or [])
    predictors: dict[str, Any] = {}
    sources: dict[str, str | None] = {}
    chosen: list[str | None] = [*(models or [])] or [None]
    for where in chosen:
        predictor = Predictor.from_pretrained(where)
        _refuse_what_was_learned(predictor, asked)
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
    from ping_llm.evaluate.split_folder import read_split
    from ping_llm.rows.manifest import Manifest
    from ping_llm.rows.measurement_set import joined, read_observations, rows_observations
    from ping_llm.sources import SPLIT_FILE

    if bool(data) == bool(rows):
        raise PingLlmError("say what to evaluate on: either --data with measurement files, or --rows with a folder")
    folders = [Path(name) for name in data if (Path(name) / SPLIT_FILE).exists()]
    if folders and len(data) > 1:
        raise PingLlmError(f"{folders[0]} is a split: give it alone as --data")
    if folders:
        return read_split(folders[0])
    with progress("reading") as advance:
        if rows:  # all measurements, whichever of the rows' own splits they are in
            measured = joined([rows_observations(rows, name) for name in Manifest.load(rows).splits])
        else:
            measured = read_observations(data, columns=columns, on_progress=advance)
    _say_dropped(measured)
    return split(measured)


def _say_dropped(measured: "MeasurementSet") -> None:
    for reason, count in measured.dropped.items():
        err.print(f"dropped {count:,} {reason}", markup=False)


def _only(split: "Split", protocols: Sequence[str]) -> "Split":
    """The split with the questions of these protocols; none means all."""
    missing = [name for name in protocols if name not in split.questions]
    if missing:
        raise PingLlmError(f"there is no question of {', '.join(missing)}, only of {', '.join(split.questions)}")
    if not protocols:
        return split
    return replace(split, questions={name: split.questions[name] for name in split.questions if name in protocols})


def _refuse_what_was_learned(predictor: "Predictor", split: "Split") -> None:
    from ping_llm.evaluate.split import trained_on

    try:
        learned = predictor.training_measurements()
    except PingLlmError as error:
        raise PingLlmError(f"cannot check that {predictor.name} was not trained on what is asked: {error}") from error
    compromised: Counter[str] = Counter()
    for measured in learned:
        compromised += Counter(trained_on(measured, split))
    if not compromised:
        return
    counts = ", ".join(f"{count:,} questions of {protocol}" for protocol, count in compromised.items())
    possible = [f"--protocol {protocol}" for protocol in split.questions if protocol not in compromised]
    raise PingLlmError(
        f"{predictor.name} was trained on what would be asked ({counts}): train it on the part that `ping-llm split` "
        "writes" + (f", or ask only for {' '.join(possible)}" if possible else "")
    )
