"""What a classical predictor is asked and what it answers.

    observations   measurements to learn from, as columns
    questions      the same columns without the answer
    baseline       settings; `fit` makes a fitted baseline, which answers questions
    static         ignores the time of a question: the caller must see to it that the training data lies before it
    causal         uses only what was measured strictly before the time of the question

Nodes are whole numbers in one id space for sources and destinations, so that a host that is both is one node. An id
that was not in the training data, and any negative one, is an unknown node: it gets a fallback, never an exception.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

DEFAULT_RTT_MS: Final = 50.0
"""The answer where nothing at all is known: about the median of a RIPE Atlas extract (50.3 ms)."""

MIN_RTT_MS: Final = 0.01
"""Floor of every RTT before its logarithm is taken. A ping tool can print 0.0; no wire is that short."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What RTT has `source` to `destination` at `time_s`? The time NaN means after everything that is known."""

    source: Ints
    destination: Ints
    time_s: Floats

    def __post_init__(self) -> None:
        sizes = {name: np.shape(column) for name, column in vars(self).items()}
        if len(set(sizes.values())) != 1 or len(np.shape(self.source)) != 1:
            raise ValueError(f"the columns must be one-dimensional and of equal length, not {sizes}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> Self:
        """The rows of a mask, of a slice or of indices."""
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    @property
    def pair(self) -> Ints:
        """One number for each (source, destination), for any ids below 2^31."""
        return np.asarray((self.source.astype(np.int64) << 32) | (self.destination.astype(np.int64) & 0xFFFFFFFF))

    def reversed(self) -> "Questions":
        return Questions(source=self.destination, destination=self.source, time_s=self.time_s)


@dataclass(frozen=True, kw_only=True)
class Observations(Questions):
    """Measurements. The RTT NaN means failed: such a row says nothing about RTTs, only about failures."""

    rtt_ms: npt.NDArray[np.floating[Any]]

    @property
    def questions(self) -> Questions:
        return Questions(source=self.source, destination=self.destination, time_s=self.time_s)

    @property
    def answered(self) -> Self:
        return self.take(~np.isnan(self.rtt_ms))

    @property
    def log_rtt(self) -> Floats:
        return np.log(np.maximum(self.rtt_ms.astype(np.float64), MIN_RTT_MS))


class FittedBaseline(Protocol):
    def predict(self, questions: Questions) -> Floats:
        """The median RTT in ms that is expected for each question, always positive and finite."""
        ...


class Baseline(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def causal(self) -> bool:
        """Whether an answer depends only on measurements strictly before the time of its question."""
        ...

    def fit(self, train: Observations) -> FittedBaseline: ...


@dataclass
class NodeIds:
    """Numbers nodes in the order they are met: `ids(column)` for any column of hashables, for example addresses."""

    of: dict[Hashable, int] = field(default_factory=dict)

    def ids(self, values: Iterable[Hashable]) -> Ints:
        """The id of each value; a value met for the first time gets the next id."""
        numbers = self.of
        return np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64)

    def __len__(self) -> int:
        return len(self.of)
