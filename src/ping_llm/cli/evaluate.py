"""`ping-llm split` and `ping-llm evaluate`: models and classical predictors on measurements that none has seen."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ping_llm.cli import options
from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError, explained

if TYPE_CHECKING:
    from ping_llm.evaluate.split import Split
    from ping_llm.predict.predictor import Predictor


def split(
    files: options.MeasurementFiles,
    output: options.OutputFolder,
    held_out_pairs: Annotated[float, Option(min=0, max=1, help="Share of the pairs that are held out.")] = 0.1,
    unseen_probes: Annotated[float, Option(min=0, max=1, help="Share of the sources that are held out.")] = 0.05,
    later: Annotated[float, Option(min=0, max=1, help="Share of the measurements after the cut in time.")] = 0.1,
    how: options.HowToRead = None,
    overwrite: options.Overwrite = False,
    json_output: options.Json = False,
) -> None:
    """Split measurements into training data and held-out questions, so that `evaluate` is fair.

    Pairs and probes are held out by a hash of their addresses, so the same measurements are always split in the same
    way. All questions were measured after a cut in time, all training data before it.

    Examples:

        ping-llm split 'data/raw/*.parquet' --output data/split
        ping-llm prepare --input data/split/train --output data/rows      # then train, then
        ping-llm evaluate runs/ping-llm/my-run --data data/split
    """
    from ping_llm.evaluate.split import SplitSettings, write_split

    settings = SplitSettings(held_out_pairs=held_out_pairs, unseen_probes=unseen_probes, later=later)
    measured = options.read_measurements(files, how)
    found = write_split(measured, output, settings, overwrite=overwrite)
    questions = {protocol: len(observations) for protocol, observations in found.questions.items()}
    train, total = len(found.train), len(measured.observations)
    result = {"train": train, "history": len(found.history), "questions": questions, "unused": found.unused}
    text = f"{train:,} of {total:,} measurements are for training, in {output}/train"
    counts = (f"  {protocol:12} {count:,} questions" for protocol, count in questions.items())
    options.show(result, json_output, text, *counts)


def evaluate(
    models: Annotated[
        list[str] | None,
        Argument(metavar="MODEL", help="Runs or exported models; `completer`, or none, is the one of the package."),
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(help="Measurement file, folder or quoted glob, or a folder of `ping-llm split`; may be repeated."),
    ] = None,
    rows: Annotated[Path | None, Option(help="Folder of probe rows instead.")] = None,
    protocols: Annotated[
        list[str] | None,
        Option("--protocol", help="`unseen_pair`, `seen_pair`, `unseen_probe` or `disconnected`.", show_default="all"),
    ] = None,
    chosen: Annotated[
        list[str] | None,
        Option("--predictors", help="Names or patterns, such as 'completer,vivaldi*'; repeatable.", show_default="all"),
    ] = None,
    questions: Annotated[int, Option(min=1, help="Questions of each protocol, at most.")] = 1000,
    seed: Annotated[int, Option(min=0, help="Each seed selects other questions.")] = 0,
    context: Annotated[int, Option(min=8, help="Measurements a completer selects for a question with a time.")] = 1024,
    world: Annotated[Path | None, Option(help="Folder of simulated measurements: adds the true distributions.")] = None,
    plots: Annotated[Path | None, Option(help="Folder for plots, one for each protocol.")] = None,
    how: options.HowToRead = None,
    json_output: options.Json = False,
) -> None:
    """Compare models with the classical predictors on measurements that none of them has seen.

    Four protocols, reported separately because their errors differ by a factor of ten: **unseen_pair**, known nodes
    that never measured each other in the training data; **seen_pair**, later measurements of a known pair;
    **unseen_probe**, a source that was not trained on, from its earlier measurements; **disconnected**, two nodes that
    no chain of known measurements links, because all those between two halves of the nodes are hidden. The questions
    depend only on addresses and times, so they are the same for everybody who evaluates the same measurements, and
    their results are hidden from every predictor.

    A model of your own must not have been trained on the questions: run `ping-llm split` first, and train on its part
    for training.

    Examples:

        ping-llm evaluate --data my_pings.csv
        ping-llm evaluate --data data/raw --world data/raw --plots data/plots
        ping-llm evaluate --data my_pings.csv --predictors 'completer,neighbours,median*'
        ping-llm evaluate runs/ping-llm/my-run --data data/split --questions 5000 --json
    """
    from ping_llm.evaluate.plots import plot
    from ping_llm.evaluate.protocols import evaluate as run
    from ping_llm.evaluate.scores import save_evaluation, tables
    from ping_llm.predict.predictor import Predictor
    from ping_llm.sources.simulator import World

    if plots:
        options.check_folder(plots, f"--plots {plots}")
    only = [name.strip() for names in chosen or [] for name in names.split(",")]
    predictors: dict[str, Any] = {}
    sources: dict[str, str | None] = {}
    for where in models or (None,):  # before the measurements are read, which may take minutes
        predictor = Predictor.from_pretrained(where, context=context)
        name = predictor.name if predictor.name not in predictors else str(where)
        predictors[name], sources[name] = predictor, where
    truth = World.load(world) if world else None
    measured = _only(_split_of(data or [], rows, how), protocols or [])
    for predictor in predictors.values():
        _refuse_what_was_learned(predictor, measured)
    begun = time.monotonic()

    def finished(name: str, of: Mapping[str, Mapping[str, float]]) -> None:
        """Print each result, on a pipe too: all of them may take minutes."""
        errors = ", ".join(f"{protocol} {scores['median_re']:.4f}" for protocol, scores in of.items())
        err.print(f"{name}: median RE {errors} ({time.monotonic() - begun:.0f} s)", markup=False)

    with progress("evaluating") as advance:
        settings: dict[str, Any] = {"questions": questions, "seed": seed, "oracle": truth, "only": only}
        tell: dict[str, Any] = {"finished": finished, "note": lambda text: err.print(text, markup=False)}
        found = run(measured, predictors, **settings, advance=advance, **tell)
    with explained(f"cannot write to {plots or 'evaluation.json'}", OSError):
        written = save_evaluation(found, sources)  # for `ping-llm report`
        written += plot(found, plots) if plots else []
    for path in written:
        err.print(f"wrote {path}", markup=False)
    options.show(found.to_json(), json_output, tables(found))


def _split_of(data: Sequence[str], rows: Path | None, how: options.HowToRead) -> "Split":
    from ping_llm.evaluate.split import read_split, split
    from ping_llm.rows.manifest import Manifest
    from ping_llm.rows.measurement_set import joined, rows_observations
    from ping_llm.sources import SPLIT_FILE

    if bool(data) == bool(rows):
        raise PingLlmError("give what to evaluate on: either --data with measurement files, or --rows with a folder")
    if rows:  # all measurements, whichever of the rows' own splits they are in
        with progress("reading"):
            return split(joined([rows_observations(rows, name) for name in Manifest.load(rows).splits]))
    folders = [Path(name) for name in data if (Path(name) / SPLIT_FILE).exists()]
    if folders and len(data) > 1:
        raise PingLlmError(f"{folders[0]} is a split: give it as the only --data")
    return read_split(folders[0]) if folders else split(options.read_measurements(data, how))


def _only(split: "Split", protocols: Sequence[str]) -> "Split":
    """The split with only the questions of these protocols, if there are any."""
    if missing := [name for name in protocols if name not in split.questions]:
        raise PingLlmError(f"there are no questions of {', '.join(missing)}, only of {', '.join(split.questions)}")
    kept = {name: found for name, found in split.questions.items() if name in (protocols or split.questions)}
    return replace(split, questions=kept)


def _refuse_what_was_learned(predictor: "Predictor", split: "Split") -> None:
    from ping_llm.evaluate.split import trained_on

    try:
        learned = predictor.training_measurements()
    except PingLlmError as error:
        raise PingLlmError(f"cannot check that {predictor.name} was not trained on the questions: {error}") from error
    compromised = sum((Counter(trained_on(measured, split)) for measured in learned), Counter[str]())
    if compromised:
        counts = ", ".join(f"{count:,} questions of {protocol}" for protocol, count in compromised.items())
        others = [f"--protocol {protocol}" for protocol in split.questions if protocol not in compromised]
        raise PingLlmError(
            f"{predictor.name} was trained on measurements that are questions ({counts}): train it on the part that "
            "`ping-llm split` writes" + (f", or evaluate only {' '.join(others)}" if others else "")
        )
