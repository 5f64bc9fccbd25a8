"""How good predictions are, in a few numbers.

Errors are those of the predicted median, over the measurements that were answered. The negative log-likelihood (NLL) is
that of every result, timeouts included, as an RTT code: so predictors that give densities and codes can be compared.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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

Losses = dict[str, Floats]
"""A number for each question, NaN where there is nothing to score: a score is their mean or one of their quantiles."""

INTERVAL: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class ScoredAnswers:
    """Of one predictor, to all questions of a protocol."""

    losses: Losses
    median_ms: Floats
    pit: Floats
    """Probability integral transform: the predicted CDF at each measured RTT; NaN where there was none."""

    @classmethod
    def of(cls, predicted: RttDistribution, observed: Observations) -> Self:
        rtt, median = observed.rtt_ms.astype(np.float64), predicted.median
        failed, error = np.isnan(rtt), np.abs(median - rtt)
        some_rtt = np.where(failed, 1.0, rtt)
        low, high = predicted.interval(INTERVAL)
        below, above = code_bounds(some_rtt)
        losses = {
            "error": error,
            "relative": error / np.maximum(rtt, MIN_RTT_MS),
            "bits": predicted.bits(rtt),
            "crps": np.where(failed, np.nan, predicted.crps(some_rtt)),
            "inside": np.where(failed, np.nan, (low <= rtt) & (rtt <= high)),
            "brier": (predicted.p_failed - failed) ** 2,
        }
        pit = np.where(failed, np.nan, (predicted.cdf(below) + predicted.cdf(above)) / 2)
        return cls(losses=losses, median_ms=median, pit=pit)

    @cached_property
    def scores(self) -> Scores:
        """All of them (see `SCORE_COLUMNS`), NaN where there was nothing to score."""
        return scores_of(self.losses)

    def inside(self, probability: Floats) -> Floats:
        """The share of RTTs inside the predicted central interval of each probability. Nothing without RTTs."""
        needed = np.sort(np.abs(2 * self.pit[~np.isnan(self.pit)] - 1))  # the narrowest interval that holds the RTT
        return np.searchsorted(needed, probability, side="right") / len(needed) if len(needed) else np.empty(0)


def scores_of(losses: Losses) -> Scores:
    return {key: column.of(losses[column.loss]) for key, column in SCORE_COLUMNS.items() if column.loss in losses}


# How far chance decides: the questions are resampled (a bootstrap), the same ones for every predictor.

RESAMPLES: Final = 1000
_MAX_DRAWS: Final = 10_000_000
_FEWEST_GROUPS: Final = 10


def resampled_counts(group: Ints, resamples: int = RESAMPLES, seed: int = 0) -> npt.NDArray[np.uint16]:
    """How often each question is in each resample, [resamples, questions]; fewer resamples of very many questions.

    Questions of a group (such as a pair of nodes) are drawn together, because they are easy or hard together; but each
    alone where there are too few groups to tell."""
    groups, number = np.unique(group, return_inverse=True)
    if len(groups) < _FEWEST_GROUPS:
        groups = number = np.arange(len(group))
    resamples = int(np.clip(_MAX_DRAWS // max(len(group), 1), min(100, resamples), resamples))
    drawn = np.random.default_rng(seed).integers(0, max(len(groups), 1), (resamples, len(groups)))
    counts = [np.bincount(row, minlength=len(groups)).astype(np.uint16) for row in drawn]
    return np.stack(counts)[:, number]


def resampled_score(losses: Floats, level: float | None, counts: npt.NDArray[np.uint16]) -> Floats:
    """The mean (no level) or a quantile of the losses in each resample; NaN where it has none of them."""
    scored = np.flatnonzero(~np.isnan(losses))
    if level is not None:
        scored = scored[np.argsort(losses[scored], kind="stable")]
    counts = counts[:, scored]
    total = counts.sum(axis=1, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        if level is None:
            return np.asarray(counts @ losses[scored] / total)
    if not len(scored):
        return np.full(len(counts), np.nan)
    at = (np.cumsum(counts, axis=1, dtype=np.int32) >= np.maximum(level * total, 0.5)[:, None]).argmax(axis=1)
    return np.where(total > 0, losses[scored][at], np.nan)


def confidence_interval(resampled: Floats) -> tuple[float, float]:
    """Between which 95 % of the resamples lie."""
    resampled = resampled[~np.isnan(resampled)]
    low, high = np.quantile(resampled, (0.025, 0.975)) if len(resampled) else (np.nan, np.nan)
    return float(low), float(high)


def leaders(scores: Mapping[str, Scores], resampled: Mapping[str, Mapping[str, Floats]]) -> dict[str, str]:
    """Of each score, who is ahead of every other outside the noise: in 97.5 % of the resamples, where all are asked
    the same questions. The truth about simulated data competes with nobody, and who has no rival leads nowhere."""
    found = {}
    for key, column in SCORE_COLUMNS.items():
        distance = {
            name: column.distance(of_name[key])
            for name, of_name in scores.items()
            if name != ORACLE and not np.isnan(of_name.get(key, np.nan))
        }
        if len(distance) < 2:
            continue
        first = min(distance, key=distance.__getitem__)
        lead = column.distance(resampled[first][key])
        if all((lead < column.distance(resampled[name][key])).mean() >= 0.975 for name in distance if name != first):
            found[key] = first
    return found


# What an evaluation found: scores by protocol and predictor, and what plots need.

ORACLE: Final = "oracle"

EVALUATION_FILE: Final = "evaluation.json"
"""In the folder of a run, for its report."""
_SHARES: Final = np.linspace(0.02, 0.98, 49).round(2)
"""Of the answers, for the distribution of errors; and of probability, for calibration."""


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    questions: Observations
    known_before: Ints
    """How many measurements of its source were known at the time of each question."""
    answers: dict[str, ScoredAnswers]
    """By predictor: baselines, models in their order, and the oracle if there is one."""

    def relative_errors(self, name: str) -> Floats:
        """Of the measurements that were answered."""
        return self.answers[name].losses["relative"][~np.isnan(self.questions.rtt_ms)]

    @cached_property
    def comparison(self) -> "Comparison":
        losses = {name: found.losses for name, found in self.answers.items()}
        return Comparison.of(losses, self.questions.unordered_pair)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predictors that were asked the same questions: scores with their noise."""

    scores: Mapping[str, Scores]
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    """By predictor and score: where it would lie with other questions, in 95 of 100 cases."""
    leaders: Mapping[str, str]
    """By score: who is ahead of all others outside the noise."""

    @classmethod
    def of(cls, losses: Mapping[str, Losses], group: Ints) -> Self:
        """`group`: questions that are drawn together, see `resampled_counts`."""
        counts = resampled_counts(group)
        scores = {name: scores_of(found) for name, found in losses.items()}
        resampled = {
            name: {
                key: resampled_score(found[column.loss], column.level, counts)
                for key, column in SCORE_COLUMNS.items()
                if column.loss in found
            }
            for name, found in losses.items()
        }
        intervals = {name: {key: confidence_interval(r) for key, r in of.items()} for name, of in resampled.items()}
        return cls(scores=scores, intervals=intervals, leaders=leaders(scores, resampled))

    def numbers(self, name: str) -> dict[str, float | None]:
        """The scores of one predictor; what could not be scored is null."""
        return {key: None if np.isnan(value) else value for key, value in self.scores[name].items()}

    def ends(self, name: str) -> dict[str, list[float]]:
        return {key: list(ends) for key, ends in self.intervals[name].items() if not np.isnan(ends[0])}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    models: Sequence[str]
    """Names of the predictors that are models, the first being the one that it is all about."""
    protocols: dict[str, ProtocolResult]

    def to_json(self) -> dict[str, Any]:
        """`{"protocols": {"unseen_pair": {"model": {"mae": …}, "dmfsgd": {…}}}}`, `intervals` in the same form with two
        ends of each score, and `leads`: by protocol and score, who is ahead of all others outside the noise.

        The first model is "model", the truth about simulated data "oracle".
        """
        found: dict[str, Any] = {"protocols": {}, "intervals": {}, "leads": {}}
        for protocol, result in self.protocols.items():
            of, questions = result.comparison, {"questions": len(result.questions)}
            found["protocols"][protocol] = {self._key(name): of.numbers(name) | questions for name in of.scores}
            found["intervals"][protocol] = {self._key(name): of.ends(name) for name in of.scores}
            found["leads"][protocol] = {score: self._key(name) for score, name in of.leaders.items()}
        return found

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
        if not where:  # the model of the package
            continue
        run = RunFolder(Path(where))
        if run.config.is_file() and run.metrics.is_file():
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
    loss: str
    """Which of the losses it is a score of: their mean, or their quantile at the level."""
    level: float | None = None
    is_share: bool = False
    """The run report shows it in per cent."""
    best: float = 0.0

    @property
    def title_with_unit(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def of(self, losses: Floats) -> float:
        scored = losses[~np.isnan(losses)]
        if not len(scored):
            return float("nan")
        return float(np.mean(scored) if self.level is None else np.quantile(scored, self.level))

    def distance(self, values: Any) -> Any:
        """From the best value there could be."""
        return values if self.best == -math.inf else np.abs(values - self.best)

    def for_page(self, value: float) -> str:
        return f"{100 * value:,.1f} %" if self.is_share else f"{value:,{self.format[2:-1]}}"


SCORE_COLUMNS: Final = {
    "median_re": ScoreColumn(
        "median RE", "", "{:.4f}", "relative error of the median answer: half are smaller", "relative", 0.5, True
    ),
    "p90_re": ScoreColumn("p90 RE", "", "{:.4f}", "relative error that one in ten exceeds", "relative", 0.9, True),
    "median_ae": ScoreColumn("median AE", "ms", "{:.2f}", "absolute error of it: half are smaller", "error", 0.5),
    "mae": ScoreColumn("MAE", "ms", "{:.2f}", "mean absolute error of it", "error"),
    "crps": ScoreColumn("CRPS", "ms", "{:.2f}", "distance of the predicted distribution from the RTT", "crps"),
    # A density could make the negative log-likelihood negative.
    "nll_bits": ScoreColumn(
        "NLL", "bits", "{:.2f}", "negative log-likelihood of a result, timeouts included", "bits", best=-math.inf
    ),
    "coverage90": ScoreColumn(
        "in 90 %",
        "",
        "{:.1%}",
        "share of RTTs inside the predicted 90 % interval: 90 % is best",
        "inside",
        is_share=True,
        best=INTERVAL,
    ),
    "brier": ScoreColumn("Brier", "", "{:.4f}", "squared error of the predicted probability of a timeout", "brier"),
}

PROTOCOL_TITLES: Final = {
    "unseen_pair": "Unseen pairs: known nodes, measured for the first time",
    "seen_pair": "Seen pairs: what they measure later",
    "unseen_probe": "Unseen probes: sources that nothing was learned from",
    "disconnected": "Disconnected pairs: no chain of known measurements links the two nodes",
}


def tables(evaluation: Evaluation) -> Group:
    """One table for each protocol, and what its columns mean."""
    parts: list[Table | Text] = []
    for protocol, result in evaluation.protocols.items():
        title = f"{PROTOCOL_TITLES.get(protocol, protocol)} ({len(result.questions):,} questions)"
        parts += [comparison_table(title, result.comparison, evaluation.models), Text()]
    return Group(*parts, legend())


def legend() -> Text:
    lines = [f"{column.title:11}{column.meaning}" for column in SCORE_COLUMNS.values()]
    lines.append(f"{'±':11}half of the 95 % interval of the value above it, had other questions been drawn")
    lines.append(f"{'*':11}best in its column, ahead of every other outside that noise")
    return Text("\n".join(lines), style="dim")


def comparison_table(title: str, comparison: Comparison, models: Sequence[str] = ("model",)) -> Table:
    """Two lines for each predictor: its scores, and their noise; what it does not give stays empty."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.show_edge = False
    table.add_column("\npredictor", overflow="fold")
    for column in SCORE_COLUMNS.values():
        first, _, second = column.title_with_unit.replace(",", "").partition(" ")
        table.add_column(f"{first}\n{second}" if second else f"\n{first}", justify="right", no_wrap=True)
    for name, scores in comparison.scores.items():
        cells = []
        for key, column in SCORE_COLUMNS.items():
            shown = Text()
            if not np.isnan(value := scores.get(key, np.nan)):
                low, high = comparison.intervals[name][key]
                leads = comparison.leaders.get(key) == name
                shown.append(f"{column.format.format(value)}{'*' if leads else ' '}", "bold green" if leads else "")
                shown.append(f"\n±{column.format.format((high - low) / 2)} ", "dim")
            cells.append(shown)
        style = "bold" if name in models else "dim" if name == ORACLE else ""
        table.add_row("the truth" if name == ORACLE else name, *cells, style=style)
    return table
