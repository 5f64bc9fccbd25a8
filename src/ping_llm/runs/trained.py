"""Trained models: the newest checkpoint of a run, or a folder of plain files that can be given to anybody.

config.yml                           what the model is made of, and how it was trained
model-00001-of-00003.safetensors …   the weights, most often in bfloat16, in files of at most 12 MB
model.safetensors.index.json         which array is in which file (Hugging Face's layout), and checksums
README.md                            the model card
"""

import json
import logging
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors.flax
import yaml
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError

from ping_llm.config import Config, load_config
from ping_llm.config.keys import TEXT_DATASET_TYPES
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_folder, file_sha256, relative_name, sha256_digest, unsealed
from ping_llm.data.completer import COMPLETER_DATA
from ping_llm.models.completer.model import CompleterSettings, SetTransformer
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.storage import locate
from ping_llm.storage.mirror import fetch
from ping_llm.tokens import VOCABULARY_SIZE

SHIPPED: Final = Path(__file__).parents[1] / "pretrained" / "completer"
"""The completer that comes with the package."""

_INDEX: Final = "model.safetensors.index.json"
_FILE_BYTES: Final = 12_000_000
_MAX_LAYERS: Final = 4096
"""More than any model has; a hostile configuration must not keep us busy."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that was trained, whichever it is."""

    config: Config
    weights: Any = field(repr=False)
    """State of the module that `task_of(config).make` makes."""
    steps: int
    where: str

    @property
    def is_completer(self) -> bool:
        return self.config.dataset_type in COMPLETER_DATA


def load_trained(where: Path | str | None = None) -> Trained:
    """A run, a folder that `save_trained` wrote, or (None or "completer") the completer that comes with the package."""
    if where is None or (str(where) == "completer" and not Path(where).exists()):
        where = SHIPPED
    folder = fetch(locate(where)) if locate(where).is_remote else Path(where)
    file = folder / "config.yml"
    if not (folder / _INDEX).exists() and not file.exists():
        raise PingLlmError(f"{where} holds no trained model: give the folder of a run, or one that `export` wrote")
    config = load_config(file)
    if not (folder / _INDEX).exists():
        steps, weights = _newest_checkpoint(folder / "checkpoints", config)
        return Trained(config=config, weights=weights, steps=steps, where=str(where))
    steps, checksums = _read_index(folder / _INDEX)
    found: dict[str, jax.Array] = {}
    for name, checksum in checksums.items():
        if not (folder / name).is_file():
            raise PingLlmError(f"{folder / name}, which holds some of the weights, is missing")
        with explained(f"{folder / name} cannot be read"):
            if file_sha256(folder / name) != checksum:
                raise PingLlmError(f"{folder / name} is damaged: its checksum is not the one that was stored with it")
            if name != file.name:
                found |= safetensors.flax.load_file(folder / name)
    return Trained(config=config, weights=weights_of(config, found, folder), steps=steps, where=str(folder))


def _read_index(file: Path) -> tuple[int, dict[str, str]]:
    """Steps done, and the checksums of the files of weights and of the configuration."""
    with explained(f"{file} is not the index of a model"):
        metadata = json.loads(file.read_text())["metadata"]
        steps, files = metadata["steps"], metadata["sha256"]
        if type(steps) is not int or steps < 0 or not isinstance(files, dict):
            raise ValueError("steps or sha256 in its metadata are wrong")
    return steps, {relative_name(name, file): sha256_digest(digest, file) for name, digest in files.items()}


@cache
def quieten_orbax() -> None:
    """It logs a line for every checkpoint it looks at, and tracebacks of its threads and of what they were waiting for
    when reading or writing failed. That it failed is raised as well, and what matters is said by us."""
    for name in ("orbax", "absl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    show = sys.unraisablehook

    def show_others(ignored: Any) -> None:
        file = getattr(getattr(ignored.object, "cr_code", None), "co_filename", "")
        if "orbax" not in file and str(ignored.exc_value) != "Event loop is closed":  # TensorStore, which comes late
            show(ignored)

    sys.unraisablehook = show_others


def _newest_checkpoint(folder: Path, config: Config) -> tuple[int, Any]:
    """Steps done and weights, averaged if the run kept an average."""
    if not folder.is_dir():
        raise PingLlmError(f"{folder} is not there: give the folder of a run, such as runs/ping-llm/my-run")
    quieten_orbax()
    here = SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), weight_shapes(config))
    with ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = manager.latest_step()
        if step is None:
            raise PingLlmError(f"{folder} holds no checkpoint yet")
        name = "average" if (folder / str(step) / "average").exists() else "weights"
        with explained(f"the checkpoint {folder / str(step)} is damaged, or of another model than config.yml says"):
            tree = {name: ocp.args.StandardRestore(like)}
            items = manager.restore(step, args=ocp.args.Composite(**tree, run=ocp.args.JsonRestore()))
            record = unsealed(items["run"])
            stored, count = record["digests"], len(jax.tree.leaves(like))
            if _settings(Config(**yaml.safe_load(record["config"]))) != _settings(config):
                raise ValueError("config.yml describes another model than the one that was saved")
            if (stored[:count] if name == "weights" else stored[-count:]) != digests(items[name]):
                raise ValueError("its arrays are not those that were saved")
        return step, items[name]


def digests(tree: Any) -> list[int]:
    """One number per array that changes with every bit and its index, and not with the sharding."""
    return [int(number) for number in np.asarray(_digests(tree))]


@jax.jit
def _digests(tree: Any) -> jax.Array:
    def of(leaf: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).reshape(-1)
        index = jnp.arange(bits.size, dtype=jnp.uint32)
        return jnp.sum(bits * (index * jnp.uint32(2654435761) | jnp.uint32(1)), dtype=jnp.uint32)

    return jnp.stack([of(leaf) for leaf in jax.tree.leaves(tree)])


def save_trained(
    trained: Trained, folder: Path, card: str, *, overwrite: bool = False, dtype: str = "bfloat16"
) -> None:
    """Write the files named above: whole or not at all."""
    check_replaceable(folder, overwrite=overwrite)
    parts = _parts({name: array.astype(dtype) for name, array in by_name(trained.weights).items()})
    index: dict[str, Any] = {"metadata": {"steps": trained.steps, "sha256": {}}, "weight_map": {}}
    failure = explained(f"cannot write to {folder}", OSError, SafetensorError)
    with failure, atomic_folder(folder) as unfinished:
        for number, part in enumerate(parts, start=1):
            name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            safetensors.flax.save_file(part, unfinished / name)
            (unfinished / name).chmod(0o644)  # safetensors makes it readable by its owner only
            index["metadata"]["sha256"][name] = file_sha256(unfinished / name)
            index["weight_map"] |= dict.fromkeys(part, name)
        (unfinished / "config.yml").write_text(trained.config.to_yaml())
        index["metadata"]["sha256"]["config.yml"] = file_sha256(unfinished / "config.yml")
        (unfinished / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (unfinished / "README.md").write_text(card)


def check_replaceable(folder: Path, *, overwrite: bool, marker: str = _INDEX) -> None:
    """A model (a folder that holds `marker`) may be replaced if that is wanted, nothing else."""
    if folder.exists() and not overwrite:
        raise PingLlmError(f"{folder} exists already; --overwrite replaces it")
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise PingLlmError(f"{folder} holds something else than a model: choose another folder")


def begin_with(trained: Trained, weights: Any) -> Any:
    """The trained weights, laid out as the given ones, which a run would otherwise have begun with."""
    have, want = by_name(trained.weights), by_name(weights)
    if different := _different(have, want):
        name = different[0]
        raise PingLlmError(
            f"{trained.where} is another model than this configuration describes: {len(different)} arrays differ, "
            f"{name} is {_shape(have, name)} there and {_shape(want, name)} here"
        )
    return jax.tree.map(lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding), trained.weights, weights)


def weights_of(config: Config, found: dict[str, Any], where: Path | str) -> Any:
    """The state of the model that the configuration describes, from its arrays by name."""
    shapes = weight_shapes(config)
    want = by_name(shapes)
    if different := _different(found, want):
        raise PingLlmError(f"{where}: the weights do not fit the configuration beside them ({different[0]})")
    if wrong := [name for name, array in found.items() if not jnp.issubdtype(array.dtype, jnp.floating)]:
        raise PingLlmError(f"{where}: {wrong[0]} holds {found[wrong[0]].dtype} numbers, which no weights are")
    leaves = [jnp.asarray(found[name], leaf.dtype) for name, leaf in want.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def by_name(weights: Any) -> dict[str, Any]:
    """Arrays by their path in the model, such as `blocks.0.qkv.kernel`, in the order of the tree."""
    found = jax.tree_util.tree_flatten_with_path(weights)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in found}


def weight_shapes(config: Config) -> Any:
    """The weights of the configured model, without their values."""

    def make() -> nnx.Module:
        s = _settings(config)
        return SetTransformer(s, nnx.Rngs(0)) if isinstance(s, CompleterSettings) else Transformer(s, nnx.Rngs(0))

    if config.base_num_decoder_layers > _MAX_LAYERS:
        raise PingLlmError(f"base_num_decoder_layers={config.base_num_decoder_layers}: at most {_MAX_LAYERS}")
    with explained("the configured model cannot be made", OverflowError, TypeError, ValueError):  # too large a size
        return nnx.split(nnx.eval_shape(make))[1]


def model_settings(config: Config) -> ModelSettings:
    """Of the language model."""
    return ModelSettings(
        **_of_either(config),
        vocabulary=vocabulary(config),
        rope_period=config.rope_max_timescale,
        qk_norm=config.use_qk_norm,
        byte_features=config.byte_features,
        logits_soft_cap=config.final_logits_soft_cap,
        quantization=config.quantization,
        remat=config.remat_policy,
    )


def _settings(config: Config) -> ModelSettings | CompleterSettings:
    return completer_settings(config) if config.dataset_type in COMPLETER_DATA else model_settings(config)


def completer_settings(config: Config) -> CompleterSettings:
    return CompleterSettings(**_of_either(config), identity=config.completer_identity)


def vocabulary(config: Config) -> int:
    """Tokens that the language model knows: as configured, or those of the data."""
    if config.dataset_type in TEXT_DATASET_TYPES:
        from ping_llm.data.tokenizer import tokenizer_of

        return config.vocab_size or tokenizer_of(config).vocabulary
    if 0 < config.vocab_size < VOCABULARY_SIZE:
        raise PingLlmError(f"vocab_size must be 0 or at least {VOCABULARY_SIZE}, the tokens of probe rows")
    return config.vocab_size or VOCABULARY_SIZE


def _of_either(config: Config) -> dict[str, Any]:
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


def _different(have: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return sorted(name for name in have.keys() | want.keys() if _shape(have, name) != _shape(want, name))


def _shape(arrays: dict[str, Any], name: str) -> str:
    return "×".join(map(str, arrays[name].shape)) if name in arrays else "missing"


def _parts(arrays: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
    """As few files as there must be, none above the limit unless a single array is."""
    parts: list[dict[str, jax.Array]] = [{}]
    for name, array in arrays.items():
        if parts[-1] and sum(a.nbytes for a in parts[-1].values()) + array.nbytes > _FILE_BYTES:
            parts.append({})
        parts[-1][name] = array
    return parts
