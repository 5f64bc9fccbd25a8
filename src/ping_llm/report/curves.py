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
    columns: list[tuple[str, str, str, Style]] = [
        ("Speed", f"real {token_word(runs[0])}s per second", "real_tokens_per_s", "count"),
        ("Waiting for data", "share of the time of the last 20 steps", "data_wait_fraction", "percent"),
        ("Model FLOPs utilisation", "share of the device's peak", "mfu", "percent"),
        ("Gradient norm", "before clipping", "grad_norm", "number"),
        ("Learning rate", "by the schedule", "learning_rate", "number"),
        ("Padding", "share of the positions of a batch", "padding", "percent"),
    ]
    last = max([1.0, *(run.curves.step[-1] for run in runs if len(run.curves.step))])
    resumed = {session.first_step for session in runs[0].sessions[1:]} - {0} if len(runs) == 1 else set()
    common: dict[str, Any] = {"x_range": (0.0, last), "marks": [(step, "resumed") for step in sorted(resumed)]}
    charts = [_loss(runs, names, common)]
    for title, unit, column, style in columns:
        values = [padding_by_step(r, figures_of(r).batch) if column == "padding" else r.curves[column] for r in runs]
        every = np.concatenate([value[np.isfinite(value)] for value in values])
        if not len(every):  # nobody knows the utilisation of an unknown device
            continue
        spiky = bool(every.min() > 0 and every.max() > _SPIKY * np.median(every))
        charts.append(
            Chart(
                title=title,
                unit=unit + (", logarithmic" if spiky else ""),
                lines=_lines(runs, names, values, title.lower(), smooth=column in ("grad_norm", "padding")),
                style=style,
                from_zero=not spiky,
                log_y=spiky,
                **common,
            )
        )
    return charts


def _loss(runs: Sequence[Run], names: Sequence[str], common: Mapping[str, Any]) -> Chart:
    several = len(runs) > 1
    evaluated = [
        Line(
            name=f"{name}, evaluation" if several else "evaluation",
            x=run.curves.evaluated_at,
            y=run.curves.eval_loss,
            colour=colour if several else 2,
            kind="dots",
            in_legend=not several,
        )
        for colour, (run, name) in enumerate(zip(runs, names, strict=True), 1)
        if len(run.curves.eval_loss)
    ]
    trained = _lines(runs, names, [run.curves["loss"] for run in runs], "training", smooth=True)
    unit = f"cross entropy, nats per {loss_unit(runs[0])}" + ("; dots: evaluation" if several and evaluated else "")
    return Chart(title="Loss", unit=unit, lines=evaluated + trained, can_switch=True, wide=True, **common)


def _lines(
    runs: Sequence[Run], names: Sequence[str], values: Sequence[Floats], label: str, *, smooth: bool
) -> list[Line]:
    """The mean over a window, and below it the single steps, unless there are too many runs."""
    several = len(runs) > 1
    lines = []
    for colour, (run, name, value) in enumerate(zip(runs, names, values, strict=True), 1):
        window = smoothing_window(len(value)) if smooth else 1
        line = Line(name=name if several else label, x=run.curves.step, y=smoothed(value, window), colour=colour)
        lines.append(line)
        if window > 1 and len(runs) <= _MAX_FAINT_RUNS:
            each = f"{name}, each step" if several else "each step"
            lines.append(replace(line, name=each, y=value, kind="faint", in_legend=not several))
    return lines


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
    baselines = [who for who in ranked if who not in models and who != ORACLE]
    looks: dict[str, dict[str, Any]] = {who: {"colour": colour} for colour, who in enumerate(models, 1)}
    looks |= {who: {"colour": 5, "name": f"{titles[who]}, best baseline"} for who in baselines[:1]}
    looks |= {ORACLE: {"colour": 3, "kind": "dashed"}}
    looks |= {who: {"colour": 7, "kind": "quiet", "in_legend": False} for who in baselines[1:]}
    errors, inside = [], []
    for who, look in looks.items():
        values = of_protocol.get(who)
        error, covered = (_floats(values.get(key)) for key in ("relative_error", "inside")) if values else (None, None)
        if error is not None and covered is not None and len(error) == len(covered) == len(share):
            inside.append(Line(**{"name": titles[who], "x": share, "y": covered, **look}))
            errors.append(replace(inside[-1], y=np.maximum(error, _SMALLEST_ERROR)))
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
