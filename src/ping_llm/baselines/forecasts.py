"""Any baseline with a predictive distribution around its answers, learned from the training data alone.

To see what errors a baseline makes, it is fitted to a part of the training data and asked about the rest (`Rehearsal`):
all measurements of some sources, all of some other pairs, and of what remains the latest. A causal baseline is also
asked about every training measurement, one step ahead. Errors are kept apart by how familiar a question is, because
they differ by ten times (`Asked.bucket`). Then the baseline is fitted to everything, and the errors are put around its
answers (`PointWithResiduals`). That is twice the time of one fit; several baselines can share a `Rehearsal`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from scipy.special import expit, logit  # type: ignore[import-untyped]

from ping_llm.baselines.interface import Baseline, Predict, fitted, mean_of_all_before, rows_of
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.core.rtt import Floats, History, Ints, Observations, Questions, RttDistribution

DEFAULT_FAILED: Final = 0.035
"""Share of unanswered probes in a RIPE Atlas extract, for where nothing at all is known."""
AGES_S: Final = np.array([86_400.0, 3_600.0, 600.0])
"""Ages that separate the buckets of measured pairs, oldest first: a day, an hour, ten minutes."""
BUCKETS: Final = 2 + len(AGES_S) + 1
_MAX_ERRORS: Final = 500_000


@dataclass(frozen=True, eq=False)
class Asked:
    """Questions, what may be known of their answers, and what every distribution needs, computed once for all."""

    known: Observations
    questions: Questions

    def by(self, baseline: Baseline) -> "Asked":
        """As the baseline sees it: a static one knows all that it was fitted to, whenever it is asked."""
        return self if baseline.causal else self._whenever

    @cached_property
    def _whenever(self) -> "Asked":
        return Asked(self.known, replace(self.questions, time_s=np.full(len(self.questions), np.nan)))

    @cached_property
    def bucket(self) -> Ints:
        """How familiar a question is at its time (NaN: after all that was measured).

        0: an end was never measured; 1: the pair was never measured; from 2 on: it was, the longer ago the less.
        """
        answered, questions = self.known.answered, self.questions
        first_s = np.full(max(answered.source.max(initial=-1), answered.destination.max(initial=-1)) + 2, np.inf)
        for node in (answered.source, answered.destination):
            np.fmin.at(first_s, node, answered.time_s)
        source, destination = rows_of(questions, len(first_s) - 1)  # the last one is every unknown node
        time_s = np.where(np.isnan(questions.time_s), np.inf, questions.time_s)
        known = (first_s[source] < time_s) & (first_s[destination] < time_s)
        of_pair = History.about(questions.pair, answered.pair, answered.time_s, np.zeros(len(answered)))
        start, stop = of_pair.span(questions.pair, questions.time_s)
        freshness = len(AGES_S) - np.searchsorted(AGES_S[::-1], of_pair.age(questions.pair, questions.time_s))
        return np.where(stop > start, 2 + freshness, known.astype(np.int64))

    @cached_property
    def p_failed(self) -> Floats:
        """From smoothed frequencies: the pair's, resting on those of its ends, which rest on that of everything.

        A Beta prior stands behind every frequency: as if some more probes had been seen that failed as often as the
        prior says. The two ends are put together by adding their log odds relative to the global ones. Only what was
        measured before a question counts. Never 0 or 1.
        """
        known, questions, failed = self.known, self.questions, np.isnan(self.known.rtt_ms)

        def frequency(keys: Ints, asked: Ints, prior: Floats, strength: float) -> Floats:
            history = History.about(asked, keys, known.time_s, failed)
            return history.mean_before(asked, questions.time_s, prior=prior, strength=strength)

        overall = mean_of_all_before(questions.time_s, known.time_s, failed, prior=DEFAULT_FAILED, strength=1.0)
        source = frequency(known.source, questions.source, overall, 10.0)
        destination = frequency(known.destination, questions.destination, overall, 10.0)
        together = expit(logit(source) + logit(destination) - logit(overall))
        return frequency(known.pair, questions.pair, together, 3.0)


# A point prediction becomes a distribution: the errors it made on held-out training data, put around it.
#
# Errors are those of ln RTT, counted in bins that are fine near zero (a hundredth of a per cent) and wide far out. A
# little of a Cauchy distribution of the same spread is mixed in, so that no RTT has probability zero. Errors are
# centred: the median of the distribution is the point itself. To correct its bias instead would change the NLL by 0.05
# bits either way, and the answers themselves for the worse as often as for the better.

_OUTWARD: Final = np.geomspace(1e-4, 17.0, 120)
EDGES: Final = np.concatenate([-_OUTWARD[::-1], _OUTWARD])
"""Edges of the bins of ln(measured / predicted): a factor of 24 million either way, zero in the middle of a bin."""
MIN_ERRORS: Final = 50
"""A bucket with fewer errors than this borrows the errors of the next one."""
_CAUCHY_SHARE: Final = 0.01
_CAUCHY_ERRORS: Final = 5.0


def cumulative(errors: Floats) -> Floats:
    """P(error <= edge) for every edge: 0 at the first, 1 at the last, strictly rising, and a half at no error."""
    errors = errors - np.median(errors) if len(errors) else errors
    spread = float(np.median(np.abs(errors))) if len(errors) else 0.5
    cauchy = np.diff(np.arctan(EDGES / max(spread, 1e-3)))
    counts, _ = np.histogram(np.clip(errors, EDGES[0], EDGES[-1]), bins=EDGES)
    mass = counts + (_CAUCHY_SHARE * len(errors) + _CAUCHY_ERRORS) * cauchy / cauchy.sum()
    total = np.concatenate([[0.0], np.cumsum(mass)])
    return np.asarray(total / total[-1])


def cumulative_by_bucket(errors: Floats, bucket: Ints, buckets: int) -> Floats:
    """One row for each bucket. Buckets are ordered by how much is known, and borrow from the side where it is less."""
    enough = np.flatnonzero(np.bincount(bucket, minlength=buckets) >= MIN_ERRORS)
    nearest = [enough[np.argmin(np.abs(enough - number))] if len(enough) else None for number in range(buckets)]
    return np.stack([cumulative(errors if number is None else errors[bucket == number]) for number in nearest])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PointWithResiduals(RttDistribution):
    """A baseline's answer: its point, times what measurements were of such points in the past; ten minutes at most."""

    point_ms: Floats
    """What the baseline itself predicts, and the median."""
    bucket: Ints
    cumulative: Floats
    """[buckets, edges]: P(error <= edge)"""

    _SHARED: ClassVar[frozenset[str]] = frozenset({"cumulative"})

    def _cdf(self, rtt_ms: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            error = np.log(rtt_ms / self.point_ms[:, None])
        until = self._each_bucket(error, lambda row, errors: np.interp(errors, EDGES, row))
        return np.where(rtt_ms < MAX_RTT_MS, until, 1.0)

    def _quantile(self, level: Floats) -> Floats:
        error = self._each_bucket(level, lambda row, levels: np.interp(levels, row, EDGES))
        return np.minimum(self.point_ms[:, None] * np.exp(error), MAX_RTT_MS)

    def _each_bucket(self, values: Floats, look_up: Callable[[Floats, Floats], Floats]) -> Floats:
        result = np.empty(values.shape)
        for number, row in enumerate(self.cumulative):
            mine = self.bucket == number
            result[mine] = look_up(row, values[mine])
        return result


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """Training data of which a part is held out. What is asked to see errors comes with ln RTT, as it was measured."""

    train: Observations
    seed: int = 0

    @cached_property
    def held_out(self) -> tuple[Asked, Floats]:
        train, rng = self.train, np.random.default_rng(self.seed)
        _, source = np.unique(train.source, return_inverse=True)
        _, pair = np.unique(train.unordered_pair, return_inverse=True)
        held_out = (rng.random(len(train)) < 0.05)[source]
        held_out |= (rng.random(len(train)) < 0.1)[pair]
        if len(train):
            held_out |= train.time_s > np.quantile(train.time_s, 0.9)
        return self._some(train.take(~held_out), train.take(held_out).answered)

    @cached_property
    def one_step_ahead(self) -> tuple[Asked, Floats]:
        """Training measurements, for baselines that see nothing of them when they are asked about them."""
        return self._some(self.train, self.train.answered)

    def _some(self, known: Observations, measured: Observations) -> tuple[Asked, Floats]:
        if len(measured) > _MAX_ERRORS:
            rows = np.random.default_rng(self.seed).choice(len(measured), _MAX_ERRORS, replace=False)
            measured = measured.take(rows)
        return Asked(known, measured.questions), measured.log_rtt

    def residuals(self, baseline: Baseline) -> Floats:
        """P(error <= edge) for each bucket of questions, as `PointWithResiduals` takes it."""
        errors, buckets = [], []
        for everybody, log_rtt in [self.held_out, self.one_step_ahead] if baseline.causal else [self.held_out]:
            asked = everybody.by(baseline)
            errors.append(log_rtt - np.log(fitted(baseline, asked.known)(asked.questions)))
            buckets.append(asked.bucket)
        return cumulative_by_bucket(np.concatenate(errors), np.concatenate(buckets), BUCKETS)


def forecast(predict: Predict, asked: Asked, residuals: Floats) -> PointWithResiduals:
    """What a fitted baseline answers, with its errors around it."""
    return PointWithResiduals(
        point_ms=predict(asked.questions), p_failed=asked.p_failed, bucket=asked.bucket, cumulative=residuals
    )


def forecaster(baseline: Baseline, train: Observations, seed: int = 0) -> Callable[[Questions], PointWithResiduals]:
    """`forecaster(Vivaldi(), train)(questions).quantile(0.9)`"""
    residuals, predict = Rehearsal(train, seed).residuals(baseline), fitted(baseline, train)

    return lambda questions: forecast(predict, Asked(train, questions).by(baseline), residuals)
