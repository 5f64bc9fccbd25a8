"""The optimizer and its learning rate over the run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from ping_llm.config import Config
from ping_llm.train.muon import scale_by_muon


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
