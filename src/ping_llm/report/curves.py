"""The charts of a training (of one run, or of several laid over each other) and of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ping_llm.evaluate.scores import ORACLE
from ping_llm.report.charts import Chart, Floats, Line, smoothed, smoothing_window
from ping_llm.report.figures import figures_of, loss_unit, padding_by_step, token_word
from ping_llm.report.formatting import Style
from ping_llm.report.run import Run

_MAX_FAINT_RUNS: Final = 3
"""Runs whose single steps are drawn as well."""
_SPIKY: Final = 15.0
"""A curve whose maximum is above its median by this factor gets a logarithmic axis."""
_SMALLEST_ERROR: Final = 1e-4
"""On a logarithmic axis, a prediction that is exactly right must lie somewhere."""


def training_charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    if not any(len(run.curves.step) for run in runs):
        return []
    token = token_word(runs[0])
    shares = [padding_by_step(run, figures_of(run).batch) for run in runs]
    columns: list[tuple[str, str, str | list[Floats | None], Style, bool]] = [
        ("Speed", f"real {token}s per second", "real_tokens_per_s", "count", False),
        ("Waiting for data", "share of the time of the last 20 steps", "data_wait_fraction", "percent", False),
        ("Model FLOPs utilisation", "share of the device's peak", "mfu", "percent", False),
        ("Gradient norm", "before clipping", "grad_norm", "number", True),
        ("Learning rate", "by the schedule", "learning_rate", "number", False),
        ("Padding", "share of the positions of a batch", shares, "percent", True),
    ]
    charts = [_loss(runs, names)]
    for title, unit, column, style, smooth in columns:
        found = [run.curves[column] for run in runs] if isinstance(column, str) else column
        values = [
            np.full(len(run.curves.step), np.nan) if value is None else value
            for run, value in zip(runs, found, strict=True)
        ]
        if any(np.isfinite(value).any() for value in values):  # nobody knows the utilisation of an unknown device
            charts.append(_chart(runs, names, values, title, unit, style, smooth=smooth))
    return charts


def _loss(runs: Sequence[Run], names: Sequence[str]) -> Chart:
    several = len(runs) > 1
    evaluated: list[Line] = []
    trained: list[Line] = []
    for colour, (run, name) in enumerate(zip(runs, names, strict=True), 1):
        prefix = f"{name}, " if several else ""
        if len(run.curves.eval_loss):
            evaluated.append(
                Line(
                    name=f"{prefix}evaluation",
                    x=run.curves.evaluated_at,
                    y=run.curves.eval_loss,
                    colour=colour if several else 2,
                    kind="dots",
                    in_legend=not several,
                )
            )
        trained += _smooth_and_faint(run, name if several else "training", run.curves["loss"], colour, prefix, runs)
    dots = "; dots: evaluation" if several and evaluated else ""
    return Chart(
        title="Loss",
        unit=f"cross entropy, nats per {loss_unit(runs[0])}{dots}",
        lines=evaluated + trained,
        can_switch=True,
        marks=_resumes(runs),
        x_range=_steps(runs),
        wide=True,
    )


def _smooth_and_faint(
    run: Run, name: str, values: Floats, colour: int, prefix: str, runs: Sequence[Run], *, legend: bool = True
) -> list[Line]:
    """The mean over a window, and below it the single steps, unless there are too many runs."""
    step, window = run.curves.step, smoothing_window(len(values))
    lines = [Line(name=name, x=step, y=smoothed(values, window), colour=colour)]
    if window > 1 and len(runs) <= _MAX_FAINT_RUNS:
        in_legend = legend and len(runs) == 1
        lines.append(
            Line(name=f"{prefix}each step", x=step, y=values, colour=colour, kind="faint", in_legend=in_legend)
        )
    return lines


def _chart(
    runs: Sequence[Run],
    names: Sequence[str],
    values: Sequence[Floats],
    title: str,
    unit: str,
    style: Style,
    *,
    smooth: bool,
) -> Chart:
    several = len(runs) > 1
    lines: list[Line] = []
    for colour, (run, name, value) in enumerate(zip(runs, names, values, strict=True), 1):
        if smooth and smoothing_window(len(value)) > 1:
            prefix = f"{name}, " if several else ""
            lines += _smooth_and_faint(run, name if several else "mean", value, colour, prefix, runs, legend=False)
        else:
            lines.append(Line(name=name if several else title.lower(), x=run.curves.step, y=value, colour=colour))
    every = np.concatenate([value[np.isfinite(value)] for value in values])
    spiky = bool(len(every)) and every.min() > 0 and every.max() > _SPIKY * np.median(every)
    return Chart(
        title=title,
        unit=unit + (", logarithmic" if spiky else ""),
        lines=lines,
        style=style,
        from_zero=not spiky,
        log_y=bool(spiky),
        marks=_resumes(runs),
        x_range=_steps(runs),
    )


def _resumes(runs: Sequence[Run]) -> list[tuple[float, str]]:
    if len(runs) > 1:
        return []
    steps = sorted({session.first_step for session in runs[0].sessions[1:] if session.first_step > 0})
    return [(step, "resumed") for step in steps]


def _steps(runs: Sequence[Run]) -> tuple[float, float]:
    return 0.0, float(max([1.0, *(run.curves.step[-1] for run in runs if len(run.curves.step))]))


def evaluation_charts(
    ranked: Sequence[str], protocol: str, found: Mapping[str, Any], models: Sequence[str], titles: Mapping[str, str]
) -> list[Chart]:
    """Errors and calibration: the models, the best baseline and the truth stand out.

    Nothing if the file has no curves: `ping-llm evaluate --json` prints scores alone.
    """
    curves = found.get("curves")
    of_protocol = curves.get(protocol) if isinstance(curves, dict) else None
    share = _floats(found.get("shares"))
    if not isinstance(of_protocol, dict) or share is None:
        return []
    errors, inside = [], []
    baselines = [who for who in ranked if who not in models and who != ORACLE]
    for who in [*models, *baselines[:1], *(w for w in ranked if w == ORACLE), *baselines[1:]]:
        values = of_protocol.get(who)
        error, covered = (_floats(values.get(key)) for key in ("relative_error", "inside")) if values else (None, None)
        if error is None or covered is None or not len(error) == len(covered) == len(share):
            continue
        line = Line(name=titles[who], x=share, y=covered, colour=7, kind="quiet", in_legend=False)
        if who in models:
            line = replace(line, colour=1 + models.index(who), kind="line", in_legend=True)
        elif who == ORACLE:
            line = replace(line, colour=3, kind="dashed", in_legend=True)
        elif who == baselines[0]:
            line = replace(line, name=f"{titles[who]}, best baseline", colour=5, kind="line", in_legend=True)
        inside.append(line)
        errors.append(replace(line, y=np.maximum(error, _SMALLEST_ERROR)))
    if not errors:
        return []
    common: dict[str, Any] = {"style": "percent", "x_style": "percent", "x_range": (0.0, 1.0)}
    common["note"] = "Grey: the other baselines."
    return [
        Chart(
            title="Errors",
            unit="relative error that this share of answers stays below; lower is better",
            x_unit="share of answers",
            lines=errors,
            log_y=True,
            **common,
        ),
        Chart(
            title="Calibration",
            unit="share of RTTs inside; nearer the diagonal is better",
            x_unit="probability of the predicted interval",
            lines=inside,
            y_range=(0.0, 1.0),
            diagonal=True,
            **common,
        ),
    ]


def _floats(values: Any) -> Floats | None:
    try:
        return np.array(values, dtype=np.float64) if isinstance(values, list) else None
    except (TypeError, ValueError):
        return None
