"""A part of large data that is enough to fit baselines to, when it is known what will be asked.

Of a baseline only the answers count, and these rest on what was measured near the questions. So of many measurements,
baselines get those of the sources that are asked about, and of some others for each node that is asked about: of those
that measured it, and of those that measured or are the nodes that share a prefix with it. Which of them is drawn once,
so that they are mostly the same sources for all. A source is kept with all its pairs; of each pair, what was measured
latest, before the cut and after it.

The models are given everything.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from ping_llm.core.measurements import prefix_numbers
from ping_llm.core.rtt import Bools, Ints, Observations
from ping_llm.evaluate.split import Split

ENOUGH: Final = 2_000_000
"""Of so many measurements for training, or less, all are used."""
_SOURCES: Final = 10
"""For each asked node, and for each of its prefixes."""
_LATEST: Final = 16
"""Of a pair, before the cut and after it."""
_PREFIXES: Final = {4: (16, 24, 32), 6: (32, 48, 128)}


def sufficient(split: Split, asked: Iterable[Observations], seed: int = 0, enough: int = ENOUGH) -> Split:
    """The split with the part of its measurements that is enough for these questions."""
    if len(split.train) <= enough:
        return split
    questions = list(asked)
    sources, destinations = (
        np.unique(np.concatenate([getattr(part, end) for part in questions])) for end in ("source", "destination")
    )
    is_asked, is_kept = np.zeros((2, len(split.nodes)), dtype=bool)
    is_asked[sources] = True
    pairs = np.unique(split.train.pair)
    source, destination = pairs >> 32, pairs & 0xFFFFFFFF
    draw = np.argsort(np.random.default_rng(seed).permutation(len(split.nodes))[source], kind="stable")
    source, destination = source[draw], destination[draw]
    is_kept[sources] = True
    for prefix in prefix_numbers(split.nodes, _PREFIXES):
        for end, of_asked in ((source, sources), (destination, destinations)):
            is_kept[_first_of_each(source, prefix[end], np.unique(prefix[of_asked]))] = True

    def part(known: Observations) -> Observations:
        rows = np.flatnonzero(is_kept[known.source])
        known = known.take(rows)
        return known.take(is_asked[known.source] | _is_latest(known, split.cut_time_s))

    return replace(split, train=part(split.train), history=part(split.history))


def _first_of_each(source: Ints, key: Ints, wanted: Ints) -> Ints:
    """The first few distinct sources of pairs with each wanted key."""
    rows = np.flatnonzero(np.isin(key, wanted))
    rows = rows[np.sort(np.unique(key[rows] << 32 | source[rows], return_index=True)[1])]
    return source[rows[_number_in_group(key[rows]) < _SOURCES]]


def _is_latest(known: Observations, cut_time_s: float) -> Bools:
    """Whether a measurement is among the latest of its pair, before the cut or after it; they are in time order."""
    _, pair = np.unique(known.pair, return_inverse=True)
    group = 2 * pair + (known.time_s >= cut_time_s)
    return (_number_in_group(group[::-1]) < _LATEST)[::-1]


def _number_in_group(group: Ints) -> Ints:
    """Of each element, how many of its group come before it."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order][:1] - 1))
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
    return number
