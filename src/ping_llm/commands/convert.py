"""`ping-llm convert`: trained models to MaxText and back."""

from pathlib import Path
from typing import Annotated

import typer

from ping_llm.commands.options import Json, Overwrite, print_json
from ping_llm.commands.outputs import check_folder, writing
from ping_llm.console import out
from ping_llm.errors import PingLlmError


def convert(
    model: Annotated[Path, typer.Argument(help="A run or exported model of ours; or RUN/checkpoints/STEP of MaxText.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the model to.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="With --from: keys of the model that are not as in --config.", metavar="KEY=VALUE…"),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="Whose model to write.", metavar="maxtext")] = None,
    source: Annotated[str | None, typer.Option("--from", help="Whose model to read.", metavar="maxtext")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="With --from: the run's MaxText configuration.", show_default="what the engine noted"),
    ] = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Carry a trained language model over to MaxText, or back: the same logits, up to rounding. docs/maxtext.md.

    Examples:

      ping-llm convert runs/ping-llm/my-run --to maxtext --output models/for-maxtext

      ping-llm convert maxtext_output/my-run/checkpoints/5000 --from maxtext --output models/from-maxtext
    """
    if [to, source].count(None) != 1 or (to or source) != "maxtext":
        raise PingLlmError("say --to maxtext or --from maxtext")
    if to and (config or changes):
        raise PingLlmError("--config and KEY=VALUE belong to --from maxtext: our models know what they are made of")
    check_folder(output, f"--output {output}")
    from ping_llm.engines.maxtext.convert import convert_from_maxtext, convert_to_maxtext

    with writing(output):
        if to:
            done = convert_to_maxtext(model, output, overwrite=overwrite)
        else:
            done = convert_from_maxtext(model, output, config=config, changes=changes or (), overwrite=overwrite)
    path = done.load_parameters_path
    if json_output:
        print_json(
            {
                "folder": str(done.folder),
                "parameters": done.parameters,
                "steps": done.steps,
                "load_parameters_path": None if path is None else str(path),
            }
        )
        return
    out.print(f"{done.parameters / 1e6:,.1f} M parameters after {done.steps:,} steps, in {done.folder}", soft_wrap=True)
    if path is not None:
        out.print(f"  load_parameters_path={path}", soft_wrap=True, markup=False)
