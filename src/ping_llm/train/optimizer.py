"""The optimizer and its learning rate over the run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from optax import contrib

from ping_llm.config import Config


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
    if config.opt_type == "muon":
        # Updates are scaled to the size that AdamW's have, so that one learning rate serves both.
        change = contrib.muon(
            rate,
            beta=config.muon_beta,
            weight_decay=config.adam_weight_decay,
            weight_decay_mask=_decayed,
            adam_b1=config.adam_b1,
            adam_b2=config.adam_b2,
            adam_weight_decay=config.adam_weight_decay,
            muon_weight_dimension_numbers=_orthogonalised,
            consistent_rms=0.2,
        )
    else:
        change = optax.adamw(
            rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.adam_weight_decay,
            mask=_decayed,
        )
    limit = config.gradient_clipping_threshold
    clip = optax.clip_by_global_norm(limit) if limit else optax.identity()
    return optax.chain(clip, change)


def _decayed(weights: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "embedding" not in jax.tree_util.keystr(path), weights)


def _orthogonalised(weights: Any) -> Any:
    """The matrices inside the layers; embedding and head are left to AdamW."""
    inside = contrib.MuonDimensionNumbers()
    return jax.tree_util.tree_map_with_path(
        lambda path, _: inside if "blocks" in jax.tree_util.keystr(path) else None, weights
    )
