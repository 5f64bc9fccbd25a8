"""Muon: momentum whose matrices are made orthogonal before they are used as updates.

As in optax.contrib, but matrices of equal shape are orthogonalised together, and on accelerators in bfloat16. One by
one, the 80 matrices of `latency_network` take 1,200 small products a step, 13 % of its time on an H200; together, 60.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from ping_llm.batches.device import DeviceBatch
from ping_llm.config import Config
from ping_llm.models.lm.transformer import Sums
from ping_llm.runs.checkpoints import TrainState, graph
from ping_llm.runs.task import Task

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_LIKE_ADAM: Final = 0.2
"""Root mean square of AdamW's updates: scaled to it, both optimizers use the same learning rates (arXiv 2502.16982)."""


class MuonState(NamedTuple):
    momentum: Any


def scale_by_muon(beta: float) -> optax.GradientTransformation:
    """Orthogonal updates of root mean square 0.2, from Nesterov momentum. For trees of matrices only."""

    def init(weights: Any) -> MuonState:
        return MuonState(momentum=jax.tree.map(jnp.zeros_like, weights))

    def update(slopes: Any, state: MuonState, weights: Any = None) -> tuple[Any, MuonState]:
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, slopes)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, slopes)
        return _orthogonalised(ahead), MuonState(momentum=momentum)

    return optax.GradientTransformation(init, update)


def _orthogonalised(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    of_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        of_shape[leaf.shape].append(number)
    for shape, members in of_shape.items():
        stacked = orthogonalise(jnp.stack([leaves[number] for number in members]))
        scale = _LIKE_ADAM * max(shape) ** 0.5
        for place, number in enumerate(members):
            leaves[number] = (stacked[place] * scale).astype(leaves[number].dtype)
    return jax.tree.unflatten(structure, leaves)


def orthogonalise(matrices: jax.Array) -> jax.Array:
    """Singular values of [n, rows, columns] matrices to about 1 (0.7 to 1.2), by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-12)
    x = x.astype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.astype(jnp.float32)
    return x.mT if is_tall else x


# The optimizer and its learning rate over the run.


def schedule(config: Config) -> optax.Schedule:
    """A linear warm-up, then `cosine` down over the whole run, or `wsd`: constant, and a linear decay at the end."""
    peak, last = config.learning_rate, config.learning_rate * config.learning_rate_final_fraction
    warmup = round(config.steps * config.warmup_steps_fraction)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if config.learning_rate_schedule == "cosine":
        fall = optax.cosine_decay_schedule(peak, max(1, config.steps - warmup), config.learning_rate_final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    decay = min(round(config.steps * config.decay_steps_fraction), config.steps - warmup)
    fall = optax.linear_schedule(peak, last, max(1, decay))
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, config.steps - decay])


def rates(config: Config) -> npt.NDArray[np.float32]:
    """The learning rate of every step, for reports: asked one by one, each would wait for the device to be idle."""
    return np.asarray(jax.jit(jax.vmap(schedule(config)))(jnp.arange(config.steps)))


def optimizer(config: Config) -> optax.GradientTransformation:
    rate = schedule(config)
    change = optax.adamw(
        rate,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        mask=_decayed,
    )
    if config.opt_type == "muon":
        inside = optax.chain(
            scale_by_muon(config.muon_beta),
            optax.add_decayed_weights(config.adam_weight_decay),
            optax.scale_by_learning_rate(rate),
        )
        change = optax.partition({"layers": inside, "ends": change}, _part)
    limit = config.gradient_clipping_threshold
    clip = optax.clip_by_global_norm(limit) if limit else optax.identity()
    return optax.chain(clip, change)


def _decayed(weights: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "embedding" not in jax.tree_util.keystr(path), weights)


def _part(weights: Any) -> Any:
    """The matrices of the layers, and embedding and head, which are left to AdamW."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "layers" if "blocks" in jax.tree_util.keystr(path) else "ends", weights
    )


# One training step and one evaluation step, compiled.

StepValues = dict[str, jax.Array]
TrainStep = Callable[[TrainState, DeviceBatch, int], tuple[TrainState, StepValues]]
EvalStep = Callable[[Any, DeviceBatch, int], Sums]


def make_train_step(task: Task, change: optax.GradientTransformation, config: Config) -> TrainStep:
    """Returns the state after the step, and numbers that stay on the device until somebody asks for them."""
    parts = config.gradient_accumulation_steps
    model = graph(task)

    def sums(weights: Any, batch: DeviceBatch, data: Any, most_segments: int) -> tuple[jax.Array, Sums]:
        values = task.sums(nnx.merge(model, weights), batch, data, most_segments)
        return values["objective"], values

    slope = jax.grad(sums, has_aux=True)

    def summed_slope(weights: Any, batch: DeviceBatch, data: Any, most_segments: int) -> tuple[Any, Sums]:
        if parts == 1:
            return slope(weights, batch, data, most_segments)
        split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0), batch)
        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: slope(weights, _first(split), data, most_segments)))

        def add(total: Any, part: DeviceBatch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, slope(weights, part, data, most_segments)), None

        return jax.lax.scan(add, zero, split)[0]

    @partial(jax.jit, static_argnums=3, donate_argnums=0)
    def train_step(
        state: TrainState, batch: DeviceBatch, data: Any, most_segments: int
    ) -> tuple[TrainState, StepValues]:
        slopes, values = summed_slope(state.weights, batch, data, most_segments)
        targets = jnp.maximum(values["targets"], 1).astype(jnp.float32)
        slopes = jax.tree.map(lambda slope: slope / targets.astype(slope.dtype), slopes)
        updates, optimizer = change.update(slopes, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        report = {
            "loss": values["cross_entropy"] / targets,
            "grad_norm": optax.tree.norm(slopes),
            "real_tokens": values["real_tokens"],
        }
        average = _averaged(state.average, weights, config.average_decay)
        return TrainState(weights=weights, optimizer=optimizer, average=average), report

    data = task.data()
    return lambda state, batch, most_segments: train_step(state, batch, data, most_segments)


def make_eval_step(task: Task) -> EvalStep:
    """Sums over a batch, without a change of anything."""
    model = graph(task)

    @partial(jax.jit, static_argnums=3)
    def eval_step(weights: Any, batch: DeviceBatch, data: Any, most_segments: int) -> Sums:
        return task.sums(nnx.merge(model, weights), batch, data, most_segments)

    data = task.data()
    return lambda weights, batch, most_segments: eval_step(weights, batch, data, most_segments)


def _averaged(average: Any, weights: Any, decay: float) -> Any:
    if average is None:
        return None
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, weights)


def _first(split: DeviceBatch) -> DeviceBatch:
    return {name: value[0] for name, value in split.items()}
