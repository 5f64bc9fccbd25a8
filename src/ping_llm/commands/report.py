"""`ping-llm report`: a run to look at, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from ping_llm.commands.options import Json, print_json
from ping_llm.commands.outputs import check_folder, writing
from ping_llm.console import out
from ping_llm.errors import PingLlmError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs; several are laid side by side.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="report.html in the run's folder"),
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            help="What `ping-llm evaluate --json` printed, instead of the run's own evaluation.json; "
            "for several runs, one for each of them."
        ),
    ] = None,
    sequences: Annotated[
        bool, typer.Option(help="Decode a few training sequences. They hold addresses: think before you share them.")
    ] = True,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    json_output: Json = False,
) -> None:
    """Show a run as a page: curves, pipeline, evaluation, decoded sequences, configuration and history.

    The page is one file that needs no other and no network. Training writes it at the end of every run; this command
    makes it anew, also while a run is going. Several runs are laid over each other, with what differs between them.

    Examples:

      ping-llm report runs/ping-llm/my-run --open

      ping-llm report runs/ping-llm/before runs/ping-llm/after --output comparison.html
    """
    from ping_llm.report.write import REPORT, write_report

    given = evaluation or []
    if given and len(given) != len(runs):
        raise PingLlmError(f"--evaluation was given {len(given)} times for {len(runs)} runs: give one for each run")
    where = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    if where.is_dir():
        raise PingLlmError(f"--output {where}: there is a folder of that name")
    if output:
        check_folder(where.parent, f"--output {where}")
    with writing(where):
        write_report(runs, where, evaluations=given, with_sequences=sequences)
    if open_it:
        typer.launch(str(where.resolve()))
    if json_output:
        print_json({"report": str(where), "bytes": where.stat().st_size, "runs": [str(run) for run in runs]})
    else:
        out.print(f"{where} ({where.stat().st_size / 1e3:,.0f} kB)", markup=False, soft_wrap=True)
