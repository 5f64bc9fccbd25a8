"""Gradient-boosted trees on address prefixes: what the neighbours of both ends measured.

Nodes that share a prefix are often near each other, so the features of a pair are means of ln RTT: of all pairs whose
source shares a prefix with it, of all whose destination does, and of all where both do, for prefixes of several
lengths. Also, how many prefixes the two ends share. A mean over few pairs rests on that of the next shorter prefix. In
training, a pair does not see itself: means are those of the other four fifths of the pairs. The trees then learn which
means to trust.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ping_llm.baselines.interface import GlobalMedian, PairTable, Predict, rows_of
from ping_llm.core.measurements import prefix_numbers
from ping_llm.core.rtt import Floats, Ints, Observations, Questions

_LENGTHS: Final = {4: (8, 12, 16, 20, 24, 32), 6: (20, 28, 32, 40, 48, 128)}
"""Bits of the prefixes, by family, shortest first; the last is the node itself."""

_LEVELS: Final = len(_LENGTHS[4])
_BOTH: Final = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 2), (2, 5), (5, 4), (4, 5))
"""Levels of source and destination where prefixes of both are taken together."""

_FOLDS: Final = 5
_PRIOR: Final = 2.0
"""Pairs that the mean of the shorter prefix is worth."""


@dataclass(frozen=True, kw_only=True)
class PrefixTrees:
    """`nodes` has the address of each node; one without an address looks like nothing that is known."""

    nodes: Sequence[str] = field(repr=False)
    trees: int = 400
    """At most; fewer if they no longer help with a tenth of the training pairs that is held back."""
    rate: float = 0.08
    seed: int = 0
    name: str = "prefix trees"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table = PairTable.of(train)
        if len(table) < _FOLDS:
            return GlobalMedian().fit(train)
        from sklearn.ensemble import HistGradientBoostingRegressor  # takes a second to import

        log_rtt = np.log(table.rtt_ms)
        prefixes, pairs = numbered_prefixes(self.nodes), table.questions
        fold = np.random.default_rng(self.seed).integers(0, _FOLDS, len(table))
        means = [KeyMeans.of(key, log_rtt - log_rtt.mean(), fold) for key in pair_keys(prefixes, pairs)]

        def features(questions: Questions, without: Ints | None = None) -> Floats:
            known = mean_features(means, list(pair_keys(prefixes, questions)), without)
            return np.stack([*known, _shared_levels(prefixes, questions)]).T

        trees = HistGradientBoostingRegressor(
            loss="absolute_error",
            max_iter=self.trees,
            learning_rate=self.rate,
            early_stopping=True,
            random_state=self.seed,
        )
        trees.fit(features(pairs, fold), log_rtt)
        return lambda questions: np.exp(trees.predict(features(questions)))


@dataclass(frozen=True, kw_only=True)
class KeyMeans:
    """Sums and counts of the pairs with each key, of everything and of each fold."""

    keys: Ints
    total: Floats
    count: Floats
    """[1 + folds, keys + 1]; the last key stands for all that are unknown."""

    @classmethod
    def of(cls, key: Ints, value: Floats, fold: Ints) -> "KeyMeans":
        keys, number = np.unique(key, return_inverse=True)
        size = len(keys) + 1

        def summed(weights: Floats) -> Floats:
            of_fold = np.bincount(fold * size + number, weights, minlength=_FOLDS * size).reshape(_FOLDS, size)
            return np.concatenate([of_fold.sum(axis=0, keepdims=True), of_fold])

        return cls(keys=keys, total=summed(value), count=summed(np.ones(len(value))))

    def look_up(self, key: Ints, without: Ints | None) -> tuple[Floats, Floats]:
        """Sum and count of the pairs with each key, without those of a fold."""
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        at = np.where(self.keys[at] == key, at, len(self.keys))
        total, count = self.total[0, at], self.count[0, at]
        if without is not None:
            total, count = total - self.total[1 + without, at], count - self.count[1 + without, at]
        return total, count


def numbered_prefixes(nodes: Sequence[str]) -> Ints:
    """[levels, nodes + 1]: a number for each prefix of each node's address; -1 for the last, unknown one."""
    return np.pad(prefix_numbers(nodes, _LENGTHS), ((0, 0), (0, 1)), constant_values=-1)


def pair_keys(prefixes: Ints, questions: Questions) -> Iterator[Ints]:
    """What pairs have to share to be counted together, one column for each mean."""
    source, destination = rows_of(questions, prefixes.shape[1] - 1)
    for level in range(_LEVELS):
        yield prefixes[level, source]
    for level in range(_LEVELS):
        yield prefixes[level, destination]
    for ours, theirs in _BOTH:
        yield (prefixes[ours, source] << 32) | (prefixes[theirs, destination] & 0xFFFFFFFF)


def _shared_levels(prefixes: Ints, questions: Questions) -> Floats:
    """How many of their prefixes the two ends have in common: they may be neighbours."""
    source, destination = rows_of(questions, prefixes.shape[1] - 1)
    return (prefixes[:, source] == prefixes[:, destination]).sum(axis=0).astype(np.float64)


def mean_features(means: list[KeyMeans], keys: list[Ints], without: Ints | None) -> list[Floats]:
    """Means, and how many pairs stand behind those that need to be trusted."""
    found = [mean.look_up(key, without) for mean, key in zip(means, keys, strict=True)]
    columns: list[Floats] = []
    ends = []
    for one_end in (found[:_LEVELS], found[_LEVELS : 2 * _LEVELS]):
        mean = np.zeros(len(keys[0]))
        for total, count in one_end:
            mean = (total + _PRIOR * mean) / (count + _PRIOR)
            columns.append(mean)
        ends.append(mean)
        columns.append(one_end[-1][1])
    mean = ends[0] + ends[1]
    columns.append(mean)
    for total, count in found[2 * _LEVELS :]:
        mean = (total + _PRIOR * mean) / (count + _PRIOR)
        columns += [mean, count]
    return columns
