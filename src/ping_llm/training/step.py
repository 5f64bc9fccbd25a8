"""The optimizer, its learning rate over the run, and the compiled training and evaluation steps.

To add an optimizer or a schedule: a function here, its line in `OPTIMIZERS` or `SCHEDULES`, and its name among the
choices of `opt_type` or `learning_rate_schedule` in `config/keys.py`.
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

from ping_llm.config import Config
from ping_llm.models.lm.transformer import Sums
from ping_llm.runs.device import DeviceBatch
from ping_llm.runs.task import Task
from ping_llm.training.state import TrainState

# -- schedules: of the steps after the warm-up


def _cosine(config: Config, steps: int) -> optax.Schedule:
    """Cosine decay to the end of the run."""
    return optax.cosine_decay_schedule(config.learning_rate, max(1, steps), config.learning_rate_final_fraction)


def _wsd(config: Config, steps: int) -> optax.Schedule:
    """Warmup-stable-decay: constant, and a linear decay at the end."""
    peak, last = config.learning_rate, config.learning_rate * config.learning_rate_final_fraction
    decay = min(round(config.steps * config.decay_steps_fraction), steps)
    fall = optax.linear_schedule(peak, last, max(1, decay))
    return optax.join_schedules([optax.constant_schedule(peak), fall], [steps - decay])


SCHEDULES: Final = {"cosine": _cosine, "wsd": _wsd}


def schedule(config: Config) -> optax.Schedule:
    """A linear warm-up, then the decay named by `learning_rate_schedule`."""
    warmup = round(config.steps * config.warmup_steps_fraction)
    rise = optax.linear_schedule(config.learning_rate / (warmup + 1), config.learning_rate, warmup)
    return optax.join_schedules(
        [rise, SCHEDULES[config.learning_rate_schedule](config, config.steps - warmup)], [warmup]
    )


def learning_rates(config: Config) -> npt.NDArray[np.float32]:
    """The learning rates of all steps, for reports. Computed one by one, each would wait for the device to be idle."""
    return np.asarray(jax.jit(jax.vmap(schedule(config)))(jnp.arange(config.steps)))


# -- optimizers


def _adamw(config: Config, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW without weight decay on the embedding."""
    return optax.adamw(
        rate,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        mask=partial(_map_paths, lambda path: "embedding" not in path),
    )


def _muon(config: Config, rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the matrices of the layers; embedding and head are left to AdamW."""
    of_layers = optax.chain(
        scale_by_muon(config.muon_beta),
        optax.add_decayed_weights(config.adam_weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    parts = {"layers": of_layers, "ends": _adamw(config, rate)}
    return optax.partition(parts, partial(_map_paths, lambda path: "layers" if "blocks" in path else "ends"))


OPTIMIZERS: Final = {"adamw": _adamw, "muon": _muon}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    limit = config.gradient_clipping_threshold
    clip = optax.clip_by_global_norm(limit) if limit else optax.identity()
    return optax.chain(clip, OPTIMIZERS[config.opt_type](config, schedule(config)))


def _map_paths(function: Callable[[str], Any], weights: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: function(jax.tree_util.keystr(path)), weights)


# -- Muon: momentum whose matrices are made orthogonal before they are used as updates
#
# As in optax.contrib, but matrices of equal shape are orthogonalized together, and on accelerators in bfloat16. One by
# one, the 80 matrices of `latency_network` take 1,200 small matmuls per step, 13 % of its time on an H200; together 60.

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_RMS_OF_ADAM: Final = 0.2
"""Of AdamW's updates: scaled to it, both optimizers use the same learning rates (arXiv 2502.16982)."""


class MuonState(NamedTuple):
    momentum: Any


def scale_by_muon(beta: float) -> optax.GradientTransformation:
    """Orthogonal updates of root mean square 0.2, from Nesterov momentum. For trees of matrices only."""

    def init(weights: Any) -> MuonState:
        return MuonState(momentum=jax.tree.map(jnp.zeros_like, weights))

    def update(gradients: Any, state: MuonState, weights: Any = None) -> tuple[Any, MuonState]:
        def mixed(momentum: Any) -> Any:
            return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, gradients)

        momentum = mixed(state.momentum)
        leaves, structure = jax.tree.flatten(mixed(momentum))
        of_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, leaf in enumerate(leaves):
            of_shape[leaf.shape].append(number)
        for shape, members in of_shape.items():
            stacked = orthogonalize(jnp.stack([leaves[number] for number in members]))
            for matrix, number in zip(stacked, members, strict=True):
                leaves[number] = (matrix * (_RMS_OF_ADAM * max(shape) ** 0.5)).astype(leaves[number].dtype)
        return jax.tree.unflatten(structure, leaves), MuonState(momentum=momentum)

    return optax.GradientTransformation(init, update)


def orthogonalize(matrices: jax.Array) -> jax.Array:
    """Bring all singular values of [n, rows, columns] matrices to about 1 (0.7 to 1.2), by Newton-Schulz iterations."""
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


StepValues = dict[str, jax.Array]
TrainStep = Callable[[TrainState, DeviceBatch, int], tuple[TrainState, StepValues]]
EvalStep = Callable[[Any, DeviceBatch, int], Sums]


def make_train_step(task: Task, optimizer: optax.GradientTransformation, config: Config) -> TrainStep:
    """A function that returns the state after a step, and its metrics, which stay on the device until they are read."""
    parts, sums = config.gradient_accumulation_steps, _sums_of_weights(task)

    def objective(*of_batch: Any) -> tuple[jax.Array, Sums]:
        values = sums(*of_batch)
        return values["objective"], values

    gradient = jax.grad(objective, has_aux=True)

    def accumulated(weights: Any, batch: DeviceBatch, data: Any, max_segments: int) -> tuple[Any, Sums]:
        """Gradient and sums of the batch, added up over `parts` micro-batches."""
        if parts == 1:
            return gradient(weights, batch, data, max_segments)
        split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0), batch)
        first = {name: value[0] for name, value in split.items()}
        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: gradient(weights, first, data, max_segments)))

        def add(total: Any, part: DeviceBatch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(weights, part, data, max_segments)), None

        return jax.lax.scan(add, zero, split)[0]

    @partial(jax.jit, static_argnums=3, donate_argnums=0)
    def train_step(
        state: TrainState, batch: DeviceBatch, data: Any, max_segments: int
    ) -> tuple[TrainState, StepValues]:
        gradients, values = accumulated(state.weights, batch, data, max_segments)
        targets = jnp.maximum(values["targets"], 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda g: g / targets.astype(g.dtype), gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        average, decay = state.average, config.average_decay
        if average is not None:
            average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, weights)
        report = {
            "loss": values["cross_entropy"] / targets,
            "grad_norm": optax.tree.norm(gradients),
            "real_tokens": values["real_tokens"],
        }
        return TrainState(weights=weights, optimizer=optimizer_state, average=average), report

    data = task.data()
    return lambda state, batch, max_segments: train_step(state, batch, data, max_segments)


def make_eval_step(task: Task) -> EvalStep:
    """A function that returns the sums of a batch."""
    eval_step, data = jax.jit(_sums_of_weights(task), static_argnums=3), task.data()
    return lambda weights, batch, max_segments: eval_step(weights, batch, data, max_segments)


def _sums_of_weights(task: Task) -> Callable[[Any, DeviceBatch, Any, int], Sums]:
    """`task.sums` as a function of the weights: the rest of the Flax module is the same in every step."""
    model = nnx.split(nnx.eval_shape(lambda: task.make(nnx.Rngs(0))))[0]
    return lambda weights, batch, data, max_segments: task.sums(nnx.merge(model, weights), batch, data, max_segments)
