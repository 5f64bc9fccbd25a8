"""The weights of the language model in MaxText's layout, and back. Arrays in, arrays out; nothing is computed with them
but the norms' scales and the queries' factor, see `architecture`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ping_llm.errors import PingLlmError
from ping_llm.model import ModelSettings

Arrays = dict[str, npt.NDArray[Any]]
"""Ours: by name, such as `blocks.0.qkv.kernel`. MaxText's: by path, such as `decoder/layers/mlp/wo/kernel`."""

_QUERY = "self_attention/query/kernel"
_ATTENTION_NORM = "pre_self_attention_layer_norm/scale"
_MLP_NORM = "post_self_attention_layer_norm/scale"


def to_maxtext(ours: Arrays, settings: ModelSettings) -> Arrays:
    """With layers stacked along axis 1, as `scan_layers` wants them."""
    layers = [_layer_to_maxtext(ours, f"blocks.{i}.", settings) for i in range(settings.layers)]
    stacked = {f"decoder/layers/{name}": np.stack([layer[name] for layer in layers], axis=1) for name in layers[0]}
    vocabulary = settings.vocabulary
    return stacked | {
        "token_embedder/embedding": ours["embedding"][:vocabulary],
        "decoder/decoder_norm/scale": np.ones(settings.width, dtype=np.float32),
        "decoder/logits_dense/kernel": ours["head.kernel"][:, :vocabulary],
    }


def from_maxtext(theirs: Arrays, settings: ModelSettings, scan_axis: int = 1) -> Arrays:
    """The scales of norms become part of the matrices that follow them."""
    padding = settings.padded_vocabulary - settings.vocabulary
    embedding = _get(theirs, "token_embedder/embedding")[: settings.vocabulary]
    head = _get(theirs, "decoder/logits_dense/kernel") * _get(theirs, "decoder/decoder_norm/scale")[:, None]
    ours = {
        "embedding": np.pad(embedding, ((0, padding), (0, 0))),
        "head.kernel": np.pad(head[:, : settings.vocabulary], ((0, 0), (0, padding))),
    }
    for number in range(settings.layers):
        layer = _layer(theirs, number, scan_axis, settings.layers)
        ours |= {f"blocks.{number}.{name}": array for name, array in _layer_from_maxtext(layer, settings).items()}
    return ours


def _layer_to_maxtext(ours: Arrays, prefix: str, settings: ModelSettings) -> Arrays:
    heads, size, width = settings.heads, settings.head_dim, settings.width
    qkv = ours[f"{prefix}qkv.kernel"].reshape(width, 3, heads, size)
    gate, up = np.split(ours[f"{prefix}gate_up.kernel"], 2, axis=1)
    ones = np.ones(width, dtype=np.float32)
    return {
        _QUERY: qkv[:, 0] / np.float32(size**0.5),
        "self_attention/key/kernel": qkv[:, 1],
        "self_attention/value/kernel": qkv[:, 2],
        "self_attention/out/kernel": ours[f"{prefix}out.kernel"].reshape(heads, size, width),
        "mlp/wi_0/kernel": gate,
        "mlp/wi_1/kernel": up,
        "mlp/wo/kernel": ours[f"{prefix}down.kernel"],
        _ATTENTION_NORM: ones,
        _MLP_NORM: ones,
    }


def _layer_from_maxtext(layer: Arrays, settings: ModelSettings) -> Arrays:
    heads, size, width = settings.heads, settings.head_dim, settings.width
    query = _get(layer, _QUERY) * np.float32(size**0.5)
    others = (_get(layer, f"self_attention/{name}/kernel") for name in ("key", "value"))
    qkv = np.stack([query, *others], axis=1).reshape(width, 3 * heads * size)
    gate_up = np.concatenate([_get(layer, f"mlp/{name}/kernel") for name in ("wi_0", "wi_1")], axis=1)
    return {
        "qkv.kernel": qkv * _get(layer, _ATTENTION_NORM)[:, None],
        "out.kernel": _get(layer, "self_attention/out/kernel").reshape(heads * size, width),
        "gate_up.kernel": gate_up * _get(layer, _MLP_NORM)[:, None],
        "down.kernel": _get(layer, "mlp/wo/kernel"),
    }


def _layer(theirs: Arrays, number: int, axis: int, layers: int) -> Arrays:
    """Of one layer, whether they are stacked or lie side by side."""
    side_by_side = f"decoder/layers_{number}/"
    found = {name.removeprefix(side_by_side): array for name, array in theirs.items() if name.startswith(side_by_side)}
    if found:
        return found
    stacked = {name: array for name, array in theirs.items() if name.startswith("decoder/layers/")}
    for name, array in stacked.items():
        if array.shape[axis] != layers:
            raise PingLlmError(f"{name} has {array.shape[axis]} layers, the configuration {layers}")
    return {name.removeprefix("decoder/layers/"): np.take(array, number, axis) for name, array in stacked.items()}


def _get(arrays: Arrays, name: str) -> npt.NDArray[Any]:
    if name not in arrays:
        raise PingLlmError(f"the checkpoint has no {name}: it is not of a model that can be converted")
    return arrays[name].astype(np.float32)
