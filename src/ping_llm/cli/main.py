"""The command line: one thin verb per task. Each reads its options, calls one function and shows what came back.

Results go to standard output (with `--json`, one JSON document as the last line), everything else to standard error.
"""

import sys
from typing import Annotated

import typer

from ping_llm import __version__
from ping_llm.cli import bench, data, evaluate, inspect, plan, predict, serve, train
from ping_llm.core.console import err, out
from ping_llm.core.errors import PingLlmError
from ping_llm.core.signals import stop_on_signals

app = typer.Typer(
    help="ping-llm: a language model of the Internet, learned from latency measurements.",
    epilog="Start with:  ping-llm predict --help   or   ping-llm simulate --output data/raw",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
import_app = typer.Typer(help="Turn other people's measurement formats into measurement files.", no_args_is_help=True)
inspect_app = typer.Typer(help="Look at what the other commands made.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure the speed of the parts on this machine.", no_args_is_help=True)

app.command()(predict.predict)
app.command()(data.simulate)
app.add_typer(import_app, name="import")
import_app.command("atlas")(data.import_atlas)
app.command()(evaluate.split)
app.command()(plan.plan)
app.command()(data.prepare)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(train.report)
app.command()(serve.serve)
app.command()(train.export)
app.command()(train.convert)
app.command()(predict.destinations)
app.command()(predict.complete)
app.command()(predict.anomalies)
app.add_typer(inspect_app, name="inspect")
inspect_app.command("rows")(inspect.inspect_rows)
inspect_app.command("batches")(inspect.inspect_batches)
inspect_app.command("batch")(inspect.inspect_batch)
app.add_typer(bench_app, name="bench")
bench_app.command("prepare")(bench.bench_prepare)
bench_app.command("pipeline")(bench.bench_pipeline)
bench_app.command("backends")(bench.bench_backends)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(f"ping-llm {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command; an error of the user's making is one line on standard error and a non-zero exit."""
    stop_on_signals()
    try:
        app()
    except PingLlmError as error:
        err.print(f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


def _escaped(message: str) -> str:
    return " ".join(message.split()).replace("[", r"\[")
