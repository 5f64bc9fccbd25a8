"""Weights on JAX: those in the checkpoints of a run, in the files that `export` writes, and at the start of a run."""

import json
import logging
import sys
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

from ping_llm.config import Config
from ping_llm.config.keys import COMPLETER_DATA, TEXT_DATASET_TYPES
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_folder, file_sha256, unsealed
from ping_llm.models.completer.model import SetTransformer
from ping_llm.models.completer.network import CompleterSettings
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.modules import by_name, with_arrays
from ping_llm.runs.trained import INDEX, Arrays, Trained, completer_settings, different_shapes, layer_settings
from ping_llm.tokens import VOCABULARY_SIZE

_FILE_BYTES: Final = 12_000_000


def newest_checkpoint(folder: Path, config: Config) -> tuple[int, Arrays]:
    """Steps done and weights, averaged if the run kept an average."""
    if not folder.is_dir():
        raise PingLlmError(f"{folder} is not there: give the folder of a run, such as runs/ping-llm/my-run")
    quieten_orbax()
    here = SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), abstract_weights(config))
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
            if settings_of(Config(**yaml.safe_load(record["config"]))) != settings_of(config):
                raise ValueError("config.yml describes another model than the one that was saved")
            if (stored[:count] if name == "weights" else stored[-count:]) != digests(items[name]):
                raise ValueError("its arrays are not those that were saved")
        return step, {name: np.asarray(leaf, np.float32) for name, leaf in by_name(items[name]).items()}


@cache
def quieten_orbax() -> None:
    """Silence Orbax. It logs a line per checkpoint, and when reading or writing fails, tracebacks from its threads; the
    failure is raised as well, and becomes one line of ours."""
    for name in ("orbax", "absl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    show = sys.unraisablehook

    def show_others(ignored: Any) -> None:
        file = getattr(getattr(ignored.object, "cr_code", None), "co_filename", "")
        if "orbax" not in file and str(ignored.exc_value) != "Event loop is closed":  # TensorStore, which comes late
            show(ignored)

    sys.unraisablehook = show_others


def digests(tree: Any) -> list[int]:
    """A checksum of each array that depends on every bit and its position, but not on how the array is sharded."""
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
    """Write the folder that `trained.py` describes: whole or not at all."""
    check_replaceable(folder, overwrite=overwrite)
    parts = _parts({name: jnp.asarray(array, dtype) for name, array in trained.weights.items()})
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
        (unfinished / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (unfinished / "README.md").write_text(card)


def check_replaceable(folder: Path, *, overwrite: bool, marker: str = INDEX) -> None:
    """Refuse to replace anything but a model (a folder that holds `marker`), and that without `overwrite`."""
    if folder.exists() and not overwrite:
        raise PingLlmError(f"{folder} exists already; --overwrite replaces it")
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise PingLlmError(f"{folder} holds something else than a model: choose another folder")


def begin_with(trained: Trained, weights: Any) -> Any:
    """The trained weights, laid out over devices like `weights`, the initial ones that they replace."""
    have, want = trained.weights, by_name(weights)
    shapes = [{name: array.shape for name, array in of.items()} for of in (have, want)]
    if different := different_shapes(*shapes):
        there, here = ("×".join(map(str, of[different[0]])) if different[0] in of else "missing" for of in shapes)
        raise PingLlmError(
            f"{trained.where} is another model than this configuration describes: {len(different)} arrays differ, "
            f"{different[0]} is {there} there and {here} here"
        )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), with_arrays(weights, have), weights)


def state_of(trained: Trained) -> Any:
    """The trained weights as the state of a Flax module."""
    return with_arrays(abstract_weights(trained.config), trained.weights)


def abstract_weights(config: Config) -> Any:
    """The weights of the configured model, without their values."""
    with explained("the configured model cannot be made", OverflowError, TypeError, ValueError):  # too large a size
        return nnx.split(nnx.eval_shape(lambda: make_model(settings_of(config), nnx.Rngs(0))))[1]


def make_model(s: ModelSettings | CompleterSettings, rngs: nnx.Rngs) -> Transformer | SetTransformer:
    """The model with its initial weights."""
    return SetTransformer(s, rngs) if isinstance(s, CompleterSettings) else Transformer(s, rngs)


def settings_of(config: Config) -> ModelSettings | CompleterSettings:
    return completer_settings(config) if config.dataset_type in COMPLETER_DATA else model_settings(config)


def model_settings(config: Config) -> ModelSettings:
    """The settings of the language model."""
    return ModelSettings(
        **layer_settings(config),
        vocabulary=vocabulary(config),
        rope_period=config.rope_max_timescale,
        qk_norm=config.use_qk_norm,
        byte_features=config.byte_features,
        logits_soft_cap=config.final_logits_soft_cap,
        quantization=config.quantization,
        remat=config.remat_policy,
    )


def vocabulary(config: Config) -> int:
    """Size of the language model's vocabulary: as configured, or that of the data."""
    if config.dataset_type in TEXT_DATASET_TYPES:
        from ping_llm.data.tokenizer import tokenizer_of

        return config.vocab_size or tokenizer_of(config).vocabulary
    if 0 < config.vocab_size < VOCABULARY_SIZE:
        raise PingLlmError(f"vocab_size must be 0 or at least {VOCABULARY_SIZE}, the tokens of probe rows")
    return config.vocab_size or VOCABULARY_SIZE


def _parts(arrays: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
    """Arrays divided into files, none larger than the limit unless a single array is."""
    parts: list[dict[str, jax.Array]] = [{}]
    for name, array in arrays.items():
        if parts[-1] and sum(a.nbytes for a in parts[-1].values()) + array.nbytes > _FILE_BYTES:
            parts.append({})
        parts[-1][name] = array
    return parts
