"""Baselines that follow one pair through time: last value, median of the last few, exponential moving average.

They are causal: an answer depends only on measurements strictly before the time of its question, of whatever pair, so
they may be fitted to the very measurements they are asked about (one step ahead). A pair's later measurements would be
a leak, so a pair without earlier ones does not get its median but the node-based fallback: ln RTT is the mean of all
earlier measurements, plus the source's deviation from it, plus the destination's, both shrunk. For unseen pairs that is
much worse than a static baseline (MENOG, half of the pairs known: median relative error .28; `LogFactors` .14).
"""

from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, ref

import numpy as np

from ping_llm.baselines.interface import Predict, mean_of_all_before, with_fallback
from ping_llm.core.rtt import DEFAULT_RTT_MS, MIN_RTT_MS, Floats, History, Observations, Questions

_MOST: Final = 20
"""Measurements of a pair that any of them looks at."""
_SHRINK: Final = 2.0
"""Measurements that the prior of a node's mean is worth."""


class _Sequential:
    """A baseline that makes one RTT of the `window` latest ones of a pair."""

    window: int
    """`_MOST` or less."""

    def summary(self, recent: Floats) -> Floats:
        """One RTT from each row of recent ones, newest first and padded with NaN."""
        raise NotImplementedError

    def fit(self, train: Observations) -> Predict:
        if self.window > _MOST:
            raise ValueError(f"the window is {self.window} measurements; it must be {_MOST} or less")

        def predict(questions: Questions) -> Floats:
            recent, fallback = _before(train, questions)
            return np.where(np.isnan(recent[:, 0]), fallback, self.summary(recent[:, : self.window]))

        return predict


_BEFORE: Final[WeakKeyDictionary[Questions, tuple[ref[Observations], Floats, Floats]]] = WeakKeyDictionary()


def _before(train: Observations, questions: Questions) -> tuple[Floats, Floats]:
    """Of each question, the latest RTTs of its pair, newest first and padded with NaN, and what is predicted without
    any: looked up once for all baselines, which takes longer than anything they do."""
    if questions in _BEFORE and _BEFORE[questions][0]() is train:
        return _BEFORE[questions][1:]
    known = train.answered
    by_pair = History.about(questions.pair, known.pair, known.time_s, np.maximum(known.rtt_ms, MIN_RTT_MS))
    start, stop = by_pair.span(questions.pair, questions.time_s)
    lacking = np.where(start < stop, 0.0, np.nan)
    found = by_pair.latest(start, stop, _MOST), with_fallback(lacking, questions, partial(_from_nodes, known))
    _BEFORE[questions] = ref(train), *found
    return found


def _from_nodes(known: Observations, questions: Questions) -> Floats:
    """What the earlier measurements of both ends say about a pair that has none."""
    time_s, log_rtt = questions.time_s, known.log_rtt
    mean = mean_of_all_before(time_s, known.time_s, log_rtt, prior=float(np.log(DEFAULT_RTT_MS)), strength=1e-3)
    source, destination = (
        History.about(asked, key, known.time_s, log_rtt).mean_before(asked, time_s, prior=mean, strength=_SHRINK)
        for asked, key in ((questions.source, known.source), (questions.destination, known.destination))
    )
    return np.exp(source + destination - mean)


@dataclass(frozen=True, kw_only=True)
class MedianOfLast(_Sequential):
    """The median of the pair's latest few RTTs: a fifth less absolute error than the last value on real pings."""

    name: str = "median of last 8"
    causal: bool = True
    window: int = 8

    def summary(self, recent: Floats) -> Floats:
        in_order = np.sort(recent, axis=1)  # NaN last
        count = np.maximum(np.count_nonzero(~np.isnan(recent), axis=1), 1)
        row = np.arange(len(recent))
        return (in_order[row, (count - 1) // 2] + in_order[row, count // 2]) / 2


@dataclass(frozen=True, kw_only=True)
class LastValue(MedianOfLast):
    """The pair's latest RTT: best in the median, but every outlier counts twice (see `MedianOfLast` for the mean)."""

    name: str = "last value"
    window: int = 1


@dataclass(frozen=True, kw_only=True)
class MovingAverage(_Sequential):
    """Exponential moving average of ln RTT, where one outlier of ten times weighs as much as ten of a tenth.

    Weights are normalised over what there is, so that the first values of a pair are not overrated. The window cuts off
    a millionth of the weight.
    """

    rate: float = 0.5
    name: str = "moving average"
    causal: bool = True
    window: int = _MOST

    def summary(self, recent: Floats) -> Floats:
        weight = np.where(np.isnan(recent), 0.0, (1.0 - self.rate) ** np.arange(self.window))
        weight[:, 0] = np.maximum(weight[:, 0], 1e-300)
        return np.exp((weight * np.log(np.where(np.isnan(recent), 1.0, recent))).sum(1) / weight.sum(1))
