"""Unseen probes: what comes next from a probe that no weight has been trained on, given what it has measured so far.

Every probe of the evaluation split is cut at 80 % of its measurements, and questions are drawn from what comes after.
The model gets what the probe measured before the cut as its context. Baselines are fitted to the same measurements of
all probes that are asked about, together with the whole training split, which is what the model was trained on. Nothing
that a probe measured after its cut is known to anyone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.addresses import format_address
from ping_llm.baselines import Baseline, GlobalMedian, NodeIds, Observations, PairMedian, Questions, Vivaldi
from ping_llm.console import Advance
from ping_llm.errors import PingLlmError
from ping_llm.evaluate.scores import Floats, bits, coverage, point_scores
from ping_llm.predict import LanguageModel
from ping_llm.predict.contexts import Prompt, prompt_for
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import ProbeRow
from ping_llm.sources.simulator import World
from ping_llm.tokens.rtt_code import code_bounds

_CUT: Final = 0.8
_QUESTIONS_A_PROBE: Final = 2
_LEAST_MEASUREMENTS: Final = 5

BASELINES: Final[tuple[Baseline, ...]] = (GlobalMedian(), PairMedian(), Vivaldi())


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question: measurement `index` of a row, of which the first `known` measurements are known."""

    row: ProbeRow
    known: int
    index: int


def draw_questions(rows: RowSet, count: int, seed: int = 0) -> list[Asked]:
    """At most `count` questions, spread over the probes; the same for equal rows and seeds."""
    random = np.random.default_rng(seed)
    large_enough = np.flatnonzero(rows.column("count") >= _LEAST_MEASUREMENTS)
    asked: list[Asked] = []
    for number in random.permutation(large_enough).tolist():
        if len(asked) >= count:
            break
        row = rows[number]
        known = int(len(row) * _CUT)
        later = np.arange(known, len(row))
        for index in np.sort(random.choice(later, min(_QUESTIONS_A_PROBE, len(later)), replace=False)).tolist():
            asked.append(Asked(row=row, known=known, index=index))
    if not asked:
        raise PingLlmError(f"no probe of {rows.folder} ({rows.split}) has {_LEAST_MEASUREMENTS} measurements or more")
    return asked[:count]


def evaluate_probes(
    model: LanguageModel,
    folder: Path,
    *,
    questions: int = 400,
    seed: int = 0,
    world: World | None = None,
    advance: Advance | None = None,
) -> dict[str, dict[str, float]]:
    """Scores of the model, the baselines and, on simulated data, of the true distribution, by name."""
    step = advance or _quiet
    with RowSet(folder, "eval") as rows:
        asked = draw_questions(rows, questions, seed)
    rtt = np.array([a.row.rtt_ms[a.index] for a in asked], dtype=np.float64)
    answered = ~np.isnan(rtt)
    known, columns = _known_and_asked(folder, asked)
    scores = {}
    for baseline in BASELINES:
        predicted = baseline.fit(known).predict(columns)
        scores[baseline.name] = point_scores(predicted[answered], rtt[answered])
        step()
    scores["model"] = _model_scores(model, asked, rtt, answered)
    step()
    if world is not None:
        scores["oracle"] = _oracle_scores(world, asked, rtt, answered)
    return scores


def _quiet(amount: float = 1, *, total: float | None = None) -> None:
    """No progress."""


def _model_scores(
    model: LanguageModel, asked: list[Asked], rtt: Floats, answered: npt.NDArray[np.bool_]
) -> dict[str, float]:
    forecast = model.forecast([_prompt(a, model.config.max_target_length) for a in asked])
    low, middle, high = (forecast.quantile(level)[answered] for level in (0.05, 0.5, 0.95))
    return {
        **point_scores(middle, rtt[answered]),
        "nll_bits": bits(forecast.log_likelihood(rtt)),
        "coverage90": coverage(low, high, rtt[answered]),
    }


def _prompt(asked: Asked, length: int) -> Prompt:
    return prompt_for(asked.row, np.arange(asked.known), asked.index, length - 3)


def _oracle_scores(world: World, asked: list[Asked], rtt: Floats, answered: npt.NDArray[np.bool_]) -> dict[str, float]:
    """The true distribution's: no prediction can be expected to do better."""
    truth = world.distribution(
        [a.row.source_address for a in asked],
        [format_address(a.row.family, a.row.destinations[a.index].tobytes()) for a in asked],
        [a.row.time_us[a.index] / 1e6 for a in asked],
    )
    low, middle, high = (truth.quantile(level)[answered] for level in (0.05, 0.5, 0.95))
    below, above = code_bounds(np.where(answered, rtt, 1.0))
    with np.errstate(divide="ignore"):
        given_answer = np.log(truth.cdf(above) - truth.cdf(below)) + np.log1p(-truth.failed_probability)
        likelihood = np.where(answered, given_answer, np.log(truth.failed_probability))
    return {
        **point_scores(middle, rtt[answered]),
        "nll_bits": bits(likelihood),
        "coverage90": coverage(low, high, rtt[answered]),
    }


def _known_and_asked(folder: Path, asked: list[Asked]) -> tuple[Observations, Questions]:
    ids = NodeIds()
    parts: list[tuple[Any, ...]] = []

    def add(row: ProbeRow, known: int) -> None:
        source = np.repeat(ids.ids([bytes(row.source)]), known)
        destination = ids.ids(address.tobytes() for address in row.destinations[:known])
        parts.append((source, destination, row.time_us[:known] / 1e6, row.rtt_ms[:known].astype(np.float64)))

    for a in {id(a.row): a for a in asked}.values():
        add(a.row, a.known)
    with RowSet(folder, "train") as train:
        for number in range(len(train)):
            row = train[number]
            add(row, len(row))
    source, destination, time_s, rtt_ms = (np.concatenate(column) for column in zip(*parts, strict=True))
    known = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt_ms)
    questions = Questions(
        source=ids.ids(bytes(a.row.source) for a in asked),
        destination=ids.ids(a.row.destinations[a.index].tobytes() for a in asked),
        time_s=np.array([a.row.time_us[a.index] / 1e6 for a in asked]),
    )
    return known, questions
