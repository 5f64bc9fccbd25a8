"""Measurements that predictors may look at, with what every distribution needs of them, computed once for all.

How much is known about a question decides how wrong a baseline is likely to be: errors differ by ten times.

    0 an end was never measured   1 the pair was never measured   2.. the pair was measured, the longer ago the less
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ping_llm.baselines.failures import FailureRates, FittedFailureRates
from ping_llm.baselines.history import History
from ping_llm.baselines.interface import Floats, Ints, Observations, Questions
from ping_llm.baselines.pairs import rows_of

AGES_S: Final = np.array([86_400.0, 3_600.0, 600.0])
"""Ages that separate the buckets of measured pairs, oldest first: a day, an hour, ten minutes."""

BUCKETS: Final = 2 + len(AGES_S) + 1


class Known:
    """Measurements, and what was familiar and what had failed at any time."""

    def __init__(self, observations: Observations) -> None:
        self.observations = observations

    @cached_property
    def familiarity(self) -> "Familiarity":
        return Familiarity.of(self.observations)

    @cached_property
    def failures(self) -> FittedFailureRates:
        return FailureRates(causal=True).fit(self.observations)


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
        time_s = np.where(np.isnan(questions.time_s), np.inf, questions.time_s)
        known = np.ones(len(questions), dtype=bool)
        for node in (questions.source, questions.destination):
            known &= self.first_s[rows_of(node, len(self.first_s) - 1)] < time_s
        start, stop = self.by_pair.span(questions.pair, questions.time_s)
        age = self.by_pair.age(questions.pair, questions.time_s)
        freshness = len(AGES_S) - np.searchsorted(AGES_S[::-1], age)
        return np.where(stop > start, 2 + freshness, known.astype(np.int64))
