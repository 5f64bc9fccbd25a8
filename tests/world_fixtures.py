"""Batches of simulated worlds, as training makes them on the device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ping_llm.prior.worlds import Batch, WorldSettings, worlds_of


@partial(jax.jit, static_argnums=(0, 4))
def world_batch(s: WorldSettings, seed: Any, step: Any, first: Any, count: int) -> Batch:
    """Rows `first` to `first + count` of the batch of a step.

    For a single row the compiler arranges the arithmetic differently, and the last bits differ.
    """
    row = jnp.arange(count) + first
    return worlds_of(s, jnp.full_like(row, seed), jnp.full_like(row, step), row)
