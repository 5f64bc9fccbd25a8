"""Any baseline with a predictive distribution around its answers, learned from the training data alone.

To see what errors a baseline makes, it is fitted to a part of the training data and asked about the rest (`Rehearsal`):
all measurements of some sources, all of some other pairs, and of what remains the latest. A causal baseline is also
asked about every training measurement, one step ahead. Errors are kept apart by how familiar a question is, because
they differ by ten times (`Familiarity`). Then the baseline is fitted to everything, and the errors are put around its
answers (`PointWithResiduals`). That is twice the time of one fit; several baselines can share one `Rehearsal`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from scipy.special import expit, logit  # type: ignore[import-untyped]

from ping_llm.baselines.interface import Baseline, FittedBaseline
from ping_llm.baselines.pairs import rows_of
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.core.rtt import Bools, Floats, History, Ints, Observations, Questions, RttDistribution

DEFAULT_FAILED: Final = 0.035
"""Share of unanswered probes in a RIPE Atlas extract, for where nothing at all is known."""
AGES_S: Final = np.array([86_400.0, 3_600.0, 600.0])
"""Ages that separate the buckets of measured pairs, oldest first: a day, an hour, ten minutes."""
BUCKETS: Final = 2 + len(AGES_S) + 1
_MAX_ERRORS: Final = 500_000


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """P(failed) from smoothed frequencies: the pair's, resting on those of its ends, which rest on that of everything.

    A Beta prior stands behind every frequency: as if some more probes had been seen that failed as often as the prior
    says. The two ends are put together by adding their log odds relative to the global ones. `causal` counts only what
    was measured before a question, otherwise all training data counts.
    """

    node_strength: float = 10.0
    pair_strength: float = 3.0
    causal: bool = False

    def fit(self, train: Observations) -> Callable[[Questions], Floats]:
        """A function that gives P(failed) of each question, never 0 or 1."""
        keys = np.zeros(len(train), np.int64), train.source, train.destination, train.pair
        everything, by_source, by_destination, by_pair = (
            History.of(key, train.time_s, np.isnan(train.rtt_ms)) for key in keys
        )

        def probability(questions: Questions) -> Floats:
            time_s = questions.time_s if self.causal else np.full(len(questions), np.nan)
            zeros = np.zeros(len(questions), np.int64)
            overall = everything.mean_before(zeros, time_s, prior=DEFAULT_FAILED, strength=1.0)
            ends = (by_source, questions.source), (by_destination, questions.destination)
            source, destination = (
                by_node.mean_before(node, time_s, prior=overall, strength=self.node_strength) for by_node, node in ends
            )
            together = expit(logit(source) + logit(destination) - logit(overall))
            return by_pair.mean_before(questions.pair, time_s, prior=together, strength=self.pair_strength)

        return probability


@dataclass(frozen=True, kw_only=True)
class Familiarity:
    """How much was known about the ends and the pair of a question at its time (NaN: of all that was measured)."""

    first_s: Floats
    """When each node was first measured, infinite for one that never was; the last one is every unknown node."""
    by_pair: History

    @classmethod
    def of(cls, measured: Observations) -> "Familiarity":
        known = measured.answered
        first_s = np.full(max(known.source.max(initial=-1), known.destination.max(initial=-1)) + 2, np.inf)
        for node in (known.source, known.destination):
            np.fmin.at(first_s, node, known.time_s)
        return cls(first_s=first_s, by_pair=History.of(known.pair, known.time_s, np.zeros(len(known))))

    def bucket(self, questions: Questions) -> Ints:
        """0: an end was never measured; 1: the pair was never measured; from 2 on: it was, the longer ago the less."""
        time_s = np.where(np.isnan(questions.time_s), np.inf, questions.time_s)
        source, destination = rows_of(questions, len(self.first_s) - 1)
        known = (self.first_s[source] < time_s) & (self.first_s[destination] < time_s)
        start, stop = self.by_pair.span(questions.pair, questions.time_s)
        age = self.by_pair.age(questions.pair, questions.time_s)
        freshness = len(AGES_S) - np.searchsorted(AGES_S[::-1], age)
        return np.where(stop > start, 2 + freshness, known.astype(np.int64))


class FittedHistory:
    """Measurements that predictors may look at, with what every distribution needs of them, computed once for all."""

    def __init__(self, observations: Observations) -> None:
        self.observations = observations

    @cached_property
    def familiarity(self) -> Familiarity:
        return Familiarity.of(self.observations)

    @cached_property
    def p_failed(self) -> Callable[[Questions], Floats]:
        return FailureRates(causal=True).fit(self.observations)


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


@dataclass(frozen=True, kw_only=True, eq=False)
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


class Rehearsal:
    """Training data of which a part is held out: what may be learned, and what is asked to see errors."""

    def __init__(
        self, train: FittedHistory, *, sources: float = 0.05, pairs: float = 0.1, latest: float = 0.1, seed: int = 0
    ) -> None:
        self.train = train
        self._shares = sources, pairs, latest
        self._seed = seed

    @cached_property
    def learned(self) -> FittedHistory:
        return FittedHistory(self.train.observations.take(~self._held_out))

    @cached_property
    def questions(self) -> Observations:
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
        _, pair = np.unique(train.unordered_pair, return_inverse=True)
        held_out = (rng.random(len(train)) < sources)[source]
        held_out |= (rng.random(len(train)) < pairs)[pair]
        if len(train):
            held_out |= train.time_s > np.quantile(train.time_s, 1.0 - latest)
        return held_out

    def _some(self, asked: Observations) -> Observations:
        if len(asked) <= _MAX_ERRORS:
            return asked
        return asked.take(np.random.default_rng(self._seed).choice(len(asked), _MAX_ERRORS, replace=False))


@dataclass(frozen=True, kw_only=True)
class WithResiduals:
    """A baseline whose answers are distributions.

    `WithResiduals(baseline=Vivaldi()).fit(train).forecast(questions).quantile(0.9)`
    """

    baseline: Baseline
    seed: int = 0

    def fit(self, train: Observations) -> "FittedForecaster":
        history = FittedHistory(train)
        return self.knowing(history, self.errors(Rehearsal(history, seed=self.seed)))

    def errors(self, rehearsal: Rehearsal) -> Floats:
        """P(error <= edge) for each bucket of questions, as `PointWithResiduals` takes it."""
        rounds = [(rehearsal.learned, rehearsal.questions)]
        if self.baseline.causal:
            rounds.append((rehearsal.train, rehearsal.one_step_ahead))
        errors, buckets = [], []
        for history, held_out in rounds:
            questions = self.as_seen(held_out.questions)
            errors.append(held_out.log_rtt - np.log(self.baseline.fit(history.observations).predict(questions)))
            buckets.append(history.familiarity.bucket(questions))
        return cumulative_by_bucket(np.concatenate(errors), np.concatenate(buckets), BUCKETS)

    def knowing(self, history: FittedHistory, errors: Floats) -> "FittedForecaster":
        """Fitted to measurements that need not be those from which the errors were learned."""
        return FittedForecaster(
            settings=self, fitted=self.baseline.fit(history.observations), history=history, errors=errors
        )

    def as_seen(self, questions: Questions) -> Questions:
        """A static baseline knows all that it was fitted to, whenever it is asked."""
        return questions if self.baseline.causal else replace(questions, time_s=np.full(len(questions), np.nan))


@dataclass(frozen=True, kw_only=True)
class FittedForecaster:
    settings: WithResiduals
    fitted: FittedBaseline
    history: FittedHistory
    errors: Floats

    def forecast(self, questions: Questions) -> PointWithResiduals:
        seen = self.settings.as_seen(questions)
        return PointWithResiduals(
            point_ms=self.fitted.predict(seen),
            p_failed=self.history.p_failed(seen),
            bucket=self.history.familiarity.bucket(seen),
            cumulative=self.errors,
        )
