"""One training step and one evaluation step, compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ping_llm.config import Config
from ping_llm.model.loss import Sums, loss_sums
from ping_llm.pipeline.device import DeviceBatch
from ping_llm.train.state import TrainState

StepValues = dict[str, jax.Array]
TrainStep = Callable[[TrainState, DeviceBatch, int], tuple[TrainState, StepValues]]
EvalStep = Callable[[Any, DeviceBatch, int], Sums]


def make_train_step(graph: Any, change: optax.GradientTransformation, config: Config) -> TrainStep:
    """Returns the state after the step, and numbers that stay on the device until somebody asks for them."""
    parts = config.gradient_accumulation_steps

    def sums(weights: Any, batch: DeviceBatch, most_segments: int) -> tuple[jax.Array, Sums]:
        values = _sums(graph, weights, batch, most_segments, config.z_loss_multiplier)
        return values["objective"], values

    slope = jax.grad(sums, has_aux=True)

    def summed_slope(weights: Any, batch: DeviceBatch, most_segments: int) -> tuple[Any, Sums]:
        if parts == 1:
            return slope(weights, batch, most_segments)
        split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, parts, *a.shape[1:]), 1, 0), batch)
        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: slope(weights, _first(split), most_segments)))

        def add(total: Any, part: DeviceBatch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, slope(weights, part, most_segments)), None

        return jax.lax.scan(add, zero, split)[0]

    @partial(jax.jit, static_argnums=2, donate_argnums=0)
    def train_step(state: TrainState, batch: DeviceBatch, most_segments: int) -> tuple[TrainState, StepValues]:
        slopes, values = summed_slope(state.weights, batch, most_segments)
        targets = jnp.maximum(values["targets"], 1).astype(jnp.float32)
        slopes = jax.tree.map(lambda slope: slope / targets.astype(slope.dtype), slopes)
        updates, optimizer = change.update(slopes, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        report = {
            "loss": values["cross_entropy"] / targets,
            "grad_norm": optax.tree.norm(slopes),
            "real_tokens": jnp.sum(batch["inputs_segmentation"] > 0, dtype=jnp.int32),
        }
        return TrainState(weights=weights, optimizer=optimizer), report

    return train_step


def make_eval_step(graph: Any) -> EvalStep:
    """Sums over a batch, without a change of anything."""
    return jax.jit(partial(_sums, graph), static_argnums=2)


def _sums(graph: Any, weights: Any, batch: DeviceBatch, most_segments: int, z_loss: float = 0.0) -> Sums:
    model = nnx.merge(graph, weights)
    logits = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], most_segments)
    return loss_sums(logits, batch["targets"], batch["targets_segmentation"], z_loss)


def _first(split: DeviceBatch) -> DeviceBatch:
    return {name: value[0] for name, value in split.items()}
