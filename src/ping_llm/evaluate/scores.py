"""How good predictions are, in a few numbers.

Errors are those of the predicted median, over the measurements that were answered. The surprise (NLL) is that of every
result, failures included, as an RTT code: a predictor that gives densities and one that gives codes can be compared.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ping_llm.core.distribution import RttDistribution, code_bounds
from ping_llm.core.observations import MIN_RTT_MS, Floats, Ints, Observations

Scores = dict[str, float]

INTERVAL: Final = 0.9


def scores(predicted: RttDistribution | Floats, observed: Observations) -> Scores:
    """All scores of distributions; of mere RTTs, those of points only. NaN where there was nothing to score.

    mae, median_ae     mean and median absolute error, ms
    median_re, p90_re  relative error: the median, and what one in ten exceeds
    nll_bits           mean surprise of a result, bits
    crps               mean continuous ranked probability score of an RTT, ms
    coverage90         share of RTTs inside their 90 % intervals
    brier              mean squared error of P(failed)
    questions          how many there were
    """
    if not isinstance(predicted, RttDistribution):
        return point_scores(predicted, observed) | {"questions": len(observed)}
    rtt = observed.rtt_ms.astype(np.float64)
    failed = np.isnan(rtt)
    answered = predicted.take(~failed)
    low, high = answered.interval(INTERVAL)
    return {
        **point_scores(predicted.median, observed),
        "nll_bits": _mean(predicted.bits(rtt)),
        "crps": _mean(answered.crps(rtt[~failed])),
        "coverage90": _mean((low <= rtt[~failed]) & (rtt[~failed] <= high)),
        "brier": _mean((predicted.p_failed - failed) ** 2),
        "questions": len(observed),
    }


def point_scores(predicted_ms: Floats, observed: Observations) -> Scores:
    """Errors of predicted RTTs."""
    error, relative = errors(predicted_ms, observed)
    return {
        "mae": _mean(error),
        "median_ae": _quantile(error, 0.5),
        "median_re": _quantile(relative, 0.5),
        "p90_re": _quantile(relative, 0.9),
    }


def errors(predicted_ms: Floats, observed: Observations) -> tuple[Floats, Floats]:
    """Absolute and relative errors of the measurements that were answered."""
    answered = ~np.isnan(observed.rtt_ms)
    rtt = observed.rtt_ms[answered].astype(np.float64)
    error = np.abs(predicted_ms[answered] - rtt)
    return error, error / np.maximum(rtt, MIN_RTT_MS)


def _mean(values: npt.NDArray[Any]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _quantile(values: Floats, level: float) -> float:
    return float(np.quantile(values, level)) if len(values) else float("nan")


# What an evaluation found: scores by protocol and predictor, and what plots need.

ORACLE: Final = "oracle"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Of one predictor, to all questions of a protocol."""

    scores: Scores
    median_ms: Floats
    place: Floats
    """Where in its distribution each measured RTT lies, from 0 to 1; NaN where there was no answer."""

    @classmethod
    def of(cls, predicted: RttDistribution, observed: Observations) -> Self:
        failed = np.isnan(observed.rtt_ms)
        below, above = code_bounds(np.where(failed, 1.0, observed.rtt_ms))
        place = (predicted.cdf(below) + predicted.cdf(above)) / 2
        return cls(
            scores=scores(predicted, observed), median_ms=predicted.median, place=np.where(failed, np.nan, place)
        )


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    asked: Observations
    known_before: Ints
    """How many measurements of its source were known at the time of each question."""
    answers: dict[str, Answers]
    """By predictor: baselines, models in their order, and the oracle if there is one."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    models: Sequence[str]
    """Names of the predictors that are models, the first being the one that it is all about."""
    protocols: dict[str, ProtocolResult]

    def to_json(self) -> dict[str, Any]:
        """`{"protocols": {"unseen_pair": {"model": {"mae": …}, "dmfsgd": {…}}}}`; what could not be scored is null.

        The first model is "model", the truth about simulated data "oracle".
        """
        keys = {name: name for name in self.models} | dict.fromkeys(self.models[:1], "model")
        return {
            "protocols": {
                protocol: {keys.get(name, _key(name)): _plain(a.scores) for name, a in result.answers.items()}
                for protocol, result in self.protocols.items()
            }
        }


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _plain(found: Scores) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else value for name, value in found.items()}


# Scores as tables for people.

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
