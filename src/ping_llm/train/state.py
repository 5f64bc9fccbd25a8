"""The state of a run: weights and optimizer, laid out over the devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from ping_llm.config import Config
from ping_llm.train.hardware import weight_sharding
from ping_llm.train.task import Task, task_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    weights: Any
    optimizer: Any
    average: Any = None
    """Of the weights over the last steps, if the run keeps one."""

    @property
    def best_weights(self) -> Any:
        """What is evaluated and used."""
        return self.weights if self.average is None else self.average


def graph(task: Task) -> Any:
    """The model without its weights: what `nnx.merge` needs beside them."""
    return nnx.split(nnx.eval_shape(lambda: task.make(nnx.Rngs(0))))[0]


def first_state(config: Config, change: optax.GradientTransformation) -> TrainState:
    """What a run begins with: a function of the configuration alone, whatever the devices."""
    weights = nnx.split(task_of(config).make(nnx.Rngs(config.init_weights_seed)))[1]
    average = jax.tree.map(jnp.copy, weights) if config.average_decay else None
    return TrainState(weights=weights, optimizer=change.init(weights), average=average)


def laid_out(config: Config, change: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The shapes of the state and where each array lies, without the values."""
    shapes = jax.eval_shape(lambda: first_state(config, change))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight_sharding(mesh, leaf.shape)), shapes
    )


def create(config: Config, change: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The first state, made where it is to lie."""
    places = jax.tree.map(lambda leaf: leaf.sharding, laid_out(config, change, mesh))
    return jax.jit(lambda: first_state(config, change), out_shardings=places)()


@jax.jit
def digest(tree: Any) -> jax.Array:
    """One number per array that changes with every bit and place in it, and not with how it is spread over devices."""
    return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(tree)])


def _digest(leaf: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).reshape(-1)
    places = jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum(bits * (places * jnp.uint32(2654435761) | jnp.uint32(1)), dtype=jnp.uint32)
