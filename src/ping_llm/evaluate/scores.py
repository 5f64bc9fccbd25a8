"""How good predictions are, in a few numbers.

Errors are those of the predicted median, over the measurements that were answered. The negative log-likelihood (NLL) is
that of every result, timeouts included, as an RTT code: so predictors that give densities and codes can be compared.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ping_llm.core.files import write_atomically
from ping_llm.core.rtt import MIN_RTT_MS, Floats, Ints, Observations, RttDistribution, code_bounds
from ping_llm.runs import RunFolder

Scores = dict[str, float]

INTERVAL: Final = 0.9


def scores(predicted: RttDistribution | Floats, observed: Observations) -> Scores:
    """All scores of distributions (see `SCORE_COLUMNS`) and how many questions there were; of mere RTTs, those of
    points only. NaN where there was nothing to score."""
    error, relative = errors(predicted.median if isinstance(predicted, RttDistribution) else predicted, observed)
    found = {
        "mae": _mean(error),
        "median_ae": _quantile(error, 0.5),
        "median_re": _quantile(relative, 0.5),
        "p90_re": _quantile(relative, 0.9),
    }
    if isinstance(predicted, RttDistribution):
        rtt = observed.rtt_ms.astype(np.float64)
        failed = np.isnan(rtt)
        answered = predicted.take(~failed)
        low, high = answered.interval(INTERVAL)
        found |= {
            "nll_bits": _mean(predicted.bits(rtt)),
            "crps": _mean(answered.crps(rtt[~failed])),
            "coverage90": _mean((low <= rtt[~failed]) & (rtt[~failed] <= high)),
            "brier": _mean((predicted.p_failed - failed) ** 2),
        }
    return found | {"questions": len(observed)}


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

EVALUATION_FILE: Final = "evaluation.json"
"""In the folder of a run, for its report."""
_SHARES: Final = np.linspace(0.02, 0.98, 49).round(2)
"""Of the answers, for the distribution of errors; and of probability, for calibration."""


@dataclass(frozen=True, kw_only=True)
class ScoredAnswers:
    """Of one predictor, to all questions of a protocol."""

    scores: Scores
    median_ms: Floats
    pit: Floats
    """Probability integral transform: the predicted CDF at each measured RTT; NaN where there was none."""

    @classmethod
    def of(cls, predicted: RttDistribution, observed: Observations) -> Self:
        failed = np.isnan(observed.rtt_ms)
        below, above = code_bounds(np.where(failed, 1.0, observed.rtt_ms))
        pit = (predicted.cdf(below) + predicted.cdf(above)) / 2
        return cls(scores=scores(predicted, observed), median_ms=predicted.median, pit=np.where(failed, np.nan, pit))

    def inside(self, probability: Floats) -> Floats:
        """The share of RTTs inside the predicted central interval of each probability. Nothing without RTTs."""
        needed = np.sort(np.abs(2 * self.pit[~np.isnan(self.pit)] - 1))  # the narrowest interval that holds the RTT
        return np.searchsorted(needed, probability, side="right") / len(needed) if len(needed) else np.empty(0)


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    questions: Observations
    known_before: Ints
    """How many measurements of its source were known at the time of each question."""
    answers: dict[str, ScoredAnswers]
    """By predictor: baselines, models in their order, and the oracle if there is one."""

    def relative_errors(self, name: str) -> Floats:
        return errors(self.answers[name].median_ms, self.questions)[1]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    models: Sequence[str]
    """Names of the predictors that are models, the first being the one that it is all about."""
    protocols: dict[str, ProtocolResult]

    def to_json(self) -> dict[str, Any]:
        """`{"protocols": {"unseen_pair": {"model": {"mae": …}, "dmfsgd": {…}}}}`; what could not be scored is null.

        The first model is "model", the truth about simulated data "oracle".
        """
        return {
            "protocols": {
                protocol: {
                    self._key(name): {key: None if np.isnan(value) else value for key, value in found.scores.items()}
                    for name, found in result.answers.items()
                }
                for protocol, result in self.protocols.items()
            }
        }

    def to_store(self, model: str) -> dict[str, Any]:
        """`to_json` with what the run report needs: names, and curves for its charts. `model` is the report's own."""
        every = [name for result in self.protocols.values() for name in result.answers]
        models = [model, *(name for name in self.models if name != model)]
        return {
            **self.to_json(),
            "names": {self._key(name): name for name in every},
            "models": [self._key(name) for name in models if name in every],
            "shares": _SHARES.tolist(),
            "curves": {
                protocol: {self._key(name): _curves(result, name) for name in result.answers}
                for protocol, result in self.protocols.items()
            },
        }

    def _key(self, name: str) -> str:
        if name in self.models:
            return "model" if name == self.models[0] else name
        return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def save_evaluation(found: Evaluation, models: Mapping[str, Path | str | None]) -> list[Path]:
    """Write `evaluation.json` into the folder of every model that is a run. `models` are where they came from."""
    written = []
    for name, where in models.items():
        run = RunFolder(Path(where or "."))
        if where and run.config.is_file() and run.metrics.is_file():
            write_atomically(run.path / EVALUATION_FILE, json.dumps(found.to_store(name)) + "\n")
            written.append(run.path / EVALUATION_FILE)
    return written


def _curves(result: ProtocolResult, name: str) -> dict[str, list[float]]:
    relative, inside = result.relative_errors(name), result.answers[name].inside(_SHARES)
    if not len(relative) or not len(inside):
        return {}
    curves = {"relative_error": np.quantile(relative, _SHARES), "inside": inside}
    return {name: [float(f"{value:.4g}") for value in curve.tolist()] for name, curve in curves.items()}


# The scores by name: how they are shown in tables, in the run report and in benchmarks.


@dataclass(frozen=True)
class ScoreColumn:
    title: str
    unit: str
    format: str
    """In a terminal."""
    meaning: str
    is_share: bool = False
    """The run report shows it in per cent."""
    best: float = 0.0

    @property
    def title_with_unit(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def distance(self, value: float) -> float:
        """From the best value there could be."""
        return value if self.best == -math.inf else abs(value - self.best)

    def for_page(self, value: float) -> str:
        return f"{100 * value:,.1f} %" if self.is_share else f"{value:,{self.format[2:-1]}}"


SCORE_COLUMNS: Final = {
    "median_re": ScoreColumn("median RE", "", "{:.4f}", "relative error of the median answer: half are smaller", True),
    "p90_re": ScoreColumn("p90 RE", "", "{:.4f}", "relative error that one in ten exceeds", True),
    "median_ae": ScoreColumn("median AE", "ms", "{:.2f}", "absolute error of it: half are smaller"),
    "mae": ScoreColumn("MAE", "ms", "{:.2f}", "mean absolute error of it"),
    "crps": ScoreColumn("CRPS", "ms", "{:.2f}", "distance of the predicted distribution from the RTT"),
    # A density could make the negative log-likelihood negative.
    "nll_bits": ScoreColumn(
        "NLL", "bits", "{:.2f}", "negative log-likelihood of a result, timeouts included", best=-math.inf
    ),
    "coverage90": ScoreColumn(
        "in 90 %", "", "{:.1%}", "share of RTTs inside the predicted 90 % interval: 90 % is best", True, INTERVAL
    ),
    "brier": ScoreColumn("Brier", "", "{:.4f}", "squared error of the predicted probability of a timeout"),
}

PROTOCOL_TITLES: Final = {
    "unseen_pair": "Unseen pairs: known nodes, measured for the first time",
    "seen_pair": "Seen pairs: what they measure later",
    "unseen_probe": "Unseen probes: sources that nothing was learned from",
}


def tables(evaluation: Evaluation) -> Group:
    """One table for each protocol, and what its columns mean."""
    parts: list[Table | Text] = []
    for protocol, result in evaluation.protocols.items():
        found = {name: answers.scores for name, answers in result.answers.items()}
        title = f"{PROTOCOL_TITLES.get(protocol, protocol)} ({len(result.questions):,} questions)"
        parts += [comparison(title, found, evaluation.models), Text()]
    legend = [f"{column.title:11}{column.meaning}" for column in SCORE_COLUMNS.values()]
    legend.append(f"{'*':11}best in its column, the truth about simulated data aside")
    return Group(*parts, Text("\n".join(legend), style="dim"))


def comparison(title: str, scores: Mapping[str, Mapping[str, float]], models: Sequence[str] = ("model",)) -> Table:
    """A line for each predictor; what it does not give stays empty."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.show_edge = False
    table.add_column("\npredictor", overflow="fold")
    best = {}
    for key, column in SCORE_COLUMNS.items():
        first, _, second = column.title_with_unit.replace(",", "").partition(" ")
        table.add_column(f"{first}\n{second}" if second else f"\n{first}", justify="right", no_wrap=True)
        rivals = [found.get(key, np.nan) for name, found in scores.items() if name != ORACLE]
        nearest = min((value for value in rivals if not np.isnan(value)), key=column.distance, default=None)
        best[key] = None if nearest is None else column.format.format(nearest)
    for name, found in scores.items():
        cells = []
        for key, column in SCORE_COLUMNS.items():
            shown = column.format.format(found[key]) if not np.isnan(found.get(key, np.nan)) else ""
            is_best = shown == best[key] and name != ORACLE
            cells.append(Text(f"{shown}*" if is_best else f"{shown} ", style="bold green" if is_best else ""))
        style = "bold" if name in models else "dim" if name == ORACLE else ""
        table.add_row("the truth" if name == ORACLE else name, *cells, style=style)
    return table
