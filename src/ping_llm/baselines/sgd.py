"""Minibatch stochastic gradient descent over known pairs, compiled as one program: for Vivaldi and DMFSGD.

The peer-to-peer originals update two nodes for each measurement with a rate of their own. Here a few hundred to tens of
thousands of pairs make a step, with Adam's step sizes for every number of every node and a rate that falls to zero in
the second half: the same model, but it converges. A million pair visits take about a second on one core.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def minimise(loss: Loss, nodes: Arrays, pairs: Arrays, settings: Arrays, descent: Descent) -> dict[str, Any]:
    """The node arrays that make `loss(nodes, batch of pairs, settings)`, a sum over the batch, small.

    `loss` must be a function of its module: it is part of the key under which the compiled program is kept.
    """
    count = len(next(iter(pairs.values())))
    epochs = int(np.clip(descent.most_visits // max(count, 1), 5, descent.epochs))
    batch = min(count, max(16, count // descent.batches))
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
    state, _ = jax.lax.scan(epoch, (nodes, zeros, zeros, jnp.float32(0.0)), jax.random.split(key, epochs))
    fitted: Arrays = state[0]
    return fitted


def smooth_absolute(error: Any, width: Any) -> Any:
    """Like the absolute value, but a parabola within about `width` of zero, so that gradients vanish there."""
    return jnp.sqrt(error * error + width * width) - width
