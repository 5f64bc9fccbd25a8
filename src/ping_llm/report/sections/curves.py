"""The curves of a training: of one run, or of several, laid over each other."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ping_llm.report.chart import Chart, Line, View, draw
from ping_llm.report.figures import figures_of, padding_by_step, token_word
from ping_llm.report.markup import Markup, element
from ping_llm.report.run import Run
from ping_llm.report.scales import Floats, Style, smoothed, smoothing_window
from ping_llm.report.sections import missing, section

_LOSS_VIEWS: Final = (
    View(label="linear"),
    View(label="log", log_y=True),
    View(label="log–log", log_x=True, log_y=True),
)
_MOST_FAINT: Final = 3
"""Runs whose raw losses are drawn as well."""
_SPIKY: Final = 15.0


def training(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    if not any(len(run.curves.step) for run in runs):
        return section("training", "Training", missing("No step has been finished yet, so there is no curve."))
    token = token_word(runs[0])
    several = len(runs) > 1
    charts = [
        _loss(runs, names),
        _chart(runs, names, "Speed", f"real {token}s a second", "real_tokens_per_s", style="count"),
        _chart(
            runs, names, "Waiting for data", "share of the time of the last 20 steps", "data_wait_fraction", "percent"
        ),
        _chart(runs, names, "Model FLOPs utilisation", "share of the device's peak", "mfu", "percent"),
        _chart(runs, names, "Gradient norm", "before clipping", "grad_norm", smooth=True),
        _chart(runs, names, "Learning rate", "by the schedule", "learning_rate"),
        _padding(runs, names),
    ]
    window = max(smoothing_window(len(run.curves.step)) for run in runs)
    lead = f"Strong lines are means over {window:,} steps, a fiftieth of the run; faint ones are single steps."
    if several:
        lead += " A colour is a run."
    return section("training", "Training", element("div", charts, class_="charts"), lead=lead if window > 1 else None)


def _loss(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        several = len(runs) > 1
        step, loss = run.curves.step, run.curves["loss"]
        window = smoothing_window(len(step))
        colour = number + 1
        prefix = f"{name}, " if several else ""
        if window > 1 and len(runs) <= _MOST_FAINT:
            lines.append(
                Line(name=f"{prefix}each step", x=step, y=loss, colour=colour, kind="faint", in_legend=not several)
            )
        lines.append(Line(name=name if several else "training", x=step, y=smoothed(loss, window), colour=colour))
        if len(run.curves.eval_loss):
            at, value = run.curves.evaluated_at, run.curves.eval_loss
            other = colour if several else 2
            lines.append(
                Line(name=f"{prefix}evaluation", x=at, y=value, colour=other, kind="dots", in_legend=not several)
            )
    what = "question" if token_word(runs[0]) == "place" else "token"
    dots = "; dots: evaluation" if len(runs) > 1 and any(line.kind == "dots" for line in lines) else ""
    chart = Chart(
        title="Loss",
        unit=f"cross entropy, nats a {what}{dots}",
        lines=lines,
        views=_LOSS_VIEWS,
        marks=_resumes(runs),
        x_range=_steps(runs),
    )
    return draw(chart, wide=True)


def _chart(
    runs: Sequence[Run],
    names: Sequence[str],
    title: str,
    unit: str,
    column: str,
    style: Style = "number",
    *,
    smooth: bool = False,
) -> Markup | None:
    """None if nobody knows any of its values: the utilisation of an unknown device."""
    values = [run.curves[column] for run in runs]
    if not any(np.isfinite(value).any() for value in values):
        return None
    return _of_columns(runs, names, values, title, unit, style, smooth=smooth)


def _padding(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    shares = [padding_by_step(run, figures_of(run).batch) for run in runs]
    if all(share is None for share in shares):
        return None
    values = [np.full(len(run.curves.step), np.nan) if s is None else s for run, s in zip(runs, shares, strict=True)]
    return _of_columns(runs, names, values, "Padding", "share of the places of a batch", "percent", smooth=True)


def _of_columns(
    runs: Sequence[Run],
    names: Sequence[str],
    values: Sequence[Floats],
    title: str,
    unit: str,
    style: Style,
    *,
    smooth: bool,
) -> Markup:
    lines = []
    for number, (run, name, value) in enumerate(zip(runs, names, values, strict=True)):
        window = smoothing_window(len(value)) if smooth else 1
        if window > 1 and len(runs) <= _MOST_FAINT:
            each = f"{name}, each step" if len(runs) > 1 else "each step"
            lines.append(Line(name=each, x=run.curves.step, y=value, colour=number + 1, kind="faint", in_legend=False))
        label = name if len(runs) > 1 else "mean" if window > 1 else title.lower()
        lines.append(Line(name=label, x=run.curves.step, y=smoothed(value, window), colour=number + 1))
    every = np.concatenate([value[np.isfinite(value)] for value in values])
    spiky = bool(len(every)) and every.min() > 0 and every.max() > _SPIKY * np.median(every)
    chart = Chart(
        title=title,
        unit=unit + (", logarithmic" if spiky else ""),
        lines=lines,
        style=style,
        from_zero=not spiky,
        views=(View(log_y=spiky),),
        marks=_resumes(runs),
        x_range=_steps(runs),
    )
    return draw(chart)


def _resumes(runs: Sequence[Run]) -> list[tuple[float, str]]:
    if len(runs) > 1:
        return []
    steps = sorted({session.first_step for session in runs[0].sessions[1:] if session.first_step > 0})
    return [(step, "resumed") for step in steps]


def _steps(runs: Sequence[Run]) -> tuple[float, float]:
    return 0.0, float(max([1.0, *(run.curves.step[-1] for run in runs if len(run.curves.step))]))
