"""What an evaluation found: scores by protocol and predictor, and what plots need."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from ping_llm.baselines.interface import Floats, Ints, Observations
from ping_llm.distribution import RttDistribution
from ping_llm.evaluate.scores import Scores, scores
from ping_llm.tokens.rtt_code import code_bounds

ORACLE: Final = "oracle"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Of one predictor, to all questions of a protocol."""

    scores: Scores
    median_ms: Floats
    place: Floats
    """Where in its distribution each measured RTT lies, from 0 to 1; NaN where there was no answer."""

    @classmethod
    def of(cls, predicted: RttDistribution, observed: Observations) -> Self:
        failed = np.isnan(observed.rtt_ms)
        below, above = code_bounds(np.where(failed, 1.0, observed.rtt_ms))
        place = (predicted.cdf(below) + predicted.cdf(above)) / 2
        return cls(
            scores=scores(predicted, observed), median_ms=predicted.median, place=np.where(failed, np.nan, place)
        )


@dataclass(frozen=True, kw_only=True)
class ProtocolResult:
    asked: Observations
    known_before: Ints
    """How many measurements of its source were known at the time of each question."""
    answers: dict[str, Answers]
    """By predictor: baselines, models in their order, and the oracle if there is one."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    models: Sequence[str]
    """Names of the predictors that are models, the first being the one that it is all about."""
    protocols: dict[str, ProtocolResult]

    def to_json(self) -> dict[str, Any]:
        """`{"protocols": {"unseen_pair": {"model": {"mae": …}, "dmfsgd": {…}}}}`; what could not be scored is null.

        The first model is "model", the truth about simulated data "oracle".
        """
        keys = {name: name for name in self.models} | dict.fromkeys(self.models[:1], "model")
        return {
            "protocols": {
                protocol: {keys.get(name, _key(name)): _plain(a.scores) for name, a in result.answers.items()}
                for protocol, result in self.protocols.items()
            }
        }


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _plain(found: Scores) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else value for name, value in found.items()}
