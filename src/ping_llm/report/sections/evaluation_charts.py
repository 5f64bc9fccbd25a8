"""The errors and the calibration of all predictors, as charts: the model, its best rival and the truth stand out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ping_llm.report.chart import Chart, Line, View
from ping_llm.report.draw import draw
from ping_llm.report.markup import Markup
from ping_llm.report.scores import ORACLE, called
from ping_llm.report.series import Floats

_LEAST_ERROR: Final = 1e-4
"""On a logarithmic axis, a prediction that is just right must lie somewhere."""


def evaluation_charts(
    ranked: Sequence[str], protocol: str, found: Mapping[str, Any], models: Sequence[str], names: Mapping[str, str]
) -> list[Markup]:
    """Nothing if the file has no curves: `ping-llm evaluate --json` prints scores alone."""
    curves = found.get("curves")
    of_protocol = curves.get(protocol) if isinstance(curves, dict) else None
    share = _floats(found.get("shares"))
    if not isinstance(of_protocol, dict) or share is None:
        return []
    errors, inside = [], []
    for who in [*models, *(r for r in ranked if r not in models)]:
        values = of_protocol.get(who)
        error, covered = (_floats(values.get(key)) for key in ("relative_error", "inside")) if values else (None, None)
        if error is None or covered is None or not len(error) == len(covered) == len(share):
            continue
        line = _look(who, ranked, models, names)
        errors.append(replace(line, x=share, y=np.maximum(error, _LEAST_ERROR)))
        inside.append(replace(line, x=share, y=covered))
    if not errors:
        return []
    common: dict[str, Any] = {"x_style": "percent", "style": "percent", "x_range": (0.0, 1.0)}
    common["note"] = "Grey: the other baselines."
    return [
        draw(
            Chart(
                title="Errors",
                unit="relative error that so many answers stay below; lower is better",
                x_unit="share of answers",
                views=(View(log_y=True),),
                lines=errors,
                **common,
            )
        ),
        draw(
            Chart(
                title="Calibration",
                unit="share of RTTs inside; nearer the diagonal is better",
                x_unit="probability of the predicted interval",
                lines=inside,
                y_range=(0.0, 1.0),
                diagonal=True,
                **common,
            )
        ),
    ]


def _look(who: str, ranked: Sequence[str], models: Sequence[str], names: Mapping[str, str]) -> Line:
    nothing: Floats = np.empty(0)
    name = called(who, names)
    if who in models:
        return Line(name=name, x=nothing, y=nothing, colour=1 + models.index(who))
    if who == ORACLE:
        return Line(name=name, x=nothing, y=nothing, colour=3, kind="dashed")
    if who == next(rival for rival in ranked if rival not in models and rival != ORACLE):
        return Line(name=f"{name}, best baseline", x=nothing, y=nothing, colour=5)
    return Line(name=name, x=nothing, y=nothing, colour=7, kind="quiet", in_legend=False)


def _floats(values: Any) -> Floats | None:
    try:
        return np.array(values, dtype=np.float64) if isinstance(values, list) else None
    except (TypeError, ValueError):
        return None
