"""What an answer rests on: how much was measured before its time of the pair and of both ends, and how they are linked.

A chain is a path over pairs whose RTT is known, in whichever direction. The ends of a pair that was measured are one
hop apart, those that a third node measured are two. Where there is no chain, nothing that was measured compares the two
ends: an answer is then a guess from typical topologies, and `widened` accordingly.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

from ping_llm.core.rtt import Floats, History, Ints, Observations, Questions, RttDistribution
from ping_llm.models.completer.inference import BinDistribution

NO_CHAIN: Final = -1
_LATEST: Final = 25
"""Measurements of a pair whose median is what was measured."""
_FEW: Final = 16
"""Of so many questions with one time or less, chains are looked for one by one."""
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
        is_usable = (known.source >= 0) & (known.destination >= 0)
        known = known if is_usable.all() else known.take(is_usable)
        time_s = np.where(np.isnan(known.time_s), -np.inf, known.time_s)  # without a time: before every question
        pair = _counts(known.unordered_pair, time_s, questions.unordered_pair, questions.time_s)
        source, destination = (
            _counts(known.source, time_s, end, questions.time_s)
            + _counts(known.destination, time_s, end, questions.time_s)
            for end in (questions.source, questions.destination)
        )
        columns = (known.source, known.destination, questions.source, questions.destination)
        chain = _chains(known, time_s, questions, 2 + max(int(column.max(initial=0)) for column in columns))
        return cls(pair=pair, source=source, destination=destination, chain=chain)

    def __len__(self) -> int:
        return len(self.pair)

    def take(self, rows: Any) -> Self:
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    def reasons(self, answers: RttDistribution) -> npt.NDArray[Any]:
        """Why each answer is an extrapolation, None where not. A language model may have learned what history lacks."""
        reasons = np.full(len(self), None, dtype=object)
        if not isinstance(answers, BinDistribution):
            return reasons
        shortest, *_, longest = np.exp(answers.bins.centres)
        low, high = answers.interval(0.9)
        of_each = {
            "neither end was ever measured": (self.source == 0) & (self.destination == 0),
            "the source was never measured": self.source == 0,
            "the destination was never measured": self.destination == 0,
            "no chain of measurements links the two ends": self.chain == NO_CHAIN,
            "the pair has only timed out": (self.pair > 0) & (self.chain > 1),
            "the answer reaches beyond the RTTs of the training": (low < shortest) | (high > longest),
        }
        for reason, holds in reversed(of_each.items()):  # the first that holds
            reasons[holds] = reason
        return reasons

    def columns(self, reasons: npt.NDArray[Any]) -> dict[str, pa.Array]:
        """What tables of answers have."""
        reason = pa.array(reasons, pa.string())
        return {
            "pair_measurements": pa.array(self.pair),
            "src_measurements": pa.array(self.source),
            "dst_measurements": pa.array(self.destination),
            "chain": pa.array(self.chain, mask=self.chain == NO_CHAIN),
            "extrapolating": reason.is_valid(),
            "reason": reason,
        }


def measured_before(known: Observations, questions: Questions) -> Floats:
    """The median of the latest answers of each pair, in either direction, before its time; NaN where there are none."""
    known, pairs = known.answered, questions.unordered_pair
    time_s = np.where(np.isnan(known.time_s), -np.inf, known.time_s)
    history = History.about(pairs, known.unordered_pair, time_s, known.rtt_ms)
    start, stop = history.span(pairs, questions.time_s)
    found, some = np.full(len(questions), np.nan), stop > start
    found[some] = np.nanmedian(history.latest(start[some], stop[some], _LATEST), axis=1)
    return found


def _counts(keys: Ints, times: Floats, asked: Ints, before: Floats) -> Ints:
    start, stop = History.about(asked, keys, times, np.zeros(len(keys))).span(asked, before)
    return stop - start


def _chains(known: Observations, time_s: Floats, questions: Questions, nodes: int) -> Ints:
    answered = ~np.isnan(known.rtt_ms)
    distinct = pa.array(known.unordered_pair[answered]).dictionary_encode()  # sorting all takes several times as long
    pairs, first_s = distinct.dictionary.to_numpy(), np.full(len(distinct.dictionary), np.inf)
    np.minimum.at(first_s, distinct.indices.to_numpy(), time_s[answered])
    order = np.argsort(pairs)
    pairs, first_s = pairs[order], first_s[order]
    now = np.where(np.isnan(questions.time_s), np.inf, questions.time_s)
    at, is_pair = np.searchsorted(pairs, questions.unordered_pair), np.isin(questions.unordered_pair, pairs)
    is_measured = np.append(first_s, np.inf)[np.where(is_pair, at, -1)] < now
    chain = np.where(questions.source == questions.destination, 0, np.where(is_measured, 1, NO_CHAIN))

    low, high = pairs >> 32, pairs & 0xFFFFFFFF
    ends = np.concatenate([low, high]), np.concatenate([high, low])
    links = csr_array((np.tile(first_s, 2), ends), shape=(nodes, nodes))
    _, component = connected_components(links, directed=False)  # what is never linked need not be looked for
    linked = component[questions.source] == component[questions.destination]
    rest = np.flatnonzero((chain == NO_CHAIN) & linked)
    for time in np.unique(now[rest]):
        rows = rest[now[rest] == time]
        if len(rows) <= _FEW:
            some = questions.take(rows)
            ends_of = zip(some.source.tolist(), some.destination.tolist(), strict=True)
            chain[rows] = [_hops_of_one(links, time, *both) for both in ends_of]
            continue
        graph = csr_array((links.data < time, links.indices, links.indptr), shape=links.shape)
        chain[rows] = _hops(graph, questions.take(rows))
    return chain


def _hops_of_one(links: Any, time: float, source: int, destination: int) -> int:
    """Breadth first from both ends, a level at a time on the side that has fewer links: a thousandth of all links."""
    fronts, reached = [np.array([source]), np.array([destination])], np.zeros((2, links.shape[0]), dtype=bool)
    reached[0, source] = reached[1, destination] = True
    hops = 0
    while all(map(len, fronts)):
        counts = [links.indptr[front + 1] - links.indptr[front] for front in fronts]
        side = int(counts[1].sum() < counts[0].sum())
        front, count, hops = fronts[side], counts[side], hops + 1
        at = np.repeat(links.indptr[front] - np.cumsum(count) + count, count) + np.arange(count.sum())
        found = links.indices[at[links.data[at] < time]]
        if reached[1 - side, found].any():
            return hops
        fronts[side] = np.unique(found[~reached[side, found]])
        reached[side, found] = True
    return NO_CHAIN


def _hops(graph: Any, questions: Questions) -> Ints:
    """Breadth first, from many nodes at once: those on the side of the questions that has fewer."""
    starts, ends = sorted((questions.source, questions.destination), key=lambda column: len(np.unique(column)))
    hops = np.full(len(questions), NO_CHAIN)
    distinct, number = np.unique(starts, return_inverse=True)
    for first in range(0, len(distinct), _AT_ONCE):
        some = distinct[first : first + _AT_ONCE]
        rows = np.flatnonzero((number >= first) & (number < first + _AT_ONCE))
        reached = np.zeros((graph.shape[0], len(some)), dtype=bool)
        reached[some, np.arange(len(some))] = True
        for hop in range(1, graph.shape[0]):
            before, reached = reached, reached | (graph @ reached)
            there = reached[ends[rows], number[rows] - first]
            hops[rows[there]] = hop
            rows = rows[~there]
            if not len(rows) or np.array_equal(reached, before):
                break
    return hops


# Answers without a chain.


@dataclass(frozen=True)
class Far:
    """RTTs between places far apart, log-normal, and their share in an answer without a chain.

    The defaults are those of `bench/disconnected.py`.
    """

    share: float = 0.15
    median_ms: float = 150.0
    spread: float = 1.0
    """Standard deviation of ln RTT."""


FAR: Final = Far()


def widened(answers: BinDistribution, support: Support, far: Far = FAR) -> BinDistribution:
    """Answers, of which those about two measured ends without a chain are mixed with RTTs between far places.

    What is known of each end says how near its neighbours are, and the model believes that the ends are as near each
    other. Where one end or both were never measured, its intervals are wide enough.
    """
    is_guess = (support.chain == NO_CHAIN) & (support.source > 0) & (support.destination > 0)
    if not is_guess.any():
        return answers
    density = np.exp(-(((answers.bins.centres - np.log(far.median_ms)) / far.spread) ** 2) / 2)
    share = np.where(is_guess, far.share, 0.0)[:, None]
    mixed = (1 - share) * answers.probability + share * (density / density.sum())
    return replace(answers, probability=mixed.astype(answers.probability.dtype))
