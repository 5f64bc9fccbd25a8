"""`ping-llm train`, and what is done with a run afterwards: `export`, `convert`, `report`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ping_llm.cli.options import Json, OutputFolder, Overwrite, check_file, check_folder, show
from ping_llm.core.console import log_to_console
from ping_llm.core.errors import PingLlmError, explained


def train(
    changes: Annotated[list[str] | None, Argument(help="Keys of the configuration.", metavar="KEY=VALUE…")] = None,
    config: Annotated[Path | None, Option(help="Configuration file; see configs/ and docs/configuration.md.")] = None,
    project: Annotated[str | None, Option(help="Folder for related runs, and the project in W&B.")] = None,
    name: Annotated[str | None, Option(help="Name of the run. The same name resumes it.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Total number of steps.")] = None,
    skip_steps: Annotated[str | None, Option(help="Steps to skip, such as 10_240:10_260.")] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Sequences per step, over all devices.")] = None,
    json_output: Json = False,
) -> None:
    """Train a model, or resume a run that was interrupted: the same command does both.

    The run's folder (runs/PROJECT/NAME) gets the configuration, checkpoints, metrics.jsonl, TensorBoard files, the loss
    curve as a picture and summary.json. SIGTERM and Ctrl-C save and end the run; after any interruption, `kill -9`
    included, the same command continues on exactly the batches that would have come next.

    Examples:

        ping-llm train --config configs/latency_network.yml --project my-project --name my-run --steps 5000
        ping-llm train --config configs/demo.yml --name try learning_rate=1e-3 opt_type=muon
        ping-llm train dataset_type=synthetic enable_checkpointing=false --steps 50   # how fast is this machine?
    """
    from ping_llm.config import load_config
    from ping_llm.training.processes import start_processes

    log_to_console()
    given = {"project": project, "run_name": name, "steps": steps, "skip_steps": skip_steps}
    overrides = [*(changes or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    settings = load_config(config, overrides)
    folder = settings.base_output_directory
    check_folder(Path(folder), f"base_output_directory={folder}")
    start_processes(settings)
    if batch_size is not None:
        import jax

        settings = settings.replace(per_device_batch_size=batch_size / jax.device_count())
    from ping_llm.report.page import write_at_end
    from ping_llm.training import train as run

    summary = run(settings, at_end=write_at_end)
    show(summary, json_output, *_in_words(summary))
    if summary["stopped_by_signal"] == 2:
        raise typer.Exit(130)


def _in_words(summary: dict[str, Any]) -> Iterator[str]:
    if summary["complete"]:
        yield f"done: {summary['steps']:,} steps, in {summary['run']}"
    else:
        yield f"stopped and saved after {summary['steps']:,} steps; the same command resumes from there"
    for key, label in (("final_loss", "loss"), ("eval_loss", "evaluation loss")):
        if summary[key] is not None:
            yield f"  {label} {summary[key]:.4f}"
    if rate := summary["real_tokens_per_s"]:
        mfu = "" if summary["mfu"] is None else f", MFU {summary['mfu']:.1%}"
        yield f"  {rate:,} tokens/s{mfu}, {summary['data_wait_fraction']:.1%} of the time waiting for data"


def export(
    run: Annotated[Path, Argument(help="Folder of a training run.")],
    output: OutputFolder,
    card: Annotated[Path | None, Option(help="Your own model card instead of the generated one.")] = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Write a trained model as safetensors with its configuration and a model card.

    The folder can be used wherever a run can: by `predict`, `evaluate`, or as `load_parameters_path` of another run.
    The weights are stored as bfloat16; the averaged ones if the run kept an average.

    Example:

        ping-llm export runs/ping-llm/my-run --output models/my-model
    """
    from ping_llm.runs.task import model_card
    from ping_llm.runs.trained import load_trained
    from ping_llm.runs.weights import check_replaceable, save_trained

    check_folder(output, f"--output {output}")
    check_replaceable(output, overwrite=overwrite)
    with explained(f"cannot read the model card {card}", OSError, UnicodeDecodeError):
        text = card.read_text(encoding="utf-8") if card else None
    trained = load_trained(run)
    with explained(f"cannot write to {output}", OSError):
        save_trained(trained, output, model_card(trained) if text is None else text, overwrite=overwrite)
    files = sorted(output.iterdir())
    size = sum(file.stat().st_size for file in files)
    result = {"folder": str(output), "files": [file.name for file in files], "bytes": size, "steps": trained.steps}
    text = f"{len(files)} files, {size / 1e6:,.1f} MB, in {output}: the model after {trained.steps:,} steps"
    show(result, json_output, text)


def convert(
    model: Annotated[Path, Argument(help="A run or exported model of ping-llm; or RUN/checkpoints/STEP of MaxText.")],
    output: OutputFolder,
    changes: Annotated[
        list[str] | None,
        Argument(help="With --from: keys of the model that differ from --config.", metavar="KEY=VALUE…"),
    ] = None,
    to: Annotated[str | None, Option("--to", help="Format to write.", metavar="maxtext")] = None,
    source: Annotated[str | None, Option("--from", help="Format to read.", metavar="maxtext")] = None,
    config: Annotated[
        Path | None,
        Option(help="With --from: the run's MaxText configuration.", show_default="the recorded one"),
    ] = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Convert a trained language model to MaxText, or back: the same logits, up to rounding (docs/maxtext.md).

    Examples:

        ping-llm convert runs/ping-llm/my-run --to maxtext --output models/for-maxtext
        ping-llm convert maxtext_output/my-run/checkpoints/5000 --from maxtext --output models/from-maxtext
    """
    if [to, source].count(None) != 1 or (to or source) != "maxtext":
        raise PingLlmError("give --to maxtext or --from maxtext")
    if to and (config or changes):
        raise PingLlmError("--config and KEY=VALUE belong to --from maxtext: our models contain their configuration")
    check_folder(output, f"--output {output}")
    from ping_llm.integrations.maxtext.convert import convert_from_maxtext, convert_to_maxtext

    with explained(f"cannot write to {output}", OSError):
        if to:
            done = convert_to_maxtext(model, output, overwrite=overwrite)
        else:
            done = convert_from_maxtext(model, output, config=config, changes=changes or (), overwrite=overwrite)
    text = f"{done['parameters'] / 1e6:,.1f} M parameters after {done['steps']:,} steps, in {output}"
    where = [f"  load_parameters_path={done['load_parameters_path']}"] if to else []
    show({"folder": str(output), **done}, json_output, text, *where)


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Folders of runs; several are compared.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="File to write.", show_default="report.html in the run's folder")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        Option(help="Output of `ping-llm evaluate --json` to show instead of the run's own, one each."),
    ] = None,
    sequences: Annotated[
        bool, Option(help="Decode a few training sequences. They contain addresses: consider this before sharing.")
    ] = True,
    open_it: Annotated[bool, Option("--open", help="Open it in the browser.")] = False,
    json_output: Json = False,
) -> None:
    """Write the report of a run: curves, pipeline, evaluation, decoded sequences, configuration and history.

    The report is one self-contained HTML file. Training writes it at the end of every run; this command writes it
    again, also during a run. Several runs are drawn over each other, with the keys in which they differ.

    Examples:

        ping-llm report runs/ping-llm/my-run --open
        ping-llm report runs/ping-llm/before runs/ping-llm/after --output comparison.html
    """
    from ping_llm.report.page import REPORT, write_report

    given = evaluation or []
    if given and len(given) != len(runs):
        raise PingLlmError(f"--evaluation was given {len(given)} times for {len(runs)} runs: give one for each run")
    where = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    if output or where.is_dir():
        check_file(where)
    with explained(f"cannot write to {where}", OSError):
        write_report(runs, where, evaluations=given, with_sequences=sequences)
    if open_it:
        typer.launch(str(where.resolve()))
    size = where.stat().st_size
    result = {"report": str(where), "bytes": size, "runs": [str(run) for run in runs]}
    show(result, json_output, f"{where} ({size / 1e3:,.0f} kB)")
