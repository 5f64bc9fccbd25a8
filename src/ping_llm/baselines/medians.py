"""The two simplest static baselines: one median for everything, and one for each pair."""

from dataclasses import dataclass, field

import numpy as np

from ping_llm.baselines.interface import DEFAULT_RTT_MS, Baseline, FittedBaseline, Floats, Observations, Questions
from ping_llm.baselines.log_factors import LogFactors
from ping_llm.baselines.pairs import PairTable


@dataclass(frozen=True, kw_only=True)
class GlobalMedian:
    """The median of all measurements. Whatever does not beat it has learnt nothing."""

    name: str = "global median"
    causal: bool = False

    def fit(self, train: Observations) -> "FittedGlobalMedian":
        rtt = train.answered.rtt_ms
        return FittedGlobalMedian(rtt_ms=float(np.median(rtt)) if len(rtt) else DEFAULT_RTT_MS)


@dataclass(frozen=True, kw_only=True)
class FittedGlobalMedian:
    rtt_ms: float

    def predict(self, questions: Questions) -> Floats:
        return np.full(len(questions), self.rtt_ms)


@dataclass(frozen=True, kw_only=True)
class PairMedian:
    """The pair's own median; for a pair that was never measured, what the `fallback` says.

    By default that is the global median times a factor of the source and a factor of the destination (`LogFactors` of
    rank 0). A better one, such as `LogFactors()`, makes this a strong baseline for seen and unseen pairs together.
    """

    fallback: Baseline = field(default_factory=lambda: LogFactors(rank=0))
    name: str = "pair median"
    causal: bool = False

    def fit(self, train: Observations) -> "FittedPairMedian":
        return FittedPairMedian(table=PairTable.of(train), fallback=self.fallback.fit(train))


@dataclass(frozen=True, kw_only=True)
class FittedPairMedian:
    table: PairTable
    fallback: FittedBaseline

    def predict(self, questions: Questions) -> Floats:
        predicted = self.table.lookup(questions)
        unseen = np.isnan(predicted)
        if unseen.any():
            predicted[unseen] = self.fallback.predict(questions.take(unseen))
        return predicted
