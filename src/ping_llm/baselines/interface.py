"""What a baseline is: settings, whose `fit` learns from measurements and returns something that answers questions.

static   ignores the time of a question: the caller must see to it that the training data lies before it
causal   uses only what was measured strictly before the time of the question
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ping_llm.core.rtt import Floats, Observations, Questions


@dataclass(frozen=True)
class FittedBaseline:
    predict: Callable[[Questions], Floats]
    """The median RTT in ms that is expected for each question, always positive and finite."""


class Baseline(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def causal(self) -> bool:
        """Whether an answer depends only on measurements strictly before the time of its question."""
        ...

    def fit(self, train: Observations) -> FittedBaseline: ...
