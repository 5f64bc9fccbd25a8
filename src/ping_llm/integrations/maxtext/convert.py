"""The weights of the language model in MaxText's layout, and back. Arrays in, arrays out; nothing is computed with them
but the norms' scales and the queries' factor, see `architecture`."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
import yaml
from orbax.checkpoint import v1 as ocp

from ping_llm.core.errors import PingLlmError
from ping_llm.integrations.maxtext.architecture import NOTE, maxtext_keys, our_config, read_keys
from ping_llm.models.lm import ModelSettings
from ping_llm.runs.task import model_settings
from ping_llm.runs.trained import Trained, by_name, load_trained, save_trained, weights_of

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


# MaxText's checkpoints as files: only weights, and without MaxText. They are Orbax's, and so are ours.

_ITEM = "items"


def write_weights(folder: Path, arrays: Arrays) -> Path:
    """A checkpoint of weights alone; returns what MaxText's `load_parameters_path` wants."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = jax.numpy.asarray(array)
    ocp.save(folder.absolute(), {"params": {"params": tree}}, checkpointable_name=_ITEM)
    return folder / _ITEM


def read_weights(checkpoint: Path) -> Arrays:
    """The weights in `RUN/checkpoints/STEP` (or its `items`), by path."""
    root = checkpoint.absolute()
    root = root.parent if root.name == _ITEM else root
    if not (root / _ITEM).is_dir():
        raise PingLlmError(f"{checkpoint} is not a checkpoint of MaxText: give RUN/checkpoints/STEP")
    try:
        stored: Any = ocp.metadata(root, checkpointable_name=_ITEM).metadata
        wanted = stored["params"]["params"]
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), wanted)
        only_weights = ocp.Context()
        only_weights.pytree.loading.partial_load = True
        with only_weights:
            found: Any = ocp.load(root, {"params": {"params": like}}, checkpointable_name=_ITEM)
    except (KeyError, TypeError) as error:
        raise PingLlmError(f"{checkpoint} holds no weights of MaxText ({error!r})") from None
    leaves = jax.tree_util.tree_flatten_with_path(found["params"]["params"])[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


# A trained language model from our trainer to MaxText, and from MaxText to ours. Neither needs MaxText installed.

_CHECKPOINT: Final = "checkpoint"
_CONFIG: Final = "config.yml"

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


@dataclass(frozen=True, kw_only=True)
class Converted:
    folder: Path
    parameters: int
    steps: int
    load_parameters_path: Path | None = None
    """For MaxText."""


def convert_to_maxtext(run: Path, output: Path, *, overwrite: bool = False) -> Converted:
    """Write the weights of a run, or of an exported model, as a MaxText checkpoint and a configuration for it."""
    trained = load_trained(run)
    if trained.is_completer:
        raise PingLlmError(f"{run} is a completer: only language models can be converted")
    keys = maxtext_keys(trained.config)
    _check_output(output, _CHECKPOINT, overwrite=overwrite)
    settings = model_settings(trained.config)
    ours = {name: np.asarray(array, dtype=np.float32) for name, array in by_name(trained.weights).items()}
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_weights(unfinished / _CHECKPOINT, to_maxtext(ours, settings))
    path = (output / _CHECKPOINT / "items").absolute()
    name = trained.config.run_name or output.name
    header = _HEADER.format(name=name, where=trained.where, steps=trained.steps, folder=output, path=path)
    settings_of_run = {"base_config": "base.yml", "dataset_type": "network", "num_epoch": -1} | keys
    (unfinished / _CONFIG).write_text(header + yaml.safe_dump(settings_of_run, sort_keys=False))
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    return Converted(folder=output, parameters=settings.parameters, steps=trained.steps, load_parameters_path=path)


def convert_from_maxtext(
    checkpoint: Path,
    output: Path,
    *,
    config: Path | None = None,
    changes: Sequence[str] = (),
    overwrite: bool = False,
) -> Converted:
    """Write the weights of a MaxText checkpoint as one of our models.

    What the model is made of stands in `config`, as changed by `changes`; None = in the note that the engine left in
    the run's folder, or in the configuration beside a converted checkpoint.
    """
    _check_output(output, "*.safetensors", overwrite=overwrite)
    root = checkpoint.parent if checkpoint.name == "items" else checkpoint
    keys = read_keys(config or _note_of(root), changes)
    name = root.absolute().parents[1].name if root.name.isdigit() else output.name
    ours = our_config(keys, name)
    settings = model_settings(ours)
    arrays = from_maxtext(read_weights(checkpoint), settings, int(keys["param_scan_axis"]))
    steps = int(root.name) + 1 if root.name.isdigit() else 0
    weights: Any = weights_of(ours, arrays, checkpoint)
    trained = Trained(config=ours, weights=weights, steps=steps, where=str(checkpoint))
    card = _CARD.format(name=name, where=checkpoint)
    save_trained(trained, output, card, overwrite=overwrite, dtype="float32")
    return Converted(folder=output, parameters=settings.parameters, steps=steps)


def _note_of(checkpoint: Path) -> Path:
    for note in (checkpoint.parent.parent / NOTE, checkpoint.parent / _CONFIG):
        if note.is_file():
            return note
    raise PingLlmError(f"there is no {NOTE} in the folder of the run: name its MaxText configuration with --config")


def _check_output(output: Path, marker: str, *, overwrite: bool) -> None:
    """A model may be replaced, nothing else."""
    if not output.exists():
        return
    if not overwrite:
        raise PingLlmError(f"{output} exists already; --overwrite replaces it")
    if any(output.iterdir()) and not any(output.glob(marker)):
        raise PingLlmError(f"{output} holds something else than a converted model: choose another folder")
