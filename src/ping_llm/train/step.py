"""One training step and one evaluation step, compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ping_llm.config import Config
from ping_llm.model.loss import Sums
from ping_llm.pipeline.device import DeviceBatch
from ping_llm.train.state import TrainState, graph
from ping_llm.train.task import Task

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
