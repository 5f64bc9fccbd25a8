"""Any baseline with a predictive distribution around its answers, learnt from the training data alone.

To see what errors a baseline makes, it is fitted to a part of the training data and asked about the rest: all
measurements of some sources, all of some other pairs, and of what remains the latest. Errors are kept apart by how
familiar a question is, since they differ by ten times:

    0 an end was never measured   1 the pair was never measured   2.. the pair was measured

A causal baseline is also asked about every training measurement, one step ahead, and the errors for measured pairs are
kept apart by the age of the latest measurement. Then the baseline is fitted to everything: twice the time of one fit.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ping_llm.baselines.failures import FailureRates, FittedFailureRates
from ping_llm.baselines.history import History
from ping_llm.baselines.interface import Baseline, Bools, FittedBaseline, Floats, Ints, Observations, Questions
from ping_llm.baselines.residuals import Forecast, cumulative_by_bucket

AGES_S: Final = np.array([86_400.0, 3_600.0, 600.0])
"""Ages that separate the buckets of measured pairs, oldest first: a day, an hour, ten minutes."""

BUCKETS: Final = 2 + len(AGES_S) + 1
_MOST_ERRORS: Final = 500_000


@dataclass(frozen=True, kw_only=True)
class WithResiduals:
    """A baseline, and how its errors are learnt."""

    baseline: Baseline
    sources_held_out: float = 0.05
    pairs_held_out: float = 0.1
    latest_held_out: float = 0.1
    seed: int = 0

    @property
    def name(self) -> str:
        return self.baseline.name

    @property
    def causal(self) -> bool:
        return self.baseline.causal

    def fit(self, train: Observations) -> "FittedForecaster":
        held_out = self._held_out(train)
        errors, bucket = self._errors(train.take(~held_out), train.take(held_out).answered)
        if self.causal:
            ahead_errors, ahead_bucket = self._errors(train, self._some(train.answered))
            errors, bucket = np.concatenate([errors, ahead_errors]), np.concatenate([bucket, ahead_bucket])
        return FittedForecaster(
            fitted=self.baseline.fit(train),
            familiarity=Familiarity.of(train, causal=self.causal),
            failures=FailureRates(causal=self.causal).fit(train),
            cumulative=cumulative_by_bucket(errors, bucket, BUCKETS),
        )

    def _held_out(self, train: Observations) -> Bools:
        rng = np.random.default_rng(self.seed)
        _, source = np.unique(train.source, return_inverse=True)
        low, high = np.minimum(train.source, train.destination), np.maximum(train.source, train.destination)
        _, pair = np.unique((low.astype(np.int64) << 32) | (high & 0xFFFFFFFF), return_inverse=True)
        held_out = (rng.random(len(train)) < self.sources_held_out)[source]
        held_out |= (rng.random(len(train)) < self.pairs_held_out)[pair]
        if len(train):
            held_out |= train.time_s > np.quantile(train.time_s, 1.0 - self.latest_held_out)
        return np.asarray(held_out)

    def _errors(self, learnt: Observations, asked: Observations) -> tuple[Floats, Ints]:
        asked = self._some(asked)
        predicted = self.baseline.fit(learnt).predict(asked.questions)
        return asked.log_rtt - np.log(predicted), Familiarity.of(learnt, causal=self.causal).bucket(asked.questions)

    def _some(self, asked: Observations) -> Observations:
        if len(asked) <= _MOST_ERRORS:
            return asked
        return asked.take(np.random.default_rng(self.seed).choice(len(asked), _MOST_ERRORS, replace=False))


def with_residuals(baseline: Baseline, *, seed: int = 0) -> WithResiduals:
    """The baseline with a distribution: `with_residuals(Vivaldi()).fit(train).forecast(questions).quantile(0.9)`."""
    return WithResiduals(baseline=baseline, seed=seed)


@dataclass(frozen=True, kw_only=True)
class FittedForecaster:
    fitted: FittedBaseline
    familiarity: "Familiarity"
    failures: FittedFailureRates
    cumulative: Floats

    def predict(self, questions: Questions) -> Floats:
        return self.fitted.predict(questions)

    def forecast(self, questions: Questions) -> Forecast:
        return Forecast(
            point_ms=self.predict(questions),
            p_failed=self.failures.probability(questions),
            bucket=self.familiarity.bucket(questions),
            cumulative=self.cumulative,
        )


@dataclass(frozen=True, kw_only=True)
class Familiarity:
    """How much is known about the ends and the pair of a question; for causal baselines: was known at its time."""

    by_node: History
    by_pair: History
    causal: bool

    @classmethod
    def of(cls, train: Observations, *, causal: bool) -> "Familiarity":
        known = train.answered
        node, time_s = np.concatenate([known.source, known.destination]), np.concatenate([known.time_s, known.time_s])
        return cls(
            by_node=History.of(node, time_s, np.zeros(len(node))),
            by_pair=History.of(known.pair, known.time_s, np.zeros(len(known))),
            causal=causal,
        )

    def bucket(self, questions: Questions) -> Ints:
        time_s = questions.time_s if self.causal else np.full(len(questions), np.nan)
        known = np.ones(len(questions), dtype=bool)
        for node in (questions.source, questions.destination):
            start, stop = self.by_node.span(node, time_s)
            known &= stop > start
        start, stop = self.by_pair.span(questions.pair, time_s)
        age = self.by_pair.age(questions.pair, time_s)
        freshness = len(AGES_S) - np.searchsorted(AGES_S[::-1], age)
        return np.where(stop > start, 2 + freshness, known.astype(np.int64))
