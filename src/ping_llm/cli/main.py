"""The command line. Each command reads its options, calls one function and shows the result.

Results go to standard output (with `--json`, one JSON document as the last line), everything else to standard error.
"""

import os
import sys
from typing import Annotated

from typer import Exit, Option, Typer

from ping_llm import __version__
from ping_llm.cli import anomalies, data, evaluate, inspect, options, predict, serve, train
from ping_llm.core.console import err, out, print_error
from ping_llm.core.errors import PingLlmError, missing_extra
from ping_llm.core.signals import stop_on_signals

app = Typer(
    help="ping-llm: a language model of the Internet, learned from latency measurements.",
    epilog="Start with:  ping-llm predict --help   or   ping-llm simulate --output data/raw",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
from_data = data.simulate, evaluate.split, data.plan, data.prepare, data.tokenize
to_a_model = predict.predict, *from_data, train.train, evaluate.evaluate
with_a_model = train.report, serve.serve, train.export, train.convert
questions = predict.suggest, predict.destinations, predict.complete, anomalies.anomalies
for command in (*to_a_model, *with_a_model, *questions):
    app.command()(options.expanded(command, "how", options.input_options))

import_app = Typer(help="Convert measurements of other formats into measurement files.", no_args_is_help=True)
import_app.command("atlas")(data.import_atlas)
app.add_typer(import_app, name="import")
inspect_app = Typer(help="Inspect what other commands have written.", no_args_is_help=True)
inspect_app.command("rows")(inspect.inspect_rows)
inspect_app.command("batches")(options.expanded(inspect.inspect_batches, "spec", inspect.batches_spec))
inspect_app.command("batch")(options.expanded(inspect.inspect_batch, "spec", inspect.batches_spec))
app.add_typer(inspect_app, name="inspect")
bench_app = Typer(help="Measure how fast this machine is.", no_args_is_help=True)
bench_app.command("pipeline")(inspect.bench_pipeline)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(f"ping-llm {__version__}")
        raise Exit


def main() -> None:
    """Run a command. Faulty input and errors of the system end in one line on standard error."""
    stop_on_signals()
    try:
        app()
    except (PingLlmError, OSError, ModuleNotFoundError) as error:
        reason: object = error
        if isinstance(error, ModuleNotFoundError) and not (reason := missing_extra(error, f"ping-llm {sys.argv[1]}")):
            raise
        if isinstance(error, OSError):  # such as a full disk, wherever it was met
            reason = PingLlmError(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is flushed again at exit
        print_error(reason)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
