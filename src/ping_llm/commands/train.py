"""`ping-llm train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ping_llm.commands.options import Json, print_json
from ping_llm.commands.outputs import check_folder
from ping_llm.console import out


def train(
    changes: Annotated[
        list[str] | None, typer.Argument(help="Keys of the configuration, as key=value.", metavar="KEY=VALUE…")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; see configs/ and docs/configuration.md.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Folder for runs that belong together; W&B's project.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. The same name goes on where it stopped.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences a step, of all devices together.")] = None,
    json_output: Json = False,
) -> None:
    """Train a model, or go on with a run that was interrupted: the same command does both.

    The run's folder (runs/PROJECT/NAME) gets the configuration, checkpoints, metrics.jsonl, TensorBoard files, the loss
    curve as a picture and summary.json. SIGTERM and Ctrl-C save and end the run; after any interruption, `kill -9`
    included, the same command continues on exactly the batches that would have come next.

    Examples:

      ping-llm train --config configs/latency_network.yml --project my-project --name my-run --steps 5000

      ping-llm train --config configs/demo.yml --name try learning_rate=1e-3 opt_type=muon

      ping-llm train dataset_type=synthetic enable_checkpointing=false --steps 50     # how fast is this machine?
    """
    from ping_llm.config import load_config
    from ping_llm.train.hardware import start_processes

    given = {"project": project, "run_name": name, "steps": steps}
    overrides = [*(changes or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    settings = load_config(config, overrides)
    runs = settings.base_output_directory
    check_folder(Path(runs), f"base_output_directory={runs}")
    start_processes(settings)
    if batch_size is not None:
        import jax

        settings = settings.replace(per_device_batch_size=batch_size / jax.device_count())
    from ping_llm.train import train as run

    summary = run(settings)
    if json_output:
        print_json(summary)
    else:
        _show_summary(summary)
    if summary["stopped_by_signal"] == 2:
        raise typer.Exit(130)


def _show_summary(summary: dict[str, Any]) -> None:
    if summary["complete"]:
        out.print(f"done: {summary['steps']:,} steps, in {summary['run']}")
    else:
        out.print(f"stopped and saved after {summary['steps']:,} steps; the same command goes on from there")
    for key, label in (("final_loss", "loss"), ("eval_loss", "evaluation loss")):
        if summary[key] is not None:
            out.print(f"  {label} {summary[key]:.4f}")
    if summary["real_tokens_per_s"]:
        mfu = "" if summary["mfu"] is None else f", MFU {summary['mfu']:.1%}"
        wait = summary["data_wait_fraction"]
        out.print(f"  {summary['real_tokens_per_s']:,} tokens/s{mfu}, {wait:.1%} of the time waiting for data")
