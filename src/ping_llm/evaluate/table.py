"""Scores as tables for people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ping_llm.evaluate.results import ORACLE, Evaluation
from ping_llm.evaluate.scores import INTERVAL

TITLES: Final = {
    "unseen_pair": "Unseen pairs: known nodes, measured for the first time",
    "seen_pair": "Seen pairs: what they measure later",
    "unseen_probe": "Unseen probes: sources that nothing was learnt from",
}

LEGEND: Final = (
    "RE, AE  relative and absolute error of the predicted median\n"
    "p90     what one error in ten exceeds; MAE is the mean AE\n"
    "CRPS    distance of the predicted distribution from the RTT\n"
    "NLL     surprise of a result, failures included\n"
    "in 90%  share of RTTs inside the predicted 90 % interval: 90 % is best\n"
    "Brier   squared error of the predicted probability of failure\n"
    "*       best in its column, the truth about simulated data aside"
)


@dataclass(frozen=True)
class _Column:
    header: str
    show: str
    distance: Callable[[float], float] = abs
    """From the best value there could be."""


_COLUMNS: Final = {
    "median_re": _Column("median\nRE", "{:.4f}"),
    "p90_re": _Column("p90\nRE", "{:.4f}"),
    "median_ae": _Column("median\nAE ms", "{:.2f}"),
    "mae": _Column("MAE\nms", "{:.2f}"),
    "crps": _Column("CRPS\nms", "{:.2f}"),
    "nll_bits": _Column("NLL\nbits", "{:.2f}", float),  # a density could make it negative
    "coverage90": _Column("in\n90%", "{:.1%}", lambda share: abs(share - INTERVAL)),
    "brier": _Column("\nBrier", "{:.4f}"),
}


def tables(evaluation: Evaluation) -> Group:
    """One table for each protocol, and what its columns mean."""
    parts: list[Table | Text] = []
    for protocol, result in evaluation.protocols.items():
        found = {name: answers.scores for name, answers in result.answers.items()}
        title = f"{TITLES.get(protocol, protocol)} ({len(result.asked):,} questions)"
        parts += [comparison(title, found, evaluation.models), Text()]
    return Group(*parts, Text(LEGEND, style="dim"))


def comparison(title: str, scores: Mapping[str, Mapping[str, float]], models: Sequence[str] = ("model",)) -> Table:
    """A line for each predictor; what it does not give stays empty."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.show_edge = False
    table.add_column("\npredictor", overflow="fold")
    best = {}
    for key, column in _COLUMNS.items():
        table.add_column(column.header, justify="right", no_wrap=True)
        rivals = [found.get(key, np.nan) for name, found in scores.items() if name != ORACLE]
        nearest = min((value for value in rivals if not np.isnan(value)), key=column.distance, default=None)
        best[key] = None if nearest is None else column.show.format(nearest)
    for name, found in scores.items():
        cells = []
        for key, column in _COLUMNS.items():
            shown = column.show.format(found[key]) if not np.isnan(found.get(key, np.nan)) else ""
            is_best = shown == best[key] and name != ORACLE
            cells.append(Text(f"{shown}*" if is_best else f"{shown} ", style="bold green" if is_best else ""))
        style = "bold" if name in models else "dim" if name == ORACLE else ""
        table.add_row("the truth" if name == ORACLE else name, *cells, style=style)
    return table
