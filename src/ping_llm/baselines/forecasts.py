"""Any baseline with a predictive distribution around its answers, learnt from the training data alone.

To see what errors a baseline makes, it is fitted to a part of the training data and asked about the rest: all
measurements of some sources, all of some other pairs, and of what remains the latest. Errors are kept apart by how
familiar a question is (see `known`). A causal baseline is also asked about every training measurement, one step ahead,
and the errors for measured pairs are kept apart by the age of the latest measurement.

Then the baseline is fitted to everything: twice the time of one fit. Several baselines can share one `Rehearsal`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ping_llm.baselines.interface import Baseline, Bools, FittedBaseline, Floats, Observations, Questions
from ping_llm.baselines.known import BUCKETS, Known
from ping_llm.baselines.residuals import PointWithResiduals, cumulative_by_bucket

_MOST_ERRORS: Final = 500_000


class Rehearsal:
    """Training data of which a part is held out: what is known, and what is asked to see errors."""

    def __init__(
        self, train: Known, *, sources: float = 0.05, pairs: float = 0.1, latest: float = 0.1, seed: int = 0
    ) -> None:
        self.train = train
        self._shares = sources, pairs, latest
        self._seed = seed

    @cached_property
    def learnt(self) -> Known:
        return Known(self.train.observations.take(~self._held_out))

    @cached_property
    def asked(self) -> Observations:
        return self._some(self.train.observations.take(self._held_out).answered)

    @cached_property
    def one_step_ahead(self) -> Observations:
        """Training measurements, for baselines that see nothing of them when they are asked about them."""
        return self._some(self.train.observations.answered)

    @cached_property
    def _held_out(self) -> Bools:
        train, (sources, pairs, latest) = self.train.observations, self._shares
        rng = np.random.default_rng(self._seed)
        _, source = np.unique(train.source, return_inverse=True)
        low, high = np.minimum(train.source, train.destination), np.maximum(train.source, train.destination)
        _, pair = np.unique((low.astype(np.int64) << 32) | (high & 0xFFFFFFFF), return_inverse=True)
        held_out = (rng.random(len(train)) < sources)[source]
        held_out |= (rng.random(len(train)) < pairs)[pair]
        if len(train):
            held_out |= train.time_s > np.quantile(train.time_s, 1.0 - latest)
        return np.asarray(held_out)

    def _some(self, asked: Observations) -> Observations:
        if len(asked) <= _MOST_ERRORS:
            return asked
        return asked.take(np.random.default_rng(self._seed).choice(len(asked), _MOST_ERRORS, replace=False))


@dataclass(frozen=True, kw_only=True)
class WithResiduals:
    """A baseline whose answers are distributions."""

    baseline: Baseline
    seed: int = 0

    @property
    def name(self) -> str:
        return self.baseline.name

    @property
    def causal(self) -> bool:
        return self.baseline.causal

    def fit(self, train: Observations) -> "FittedForecaster":
        known = Known(train)
        return self.knowing(known, self.errors(Rehearsal(known, seed=self.seed)))

    def errors(self, rehearsal: Rehearsal) -> Floats:
        """P(error <= edge) for each bucket of questions, as `PointWithResiduals` takes it."""
        rounds = [(rehearsal.learnt, rehearsal.asked)]
        if self.causal:
            rounds.append((rehearsal.train, rehearsal.one_step_ahead))
        errors, buckets = [], []
        for known, asked in rounds:
            questions = self.as_seen(asked.questions)
            errors.append(asked.log_rtt - np.log(self.baseline.fit(known.observations).predict(questions)))
            buckets.append(known.familiarity.bucket(questions))
        return cumulative_by_bucket(np.concatenate(errors), np.concatenate(buckets), BUCKETS)

    def knowing(self, known: Known, errors: Floats) -> "FittedForecaster":
        """Fitted to measurements that need not be those from which the errors were learnt."""
        fitted = self.baseline.fit(known.observations)
        return FittedForecaster(settings=self, fitted=fitted, known=known, errors=errors)

    def as_seen(self, questions: Questions) -> Questions:
        """A static baseline knows all that it was fitted to, whenever it is asked."""
        if self.causal:
            return questions
        whenever = np.full(len(questions), np.nan)
        return Questions(source=questions.source, destination=questions.destination, time_s=whenever)


def with_residuals(baseline: Baseline, *, seed: int = 0) -> WithResiduals:
    """The baseline with a distribution: `with_residuals(Vivaldi()).fit(train).forecast(questions).quantile(0.9)`."""
    return WithResiduals(baseline=baseline, seed=seed)


@dataclass(frozen=True, kw_only=True)
class FittedForecaster:
    settings: WithResiduals
    fitted: FittedBaseline
    known: Known
    errors: Floats

    def predict(self, questions: Questions) -> Floats:
        return self.fitted.predict(questions)

    def forecast(self, questions: Questions) -> PointWithResiduals:
        asked = self.settings.as_seen(questions)
        return PointWithResiduals(
            point_ms=self.fitted.predict(asked),
            p_failed=self.known.failures.probability(asked),
            bucket=self.known.familiarity.bucket(asked),
            cumulative=self.errors,
        )
