"""The page: its sections, style and script in one file that asks for no other.

A content security policy allows just this script, by its hash: text that got through the escaping would not run either.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from ping_llm import __version__
from ping_llm.report.figures import figures_of
from ping_llm.report.markup import Content, Markup, element, join
from ping_llm.report.reading import Run
from ping_llm.report.sections.comparison import comparison, evaluations
from ping_llm.report.sections.configuration import configuration, differences
from ping_llm.report.sections.curves import training
from ping_llm.report.sections.evaluation import evaluation
from ping_llm.report.sections.origin import history, model_and_data
from ping_llm.report.sections.overview import overview
from ping_llm.report.sections.pipeline import pipeline, pipelines
from ping_llm.report.sections.sequences import sequences
from ping_llm.report.status import Note, notes_of, status_of

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
