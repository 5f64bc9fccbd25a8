"""The report of a run or a comparison of several, as a page."""

import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from ping_llm.batches.report import draw
from ping_llm.config import KEYS
from ping_llm.config.keys import COMPLETER_DATA, TEXT_DATASET_TYPES
from ping_llm.contexts.spec import STAGES
from ping_llm.core.console import err
from ping_llm.core.files import write_atomically
from ping_llm.data.registry import TEXT_STAGES
from ping_llm.evaluate.scores import SCORE_COLUMNS
from ping_llm.report.charts import training_charts
from ping_llm.report.formatting import SI, duration, number, percent, short
from ping_llm.report.rendering import environment, rendered, write_page
from ping_llm.report.run import DATA_FILE, Run
from ping_llm.report.sections import compared_evaluations, differing_keys, evaluation_of, fingerprint, sequences_of

if TYPE_CHECKING:
    from ping_llm.runs import RunFolder

REPORT: Final = "report.html"
_STYLES: Final = ("style.css", "uPlot.min.css", "report.css")
_SCRIPTS: Final = ("uPlot.min.js", "chart.js", "theme.js", "report.js")


def page_of(runs: Sequence[Run], *, with_sequences: bool = True) -> str:
    """The report of a run, or a comparison of several. Sequences contain addresses: `with_sequences` can omit them."""
    for run, label in zip(runs, distinct_labels(runs), strict=True):
        run.label = label
    values: dict[str, Any] = {
        "runs": runs,
        "charts": training_charts(runs),
        "window": max(run.window for run in runs),
    }
    if len(runs) == 1:
        left_out = "Left out of this report: sequences contain addresses."
        values["protocols"] = evaluation_of(runs[0])
        values["sequences"] = sequences_of(runs[0]) if with_sequences else left_out
        return rendered("run.html", _STYLES, _SCRIPTS, values)
    values["protocols"] = compared_evaluations(runs)
    values["differing"], values["same"] = differing_keys(runs)
    return rendered("comparison.html", _STYLES, _SCRIPTS, values)


def _backticks(text: str) -> Markup:
    """Text between backticks as code."""
    parts = escape(text).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _pipeline_graph(report: dict[str, Any]) -> Markup:
    """The SVG of a pipeline, with a label for screen readers."""
    stages = ", ".join(f"{name} {stage['ms_per_batch']} ms" for name, stage in report["stages"].items())
    name = escape(f"Pipeline: files, {stages}, training")
    return Markup(draw(report).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1))


_ENVIRONMENT: Final = environment()
_ENVIRONMENT.filters |= {own.__name__: own for own in (number, percent, short, duration, fingerprint)}
_ENVIRONMENT.filters |= {"backticks": _backticks, "pipeline_graph": _pipeline_graph}
_ENVIRONMENT.globals |= {"KEYS": KEYS, "SI": SI, "SCORE_COLUMNS": SCORE_COLUMNS}
_ENVIRONMENT.globals |= {"COMPLETER_DATA": COMPLETER_DATA, "TEXT_DATASET_TYPES": TEXT_DATASET_TYPES}
_ENVIRONMENT.globals |= {"STAGES": STAGES, "TEXT_STAGES": TEXT_STAGES}


def distinct_labels(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, with as much of their paths as makes them distinct."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def write_report(
    runs: Sequence[Path], output: Path, *, evaluations: Sequence[Path] = (), with_sequences: bool = True
) -> Path:
    """Write the report of a run, or a comparison of several; `evaluations` are those of the runs, in their order."""
    read = [Run(folder, file) for folder, file in zip_longest(runs, evaluations)]
    write_page(page_of(read, with_sequences=with_sequences), output)
    return output


def write_at_end(folder: "RunFolder", loader: Any) -> None:
    """At the end of a run, write its report and what only its process knows: the state of its data and pipeline."""
    if isinstance(sys.exception(), KeyboardInterrupt):  # a second Ctrl-C asks it to end at once
        return
    try:
        write_atomically(folder.path / DATA_FILE, loader.state().to_json() + "\n")
        report = getattr(loader, "report", None)
        if report is not None and report.to_json()["batches"]:
            report.write(folder.path)
        write_report([folder.path], folder.path / REPORT)
    except Exception as error:  # a run does not fail because its report does
        message = " ".join(f"{type(error).__name__}: {error}".split())
        err.print(f"warning: the report was not written: {message}", markup=False)
