"""Matrix factorisation of ln RTT: ln RTT(i, j) = median + source bias + destination bias + u_i · v_j.

Fitted by alternating least squares: with the destinations fixed, every source is a small ridge regression, and the
other way round. All normal matrices of one side are a single sparse-times-dense product, so that one sweep over five
million pairs takes 5 s on one core at rank 24; there is no learning rate to tune.

RTTs have outliers that would bend every factor, so pairs are reweighted after every sweep (a Huber loss): with the
squared loss the median relative error on PlanetLab with 20 % of the pairs known is .059 at best, with this one .038.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import scipy.sparse  # type: ignore[import-untyped]

from ping_llm.baselines.interface import Baseline, PairTable, Predict, fitted, rows_of, with_fallback
from ping_llm.core.rtt import DEFAULT_RTT_MS, Floats, Ints, Observations, Questions

_NODES_AT_A_TIME: Final = 4096
_SMALL_SIZES: Final = (4, 8, 16)
"""Nodes with at most so many pairs are solved together, as if they had that many."""


@dataclass(frozen=True, kw_only=True)
class LogFactors:
    """The strongest classical baseline once a node has about a hundred known pairs.

    `base` makes it learn what another baseline gets wrong: `LogFactors(base=Vivaldi())` is better with few known pairs
    (PlanetLab, 5 %: median relative error .067 instead of .078) and about as good with many. `symmetric` lets every
    pair count in both directions. Rank 0 leaves the biases alone: the node-based fallback of other baselines.
    """

    rank: int = 24
    """Median relative error on PlanetLab with half of the pairs known: .034 at 10, .026 at 20, .025 at 24 and at 30."""
    ridge: float = 0.25
    """Pull of the factors towards zero, in known pairs: .25 is near the best from 3 to 250 pairs per node."""
    bias_ridge: float = 0.3
    width: float = 0.03
    """Errors above this (3 %) count by their size instead of their square."""
    sweeps: int = 30
    most_visits: int = 2_000_000
    """Bound on pairs × sweeps, but for the first eight. Large data are sparse, where more make it worse: of 160,000
    pairs of 54,000 simulated nodes, the median relative error of seen pairs is .049 after eight, .060 after thirty."""
    symmetric: bool = False
    base: Baseline | None = None
    seed: int = 0
    name: str = "log factors"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table = PairTable.of(train)
        base = fitted(self.base, train) if self.base else None
        log_rtt = np.log(table.rtt_ms)
        if base:
            log_rtt -= np.log(base(table.questions))
        source, destination = table.source, table.destination
        if self.symmetric:
            source, destination = np.concatenate([source, destination]), np.concatenate([destination, source])
            log_rtt = np.concatenate([log_rtt, log_rtt])
        default = 0.0 if base else float(np.log(DEFAULT_RTT_MS))
        centre = float(np.median(log_rtt)) if len(log_rtt) else default
        sources, destinations = self._alternate(source, destination, log_rtt - centre, table.nodes)

        def predict_log(questions: Questions) -> Floats:
            ours, theirs = rows_of(questions, len(sources) - 1)
            return centre + _biases_and_dot(sources, ours, destinations, theirs)

        def predict(questions: Questions) -> Floats:
            log_ratio = predict_log(questions)
            if self.symmetric:
                log_ratio = (log_ratio + predict_log(questions.reversed())) / 2
            ratio = np.exp(np.clip(log_ratio, -15.0, 15.0))
            return ratio * base(questions) if base else ratio

        return predict

    def sweeps_of(self, pairs: int) -> int:
        return min(self.sweeps, max(8, self.most_visits // max(pairs, 1)))

    def _alternate(self, source: Ints, destination: Ints, value: Floats, nodes: int) -> tuple[Floats, Floats]:
        """Of every node, and of an unknown one in the last row: bias, then factors; as source and as destination."""
        rng = np.random.default_rng(self.seed)
        ours, theirs = rng.normal(0.0, 0.1, (2, nodes + 1, 1 + self.rank))
        ours[:, 0] = theirs[:, 0] = 0.0
        if not len(value):
            return np.zeros_like(ours), np.zeros_like(theirs)
        by_source = _Grouped(source, destination, value, nodes + 1)
        by_destination = _Grouped(destination, source, value, nodes + 1)
        ridge = np.full(1 + self.rank, self.ridge)
        ridge[0] = self.bias_ridge
        weight = np.ones(len(value))
        for _ in range(self.sweeps_of(len(value))):
            ours = by_source.solve(theirs, weight, ridge)
            theirs = by_destination.solve(ours, weight, ridge)
            error = np.abs(value - _biases_and_dot(ours, source, theirs, destination))
            weight = 1.0 / np.maximum(error / self.width, 1.0)
            weight /= weight.mean()  # so that a ridge means the same whatever the width
        return ours, theirs


class _Grouped:
    """The known pairs, ordered by the node that is solved for, nodes with equally many pairs next to each other."""

    def __init__(self, node: Ints, other: Ints, value: Floats, nodes: int) -> None:
        count = np.bincount(node, minlength=nodes)
        self.nodes = np.argsort(count, kind="stable")[np.count_nonzero(count == 0) :]  # a node without pairs gets zeros
        slot = np.zeros(nodes, np.int64)
        slot[self.nodes] = np.arange(len(self.nodes))
        self.order = np.argsort(slot[node], kind="stable")
        self.count = count[self.nodes]
        self.start = np.concatenate([[0], np.cumsum(self.count)])
        self.others, self.other = np.unique(other[self.order], return_inverse=True)  # of many nodes, few may occur
        self.value = value[self.order]

    def solve(self, others: Floats, weight: Floats, ridge: Floats) -> Floats:
        """The weighted ridge regression of every node on the rows of the others."""
        solved = np.zeros_like(others)
        weight = weight[self.order]
        features = others[self.others]
        target = self.value - features[self.other, 0]
        features[:, 0] = 1.0
        begin = 0
        for size in _SMALL_SIZES:
            end = int(np.searchsorted(self.count, size, side="right"))
            for first in range(begin, end, _NODES_AT_A_TIME):
                rows = slice(first, min(first + _NODES_AT_A_TIME, end))
                solved[self.nodes[rows]] = self._few_pairs(rows, size, features, weight, target, ridge)
            begin = end
        upper, lower = np.triu_indices(features.shape[1])
        products = features[:, upper] * features[:, lower]
        for first in range(begin, len(self.nodes), _NODES_AT_A_TIME):  # all normal matrices could be gigabytes
            rows = slice(first, min(first + _NODES_AT_A_TIME, len(self.nodes)))
            solved[self.nodes[rows]] = self._many_pairs(rows, features, products, weight, target, ridge)
        return solved

    def _few_pairs(
        self, rows: slice, size: int, features: Floats, weight: Floats, target: Floats, ridge: Floats
    ) -> Floats:
        """By equations for pairs instead of features: most nodes have fewer of them, and small matrices are quick."""
        number = np.arange(size)
        is_pair = number < self.count[rows, None]
        at = np.where(is_pair, self.start[:-1][rows, None] + number, 0)
        ours = features[self.other[at]] * is_pair[..., None]
        noise = np.where(is_pair, 1.0 / weight[at], 1.0)
        matrix = (ours / ridge) @ ours.swapaxes(1, 2) + noise[:, :, None] * np.eye(size)
        share = np.linalg.solve(matrix, (target[at] * is_pair)[..., None])
        return (ours.swapaxes(1, 2) @ share)[..., 0] / ridge

    def _many_pairs(
        self, rows: slice, features: Floats, products: Floats, weight: Floats, target: Floats, ridge: Floats
    ) -> Floats:
        upper, lower = np.triu_indices(features.shape[1])
        pairs = slice(self.start[rows.start], self.start[rows.stop])
        start = self.start[rows.start : rows.stop + 1] - self.start[rows.start]
        shape = rows.stop - rows.start, len(features)

        def summed(factor: Floats, columns: Floats) -> Floats:
            table: Floats = scipy.sparse.csr_array((factor, self.other[pairs], start), shape=shape) @ columns
            return table

        normal = np.empty((shape[0], len(ridge), len(ridge)))
        normal[:, upper, lower] = normal[:, lower, upper] = summed(weight[pairs], products)
        right = summed(weight[pairs] * target[pairs], features)
        return np.linalg.solve(normal + np.diag(ridge), right[..., None])[..., 0]


def _biases_and_dot(ours: Floats, ours_at: Ints, theirs: Floats, theirs_at: Ints) -> Floats:
    dot = rowwise_dot(ours[:, 1:], ours_at, theirs[:, 1:], theirs_at)
    return np.asarray(ours[ours_at, 0] + theirs[theirs_at, 0] + dot)


def rowwise_dot(ours: Floats, ours_at: Ints, theirs: Floats, theirs_at: Ints) -> Floats:
    """ours[ours_at] · theirs[theirs_at], row by row, without the two large gathered tables."""
    result = np.zeros(len(ours_at))
    for column in range(ours.shape[1]):
        result += ours[:, column][ours_at] * theirs[:, column][theirs_at]
    return result


@dataclass(frozen=True, kw_only=True)
class PairMedian:
    """The pair's own median; for a pair that was never measured, what the `fallback` says.

    By default that is the global median times a factor of the source and a factor of the destination (`LogFactors` of
    rank 0). A better one, such as `LogFactors()`, makes this a strong baseline for seen and unseen pairs together.
    """

    fallback: Baseline = field(default_factory=lambda: LogFactors(rank=0))
    name: str = "pair median"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table, fallback = PairTable.of(train), fitted(self.fallback, train)
        return lambda questions: with_fallback(table.lookup(questions), questions, fallback)
