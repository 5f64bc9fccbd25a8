"""What an answer rests on: how much was measured before its time of the pair and of both ends, and how they are linked.

A chain is a path over pairs whose RTT is known, in whichever direction. The ends of a pair that was measured are one
hop apart, those that a third node measured are two. Where there is no chain, nothing that was measured compares the two
ends: an answer is then a guess from typical topologies (see `uncertainty`).
"""

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

from ping_llm.core.rtt import History, Ints, Observations, Questions, RttDistribution

NO_CHAIN: Final = -1
_AT_ONCE: Final = 256
"""Sources from which paths are followed together, a byte for each of them and each node."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """Of each question, from what was measured strictly before its time."""

    pair: Ints
    """Measurements of the two ends, in either direction, timeouts included."""
    source: Ints
    """Measurements in which it takes part, as source or destination."""
    destination: Ints
    chain: Ints
    """Hops of the shortest chain, or `NO_CHAIN`."""

    @classmethod
    def of(cls, known: Observations, questions: Questions) -> Self:
        known = known.take((known.source >= 0) & (known.destination >= 0))
        time_s = np.where(np.isnan(known.time_s), -np.inf, known.time_s)  # without a time: before every question
        ends = np.concatenate([known.source, known.destination])
        asked = np.concatenate([questions.source, questions.destination])
        matters = np.zeros(max(ends.max(initial=0), asked.max(initial=0)) + 2, dtype=bool)  # an id of -1 is the last
        matters[np.maximum(asked, -1)] = True
        own = matters[known.source] | matters[known.destination]
        pairs = _counts(known.unordered_pair[own], time_s[own], questions.unordered_pair, questions.time_s)
        own = matters[ends]
        nodes = _counts(ends[own], np.tile(time_s, 2)[own], asked, np.tile(questions.time_s, 2))
        source, destination = np.split(nodes, 2)
        chain = _chains(known, time_s, questions, len(matters))
        return cls(pair=pairs, source=source, destination=destination, chain=chain)

    def __len__(self) -> int:
        return len(self.pair)

    def take(self, rows: Any) -> Self:
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    def reasons(self, answers: RttDistribution, range_ms: tuple[float, float]) -> npt.NDArray[Any]:
        """Why each answer is an extrapolation, None where it is not.

        `range_ms` are the RTTs that the model was trained on: an interval that reaches beyond is extrapolated, too.
        """
        low, high = answers.interval(0.9)
        of_each = {
            "neither end was ever measured": (self.source == 0) & (self.destination == 0),
            "the source was never measured": self.source == 0,
            "the destination was never measured": self.destination == 0,
            "no chain of measurements links the two ends": self.chain == NO_CHAIN,
            "the pair has only timed out": (self.pair > 0) & (self.chain > 1),
            "the answer reaches beyond the RTTs of the training": (low < range_ms[0]) | (high > range_ms[1]),
        }
        reasons = np.full(len(self), None, dtype=object)
        for reason, holds in reversed(of_each.items()):  # the first that holds
            reasons[holds] = reason
        return reasons


def _counts(keys: Ints, times: Any, asked: Ints, before: Any) -> Ints:
    start, stop = History.of(keys, times, np.zeros(len(keys))).span(asked, before)
    return stop - start


def _chains(known: Observations, time_s: Any, questions: Questions, nodes: int) -> Ints:
    answered = ~np.isnan(known.rtt_ms)
    pairs, number = np.unique(known.unordered_pair[answered], return_inverse=True)
    first_s = np.full(len(pairs), np.inf)
    np.minimum.at(first_s, number, time_s[answered])
    chain = np.empty(len(questions), np.int64)
    for now in np.unique(questions.time_s):  # NaN once
        rows = np.flatnonzero(np.isnan(questions.time_s) if np.isnan(now) else questions.time_s == now)
        links = pairs if np.isnan(now) else pairs[first_s < now]
        chain[rows] = _hops(links, questions.take(rows), nodes)
    return chain


def _hops(links: Ints, questions: Questions, nodes: int) -> Ints:
    """Breadth first, from many nodes at once: those on the side of the questions that has fewer."""
    half = coo_array((np.ones(len(links), bool), (links >> 32, links & 0xFFFFFFFF)), shape=(nodes, nodes)).tocsr()
    graph = half + half.T
    _, component = connected_components(graph, directed=False)
    starts, ends = sorted((questions.source, questions.destination), key=lambda column: len(np.unique(column)))
    hops = np.where(component[starts] == component[ends], 0, NO_CHAIN)
    missing = np.flatnonzero((hops == 0) & (starts != ends))
    distinct, number = np.unique(starts[missing], return_inverse=True)
    for first in range(0, len(distinct), _AT_ONCE):
        some = distinct[first : first + _AT_ONCE]
        rows = missing[(number >= first) & (number < first + _AT_ONCE)]
        column = np.searchsorted(some, starts[rows])
        reached = np.zeros((nodes, len(some)), dtype=bool)
        reached[some, np.arange(len(some))] = True
        while len(rows):
            reached = graph @ reached  # whoever was reached is reached again, by way of a neighbour, two hops later
            hops[rows] += 1
            there = reached[ends[rows], column]
            rows, column = rows[~there], column[~there]
    return hops
