"""The layers of `layers.py` as Flax modules for training: initial weights, choice of attention, weights by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.core.errors import PingLlmError
from ping_llm.models.layers import LayerFunctions, LayerSettings
from ping_llm.storage.cache import cache_folder


class Layer(LayerFunctions, nnx.Module):
    """The matrices of one layer, as they are before training."""

    def __init__(self, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        heads = settings.heads * settings.head_dim
        self.settings = settings
        self.qkv = linear(settings, settings.width, 3 * heads, rngs)
        self.out = linear(settings, heads, settings.width, rngs, into_residual=True)
        self.gate_up = linear(settings, settings.width, 2 * settings.mlp_width, rngs)
        self.down = linear(settings, settings.mlp_width, settings.width, rngs, into_residual=True)


def linear(
    settings: LayerSettings, inputs: int, outputs: int, rngs: nnx.Rngs, *, into_residual: bool = False
) -> nnx.Linear:
    """A matrix without bias whose outputs have the variance of its inputs; `into_residual`: whose outputs, summed over
    all layers, have it."""
    scale = inputs**-0.5
    if into_residual:  # 2 × layers of them are added up
        scale *= (2 * settings.layers) ** -0.5
    start, dtype, kept = nnx.initializers.normal(scale), jnp.dtype(settings.dtype), jnp.dtype(settings.weight_dtype)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=start, dtype=dtype, param_dtype=kept, rngs=rngs)


def choose_attention(name: str, dtype: str) -> str:
    """The attention to use on this machine: resolves `auto`, and raises an error for one that cannot run here."""
    possible = dtype in ("bfloat16", "float16") and is_hopper_or_newer()
    if name == "cudnn" and not possible:
        raise PingLlmError(
            "attention=cudnn needs an NVIDIA GPU of the Hopper generation or newer and dtype=bfloat16; "
            "use attention=plain or auto"
        )
    return name if name != "auto" else "cudnn" if possible else "plain"


def is_hopper_or_newer() -> bool:
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "0"))
    return device.platform == "gpu" and capability.replace(".", "").isdigit() and float(capability) >= 9.0


def by_name(weights: Any) -> dict[str, Any]:
    """Arrays by their path in the model, such as `blocks.0.qkv.kernel`, in the order of the tree."""
    found = jax.tree_util.tree_flatten_with_path(weights)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in found}


def with_arrays(weights: Any, arrays: Mapping[str, Any]) -> Any:
    """The same tree of weights with the arrays given by name."""
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in by_name(weights).items()]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def keep_compiled(folder: Path | None = None) -> None:
    """Keep compiled programs on disk, which saves the next process some seconds. A folder that was set before stays."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir:
        return
    config.update("jax_compilation_cache_dir", str(folder or cache_folder() / "compiled"))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
