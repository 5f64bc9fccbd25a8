"""What is trained: a model, and the sums that its loss is made of.

`dataset_type=worlds` and `measured` train the completer, all others the language model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.batches.device import DeviceBatch
from ping_llm.config import Config
from ping_llm.config.keys import TEXT_DATASET_TYPES
from ping_llm.core.errors import PingLlmError
from ping_llm.data.completer import COMPLETER_DATA, measurements_of, world_settings
from ping_llm.models.completer.mixture import loss_sums as completer_sums
from ping_llm.models.completer.model import CompleterSettings, SetTransformer
from ping_llm.models.lm import ModelSettings, Transformer, attention, float8
from ping_llm.models.lm.transformer import Sums, loss_sums
from ping_llm.prior.fine_tuning import Measurements, measured_batch
from ping_llm.prior.worlds import Batch, WorldSettings, worlds_of
from ping_llm.tokens.encode import VOCABULARY_SIZE


@dataclass(frozen=True, kw_only=True)
class Task:
    description: str
    """Its shape."""
    arithmetic: str
    parameters: int
    flops_per_token: int
    """Of a training step. A token is a place of the model's input."""
    make: Callable[[nnx.Rngs], nnx.Module]
    sums: Callable[[Any, DeviceBatch, Any, int], Sums]
    """Of the model, a batch, `data`, and the segments that a sequence has at most: `objective` is what is minimised,
    `cross_entropy` what is reported, `targets` what both are divided by, `real_tokens` what was not padding."""
    data: Callable[[], Any] = lambda: None
    """Gives what every step needs on the device beside its batch. Only training asks for it."""
    asks_for_segments: bool = False
    """Whether the attention used has to be told how many segments there may be."""


def task_of(config: Config) -> Task:
    return _completer(config) if config.dataset_type in COMPLETER_DATA else _language_model(config)


def model_settings(config: Config) -> ModelSettings:
    """Of the language model."""
    return ModelSettings(
        **_of_either(config),
        vocabulary=vocabulary(config),
        rope_period=config.rope_max_timescale,
        logits_soft_cap=config.final_logits_soft_cap,
        quantization=config.quantization,
        remat=config.remat_policy,
    )


def vocabulary(config: Config) -> int:
    """Tokens that the language model knows: as configured, or those of the data."""
    if config.dataset_type in TEXT_DATASET_TYPES:
        from ping_llm.data.tokenizer import tokenizer_of

        return config.vocab_size or tokenizer_of(config).vocabulary
    if 0 < config.vocab_size < VOCABULARY_SIZE:
        raise PingLlmError(f"vocab_size must be 0 or at least {VOCABULARY_SIZE}, the tokens of probe rows")
    return config.vocab_size or VOCABULARY_SIZE


def completer_settings(config: Config) -> CompleterSettings:
    return CompleterSettings(**_of_either(config), identity=config.completer_identity)


def _of_either(config: Config) -> dict[str, Any]:
    """The settings that both models have."""
    return {
        "layers": config.base_num_decoder_layers,
        "width": config.base_emb_dim,
        "heads": config.base_num_query_heads,
        "head_dim": config.head_dim,
        "mlp_width": config.base_mlp_dim,
        "dtype": config.dtype,
        "weight_dtype": config.weight_dtype,
        "attention": config.attention,
    }


def _language_model(config: Config) -> Task:
    s = model_settings(config)
    s = replace(
        s,
        attention=attention.choose(s.attention, s.dtype),
        quantization=float8.choose(s.quantization, s.dtype, has_units=attention.is_hopper_or_newer()),
    )

    def sums(model: Transformer, batch: DeviceBatch, data: None, most_segments: int) -> Sums:
        logits = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], most_segments)
        values = loss_sums(logits, batch["targets"], batch["targets_segmentation"], config.z_loss_multiplier)
        return {**values, "real_tokens": jnp.sum(batch["inputs_segmentation"] > 0, dtype=jnp.int32)}

    return Task(
        description=f"{s.layers} layers of {s.width}, {s.heads} heads of {s.head_dim}, MLP {s.mlp_width}), "
        f"{s.flops_per_token(config.max_target_length) / 1e9:,.3f} GFLOP a token",
        arithmetic=f"{s.dtype} on {s.weight_dtype} weights"
        f"{', products in 8 bits' if s.quantization == 'fp8' else ''}, attention {s.attention}",
        parameters=s.parameters,
        flops_per_token=s.flops_per_token(config.max_target_length),
        make=partial(Transformer, s),
        sums=sums,
        asks_for_segments=s.attention == "cudnn",
    )


def _completer(config: Config) -> Task:
    if config.quantization == "fp8":
        raise PingLlmError("quantization=fp8 is for the language model: leave it out for a completer")
    s = completer_settings(config)
    s = replace(s, attention=attention.choose(s.attention, s.dtype))
    worlds = world_settings(config)
    positions = worlds.context + worlds.questions
    flops = s.flops_per_context(worlds.context, worlds.questions) // positions

    def sums(model: SetTransformer, batch: DeviceBatch, data: Measurements | None, most_segments: int) -> Sums:
        shown = jax.lax.stop_gradient(_contexts(worlds, data, config.measured_share, batch))
        values = completer_sums(model(shown), shown)
        return {
            **{name: values[name] for name in ("objective", "cross_entropy", "targets")},
            "real_tokens": jnp.sum(shown["context_length"], dtype=jnp.int32) + values["targets"],
        }

    return Task(
        description=f"completer, {s.layers} layers of {s.width}, {s.heads} heads of {s.head_dim}, MLP {s.mlp_width}), "
        f"{worlds.context} measurements and {worlds.questions} questions a world, {flops / 1e9:,.3f} GFLOP a place",
        arithmetic=f"{s.dtype} on {s.weight_dtype} weights, attention {s.attention}",
        parameters=s.parameters,
        flops_per_token=flops,
        make=partial(SetTransformer, s),
        sums=sums,
        data=lambda: measurements_of(config).on_device if config.dataset_type == "measured" else None,
    )


def _contexts(worlds: WorldSettings, data: Measurements | None, share: float, batch: DeviceBatch) -> Batch:
    """Of simulated worlds; of real measurements too, where there are any: the first rows of the batch are theirs."""
    numbers = batch["seed"], batch["step"], batch["row"]
    if data is None:
        return worlds_of(worlds, *numbers)
    real = round(share * len(numbers[0]))
    parts = [measured_batch(worlds, data, *(column[:real] for column in numbers))] if real else []
    if real < len(numbers[0]):
        parts.append(worlds_of(worlds, *(column[real:] for column in numbers)))
    most_nodes = max(part["node_groups"].shape[1] for part in parts)
    for part in parts:
        part["node_groups"] = jnp.pad(
            part["node_groups"], ((0, 0), (0, most_nodes - part["node_groups"].shape[1]), (0, 0))
        )
    return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}
