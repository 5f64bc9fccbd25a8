"""What to measure next: the pairs that are least certain, spread over the nodes.

A measurement says something about its pair, and about all other pairs of its two ends. So the value of a candidate is
the width of its predicted interval in ln RTT, divided by 1 + the number of pairs of its ends that were taken before,
and the best one is taken before the next is looked for. Of candidates that link two parts of the network between which
nothing is known, each one taken makes the others worth less, too. `bench/suggest.py` has what that is worth.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats, Ints, Observations, Questions

LEVELS: Final = (0.05, 0.5, 0.95)
_MAX_PAIRS: Final = 2_000_000
"""Of more pairs, so many are drawn."""
_FEWEST_CANDIDATES: Final = 1_000
"""And one more for each suggestion. Each is a prediction."""


def unmeasured_pairs(known: Observations, nodes: Sequence[str]) -> Questions:
    """Pairs of a source and a destination of the history of which nothing is known in either direction."""
    if not len(known):
        raise PingLlmError("the history has no measurements to add to")
    sources, destinations = np.unique(known.source), np.unique(known.destination)
    count = len(sources) * len(destinations)
    number = np.arange(count) if count <= _MAX_PAIRS else np.random.default_rng(0).integers(0, count, _MAX_PAIRS)
    source, destination = sources[number // len(destinations)], destinations[number % len(destinations)]
    found = Questions(source=source, destination=destination, time_s=np.full(len(source), np.nan))
    is_ipv6 = np.array([":" in node for node in nodes], dtype=bool)
    possible = (source != destination) & (is_ipv6[source] == is_ipv6[destination])
    found = found.take(possible & ~np.isin(found.unordered_pair, known.unordered_pair))
    return found.take(np.sort(np.unique(found.unordered_pair, return_index=True)[1]))


def shortlist(pairs: Questions, known: Observations, budget: int) -> Ints:
    """Rows of the pairs that are worth a prediction: all, or a random part where pairs of rare nodes are likelier."""
    limit = _FEWEST_CANDIDATES + budget
    if len(pairs) <= limit:
        return np.arange(len(pairs))
    ends = np.concatenate([known.source, known.destination])
    count = np.bincount(ends, minlength=_nodes(pairs, known))
    weight = 1 / (1 + count[pairs.source]) + 1 / (1 + count[pairs.destination])
    late = np.random.default_rng(0).exponential(size=len(pairs)) / weight
    return np.sort(np.argpartition(late, limit)[:limit])


def most_informative(pairs: Questions, width: Floats, known: Observations, budget: int) -> Ints:
    """Rows of the most valuable pairs, best first; `width` is that of their intervals in ln RTT."""
    nodes, answered = _nodes(pairs, known), known.answered
    graph = coo_array((np.ones(len(answered)), (answered.source, answered.destination)), shape=(nodes, nodes))
    parts = connected_components(graph, directed=False)[1]
    ends = np.sort(parts[np.stack([pairs.source, pairs.destination])], axis=0)
    _, link = np.unique(ends[0] * nodes + ends[1], return_inverse=True)
    taken, links, left = np.zeros(nodes), np.zeros(len(pairs)), width.copy()
    chosen = np.zeros(min(budget, len(pairs)), np.int64)
    for place in range(len(chosen)):
        value = left / (1 + taken[pairs.source] + taken[pairs.destination]) / (1 + links[link])
        best = chosen[place] = np.argmax(value)
        left[best] = -1.0
        taken[[pairs.source[best], pairs.destination[best]]] += 1
        links[link[best]] += ends[0, best] != ends[1, best]
    return chosen


def _nodes(pairs: Questions, known: Observations) -> int:
    every = (pairs.source, pairs.destination, known.source, known.destination)
    return 1 + max(int(column.max(initial=0)) for column in every)
