"""Minibatch stochastic gradient descent over known pairs: for Vivaldi and DMFSGD.

The peer-to-peer originals update two nodes for each measurement with a rate of their own. Here a few hundred to tens of
thousands of pairs make a step, with Adam's step sizes for every number of every node and a rate that falls to zero in
the second half: the same model, but it converges. A million pair visits take about a second on one core.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.special import expit  # type: ignore[import-untyped]

from ping_llm.baselines.factors import LogFactors, rowwise_dot
from ping_llm.baselines.interface import GlobalMedian, PairTable, Predict, fitted, rows_of, with_fallback
from ping_llm.core.rtt import MIN_RTT_MS, Floats, Ints, Observations, Questions

Singles = npt.NDArray[np.float32]
Arrays = dict[str, Any]
Gradients = Callable[[Arrays, Arrays], Mapping[str, tuple[Ints, Singles]]]
"""From the arrays of nodes and a batch of pairs: of each array, rows and what to add to their gradients."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How long and how fast. Every epoch visits all pairs in a new order, in `batches` steps."""

    rate: float = 0.02
    epochs: int = 60
    batches: int = 64
    most_visits: int = 60_000_000
    """Bound on pairs × epochs, about a minute: five million pairs are visited 12 times instead of 60."""
    seed: int = 0

    def epochs_of(self, pairs: int) -> int:
        return int(np.clip(self.most_visits // max(pairs, 1), 5, self.epochs))


def minimise(gradients: Gradients, nodes: Arrays, pairs: Arrays, descent: Descent) -> dict[str, Floats]:
    """The arrays of nodes that make a loss, a sum over pairs, small. They are changed in place."""
    count, rng = len(next(iter(pairs.values()))), np.random.default_rng(descent.seed)
    epochs, batch = descent.epochs_of(count), min(count, max(16, count // descent.batches))
    steps, number = count // batch, 0
    mean, square = ({name: np.zeros_like(array) for name, array in nodes.items()} for _ in range(2))
    for _ in range(epochs):
        for rows in rng.permutation(count)[: steps * batch].reshape(steps, batch):
            found = gradients(nodes, {name: column[rows] for name, column in pairs.items()})
            number += 1
            rate = descent.rate * min(1.0, 2.0 * (1.0 - number / (steps * epochs)))
            size = np.float32(rate * np.sqrt(1.0 - 0.99**number) / (1.0 - 0.9**number))
            for name, (of_nodes, parts) in found.items():  # Adam
                gradient = _summed(of_nodes, parts, len(nodes[name]))
                mean[name] += np.float32(0.1) * (gradient - mean[name])
                square[name] += np.float32(0.01) * (gradient * gradient - square[name])
                nodes[name] -= size * mean[name] / (np.sqrt(square[name]) + np.float32(1e-8))
    return {name: array.astype(np.float64) for name, array in nodes.items()}


def _summed(rows: Ints, parts: Singles, size: int) -> Singles:
    """Of each of so many rows, the sum of its parts."""
    to_rows = csr_array((np.ones(len(rows), np.float32), rows, np.arange(len(rows) + 1)), shape=(len(rows), size))
    return np.asarray(to_rows.T @ parts)


def _gradient(error: Singles, width: float) -> Singles:
    """Of a smooth absolute value: a parabola within about `width` of zero, so that gradients vanish there."""
    return error / np.sqrt(error * error + np.float32(width * width))


# Vivaldi: every node has a position in a Euclidean space and a height, RTT(i, j) = |x_i - x_j| + h_i + h_j.
#
# The distance is the path through the core, the height the access link (Dabek et al. 2004). Gravity pulls nodes to
# the origin, as in the variants that run in production; it decides where nodes with few pairs go. The error is that
# of ln RTT, as an absolute value: relative errors are what counts, and outliers should not bend the space. Together
# this makes the median relative error on PlanetLab .056 with 20 % of the pairs known, where the original's springs
# reach .083.
#
# Always symmetric, and unable to follow paths that break the triangle inequality, so that more known pairs help it
# little (.054 at 50 %). But with few of them it beats every factorisation: .071 at 5 %, about 24 pairs per node.

_START_HEIGHT = -2.0  # through softplus: an eighth of the median RTT


@dataclass(frozen=True, kw_only=True)
class Vivaldi:
    """More dimensions than five gain nothing; with two the absolute error is a fifth larger."""

    dimensions: int = 5
    gravity: float = 0.03
    height_pull: float = 0.001
    width: float = 0.05
    """Errors of ln RTT below this count by their square."""
    descent: Descent = field(default_factory=lambda: Descent(rate=0.03))
    name: str = "vivaldi"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table = PairTable.of(train)
        fallback = fitted(LogFactors(rank=0), train)
        if not len(table):
            return fallback
        scale = float(np.median(table.rtt_ms))
        rng = np.random.default_rng(self.descent.seed)
        known = np.zeros(table.nodes + 1, dtype=bool)
        known[table.source] = known[table.destination] = True
        number = np.cumsum(known) - 1  # every step updates all nodes, so that there are none without a pair
        start = rng.normal(0.0, 0.3, (table.nodes, self.dimensions)).astype(np.float32)
        nodes = {"position": start[known[:-1]], "height": np.full(known.sum(), _START_HEIGHT, np.float32)}
        pairs = {
            "source": number[table.source],
            "destination": number[table.destination],
            "log_rtt": np.log(table.rtt_ms / scale).astype(np.float32),
        }
        found = minimise(self._gradients, nodes, pairs, self.descent)
        # In ms; that of an unknown node, the last row for one, is never used.
        position = scale * found["position"][np.where(known, number, 0)]
        height = scale * np.logaddexp(0.0, found["height"][np.where(known, number, 0)])

        def predict(questions: Questions) -> Floats:
            ours, theirs = rows_of(questions, table.nodes)
            distance = np.sqrt(sum((axis[ours] - axis[theirs]) ** 2 for axis in position.T))
            predicted = np.maximum(distance + height[ours] + height[theirs], MIN_RTT_MS)
            predicted[~(known[ours] & known[theirs])] = np.nan  # the origin would be too near to everything
            return with_fallback(predicted, questions, fallback)

        return predict

    def _gradients(self, nodes: Arrays, pairs: Arrays) -> Mapping[str, tuple[Ints, Singles]]:
        ends = np.concatenate([pairs["source"], pairs["destination"]])
        position, height = nodes["position"][ends], nodes["height"][ends]
        ours, theirs = np.split(position, 2)
        away = ours - theirs
        distance = np.sqrt((away * away).sum(axis=1) + np.float32(1e-6))  # the root has no gradient at zero
        rtt = distance + np.logaddexp(np.float32(0), height).reshape(2, -1).sum(axis=0)
        gradient = _gradient(np.log(rtt) - pairs["log_rtt"], self.width) / rtt
        apart = away * (gradient / distance)[:, None]
        return {
            "position": (ends, np.concatenate([apart, -apart]) + 2 * self.gravity * position),
            "height": (ends, np.tile(gradient, 2) * expit(height) + 2 * self.height_pull * (height - _START_HEIGHT)),
        }


# DMFSGD: RTT(i, j) = u_i · v_j in units of the median RTT, by stochastic gradient descent (Liao et al. 2013).
#
# Two things differ from the paper, and both make it better. The vectors are pulled towards one common vector whose
# product with itself is the median RTT, not towards zero, so that a node with few pairs looks average instead of near:
# MENOG with half of the pairs known, median relative error .15 instead of .22. And the loss is |error| / RTT^0.4,
# between absolute (0, which neglects short paths) and relative (1, which gets stuck on a few very short ones).

_FLOOR = 0.002  # of the median RTT: a dot product can be negative


@dataclass(frozen=True, kw_only=True)
class Dmfsgd:
    """`symmetric` lets every pair count in both directions."""

    rank: int = 20
    pull: float = 2.0
    """Towards the common vector, for each node and epoch. A tenth of it costs a fifth with few known pairs."""
    power: float = 0.4
    width: float = 0.03
    symmetric: bool = False
    descent: Descent = field(default_factory=Descent)
    name: str = "dmfsgd"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table = PairTable.of(train)
        if not len(table):
            return GlobalMedian().fit(train)
        source, destination, rtt = table.source, table.destination, table.rtt_ms
        scale = float(np.median(rtt))
        if self.symmetric:
            source, destination = np.concatenate([source, destination]), np.concatenate([destination, source])
            rtt = np.concatenate([rtt, rtt])
        # Every step updates all vectors, so that there are none of nodes without a pair in this role.
        (sources, ours), (destinations, theirs) = (np.unique(end, return_inverse=True) for end in (source, destination))
        rng = np.random.default_rng(self.descent.seed)
        start = rng.normal(0.0, 0.1, (2, table.nodes, self.rank)).astype(np.float32)
        nodes = {"source": start[0, sources], "destination": start[1, destinations]}
        pairs = {
            "source": ours,
            "destination": theirs,
            "rtt": (rtt / scale).astype(np.float32),
            "our_share": (1.0 / np.bincount(ours)[ours]).astype(np.float32),
            "their_share": (1.0 / np.bincount(theirs)[theirs]).astype(np.float32),
        }
        found = minimise(self._gradients, nodes, pairs, self.descent)
        vectors = np.full((2, table.nodes + 1, self.rank), self._common)  # the last one is that of every unknown node
        vectors[0, sources] += found["source"]
        vectors[1, destinations] += found["destination"]

        def predict_one_way(questions: Questions) -> Floats:
            rows, columns = rows_of(questions, table.nodes)
            return scale * np.maximum(rowwise_dot(vectors[0], rows, vectors[1], columns), _FLOOR)

        def predict(questions: Questions) -> Floats:
            rtt = predict_one_way(questions)
            return (rtt + predict_one_way(questions.reversed())) / 2 if self.symmetric else rtt

        return predict

    @property
    def _common(self) -> float:
        return self.rank**-0.5

    def _gradients(self, nodes: Arrays, pairs: Arrays) -> Mapping[str, tuple[Ints, Singles]]:
        ours, theirs = nodes["source"][pairs["source"]], nodes["destination"][pairs["destination"]]
        our_vectors, their_vectors = ours + self._common, theirs + self._common
        rtt = pairs["rtt"]
        unit = rtt**self.power
        gradient = _gradient(((our_vectors * their_vectors).sum(axis=1) - rtt) / unit, self.width) / unit
        pull = 2 * self.pull
        return {
            "source": (pairs["source"], gradient[:, None] * their_vectors + pull * pairs["our_share"][:, None] * ours),
            "destination": (
                pairs["destination"],
                gradient[:, None] * our_vectors + pull * pairs["their_share"][:, None] * theirs,
            ),
        }
