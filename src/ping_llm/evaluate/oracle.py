"""The truth about simulated measurements, as a prediction: no predictor can be expected to do better."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ping_llm.baselines.interface import Observations, Questions
from ping_llm.distribution import Floats, RttDistribution
from ping_llm.sources.simulator import Distribution, World


@dataclass(frozen=True, kw_only=True, eq=False)
class TrueDistribution(RttDistribution):
    truth: Distribution

    @classmethod
    def of(cls, truth: Distribution) -> Self:
        return cls(p_failed=truth.failed_probability, truth=truth)

    def take(self, rows: Any) -> Self:
        truth = self.truth
        return self.of(
            Distribution(
                failed_probability=truth.failed_probability[rows],
                floor_ms=truth.floor_ms[rows],
                weight=tuple(weight[rows] for weight in truth.weight),
                log_median=tuple(log_median[rows] for log_median in truth.log_median),
                sigma=truth.sigma,
            )
        )

    @property
    def mean(self) -> Floats:
        return self.truth.mean()

    def _cdf(self, rtt_ms: Floats) -> Floats:
        return self.truth.cdf(rtt_ms.T).T

    def _quantile(self, level: Floats) -> Floats:
        return self.truth.quantile(level.T).T


@dataclass(frozen=True)
class Oracle:
    """A predictor that knows how the simulated Internet was made."""

    world: World

    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> TrueDistribution:
        addresses = np.array(nodes, dtype=object)
        return TrueDistribution.of(
            self.world.distribution(addresses[questions.source], addresses[questions.destination], questions.time_s)
        )
