"""An evaluation as pictures: for each protocol one PNG with four panels.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; where they run out, dashes help.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.observations import Ints
from ping_llm.evaluate.scores import ORACLE, PROTOCOL_TITLES, Evaluation, ProtocolResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINE_COLOURS: Final = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2")
_MODEL_COLOURS: Final = ("#D55E00", "#CC79A7", "#6A3D9A", "#8C510A")
_MOST_DOTS: Final = 3000
_FEWEST_IN_BIN: Final = 20
_MOST_BINS: Final = 10


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
        _error_cdf(panels[0, 0], result, styles)
        _calibration(panels[0, 1], result, styles)
        _error_by_context(panels[1, 0], result, styles)
        _predicted_against_measured(panels[1, 1], result, styles, evaluation.models)
        figure.suptitle(f"{PROTOCOL_TITLES.get(protocol, protocol)} ({len(result.asked):,} questions)", fontsize=14)
        lines, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=5, frameon=False)
        written.append(folder / f"{protocol}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def _styles(names: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How the line of each predictor looks: models stand out, the truth is black."""
    styles: dict[str, dict[str, Any]] = {}
    baselines = [name for name in names if name not in models and name != ORACLE]
    for number, name in enumerate(baselines):
        dashes = ("-", (0, (4, 1.5)), (0, (1, 1)))[number // len(_BASELINE_COLOURS) % 3]
        styles[name] = {
            "color": _BASELINE_COLOURS[number % len(_BASELINE_COLOURS)],
            "linestyle": dashes,
            "linewidth": 1.4,
        }
    for number, name in enumerate(models):
        colour = _MODEL_COLOURS[number % len(_MODEL_COLOURS)]
        styles[name] = {"color": colour, "linestyle": "-", "linewidth": 2.8, "zorder": 4}
    styles[ORACLE] = {"color": "black", "linestyle": (0, (6, 2, 1, 2)), "linewidth": 1.4, "zorder": 3}
    return {name: styles[name] | {"label": "the truth" if name == ORACLE else name} for name in names}


def _error_cdf(axes: "Axes", result: ProtocolResult, styles: dict[str, dict[str, Any]]) -> None:
    least, most = 1e-4, 10.0
    share = np.linspace(0, 1, 501)
    for name, style in styles.items():
        relative = result.relative_errors(name)
        if len(relative):
            axes.plot(np.clip(np.quantile(relative, share), least, most), share, **style)
    axes.axhline(0.5, color="black", linewidth=0.8, alpha=0.5)
    _logarithmic(axes.xaxis, percent=True)
    axes.set(xlim=(least, most), ylim=(0, 1), xlabel="relative error of the predicted median, at most")
    axes.set(ylabel="share of answered measurements", title="Errors (further left is better)")
    axes.grid(alpha=0.3)


def _calibration(axes: "Axes", result: ProtocolResult, styles: dict[str, dict[str, Any]]) -> None:
    nominal = np.linspace(0, 1, 101)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5)
    for name, style in styles.items():
        inside = result.answers[name].inside(nominal)
        if len(inside):
            axes.plot(nominal, inside, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the predicted interval")
    axes.set(ylabel="share of measured RTTs inside", title="Calibration (nearer the diagonal is better)")
    axes.grid(alpha=0.3)


def _error_by_context(axes: "Axes", result: ProtocolResult, styles: dict[str, dict[str, Any]]) -> None:
    known = result.known_before[~np.isnan(result.asked.rtt_ms)]
    bins = _equal_bins(known)
    for name, style in styles.items():
        relative = result.relative_errors(name)
        points = [(np.median(known[rows]), np.median(relative[rows])) for rows in bins]
        if points:
            axes.plot(*np.array(points).T, marker="o", markersize=3.5, **style)
    _logarithmic(axes.xaxis, "symlog")
    _logarithmic(axes.yaxis, percent=True)
    axes.set(xlabel="measurements of the source that are known", ylabel="median relative error")
    axes.set(title="What a history is good for (lower is better)")
    axes.grid(alpha=0.3)


def _predicted_against_measured(
    axes: "Axes", result: ProtocolResult, styles: dict[str, dict[str, Any]], models: Sequence[str]
) -> None:
    answered = np.flatnonzero(~np.isnan(result.asked.rtt_ms))[:_MOST_DOTS]
    measured = result.asked.rtt_ms[answered]
    baselines = {n: a for n, a in result.answers.items() if n not in models and n != ORACLE}
    shown = [min(baselines, key=lambda name: baselines[name].scores["median_re"])] if baselines else []
    shown += list(models[:1])
    for name, marker in zip(shown, "xo"[-len(shown) :], strict=True) if len(answered) else ():
        predicted = result.answers[name].median_ms[answered]
        label = f"{name}, the best baseline" if name in baselines else name
        look = {"color": styles[name]["color"], "s": 9 if marker == "o" else 14, "alpha": 0.5, "linewidths": 0.6}
        axes.scatter(measured, predicted, marker=marker, label=label, **look)
    if len(answered):
        ends = np.array([measured.min(), measured.max()]) * [0.8, 1.25]
        axes.plot(ends, ends, color="black", linewidth=0.8, alpha=0.5)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(loc="upper left", frameon=False)
    _logarithmic(axes.xaxis)
    _logarithmic(axes.yaxis)
    axes.set(xlabel="measured RTT, ms", ylabel="predicted median, ms", title="Predicted against measured")
    axes.grid(alpha=0.3)


def _logarithmic(axis: Any, scale: str = "log", *, percent: bool = False) -> None:
    """With plain numbers."""
    limits = {"linthresh": 1} if scale == "symlog" else {}
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)(scale, **limits)
    axis.set_major_formatter(lambda value, _: f"{100 * value:,g} %" if percent else f"{value:,g}")


def _equal_bins(known: Ints) -> list[Ints]:
    """Rows in bins of about equally many, none of which cuts through rows of one value."""
    order = np.argsort(known, kind="stable")
    count = int(np.clip(len(known) // _FEWEST_IN_BIN, 1, _MOST_BINS)) if len(known) else 0
    edges = np.unique(known[order[np.arange(count) * len(known) // max(count, 1)]]) if count else known
    parts = np.split(order, np.searchsorted(known[order], edges[1:]))
    return [part for part in parts if len(part) >= min(_FEWEST_IN_BIN, len(known))] if count else []
