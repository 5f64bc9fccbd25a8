"""The page: its sections, style and script in one file that asks for no other.

A content security policy allows just this script, by its hash: text that got through the escaping would not run either.
"""

import base64
import hashlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.report.figures import Note, figures_of, notes_of, status_of
from ping_llm.report.markup import Content, Markup, element, join
from ping_llm.report.run import Run
from ping_llm.report.sections.configuration import configuration, differences, history, model_and_data
from ping_llm.report.sections.curves import training
from ping_llm.report.sections.evaluation import evaluation
from ping_llm.report.sections.overview import comparison, evaluations, overview
from ping_llm.report.sections.pipeline import pipeline, pipelines
from ping_llm.report.sections.sequences import sequences

if TYPE_CHECKING:
    from ping_llm.runs import RunFolder

_LINKS = (
    ("training", "Training"),
    ("pipeline", "Pipeline"),
    ("evaluation", "Evaluation"),
    ("sequences", "Sequences"),
    ("origin", "Model and data"),
    ("configuration", "Configuration"),
    ("history", "History"),
)


def page_of(runs: Sequence[Run], *, with_sequences: bool = True) -> str:
    """The report of a run, or of several side by side."""
    content = _one(runs[0], with_sequences) if len(runs) == 1 else _several(runs)
    title = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    style, script = _file("style.css") + _file("report.css"), _file("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    present = [(name, label) for name, label in _LINKS if f'id="{name}"' in content]
    navigation = element(
        "nav",
        element("a", "Overview", href="#overview"),
        [element("a", label, href=f"#{name}") for name, label in present],
        element("button", "Dark", type="button", id="theme", hidden=True),
        aria_label="Sections",
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=f"ping-llm {__version__}"),
        element("title", f"{title} · ping-llm report"),
        element("style", Markup(style)),
    )
    made = f"Made by ping-llm {__version__} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from "
    places = [element("code", str(run.folder)) for run in runs]
    footer = element("footer", element("p", made, join(places, ", "), "."))
    body = element("body", navigation, element("main", content), footer, element("script", Markup(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _one(run: Run, with_sequences: bool) -> Markup:
    found = figures_of(run)
    status = status_of(run)
    parts: list[Content] = [
        overview(run, found, status, notes_of(run, found)),
        training([run], [run.name]),
        pipeline(run),
        evaluation(run.evaluation),
        sequences(run, wanted=with_sequences),
        model_and_data(run, found),
        configuration(run),
        history(run),
    ]
    return join(parts)


def _several(runs: Sequence[Run]) -> Markup:
    names = distinct_names(runs)
    found = [figures_of(run) for run in runs]
    statuses = [status_of(run) for run in runs]
    notes = [
        [*([Note(tone=status.tone, text=status.sentence)] if status.sentence else []), *notes_of(run, figures)]
        for run, figures, status in zip(runs, found, statuses, strict=True)
    ]
    parts: list[Content] = [
        comparison(runs, names, found, statuses, notes),
        training(runs, names),
        differences(runs, names),
        evaluations(runs, names),
        pipelines(runs, names),
    ]
    return join(parts)


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, with as much of the path as tells them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def _file(name: str) -> str:
    return files("ping_llm.report").joinpath(name).read_text(encoding="utf-8")


# Writing a report: asked for by a command, or at the end of a run, where it must never be what fails.

REPORT: Final = "report.html"


def write_report(
    runs: Sequence[Path], output: Path, *, evaluations: Sequence[Path] = (), with_sequences: bool = True
) -> Path:
    """One HTML file about a run, or about several side by side. `evaluations` belong to the runs in their order."""
    from ping_llm.report.run import read_run
    from ping_llm.runs import RunFolder

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
    from ping_llm.report.run import DATA

    folder.write(folder.path / DATA, loader.state().to_json() + "\n")
    report = getattr(loader, "report", None)
    if report is not None and report.to_json()["batches"]:
        report.write(folder.path)
