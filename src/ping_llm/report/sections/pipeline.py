"""Where the time of the input pipeline goes, and what limits it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ping_llm.batches.report import PipelineReport, draw
from ping_llm.config.keys import TEXT
from ping_llm.data.completer import COMPLETER_DATA
from ping_llm.data.stream import TextReport
from ping_llm.report.markup import Markup, element, table
from ping_llm.report.run import Run
from ping_llm.report.scales import short, shown
from ping_llm.report.sections import missing, section


def pipeline(run: Run) -> Markup:
    return section("pipeline", "Input pipeline", _of(run))


def pipelines(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Several beside each other, as numbers alone."""
    found = [run.pipeline for run in runs]
    if not any(found):
        return None
    stages = list(dict.fromkeys(stage for report in found if report for stage in report["stages"]))
    lines: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("bottleneck", lambda report: str(report["bottleneck"])),
        ("waiting for data", lambda report: shown(report["wait_share"], "percent")),
        ("worker processes", lambda report: f"{report['workers']:,}"),
        ("real tokens a second", lambda report: short(report["real_tokens_per_s"])),
        ("padding", lambda report: shown(report["padding_fraction"], "percent")),
    ]
    lines += [(f"{stage}, ms a batch", partial(_milliseconds, stage)) for stage in stages]
    rows = [[title, *(show(report) if report else "–" for report in found)] for title, show in lines]
    return section("pipeline", "Input pipeline", table(["", *names], rows, caption="Pipelines", class_="numbers"))


def _milliseconds(stage: str, report: Mapping[str, Any]) -> str:
    return f"{report['stages'][stage]['ms_per_batch']:,.2f}" if stage in report["stages"] else "–"


def _of(run: Run) -> Markup:
    if run.pipeline:
        return _measured(run.pipeline, _meaning(run))
    if run.dataset_type in COMPLETER_DATA:
        return missing("The device makes its contexts itself, within the step: there is no pipeline to wait for.")
    if run.dataset_type == "synthetic":
        return missing("Random tokens, made before the run began: there is no pipeline to wait for.")
    return missing(
        "The time of each stage is written when a session ends, and none has yet. While a run is going, "
        "grain_visualization_dir writes it every minute."
    )


def _meaning(run: Run) -> Mapping[str, str]:
    return TextReport.meaning if run.dataset_type in TEXT else PipelineReport.meaning


def _measured(report: Mapping[str, Any], meaning: Mapping[str, str]) -> Markup:
    bottleneck = report["bottleneck"]
    verdict = {
        "consumer": "The model is the bottleneck: batches are ready before they are asked for.",
        "unknown": "Too few batches were made to tell what limits them.",
    }.get(bottleneck, f"The bottleneck is “{bottleneck}”: {report['advice']}.")
    workers = report["workers"]
    made = f"by {workers} worker process{'es' if workers != 1 else ''}" if workers else "in the training process"
    facts = (
        f"{report['batches']:,} batches made {made}; training waited {shown(report['wait_share'], 'percent')} of the "
        f"time for them, and {report.get('first_batch_s', 0):,} s for the first. Numbers are those of the last session."
    )
    picture = draw(dict(report)).replace("<svg ", f'<svg role="img" aria-label="{_described(report)}" ', 1)
    most = max([1e-9, *(stage["ms_per_batch"] for stage in report["stages"].values())])
    rows = [
        [
            element("span", name, class_="strong") if name == bottleneck else name,
            element("td", _bar(stage["ms_per_batch"] / most, strong=name == bottleneck), class_="bar"),
            f"{stage['ms_per_batch']:,.2f}",
            shown(stage["share"], "percent"),
            element("td", meaning.get(name, ""), class_="text"),
        ]
        for name, stage in report["stages"].items()
    ]
    return element(
        "div",
        element("p", verdict, class_="verdict"),
        element("p", facts, class_="note"),
        element("div", Markup(picture), class_="graph scroll", tabindex=0, role="region", aria_label="Pipeline graph"),
        table(
            ["stage", "", "ms a batch", "share", "what it does"],
            rows,
            caption="Time of each stage",
            class_="numbers stages",
        ),
    )


def _bar(share: float, *, strong: bool) -> Markup:
    return element("span", class_="fill strong" if strong else "fill", style=f"width:{100 * share:.1f}%")


def _described(report: Mapping[str, Any]) -> str:
    """Of numbers and names that `_is_pipeline` has seen; escaped as anything else."""
    stages = ", ".join(f"{name} {stage['ms_per_batch']} ms" for name, stage in report["stages"].items())
    return str(element("b", f"Pipeline: rows, {stages}, training"))[3:-4]
