"""`ping-llm export`: a trained model as plain files."""

from pathlib import Path
from typing import Annotated

import typer

from ping_llm.commands.options import Json, Overwrite, print_json
from ping_llm.commands.outputs import check_folder, writing
from ping_llm.console import out
from ping_llm.errors import PingLlmError


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the model to.")],
    card: Annotated[Path | None, typer.Option(help="Your own model card instead of the one that is made.")] = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Write a trained model as safetensors with its configuration and a model card.

    The folder can be given wherever a run can: to `predict`, `evaluate`, or as `load_parameters_path` of another run.
    Weights have 16 bits there; the averaged ones if the run kept an average.

    Example:

      ping-llm export runs/ping-llm/my-run --output models/my-model
    """
    from ping_llm.card import model_card
    from ping_llm.train.trained import check_replaceable, load_trained, save_trained

    check_folder(output, f"--output {output}")
    check_replaceable(output, overwrite=overwrite)
    own_card = _read_card(card) if card else None
    trained = load_trained(run)
    with writing(output):
        save_trained(trained, output, model_card(trained) if own_card is None else own_card, overwrite=overwrite)
    files = sorted(output.iterdir())
    size = sum(file.stat().st_size for file in files)
    if json_output:
        print_json(
            {"folder": str(output), "files": [file.name for file in files], "bytes": size, "steps": trained.steps}
        )
    else:
        out.print(f"{len(files)} files, {size / 1e6:,.1f} MB, in {output}: the model after {trained.steps:,} steps")


def _read_card(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise PingLlmError(f"cannot read the model card {path}: {reason}") from error
