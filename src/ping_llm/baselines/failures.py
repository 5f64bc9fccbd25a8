"""P(failed) from smoothed frequencies: the pair's, resting on those of its ends, which rest on that of everything.

A Beta prior stands behind every frequency: as if some more probes had been seen that failed as often as the prior says.
The two ends are put together by adding their log odds relative to the global ones.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ping_llm.baselines.history import History
from ping_llm.baselines.interface import Floats, Observations, Questions

DEFAULT_FAILED: Final = 0.035
"""Share of failed probes in a RIPE Atlas extract, for where nothing at all is known."""


@dataclass(frozen=True, kw_only=True)
class FailureRates:
    """`causal` counts only what was measured before a question, otherwise all training data counts."""

    node_strength: float = 10.0
    pair_strength: float = 3.0
    causal: bool = False

    def fit(self, train: Observations) -> "FittedFailureRates":
        failed = np.isnan(train.rtt_ms)
        return FittedFailureRates(
            settings=self,
            everything=History.of(np.zeros(len(train), np.int64), train.time_s, failed),
            by_source=History.of(train.source, train.time_s, failed),
            by_destination=History.of(train.destination, train.time_s, failed),
            by_pair=History.of(train.pair, train.time_s, failed),
        )


@dataclass(frozen=True, kw_only=True)
class FittedFailureRates:
    settings: FailureRates
    everything: History
    by_source: History
    by_destination: History
    by_pair: History

    def probability(self, questions: Questions) -> Floats:
        """P(failed) of each question, never 0 or 1."""
        node, pair = self.settings.node_strength, self.settings.pair_strength
        time_s = questions.time_s if self.settings.causal else np.full(len(questions), np.nan)
        zeros = np.zeros(len(questions), np.int64)
        overall = self.everything.mean_before(zeros, time_s, prior=DEFAULT_FAILED, strength=1.0)
        source = self.by_source.mean_before(questions.source, time_s, prior=overall, strength=node)
        destination = self.by_destination.mean_before(questions.destination, time_s, prior=overall, strength=node)
        together = 1.0 / (1.0 + np.exp(-(_log_odds(source) + _log_odds(destination) - _log_odds(overall))))
        return self.by_pair.mean_before(questions.pair, time_s, prior=together, strength=pair)


def _log_odds(probability: Floats) -> Floats:
    return np.asarray(np.log(probability) - np.log1p(-probability))
