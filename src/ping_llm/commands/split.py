"""`ping-llm split`: measurements for training, and questions that stay unseen."""

from pathlib import Path
from typing import Annotated

import typer

from ping_llm.commands.options import Columns, Json, Overwrite, print_json, renamed
from ping_llm.console import err, out, progress


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
    from ping_llm.evaluate.write_split import write_split
    from ping_llm.sources.observations import read_observations

    settings = SplitSettings(held_out_pairs=held_out_pairs, unseen_probes=unseen_probes, later=later)
    with progress("reading") as advance:
        measured = read_observations(files, columns=renamed(columns), on_progress=advance)
    for reason, count in measured.dropped.items():
        err.print(f"dropped {count:,} {reason}", markup=False)
    found = write_split(measured, output, settings, overwrite=overwrite)
    asked = {protocol: len(questions) for protocol, questions in found.questions.items()}
    if json_output:
        print_json(
            {"train": len(found.train), "history": len(found.history), "questions": asked, "unused": found.unused}
        )
        return
    out.print(
        f"{len(found.train):,} of {len(measured.observations):,} measurements are for training, in {output}/train"
    )
    for protocol, count in asked.items():
        out.print(f"  {protocol:12} {count:,} questions")
