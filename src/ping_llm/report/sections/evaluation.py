"""The errors and the calibration of all predictors, as charts: the model, its best rival and the truth stand out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ping_llm.report.chart import Chart, Line, View, draw
from ping_llm.report.markup import Markup, element, tabbed, table
from ping_llm.report.scales import Floats, Scale, shown
from ping_llm.report.scores import (
    COLUMNS,
    ORACLE,
    TABS,
    Scores,
    best_in_column,
    called,
    naming,
    or_infinite,
    protocols_of,
    score_cell,
)
from ping_llm.report.sections import missing, section

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


# How good the model is beside the classical predictors, a tab for each protocol.

_EXPLAINED: Final = (
    ("median RE, p90 RE", "relative error of the predicted median: half of the errors, nine in ten are smaller"),
    ("median AE, MAE", "absolute error of it: the median and the mean"),
    ("CRPS", "distance of the whole predicted distribution from what was measured"),
    ("NLL", "surprise of the result, failures included"),
    ("in 90 %", "share of RTTs inside the predicted 90 % interval; 90 % is best"),
    ("Brier", "squared error of the predicted probability of failure"),
)


def evaluation(found: Mapping[str, Any] | None) -> Markup:
    protocols = protocols_of(found)
    if not protocols:
        return section(
            "evaluation",
            "Evaluation",
            missing(
                "It was not compared with the classical predictors yet. ",
                element("code", "ping-llm evaluate RUN --data …"),
                " does that; the report finds the result in the run's folder, or takes a file of ",
                element("code", "--json"),
                " as ",
                element("code", "--evaluation FILE"),
                ".",
            ),
        )
    assert found is not None
    tabs = [(TABS.get(name, name), _protocol(name, scores, found)) for name, scores in protocols.items()]
    legend = element("dl", [element("div", element("dt", a), element("dd", b)) for a, b in _EXPLAINED], class_="terms")
    lead = "Each protocol is scored apart, because errors differ by ten times between them."
    return section("evaluation", "Evaluation", tabbed("Protocol", tabs), legend, lead=lead)


def _protocol(name: str, scores: Mapping[str, Scores], found: Mapping[str, Any]) -> Markup:
    from ping_llm.evaluate.scores import TITLES

    names, models = naming(found)
    asked = next((int(s["questions"] or 0) for s in scores.values() if s.get("questions")), None)
    title = f"{TITLES.get(name, name)}." + (f" {asked:,} questions." if asked else "")
    ranked = sorted(scores, key=lambda who: (who == ORACLE, or_infinite(scores[who].get("median_re"))))
    return element(
        "div",
        element("p", _verdict(scores, models, names), class_="verdict"),
        element("p", title, class_="note"),
        _table(ranked, scores, models, names),
        element("div", evaluation_charts(ranked, name, found, models, names), class_="charts"),
    )


def _verdict(scores: Mapping[str, Scores], models: Sequence[str], names: Mapping[str, str]) -> str:
    """The model against the best of the classical predictors, by the median relative error."""
    own = scores[models[0]].get("median_re") if models[0] in scores else None
    rivals = {who: s.get("median_re") for who, s in scores.items() if who not in models and who != ORACLE}
    known = {who: value for who, value in rivals.items() if value is not None}
    if own is None or not known:
        return ""
    best = min(known, key=lambda who: known[who])
    rival = known[best]
    who, other = names.get(models[0], models[0]), called(best, names)
    order = "as good as" if own == rival else "better than" if own < rival else "worse than"
    return (
        f"{who}: median error {shown(own, 'percent')}, {order} the best of the classical predictors "
        f"({other}, {shown(rival, 'percent')})"
    )


def _table(
    ranked: Sequence[str], scores: Mapping[str, Scores], models: Sequence[str], names: Mapping[str, str]
) -> Markup:
    errors = [scores[who].get(key) for who in ranked for key in ("median_re", "p90_re")]
    scale = Scale.over(np.array([e for e in errors if e], dtype=np.float64), log=True, room=0.05, style="percent")
    best = {key: best_in_column(key, [scores[who].get(key) for who in ranked if who != ORACLE]) for key in COLUMNS}
    rows = []
    for who in ranked:
        kind = "model" if who in models else "oracle" if who == ORACLE else ""
        cells = [element("td", _dot(scores[who], scale), class_=f"dots {kind}")]
        cells += [score_cell(key, scores[who].get(key), best[key], rival=who != ORACLE) for key in COLUMNS]
        rows.append([element("span", called(who, names), class_=f"who {kind}"), *cells])
    ticks = element(
        "span",
        [
            element(
                "span",
                scale.label(t),
                class_="tick spare" if i % 2 else "tick",
                style=f"left:{100 * scale.place(np.array([t]))[0]:.1f}%",
            )
            for i, t in enumerate(scale.ticks(3))
        ],
        class_="ticks",
    )
    head = ["predictor", element("span", "relative error, median to p90", ticks, class_="plot-head")]
    head += [column.title for column in COLUMNS.values()]
    return table(
        head, rows, caption="Scores of all predictors; the best of each column is marked", class_="numbers scores"
    )


def _dot(scores: Scores, scale: Scale) -> Markup | None:
    median, p90 = scores.get("median_re"), scores.get("p90_re")
    if not median or not p90:
        return None
    begin, end = (100 * scale.place(np.array([median, p90]))).tolist()
    return element(
        "span",
        element("span", class_="range", style=f"left:{begin:.1f}%;width:{max(0.0, end - begin):.1f}%"),
        element("span", class_="dot", style=f"left:{begin:.1f}%"),
        class_="dot-plot",
    )
