"""An evaluation as pictures: for each protocol one PNG with four panels.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; where they run out, dashes help.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Ints
from ping_llm.evaluate.scores import ORACLE, PROTOCOL_TITLES, Evaluation, ProtocolResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINE_COLOURS: Final = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
_MODEL_COLOURS: Final = ("#D55E00", "#CC79A7", "#6A3D9A", "#8C510A")
_DASHES: Final = ("-", (0, (4, 1.5)), (0, (1, 1)))
_MAX_DOTS: Final = 3000
_MIN_IN_BIN: Final = 20
_MAX_BINS: Final = 10
_THIN: Final[dict[str, Any]] = {"color": "black", "linewidth": 0.8, "alpha": 0.5}

Styles = dict[str, dict[str, Any]]


def plot(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `unseen_pair.png` and so on, and say where."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PingLlmError("plots need matplotlib: pip install 'ping-llm[plots]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for protocol, result in evaluation.protocols.items():
        figure = Figure(figsize=(13, 10), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 2)
        styles = _styles(list(result.answers), evaluation.models)
        _errors(panels[0, 0], result, styles)
        _calibration(panels[0, 1], result, styles)
        _error_by_context(panels[1, 0], result, styles)
        _predicted_against_measured(panels[1, 1], result, styles, evaluation.models)
        for panel in panels.flat:
            panel.grid(alpha=0.3)
        figure.suptitle(f"{PROTOCOL_TITLES.get(protocol, protocol)} ({len(result.questions):,} questions)", fontsize=14)
        lines, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=5, frameon=False)
        written.append(folder / f"{protocol}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def _styles(names: Sequence[str], models: Sequence[str]) -> Styles:
    """How the line of each predictor looks: models stand out, the truth is black."""
    styles: Styles = {}
    for number, name in enumerate(name for name in names if name not in models and name != ORACLE):
        turn, colour = divmod(number, len(_BASELINE_COLOURS))
        styles[name] = {"color": _BASELINE_COLOURS[colour], "linestyle": _DASHES[turn % 3], "linewidth": 1.4}
    for number, name in enumerate(models):
        styles[name] = {"color": _MODEL_COLOURS[number % len(_MODEL_COLOURS)], "linewidth": 2.8, "zorder": 4}
    styles[ORACLE] = {"color": "black", "linestyle": (0, (6, 2, 1, 2)), "linewidth": 1.4, "zorder": 3}
    return {name: styles[name] | {"label": "the truth" if name == ORACLE else name} for name in names}


def _errors(axes: "Axes", result: ProtocolResult, styles: Styles) -> None:
    least, most = 1e-4, 10.0
    share = np.linspace(0, 1, 501)
    for name, style in styles.items():
        relative = result.relative_errors(name)
        if len(relative):
            axes.plot(np.clip(np.quantile(relative, share), least, most), share, **style)
    axes.axhline(0.5, **_THIN)
    _logarithmic(axes.xaxis, percent=True)
    axes.set(xlim=(least, most), ylim=(0, 1), xlabel="relative error of the predicted median, at most")
    axes.set(ylabel="share of answered measurements", title="Errors (further left is better)")


def _calibration(axes: "Axes", result: ProtocolResult, styles: Styles) -> None:
    nominal = np.linspace(0, 1, 101)
    axes.plot([0, 1], [0, 1], **_THIN)
    for name, style in styles.items():
        inside = result.answers[name].inside(nominal)
        if len(inside):
            axes.plot(nominal, inside, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the predicted interval")
    axes.set(ylabel="share of measured RTTs inside", title="Calibration (nearer the diagonal is better)")


def _error_by_context(axes: "Axes", result: ProtocolResult, styles: Styles) -> None:
    known = result.known_before[~np.isnan(result.questions.rtt_ms)]
    bins = equal_bins(known)
    for name, style in styles.items() if bins else ():
        relative = result.relative_errors(name)
        medians = [np.median(relative[rows]) for rows in bins]
        axes.plot([np.median(known[rows]) for rows in bins], medians, marker="o", markersize=3.5, **style)
    _logarithmic(axes.xaxis, "symlog")
    _logarithmic(axes.yaxis, percent=True)
    axes.set(xlabel="measurements of the source that are known", ylabel="median relative error")
    axes.set(title="What a history is good for (lower is better)")


def _predicted_against_measured(axes: "Axes", result: ProtocolResult, styles: Styles, models: Sequence[str]) -> None:
    answered = np.flatnonzero(~np.isnan(result.questions.rtt_ms))[:_MAX_DOTS]
    baselines = [name for name in result.answers if name not in models and name != ORACLE]
    best = sorted(baselines, key=lambda name: result.answers[name].scores["median_re"])[:1]
    if len(answered):
        measured = result.questions.rtt_ms[answered]
        for name in [*best, *models[:1]]:
            label, marker, size = (f"{name}, the best baseline", "x", 14) if name in best else (name, "o", 9)
            look = {"color": styles[name]["color"], "s": size, "alpha": 0.5, "linewidths": 0.6}
            axes.scatter(measured, result.answers[name].median_ms[answered], marker=marker, label=label, **look)
        ends = np.array([measured.min(), measured.max()]) * [0.8, 1.25]
        axes.plot(ends, ends, **_THIN)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(loc="upper left", frameon=False)
    _logarithmic(axes.xaxis)
    _logarithmic(axes.yaxis)
    axes.set(xlabel="measured RTT, ms", ylabel="predicted median, ms", title="Predicted against measured")


def _logarithmic(axis: Any, scale: str = "log", *, percent: bool = False) -> None:
    """With plain numbers."""
    limits = {"linthresh": 1} if scale == "symlog" else {}
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)(scale, **limits)
    axis.set_major_formatter(lambda value, _: f"{100 * value:,g} %" if percent else f"{value:,g}")


def equal_bins(known: Ints) -> list[Ints]:
    """Rows in bins of about equally many, none of which cuts through rows of one value."""
    order = np.argsort(known, kind="stable")
    count = int(np.clip(len(known) // _MIN_IN_BIN, 1, _MAX_BINS)) if len(known) else 0
    edges = np.unique(known[order[np.arange(count) * len(known) // max(count, 1)]]) if count else known
    parts = np.split(order, np.searchsorted(known[order], edges[1:]))
    return [part for part in parts if len(part) >= min(_MIN_IN_BIN, len(known))] if count else []
