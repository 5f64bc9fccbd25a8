"""A part of large data that is enough to fit baselines to, when it is known what will be asked.

Of a baseline only the answers count, and these rest on what was measured near the questions. So of many measurements,
baselines get those of the sources that are asked about, and of some others for each node that is asked about: of those
that measured it, that measured or are the nodes that share a prefix with it, or that measured what an asked source did;
and then of more sources, up to a number of pairs. Sources with more pairs come first: one with a few says little about
where its destinations are, for it has a position of its own to be found. A source is kept with all its pairs; of each
pair, what was measured latest, before the cut and after it.

The models are given everything.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from ping_llm.core.measurements import prefix_numbers
from ping_llm.core.rtt import Bools, Ints, Observations
from ping_llm.evaluate.split import Split

ENOUGH: Final = 4_000_000
"""Of so many measurements for training, or less, all are used."""
PAIRS: Final = 400_000
"""As many, or what the asked nodes need."""
_SOURCES: Final = 20
"""For each asked node, and for each of its prefixes."""
_LATEST: Final = 16
"""Of a pair, before the cut and after it."""
_PREFIXES: Final = {4: (16, 24, 32), 6: (32, 48, 128)}


def sufficient(
    split: Split, asked: Iterable[Observations], seed: int = 0, *, enough: int = ENOUGH, pairs: int = PAIRS
) -> Split:
    """The split with the part of its measurements that is enough for these questions."""
    if len(split.train) <= enough:
        return split
    questions = list(asked)
    sources, destinations = (
        np.unique(np.concatenate([getattr(part, end) for part in questions])) for end in ("source", "destination")
    )
    distinct, nodes = np.unique(split.train.pair), len(split.nodes)
    source, destination = distinct >> 32, distinct & 0xFFFFFFFF
    count = np.bincount(source, minlength=nodes)
    best_first = np.lexsort((np.random.default_rng(seed).random(nodes), -count))
    order = np.argsort(np.argsort(best_first)[source], kind="stable")
    source, destination = source[order], destination[order]

    is_asked, is_kept = np.zeros((2, nodes), dtype=bool)
    is_asked[sources] = is_kept[sources] = True
    for prefix in prefix_numbers(split.nodes, _PREFIXES):
        for end, of_asked in ((source, sources), (destination, destinations)):
            is_kept[_first_of_each(source, prefix[end], np.unique(prefix[of_asked]))] = True
    heard = np.unique(split.history.destination[is_asked[split.history.source]])
    is_kept[_first_of_each(source, destination, heard)] = True  # what places the asked sources has a place, too
    more = best_first[~is_kept[best_first]]
    is_kept[more[np.cumsum(count[more]) <= pairs - count[is_kept].sum()]] = True

    def part(known: Observations) -> Observations:
        known = known.take(is_kept[known.source])
        return known.take(is_asked[known.source] | _is_latest(known, split.cut_time_s))

    return replace(split, train=part(split.train), history=part(split.history))


def _first_of_each(source: Ints, key: Ints, wanted: Ints) -> Ints:
    """The first few distinct sources of pairs with each wanted key."""
    rows = np.flatnonzero(np.isin(key, wanted))
    rows = rows[np.sort(np.unique(key[rows] << 32 | source[rows], return_index=True)[1])]
    return source[rows[_number_in_group(key[rows]) < _SOURCES]]


def _is_latest(known: Observations, cut_time_s: float) -> Bools:
    """Whether a measurement is among the latest of its pair, before the cut or after it; they are in time order."""
    pair = pa.array(known.pair).dictionary_encode().indices.to_numpy()
    group = 2 * pair.astype(np.int64) + (known.time_s >= cut_time_s)
    is_latest = np.bincount(group)[group] <= _LATEST
    rows = np.flatnonzero(~is_latest)[::-1]  # only large groups are sorted
    is_latest[rows] = _number_in_group(group[rows]) < _LATEST
    return is_latest


def _number_in_group(group: Ints) -> Ints:
    """Of each element, how many of its group come before it."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order][:1] - 1))
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
    return number
