"""Writing a report: asked for by a command, or at the end of a run, where it must never be what fails."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ping_llm.console import err

if TYPE_CHECKING:  # training imports this module, which must not import training before it is asked for something
    from ping_llm.train.folder import RunFolder

REPORT: Final = "report.html"


def write_report(
    runs: Sequence[Path], output: Path, *, evaluations: Sequence[Path] = (), with_sequences: bool = True
) -> Path:
    """One HTML file about a run, or about several side by side. `evaluations` belong to the runs in their order."""
    from ping_llm.report.page import page_of
    from ping_llm.report.reading import read_run
    from ping_llm.train.folder import RunFolder

    given: list[Path | None] = [*evaluations, *[None] * (len(runs) - len(evaluations))]
    read = [read_run(folder, file) for folder, file in zip(runs, given, strict=True)]
    RunFolder(output.parent).write(output, page_of(read, with_sequences=with_sequences))
    return output


def write_at_end(folder: "RunFolder", loader: Any) -> None:
    """The report of a run that ends, and what else of it only its process knows: how its data was made."""
    if isinstance(sys.exception(), KeyboardInterrupt):  # a second Ctrl-C: somebody wants it to end at once
        return
    try:
        _keep_what_the_loader_knows(folder, loader)
        write_report([folder.path], folder.path / REPORT)
    except Exception as error:  # a run does not fail for want of a picture
        message = " ".join(f"{type(error).__name__}: {error}".split())
        err.print(f"warning: the report was not written: {message}", markup=False, soft_wrap=True)


def _keep_what_the_loader_knows(folder: "RunFolder", loader: Any) -> None:
    from ping_llm.report.reading import DATA

    folder.write(folder.path / DATA, loader.state().to_json() + "\n")
    report = getattr(loader, "report", None)
    if report is not None and report.to_json()["batches"]:
        report.write(folder.path)
