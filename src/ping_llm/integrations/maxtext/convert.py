"""Conversion of trained language models from our trainer to MaxText and back. MaxText need not be installed.

MaxText's `llama2` decoder differs from our model in four things, which the conversion makes up for: its RMSNorms have
scales (which are multiplied into the matrices that follow), its query matrix includes the division by the root of the
head size, its matrices are separate where ours are fused, and its embedding has no rows that only pad the vocabulary.
Weights are converted, the state of the optimizer is not. Both use Orbax checkpoints.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
import yaml
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as ocp

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_folder
from ping_llm.models.lm import ModelSettings
from ping_llm.runs.trained import Trained, check_shapes, load_trained
from ping_llm.runs.weights import check_replaceable, model_settings, save_trained
from ping_llm.tokens import VOCABULARY_SIZE

NOTE: Final = "architecture.yml"
"""File in the folder of a MaxText run, written by the launcher: the keys of `_BASE` with their values."""

_CHECKPOINT: Final = "checkpoint"
_CONFIG: Final = "config.yml"
_ITEM: Final = "items"

_HEADER: Final = """# {name}: the model of {where} after {steps:,} steps, for MaxText.
#
#     python -m ping_llm.integrations.maxtext {folder}/config.yml run_name=my-run load_parameters_path={path} \\
#         network_train_files=data/probe_rows network_eval_files=data/probe_rows

"""

_CARD: Final = """---
library_name: ping-llm
license: apache-2.0
---

# {name}

A language model of latency measurements, trained by MaxText and converted from {where}. `config.yml` beside this card
describes the model (what it says about training is not how this one was trained); weights are float32 safetensors.
"""


def convert_to_maxtext(run: Path, output: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the weights of a run, or of an exported model, as a MaxText checkpoint and a configuration for it."""
    trained = load_trained(run)
    if trained.is_completer:
        raise PingLlmError(f"{run} is a completer: only language models can be converted")
    keys = maxtext_keys(trained.config)
    check_replaceable(output, overwrite=overwrite, marker=_CHECKPOINT)
    settings = model_settings(trained.config)
    path = (output / _CHECKPOINT / _ITEM).absolute()
    name = trained.config.run_name or output.name
    header = _HEADER.format(name=name, where=trained.where, steps=trained.steps, folder=output, path=path)
    settings_of_run = {"base_config": "base.yml", "dataset_type": "network", "num_epoch": -1} | keys
    with atomic_folder(output) as unfinished:
        write_weights(unfinished / _CHECKPOINT, to_maxtext(trained.weights, settings))
        (unfinished / _CONFIG).write_text(header + yaml.safe_dump(settings_of_run, sort_keys=False))
    return {"parameters": settings.parameters, "steps": trained.steps, "load_parameters_path": str(path)}


def convert_from_maxtext(
    checkpoint: Path, output: Path, *, config: Path | None = None, changes: Sequence[str] = (), overwrite: bool = False
) -> dict[str, Any]:
    """Write the weights of a MaxText checkpoint as one of our models.

    `config` describes the model, and `changes` override it. None = the note that the launcher left in the run's folder,
    or the configuration beside a converted checkpoint.
    """
    check_replaceable(output, overwrite=overwrite)
    root = checkpoint.parent if checkpoint.name == _ITEM else checkpoint
    is_step = root.name.isdigit()
    if config is None:
        notes = (root.parent.parent / NOTE, root.parent / _CONFIG)
        config = next((note for note in notes if note.is_file()), None)
    if config is None:
        raise PingLlmError(f"there is no {NOTE} in the folder of the run: name its MaxText configuration with --config")
    keys = read_keys(config, changes)
    name = root.absolute().parents[1].name if is_step else output.name
    steps = int(root.name) + 1 if is_step else 0
    ours = our_config(keys, name)
    settings = model_settings(ours)
    arrays = from_maxtext(read_weights(checkpoint), settings, int(keys["param_scan_axis"]))
    check_shapes(ours, arrays, checkpoint)
    trained = Trained(config=ours, weights=arrays, steps=steps, where=str(checkpoint))
    save_trained(trained, output, _CARD.format(name=name, where=checkpoint), overwrite=overwrite, dtype="float32")
    return {"parameters": settings.parameters, "steps": steps, "load_parameters_path": None}


# -- the architecture, in MaxText's keys

_SAME_NAME: Final = ("base_num_decoder_layers", "base_emb_dim", "base_num_query_heads", "head_dim", "base_mlp_dim")

_MUST_BE: Final[dict[str, Any]] = {
    "decoder_block": "llama2", "normalization_layer_epsilon": 1e-6, "mlp_activations": ["silu", "linear"],
    "mlp_bias": False, "logits_via_embedding": False, "attention_type": "global", "attn_logits_soft_cap": 0.0,
    "num_experts": 1, "use_qk_norm": False, "fused_qkv": False, "fused_mlp": False, "rope_type": "default",
    "rope_min_timescale": 1, "rope_linear_scaling_factor": 1.0, "nope_layer_interval": -1,
}  # fmt: skip
"""What every model that can be converted has, whatever its size."""

_BASE: Final[dict[str, Any]] = _MUST_BE | {
    "normalization_layer_epsilon": 1e-5, "base_num_decoder_layers": 16, "base_emb_dim": 2048,
    "base_num_query_heads": 16, "base_num_kv_heads": 16, "head_dim": 128, "base_mlp_dim": 7168, "vocab_size": 32_000,
    "rope_max_timescale": 10_000, "max_target_length": 2048, "scan_layers": True, "param_scan_axis": 1,
    "dtype": "bfloat16", "weight_dtype": "float32",
}  # fmt: skip
"""The keys that matter for the conversion, with their values in MaxText's base.yml."""


def maxtext_keys(config: Config) -> dict[str, Any]:
    """MaxText's keys for this model."""
    if config.final_logits_soft_cap:
        raise PingLlmError(
            f"final_logits_soft_cap={config.final_logits_soft_cap:g}: MaxText squeezes logits only where they share "
            "the embedding's matrix, which ours do not"
        )
    if config.use_qk_norm or config.byte_features:
        raise PingLlmError(
            "use_qk_norm and byte_features: MaxText has no such model; only without them it is converted"
        )
    if config.rope_max_timescale != int(config.rope_max_timescale):
        raise PingLlmError(f"rope_max_timescale={config.rope_max_timescale:g}: MaxText takes whole numbers only")
    return _MUST_BE | {name: getattr(config, name) for name in _SAME_NAME} | {
        "base_num_kv_heads": config.base_num_query_heads, "vocab_size": VOCABULARY_SIZE,
        "rope_max_timescale": int(config.rope_max_timescale), "max_target_length": config.max_target_length,
        "scan_layers": True, "param_scan_axis": 1, "dtype": config.dtype, "weight_dtype": config.weight_dtype,
    }  # fmt: skip


def our_config(keys: Mapping[str, Any], run_name: str) -> Config:
    """The configuration of a model that MaxText made with these keys; an error if ours cannot express it."""
    for name, expected in _MUST_BE.items():
        if _plain(keys[name]) != _plain(expected):
            raise PingLlmError(f"{name}={keys[name]}: only models with {name}={expected} can be converted")
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
    found = read_yaml(path)
    base = found.get("base_config")
    keys = read_keys(path.parent / str(base)) if base and (path.parent / str(base)).is_file() else dict(_BASE)
    keys |= {name: value for name, value in found.items() if name in _BASE}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or name not in _BASE:
            raise PingLlmError(f"{text}: write key=value with a key of {', '.join(sorted(_BASE))}")
        keys[name] = yaml.safe_load(value)
    return keys


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration of MaxText's as it stands in the file, without its base."""
    with explained(f"{path} is not a configuration", OSError, UnicodeDecodeError, yaml.YAMLError):
        found = yaml.safe_load(path.read_text()) or {}
    if not isinstance(found, dict):
        raise PingLlmError(f"{path} is not a configuration: it must hold lines of the form key: value")
    return found


def note(config: Any) -> str:
    """The text of a file that `read_keys` reads, from MaxText's own configuration object."""
    values = {name: getattr(config, name) for name in _BASE}
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    plain |= {name: str(plain[name]) for name in ("dtype", "weight_dtype")}
    return yaml.safe_dump(plain | {"mlp_activations": list(plain["mlp_activations"])})


def _plain(value: Any) -> Any:
    """A value in a form that can be compared: numbers as floats, however YAML reads them, and None as 0."""
    try:
        return float(value or 0)
    except (TypeError, ValueError):
        return value


# -- weights: arrays in, arrays out

Arrays = dict[str, npt.NDArray[Any]]
"""Weights by name, such as our `blocks.0.qkv.kernel` or MaxText's `decoder/layers/mlp/wo/kernel`."""

_QUERY, _KEY, _VALUE, _OUT = (f"self_attention/{name}/kernel" for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (f"mlp/{name}/kernel" for name in ("wi_0", "wi_1", "wo"))
_ATTENTION_NORM, _MLP_NORM = (f"{name}_self_attention_layer_norm/scale" for name in ("pre", "post"))


def to_maxtext(ours: Arrays, settings: ModelSettings) -> Arrays:
    """Our weights as MaxText's, with layers stacked along axis 1, as `scan_layers` needs them."""
    heads, size, width = settings.heads, settings.head_dim, settings.width
    ones = np.ones(width, dtype=np.float32)
    layers = []
    for prefix in (f"blocks.{i}" for i in range(settings.layers)):
        qkv = ours[f"{prefix}.qkv.kernel"].reshape(width, 3, heads, size)
        gate, up = np.split(ours[f"{prefix}.gate_up.kernel"], 2, axis=1)
        layer = {_QUERY: qkv[:, 0] / np.float32(size**0.5), _KEY: qkv[:, 1], _VALUE: qkv[:, 2]}
        layer[_OUT] = ours[f"{prefix}.out.kernel"].reshape(heads, size, width)
        layer |= {_GATE: gate, _UP: up, _DOWN: ours[f"{prefix}.down.kernel"]}
        layers.append(layer | {_ATTENTION_NORM: ones, _MLP_NORM: ones})
    stacked = {f"decoder/layers/{name}": np.stack([layer[name] for layer in layers], axis=1) for name in layers[0]}
    return stacked | {
        "token_embedder/embedding": ours["embedding"][: settings.vocabulary],
        "decoder/decoder_norm/scale": ones,
        "decoder/logits_dense/kernel": ours["head.kernel"][:, : settings.vocabulary],
    }


def from_maxtext(theirs: Arrays, settings: ModelSettings, scan_axis: int = 1) -> Arrays:
    heads, size, width = settings.heads, settings.head_dim, settings.width
    padding = settings.padded_vocabulary - settings.vocabulary
    theirs = {name: array.astype(np.float32) for name, array in theirs.items()}
    try:
        embedding = theirs["token_embedder/embedding"][: settings.vocabulary]
        head = theirs["decoder/logits_dense/kernel"] * theirs["decoder/decoder_norm/scale"][:, None]
        ours = {
            "embedding": np.pad(embedding, ((0, padding), (0, 0))),
            "head.kernel": np.pad(head[:, : settings.vocabulary], ((0, 0), (0, padding))),
        }
        for number in range(settings.layers):
            layer = _layer(theirs, number, scan_axis, settings.layers)
            query = layer[_QUERY] * np.float32(size**0.5)
            qkv = np.stack([query, layer[_KEY], layer[_VALUE]], axis=1).reshape(width, 3 * heads * size)
            gate_up = np.concatenate([layer[_GATE], layer[_UP]], axis=1)
            ours |= {
                f"blocks.{number}.qkv.kernel": qkv * layer[_ATTENTION_NORM][:, None],
                f"blocks.{number}.out.kernel": layer[_OUT].reshape(heads * size, width),
                f"blocks.{number}.gate_up.kernel": gate_up * layer[_MLP_NORM][:, None],
                f"blocks.{number}.down.kernel": layer[_DOWN],
            }
    except KeyError as error:
        missing = f"the checkpoint has no {error.args[0]}: it is not of a model that can be converted"
        raise PingLlmError(missing) from None
    return ours


def _layer(theirs: Arrays, number: int, axis: int, layers: int) -> Arrays:
    """The weights of one layer, whether MaxText stacked the layers or keeps each by itself."""

    def under(prefix: str) -> Arrays:
        return {name.removeprefix(prefix): array for name, array in theirs.items() if name.startswith(prefix)}

    if found := under(f"decoder/layers_{number}/"):
        return found
    stacked = under("decoder/layers/")
    for name, array in stacked.items():
        if array.shape[axis] != layers:
            raise PingLlmError(f"decoder/layers/{name} has {array.shape[axis]} layers, the configuration {layers}")
    return {name: np.take(array, number, axis) for name, array in stacked.items()}


# -- the weights in MaxText's checkpoints


def write_weights(folder: Path, arrays: Arrays) -> None:
    tree = unflatten_dict({name: jax.numpy.asarray(array) for name, array in arrays.items()}, sep="/")
    ocp.save(folder.absolute(), {"params": {"params": tree}}, checkpointable_name=_ITEM)


def read_weights(checkpoint: Path) -> Arrays:
    """The weights in `RUN/checkpoints/STEP` (or its `items`), by path."""
    root = checkpoint.absolute()
    root = root.parent if root.name == _ITEM else root
    if not (root / _ITEM).is_dir():
        raise PingLlmError(f"{checkpoint} is not a checkpoint of MaxText: give RUN/checkpoints/STEP")
    try:
        stored: Any = ocp.metadata(root, checkpointable_name=_ITEM).metadata
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), stored["params"]["params"]
        )
        only_weights = ocp.Context()
        only_weights.pytree.loading.partial_load = True
        with only_weights:
            found: Any = ocp.load(root, {"params": {"params": like}}, checkpointable_name=_ITEM)
    except (KeyError, TypeError) as error:
        raise PingLlmError(f"{checkpoint} holds no weights of MaxText ({error!r})") from None
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(found["params"]["params"], sep="/").items()}
