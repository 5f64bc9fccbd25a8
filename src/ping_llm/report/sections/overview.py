"""The top of the page: what the run is, how it stands, and its key figures."""

from collections.abc import Sequence
from datetime import timedelta

from ping_llm.report.figures import Figures, kind_of, token_word
from ping_llm.report.markup import Content, Markup, element
from ping_llm.report.reading import Run
from ping_llm.report.scales import SI, short, shown
from ping_llm.report.status import Note, Status


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
