"""Our language model in MaxText's terms, and back.

MaxText's `llama2` decoder is ours but for four things, which `weights` makes up for: its norms have scales, it divides
queries by the root of the head size in their matrix and not at run time, its matrices are apart where ours are joined,
and it has no rows that only fill up the vocabulary. What else must be set is here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.tokens import VOCABULARY_SIZE

NOTE: Final = "architecture.yml"
"""In the folder of a MaxText run: the keys below, as the engine found them."""

_SAME_NAME: Final = ("base_num_decoder_layers", "base_emb_dim", "base_num_query_heads", "head_dim", "base_mlp_dim")

_MUST_BE: Final[dict[str, Any]] = {
    "decoder_block": "llama2",
    "normalization_layer_epsilon": 1e-6,
    "mlp_activations": ["silu", "linear"],
    "mlp_bias": False,
    "logits_via_embedding": False,
    "attention_type": "global",
    "attn_logits_soft_cap": 0.0,
    "num_experts": 1,
    "use_qk_norm": False,
    "fused_qkv": False,
    "fused_mlp": False,
    "rope_type": "default",
    "rope_min_timescale": 1,
    "rope_linear_scaling_factor": 1.0,
    "nope_layer_interval": -1,
}
"""Whatever the size of the model."""

_BASE: Final[dict[str, Any]] = _MUST_BE | {
    "normalization_layer_epsilon": 1e-5,
    "base_num_decoder_layers": 16,
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "head_dim": 128,
    "base_mlp_dim": 7168,
    "vocab_size": 32_000,
    "rope_max_timescale": 10_000,
    "max_target_length": 2048,
    "scan_layers": True,
    "param_scan_axis": 1,
    "dtype": "bfloat16",
    "weight_dtype": "float32",
}
"""What MaxText's base.yml says on these keys."""


def maxtext_keys(config: Config) -> dict[str, Any]:
    """What MaxText must be told to make this model."""
    if config.final_logits_soft_cap:
        raise PingLlmError(
            f"final_logits_soft_cap={config.final_logits_soft_cap:g}: MaxText squeezes logits only where they share "
            "the embedding's matrix, which ours do not"
        )
    if config.rope_max_timescale != int(config.rope_max_timescale):
        raise PingLlmError(f"rope_max_timescale={config.rope_max_timescale:g}: MaxText takes whole numbers only")
    return _MUST_BE | {name: getattr(config, name) for name in _SAME_NAME} | {
        "base_num_kv_heads": config.base_num_query_heads,
        "vocab_size": VOCABULARY_SIZE,
        "rope_max_timescale": int(config.rope_max_timescale),
        "max_target_length": config.max_target_length,
        "scan_layers": True,
        "param_scan_axis": 1,
        "dtype": config.dtype,
        "weight_dtype": config.weight_dtype,
    }  # fmt: skip


def our_config(keys: Mapping[str, Any], run_name: str) -> Config:
    """The configuration of a model that MaxText made with these keys; an error if ours cannot express it."""
    for name, wanted in _MUST_BE.items():
        if _plain(keys[name]) != _plain(wanted):
            raise PingLlmError(f"{name}={keys[name]}: only models with {name}={wanted} can be converted")
    if int(keys["base_num_kv_heads"]) != int(keys["base_num_query_heads"]):
        raise PingLlmError("base_num_kv_heads differs from base_num_query_heads: our model has no grouped heads")
    if int(keys["vocab_size"]) < VOCABULARY_SIZE:
        raise PingLlmError(f"vocab_size={keys['vocab_size']}: a model of network data has at least {VOCABULARY_SIZE}")
    return Config(run_name=run_name).replace(
        rope_max_timescale=float(keys["rope_max_timescale"]),
        max_target_length=int(keys["max_target_length"]),
        dtype=str(keys["dtype"]),
        **{name: int(keys[name]) for name in _SAME_NAME},
    )


def read_keys(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys that matter here, from a MaxText configuration and `key=value`; the rest as in MaxText's base.yml."""
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise PingLlmError(f"cannot read the configuration {path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise PingLlmError(f"{path} is not a configuration: it must hold lines of the form key: value")
    base = found.get("base_config")
    keys = dict(_BASE)
    if base and (path.parent / str(base)).is_file():
        keys = read_keys(path.parent / str(base))
    keys |= {name: value for name, value in found.items() if name in _BASE}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or name not in _BASE:
            raise PingLlmError(f"{text}: write key=value with a key of {', '.join(sorted(_BASE))}")
        keys[name] = yaml.safe_load(value)
    return keys


def note(config: Any) -> str:
    """Of MaxText's own configuration object: a file that `read_keys` reads."""
    values = {name: getattr(config, name) for name in _BASE}
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    plain |= {name: str(plain[name]) for name in ("dtype", "weight_dtype")}
    plain["mlp_activations"] = list(plain["mlp_activations"])
    return yaml.safe_dump(plain)


def _plain(value: Any) -> Any:
    """Numbers alike, however YAML read them; MaxText says None for a cap of 0."""
    try:
        return float(value or 0)
    except (TypeError, ValueError):
        return value
