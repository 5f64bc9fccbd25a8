"""Several runs side by side: figures with the best marked, and their evaluations."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from ping_llm.report.figures import Figures, kind_of
from ping_llm.report.markup import Content, Markup, element, tabbed, table
from ping_llm.report.reading import Run
from ping_llm.report.scales import SI, short, shown
from ping_llm.report.scores import (
    COLUMNS,
    TABS,
    best_in_column,
    classical_best,
    naming,
    protocols_of,
    score_cell,
)
from ping_llm.report.sections import section
from ping_llm.report.sections.overview import hardware, lasting, note_list
from ping_llm.report.status import Note, Status

_Show = Callable[[Any], str]
_ROWS: Final[tuple[tuple[str, str, _Show, Callable[..., Any] | None], ...]] = (
    ("Lowest evaluation loss, nats", "best_eval_loss", shown, min),
    ("Training loss at the end, nats", "loss", shown, min),
    ("Real tokens a second", "tokens_per_s", short, max),
    ("MFU", "mfu", lambda value: shown(value, "percent"), max),
    ("Waiting for data", "data_wait", lambda value: shown(value, "percent"), min),
    ("Padding", "padding", lambda value: shown(value, "percent"), min),
    ("Tokens", "tokens", short, None),
    ("Parameters", "parameters", short, None),
    ("FLOP", "flops", lambda value: short(value, SI), None),
    ("Time", "time", lasting, None),
)


def comparison(
    runs: Sequence[Run],
    names: Sequence[str],
    found: Sequence[Figures],
    statuses: Sequence[Status],
    notes: Sequence[Sequence[Note]],
) -> Markup:
    rows: list[list[Content]] = [
        ["Status", *(element("td", element("span", s.word, class_=f"badge {s.tone}")) for s in statuses)],
        ["Steps", *(f"{run.steps_done:,}" for run in runs)],
    ]
    for title, key, show, best in _ROWS:
        values = [getattr(figures, key) for figures in found]
        known = [value for value in values if value is not None]
        chosen = best(known) if best and len(known) > 1 and len(set(known)) > 1 else None
        if known:
            rows.append([title, *(_cell(value, show, chosen) for value in values)])
    rows.append(["Model", *(kind_of(run) for run in runs)])
    rows.append(["Machine", *(hardware(run) or "–" for run in runs)])
    heads = [element("span", _swatch(i), name, class_="run-name") for i, name in enumerate(names)]
    told = [
        element("div", element("h3", name), note_list(lines), class_="part")
        for name, lines in zip(names, notes, strict=True)
        if lines
    ]
    return element(
        "header",
        element("p", "ping-llm run report", class_="kicker"),
        element("h1", f"{len(runs)} runs side by side"),
        table(["", *heads], rows, caption="Key figures; the best of each line is marked", class_="numbers runs"),
        told,
        id="overview",
    )


def _swatch(index: int) -> Markup:
    return element("span", class_="key line", style=f"--colour:var(--series-{index % 8 + 1})")


def _cell(value: Any, show: _Show, best: Any) -> Markup:
    if best is None or value != best:
        return element("td", show(value))
    return element("td", element("span", "★", class_="star", aria_label="best: "), show(value), class_="best")


def evaluations(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """The model of each run, and the best classical predictor of the first evaluation that has one."""
    by_run = [protocols_of(run.evaluation) for run in runs]
    asked = list(dict.fromkeys(protocol for protocols in by_run for protocol in protocols))
    if not asked:
        return None
    panels = []
    for protocol in asked:
        scores: dict[str, Any] = {}
        for run, name, protocols in zip(runs, names, by_run, strict=True):
            if protocol in protocols and run.evaluation:
                own = naming(run.evaluation)[1][0]
                scores[name] = protocols[protocol].get(own, {})
                scores |= {f"{who} (baseline)": s for who, s in classical_best(protocols[protocol], run.evaluation)}
        best = {key: best_in_column(key, [s.get(key) for s in scores.values()]) for key in COLUMNS}
        rows = [[who, *(score_cell(key, s.get(key), best[key]) for key in COLUMNS)] for who, s in scores.items()]
        heads: list[Content] = ["predictor", *(column.title for column in COLUMNS.values())]
        panels.append((TABS.get(protocol, protocol), table(heads, rows, caption="Scores", class_="numbers scores")))
    lead = "Compare them only where they were asked the same questions."
    return section("evaluation", "Evaluation", tabbed("Protocol", panels), lead=lead)
