"""Minibatch stochastic gradient descent over known pairs, compiled as one program: for Vivaldi and DMFSGD.

The peer-to-peer originals update two nodes for each measurement with a rate of their own. Here a few hundred to tens of
thousands of pairs make a step, with Adam's step sizes for every number of every node and a rate that falls to zero in
the second half: the same model, but it converges. A million pair visits take about a second on one core.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.baselines.factors import LogFactors, rowwise_dot
from ping_llm.baselines.interface import GlobalMedian, PairTable, Predict, fitted, rows_of, with_fallback
from ping_llm.core.rtt import MIN_RTT_MS, Floats, Observations, Questions

Arrays = dict[str, Any]
Loss = Callable[[Arrays, Arrays, Arrays], Any]


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


def minimise(loss: Loss, nodes: Arrays, pairs: Arrays, settings: Arrays, descent: Descent) -> dict[str, Any]:
    """The node arrays that make `loss(nodes, batch of pairs, settings)`, a sum over the batch, small.

    `loss` must be a function of its module: it is part of the key under which the compiled program is kept.
    """
    count = len(next(iter(pairs.values())))
    epochs, batch = descent.epochs_of(count), min(count, max(16, count // descent.batches))
    with _on_cpu():
        fitted = _descend(loss, epochs, batch, nodes, pairs, settings, descent.rate, jax.random.key(descent.seed))
        return {name: np.asarray(value, dtype=np.float64) for name, value in fitted.items()}


def _on_cpu() -> Any:
    """Additions on a GPU happen in any order, and a baseline must be reproducible."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # the user allows no other platform than the accelerator
        return nullcontext()


@partial(jax.jit, static_argnames=("batch", "epochs", "loss"))
def _descend(
    loss: Loss, epochs: int, batch: int, nodes: Arrays, pairs: Arrays, settings: Arrays, rate: Any, key: Any
) -> Arrays:
    count = len(next(iter(pairs.values())))
    steps = count // batch
    tree = jax.tree.map

    def step(state: Any, rows: Any) -> Any:
        """Adam. optax's rounds differently, which the descent amplifies: single answers would move by up to 6 %."""
        nodes, mean, square, number = state
        gradient = jax.grad(loss)(nodes, {name: column[rows] for name, column in pairs.items()}, settings)
        number = number + 1.0
        mean = tree(lambda old, new: 0.9 * old + 0.1 * new, mean, gradient)
        square = tree(lambda old, new: 0.99 * old + 0.01 * new * new, square, gradient)
        now = rate * jnp.minimum(1.0, 2.0 * (1.0 - number / (steps * epochs)))
        size = now * jnp.sqrt(1.0 - 0.99**number) / (1.0 - 0.9**number)
        nodes = tree(lambda node, m, s: node - size * m / (jnp.sqrt(s) + 1e-8), nodes, mean, square)
        return (nodes, mean, square, number), None

    def epoch(state: Any, key: Any) -> Any:
        rows = jax.random.permutation(key, count)[: steps * batch].reshape(steps, batch)
        return jax.lax.scan(step, state, rows)

    zeros = tree(jnp.zeros_like, nodes)
    (fitted, *_), _ = jax.lax.scan(epoch, (nodes, zeros, zeros, jnp.float32(0.0)), jax.random.split(key, epochs))
    return fitted


def smooth_absolute(error: Any, width: Any) -> Any:
    """Like the absolute value, but a parabola within about `width` of zero, so that gradients vanish there."""
    return jnp.sqrt(error * error + width * width) - width


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
        position = rng.normal(0.0, 0.3, (table.nodes, self.dimensions)).astype(np.float32)
        nodes = {"position": position[known[:-1]], "height": np.full(known.sum(), _START_HEIGHT, np.float32)}
        pairs = {
            "source": number[table.source],
            "destination": number[table.destination],
            "log_rtt": np.log(table.rtt_ms / scale).astype(np.float32),
        }
        settings = {"gravity": self.gravity, "height_pull": self.height_pull, "width": self.width}
        found = minimise(_vivaldi_loss, nodes, pairs, settings, self.descent)
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


def _vivaldi_loss(nodes: Arrays, pairs: Arrays, settings: Arrays) -> Any:
    position, height = nodes["position"], nodes["height"]
    ours, theirs = position[pairs["source"]], position[pairs["destination"]]
    our_height, their_height = height[pairs["source"]], height[pairs["destination"]]
    distance = jnp.sqrt(jnp.square(ours - theirs).sum(1) + 1e-6)  # the root has no gradient at zero
    rtt = distance + jax.nn.softplus(our_height) + jax.nn.softplus(their_height)
    error = smooth_absolute(jnp.log(rtt) - pairs["log_rtt"], settings["width"])
    gravity = jnp.square(ours).sum(1) + jnp.square(theirs).sum(1)
    pull = jnp.square(our_height - _START_HEIGHT) + jnp.square(their_height - _START_HEIGHT)
    return (error + settings["gravity"] * gravity + settings["height_pull"] * pull).sum()


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
        common = self.rank**-0.5
        pairs = {
            "source": ours,
            "destination": theirs,
            "rtt": (rtt / scale).astype(np.float32),
            "our_share": (1.0 / np.bincount(ours)[ours]).astype(np.float32),
            "their_share": (1.0 / np.bincount(theirs)[theirs]).astype(np.float32),
        }
        settings = {"pull": self.pull, "power": self.power, "width": self.width, "common": common}
        found = minimise(_dmfsgd_loss, nodes, pairs, settings, self.descent)
        vectors = np.full((2, table.nodes + 1, self.rank), common)  # the last one is that of every unknown node
        vectors[0, sources] += found["source"]
        vectors[1, destinations] += found["destination"]

        def predict_one_way(questions: Questions) -> Floats:
            rows, columns = rows_of(questions, table.nodes)
            return scale * np.maximum(rowwise_dot(vectors[0], rows, vectors[1], columns), _FLOOR)

        def predict(questions: Questions) -> Floats:
            rtt = predict_one_way(questions)
            return (rtt + predict_one_way(questions.reversed())) / 2 if self.symmetric else rtt

        return predict


def _dmfsgd_loss(nodes: Arrays, pairs: Arrays, settings: Arrays) -> Any:
    ours, theirs = nodes["source"][pairs["source"]], nodes["destination"][pairs["destination"]]
    rtt, common = pairs["rtt"], settings["common"]
    predicted = ((ours + common) * (theirs + common)).sum(1)
    error = smooth_absolute((predicted - rtt) / rtt ** settings["power"], settings["width"])
    pull = (ours * ours).sum(1) * pairs["our_share"] + (theirs * theirs).sum(1) * pairs["their_share"]
    return (error + settings["pull"] * pull).sum()
