"""The top of the page: what the run is, how it stands, and its key figures."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from ping_llm.report.figures import Figures, Note, Status, kind_of, token_word
from ping_llm.report.markup import Content, Markup, element, tabbed, table
from ping_llm.report.run import Run
from ping_llm.report.scales import SI, short, shown
from ping_llm.report.scores import COLUMNS, TABS, best_in_column, classical_best, naming, protocols_of, score_cell
from ping_llm.report.sections import section


def overview(run: Run, found: Figures, status: Status, notes: Sequence[Note]) -> Markup:
    return element(
        "header",
        element("p", f"ping-llm run report · {run.settings.get('project', '')}", class_="kicker"),
        element("h1", run.name, " ", element("span", status.word, class_=f"badge {status.tone}")),
        element("p", _sentence(run, found), class_="lead"),
        element("p", status.sentence, class_="lead soft") if status.sentence else None,
        _strip(run, found),
        note_list(notes),
        id="overview",
    )


def note_list(notes: Sequence[Note]) -> Markup | None:
    if not notes:
        return None
    lines = [element("li", note.text, class_=note.tone) for note in notes]
    return element("ul", lines, class_="notes", aria_label="Warnings")


def _sentence(run: Run, found: Figures) -> str:
    wanted = f" of {run.steps_wanted:,}" if isinstance(run.steps_wanted, int) else ""
    size = f" with {short(found.parameters)} parameters" if found.parameters else ""
    machine = hardware(run)
    seen = f", {short(found.tokens)} {token_word(run)}s" if found.tokens else ""
    return f"A {kind_of(run)}{size}: {run.steps_done:,}{wanted} steps{seen}{f', on {machine}' if machine else ''}."


def hardware(run: Run) -> str:
    machine = run.sessions[-1].machine if run.sessions else {}
    return f"{machine['devices']}\u00a0×\u00a0{machine['device']}" if {"devices", "device"} <= machine.keys() else ""


def _strip(run: Run, found: Figures) -> Markup:
    token = token_word(run)
    best = "never evaluated" if found.best_eval_step is None else f"lowest, at step {found.best_eval_step:,}"
    tiles = [
        _tile("Evaluation loss", shown(found.best_eval_loss), f"nats/{_asked(run)}", best),
        _tile("Training loss", shown(found.loss), f"nats/{_asked(run)}", "mean of the last steps"),
        _tile("Speed", short(found.tokens_per_s), f"{token}s/s", f"real {token}s, no padding"),
        _tile("MFU", shown(found.mfu, "percent"), "", "of the device's peak" if found.mfu else "peak unknown"),
        _tile("Waiting for data", shown(found.data_wait, "percent"), "", "of the training time"),
        _tile("Padding", shown(found.padding, "percent"), "", "of all places") if found.padding is not None else None,
        _tile("Compute", *_compute(found), f"{short(found.tokens)} {token}s"),
        _tile("Time", *_parted(lasting(found.time)), "all sessions together") if found.time else None,
    ]
    return element("dl", tiles, class_="strip")


def _compute(found: Figures) -> tuple[str, str]:
    """3.2 PFLOP: the prefix belongs to the unit."""
    number, prefix = _parted(short(found.flops, SI, " "))
    return number, f"{prefix}FLOP"


def _parted(text: str) -> tuple[str, str]:
    number, _, unit = text.partition(" ")
    return number, unit


def _asked(run: Run) -> str:
    return "question" if token_word(run) == "place" else "token"


def _tile(name: str, value: str, unit: str, note: str) -> Markup:
    dash = value == "–"
    number = element("span", value, class_="value faint" if dash else "value")
    parts: Content = [number, " ", element("span", unit, class_="unit")] if unit and not dash else number
    return element("div", element("dt", name), element("dd", parts, element("p", note, class_="note")))


def lasting(time: timedelta | None) -> str:
    """A number and a unit."""
    seconds = 0.0 if time is None else time.total_seconds()
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return "–" if time is None else f"{seconds:.0f} s"


# Several runs side by side: figures with the best marked, and their evaluations.

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
