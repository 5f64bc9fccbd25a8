"""Trained models: the newest checkpoint of a run, or an exported folder of plain files:

config.yml                           the model's shape, and how it was trained
model-00001-of-00003.safetensors …   the weights, most often in bfloat16, in files of at most 12 MB
model.safetensors.index.json         which array is in which file (Hugging Face's layout), and checksums
README.md                            the model card

Reading such a folder takes NumPy only. Runs, and language models, are read by `weights.py`, which needs JAX.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors

from ping_llm.config import Config, load_config
from ping_llm.config.keys import COMPLETER_DATA
from ping_llm.core.errors import PingLlmError, explained, extras_needed
from ping_llm.core.files import file_sha256, relative_name, sha256_digest
from ping_llm.models.completer.network import CompleterSettings
from ping_llm.storage import locate
from ping_llm.storage.mirror import fetch

SHIPPED: Final = Path(__file__).parents[1] / "pretrained" / "completer"
"""The completer that comes with the package."""
INDEX: Final = "model.safetensors.index.json"

Arrays = dict[str, npt.NDArray[np.float32]]

_MAX_LAYERS: Final = 4096
"""More than any model has. A hostile configuration must not make us build a million layers."""
_DTYPES: Final = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model, language model or completer."""

    config: Config
    weights: Arrays = field(repr=False)
    """By their path in the model, such as `blocks.0.qkv.kernel`."""
    steps: int
    where: str

    @property
    def is_completer(self) -> bool:
        return self.config.dataset_type in COMPLETER_DATA


def load_trained(where: Path | str | None = None) -> Trained:
    """Load a run, an exported folder, or (None or "completer") the completer that comes with the package."""
    if where is None or (str(where) == "completer" and not Path(where).exists()):
        where = SHIPPED
    folder = fetch(locate(where)) if locate(where).is_remote else Path(where)
    file = folder / "config.yml"
    if not (folder / INDEX).exists() and not file.exists():
        raise PingLlmError(f"{where} holds no trained model: give the folder of a run, or one that `export` wrote")
    config = load_config(file)
    if not (folder / INDEX).exists():
        with extras_needed(f"reading the checkpoints of {where}"):
            from ping_llm.runs.weights import newest_checkpoint

        steps, weights = newest_checkpoint(folder / "checkpoints", config)
        return Trained(config=config, weights=weights, steps=steps, where=str(where))
    steps, checksums = _read_index(folder / INDEX)
    found: Arrays = {}
    for name, checksum in checksums.items():
        if not (folder / name).is_file():
            raise PingLlmError(f"{folder / name}, which holds some of the weights, is missing")
        with explained(f"{folder / name} cannot be read"):
            if file_sha256(folder / name) != checksum:
                raise PingLlmError(f"{folder / name} is damaged: its checksum is not the one that was stored with it")
            if name != file.name:
                found |= _read_arrays(folder / name)
    check_shapes(config, found, folder)
    return Trained(config=config, weights=found, steps=steps, where=str(folder))


def _read_arrays(file: Path) -> Arrays:
    """Arrays as float32. NumPy has no bfloat16, but its bits are the upper half of a float32's."""
    found = {}
    for name, array in safetensors.deserialize(file.read_bytes()):
        kind, shape, data = array["dtype"], array["shape"], array["data"]
        if kind == "BF16":
            flat = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif kind in _DTYPES:
            flat = np.frombuffer(data, _DTYPES[kind]).astype(np.float32, copy=False)
        else:
            raise PingLlmError(f"{file}: {name} holds {kind} numbers, which no weights are")
        found[name] = flat.reshape(shape)
    return found


def check_shapes(config: Config, found: Arrays, where: Path | str) -> None:
    """Raise an error unless these are the weights of the configured model."""
    if different := different_shapes({name: array.shape for name, array in found.items()}, weight_shapes(config)):
        raise PingLlmError(f"{where}: the weights do not fit the configuration beside them ({different[0]})")


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of all arrays of the configured model, by name."""
    if config.base_num_decoder_layers > _MAX_LAYERS:
        raise PingLlmError(f"base_num_decoder_layers={config.base_num_decoder_layers}: at most {_MAX_LAYERS}")
    if config.dataset_type in COMPLETER_DATA:
        return dict(completer_settings(config).shapes)
    with extras_needed("a language model"):
        from ping_llm.models.modules import by_name
        from ping_llm.runs.weights import abstract_weights

    return {name: leaf.shape for name, leaf in by_name(abstract_weights(config)).items()}


def different_shapes(have: dict[str, tuple[int, ...]], want: dict[str, tuple[int, ...]]) -> list[str]:
    return sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))


def _read_index(file: Path) -> tuple[int, dict[str, str]]:
    """The number of training steps, and the checksums of the files of weights and of the configuration."""
    with explained(f"{file} is not the index of a model"):
        metadata = json.loads(file.read_text())["metadata"]
        steps, files = metadata["steps"], metadata["sha256"]
        if type(steps) is not int or steps < 0 or not isinstance(files, dict):
            raise ValueError("steps or sha256 in its metadata are wrong")
    return steps, {relative_name(name, file): sha256_digest(digest, file) for name, digest in files.items()}


def completer_settings(config: Config) -> CompleterSettings:
    return CompleterSettings(**layer_settings(config), identity=config.completer_identity)


def layer_settings(config: Config) -> dict[str, Any]:
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
