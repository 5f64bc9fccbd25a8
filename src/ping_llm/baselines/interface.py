"""What a baseline is: settings, whose `fit` learns from measurements and returns a function of questions.

static   ignores the time of a question: the caller must see to it that the training data lies before it
causal   uses only what was measured strictly before the time of the question

Static ones learn from one value for each measured pair (`PairTable`). The simplest of all stands at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ping_llm.core.rtt import DEFAULT_RTT_MS, MIN_RTT_MS, Floats, Ints, Observations, Questions

Predict = Callable[[Questions], Floats]
"""The median RTT in ms that is expected for each question, always positive and finite."""


class Baseline(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def causal(self) -> bool: ...

    def fit(self, train: Observations) -> Predict: ...


_FITTED: Final[WeakKeyDictionary[Observations, dict[Baseline, Predict]]] = WeakKeyDictionary()


def fitted(baseline: Baseline, train: Observations) -> Predict:
    """A baseline that others build on is fitted once to the same measurements, however many ask."""
    if baseline.causal:  # which others do not build on, and which keeps all measurements
        return baseline.fit(train)
    of_train = _FITTED.setdefault(train, {})
    if baseline not in of_train:
        of_train[baseline] = baseline.fit(train)
    return of_train[baseline]


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """One row for each measured pair, sorted by `pair`: the median of its answered measurements.

    The median makes one bad measurement harmless, and the table bounds the work: five million measurements of a hundred
    thousand pairs are a hundred thousand rows.
    """

    pair: Ints
    source: Ints
    destination: Ints
    rtt_ms: Floats

    @classmethod
    def of(cls, train: Observations) -> "PairTable":
        """Sorted once for all baselines that learn from the same measurements."""
        if train not in _TABLES:
            _TABLES[train] = cls._of(train.answered)
        return _TABLES[train]

    @classmethod
    def _of(cls, known: Observations) -> "PairTable":
        pair = known.pair
        rtt = np.maximum(known.rtt_ms.astype(np.float64), MIN_RTT_MS)
        order = np.lexsort((rtt, pair))
        pair, rtt = pair[order], rtt[order]
        first = np.flatnonzero(np.diff(pair, prepend=pair[:1] - 1)) if len(pair) else np.zeros(0, dtype=np.int64)
        count = np.diff(first, append=len(pair))
        return cls(
            pair=pair[first],
            source=known.source[order[first]].astype(np.int64),
            destination=known.destination[order[first]].astype(np.int64),
            rtt_ms=(rtt[first + (count - 1) // 2] + rtt[first + count // 2]) / 2,
        )

    def __len__(self) -> int:
        return len(self.pair)

    @property
    def nodes(self) -> int:
        """One more than the largest id."""
        return int(max(self.source.max(), self.destination.max())) + 1 if len(self) else 0

    @property
    def questions(self) -> Questions:
        return Questions(source=self.source, destination=self.destination, time_s=np.full(len(self), np.nan))

    def lookup(self, questions: Questions) -> Floats:
        """The median of each question's pair, NaN where the pair was never measured."""
        if not len(self):
            return np.full(len(questions), np.nan)
        at = np.minimum(np.searchsorted(self.pair, questions.pair), len(self) - 1)
        return np.where(self.pair[at] == questions.pair, self.rtt_ms[at], np.nan)


_TABLES: Final[WeakKeyDictionary[Observations, PairTable]] = WeakKeyDictionary()


def rows_of(questions: Questions, count: int) -> tuple[Ints, Ints]:
    """The rows of sources and destinations in tables of `count` nodes and one last row for every unknown node."""
    source, destination = (
        np.where((nodes >= 0) & (nodes < count), nodes, count) for nodes in (questions.source, questions.destination)
    )
    return source, destination


def mean_of_all_before(
    asked_s: Floats, time_s: Floats, value: npt.NDArray[Any], *, prior: float, strength: float
) -> Floats:
    """As `History.mean_before`, of all measurements whatever their key."""
    order = np.argsort(time_s, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(value[order], dtype=np.float64)])
    count = np.searchsorted(time_s[order], asked_s)
    return np.asarray((total[count] + strength * prior) / (count + strength))


def with_fallback(predicted: Floats, questions: Questions, fallback: Predict) -> Floats:
    """What the fallback predicts takes the place of every NaN."""
    lacking = np.isnan(predicted)
    if lacking.any():
        predicted[lacking] = fallback(questions.take(lacking))
    return predicted


@dataclass(frozen=True, kw_only=True)
class GlobalMedian:
    """The median of all measurements. Whatever does not beat it has learned nothing."""

    name: str = "global median"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        rtt = train.answered.rtt_ms
        median = float(np.median(rtt)) if len(rtt) else DEFAULT_RTT_MS
        return lambda questions: np.full(len(questions), median)
