"""What a configuration trains: a model, and the sums that make up its loss.

`dataset_type=worlds` and `measured` train the completer, all others the language model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jinja2 import Template

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.completer import measurements_on_device, world_settings
from ping_llm.models.completer.model import SetTransformer
from ping_llm.models.completer.model import loss_sums as completer_sums
from ping_llm.models.completer.network import CompleterSettings
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.lm.float8 import choose_quantization
from ping_llm.models.lm.transformer import Sums, loss_sums, rtt_weights
from ping_llm.models.modules import choose_attention, is_hopper_or_newer
from ping_llm.prior.fine_tuning import measured_batch
from ping_llm.prior.prng import Columns
from ping_llm.prior.worlds import Batch, WorldSettings, worlds_of
from ping_llm.runs.device import DeviceBatch
from ping_llm.runs.trained import Trained
from ping_llm.runs.weights import make_model, settings_of


@dataclass(frozen=True, kw_only=True)
class Task:
    settings: (
        ModelSettings | CompleterSettings
    )  # of the model, with attention and quantization as this machine has them
    parameters: int
    flops_per_token: int  # of a training step; a token is a position of the model's input
    cost: str  # the FLOPs in words
    sums: Callable[[Any, DeviceBatch, Any, int], Sums]
    """A function of the model, a batch, `data`, and the largest number of segments in a sequence. Its results: the
    `objective` is minimised, `cross_entropy` is reported, `targets` is what both are divided by, and `real_tokens` is
    the number of positions that are not padding."""
    data: Callable[[], Any] = lambda: None  # what every training step needs on the device beside its batch

    @property
    def shape(self) -> str:
        """Layers, heads and sizes, for people."""
        s = self.settings
        kind = "completer, " if isinstance(s, CompleterSettings) else ""
        return f"{kind}{s.layers} layers of {s.width}, {s.heads} heads of {s.head_dim}, MLP {s.mlp_width}"

    @property
    def arithmetic(self) -> str:
        s = self.settings
        fp8 = ", FP8 matmuls" if isinstance(s, ModelSettings) and s.quantization == "fp8" else ""
        return f"{s.dtype} on {s.weight_dtype} weights{fp8}, attention {s.attention}"

    @property
    def needs_max_segments(self) -> bool:
        """Whether attention is compiled for a number of segments."""
        return isinstance(self.settings, ModelSettings) and self.settings.attention == "cudnn"

    def make(self, rngs: nnx.Rngs) -> Transformer | SetTransformer:
        return make_model(self.settings, rngs)


def task_of(config: Config) -> Task:
    s = settings_of(config)
    s = replace(s, attention=choose_attention(s.attention, s.dtype))
    return _completer(config, s) if isinstance(s, CompleterSettings) else _language_model(config, s)


def size_of(config: Config) -> tuple[int, int]:
    """Parameters, and FLOPs of a training step per token (a position of the model's input). Uses no device."""
    s = settings_of(config)
    if isinstance(s, ModelSettings):
        return s.parameters, s.flops_per_token(config.max_target_length)
    worlds = world_settings(config)
    positions = worlds.context + worlds.questions
    return s.parameters, s.flops_per_context(worlds.context, worlds.questions) // positions


def _language_model(config: Config, s: ModelSettings) -> Task:
    s = replace(s, quantization=choose_quantization(s.quantization, s.dtype, has_fp8=is_hopper_or_newer()))
    parameters, flops = size_of(config)

    def sums(model: Transformer, batch: DeviceBatch, data: None, max_segments: int) -> Sums:
        logits = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], max_segments)
        weights = None if config.rtt_loss_weight == 1 else rtt_weights(batch["inputs"], config.rtt_loss_weight)
        segments = batch["targets_segmentation"]
        values = loss_sums(logits, batch["targets"], segments, config.z_loss_multiplier, weights)
        return {**values, "real_tokens": jnp.sum(batch["inputs_segmentation"] > 0, dtype=jnp.int32)}

    cost = f"{flops / 1e9:,.3f} GFLOP per token"
    return Task(settings=s, parameters=parameters, flops_per_token=flops, cost=cost, sums=sums)


def _completer(config: Config, s: CompleterSettings) -> Task:
    if config.quantization == "fp8":
        raise PingLlmError("quantization=fp8 is for the language model: leave it out for a completer")
    worlds = world_settings(config)
    parameters, flops = size_of(config)

    def sums(model: SetTransformer, batch: DeviceBatch, data: Columns | None, max_segments: int) -> Sums:
        shown = jax.lax.stop_gradient(_contexts(worlds, data, config.measured_share, batch))
        values = completer_sums(model(shown), shown)
        return {**values, "real_tokens": jnp.sum(shown["context_length"], dtype=jnp.int32) + values["targets"]}

    return Task(
        settings=s,
        parameters=parameters,
        flops_per_token=flops,
        cost=f"{worlds.context} measurements and {worlds.questions} questions per world, {flops / 1e9:,.3f} GFLOP each",
        sums=sums,
        data=lambda: measurements_on_device(config) if config.dataset_type == "measured" else None,
    )


def _contexts(worlds: WorldSettings, data: Columns | None, share: float, batch: DeviceBatch) -> Batch:
    """Contexts and questions from simulated worlds; with `data`, the first rows are from real measurements instead."""
    numbers = batch["seed"], batch["step"], batch["row"]
    if data is None:
        return worlds_of(worlds, *numbers)
    real = round(share * len(numbers[0]))
    parts = [measured_batch(worlds, data, *(column[:real] for column in numbers))] if real else []
    if real < len(numbers[0]):
        parts.append(worlds_of(worlds, *(column[real:] for column in numbers)))
    most_nodes = max(part["node_words"].shape[1] for part in parts)
    for part in parts:
        room = most_nodes - part["node_words"].shape[1]
        part["node_words"] = jnp.pad(part["node_words"], ((0, 0), (0, room), (0, 0)))
    return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}


def model_card(trained: Trained) -> str:
    """The model card in Markdown: what the model is, how it was trained, how to use it."""
    text = files("ping_llm.runs").joinpath("model_card.md").read_text(encoding="utf-8")
    template = Template(text, keep_trailing_newline=True, trim_blocks=True)
    known = {"config": trained.config, "steps": trained.steps, "is_completer": trained.is_completer}
    return template.render(task=task_of(trained.config), **known)
