"""The state of a run: weights, optimizer and data position, laid out over devices, saved, and restored exactly.

A checkpoint holds the weights, the optimizer, the data state, the configuration, a digest of every array (computed on
the device before anything is written), and a checksum of all that is not an array. It is written while training
continues, whole or not at all. A checkpoint whose arrays do not have these digests is damaged: if there is an earlier
sound one, the run resumes from that, and the damaged one is set aside.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from ping_llm.batches.spec import DataState, TrainLoader
from ping_llm.config import Config, load_config
from ping_llm.config.keys import COMPLETER_DATA
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.core.files import sealed, unsealed
from ping_llm.data.stream import POSITIONS, StreamLoader
from ping_llm.runs.task import task_of
from ping_llm.runs.weights import digests, quieten_orbax, vocabulary
from ping_llm.training.processes import of_all_processes, tells_of_a_lost_process

_SMALLEST_SHARDED: Final = 2**12
"""Arrays smaller than this stay whole on every device: sharding them saves nothing."""
_DAMAGED: Final = "damaged-checkpoints"


class TrainState(NamedTuple):
    weights: Any
    optimizer: Any
    average: Any = None
    """Running average of the weights, if `average_decay` is set."""

    @property
    def best_weights(self) -> Any:
        """The weights to evaluate and to use: the average, if there is one."""
        return self.weights if self.average is None else self.average


# -- over devices


def make_mesh(config: Config) -> Mesh:
    """All devices, as `data` × `fsdp`."""
    devices = jax.device_count()
    fsdp, data = config.ici_fsdp_parallelism, config.ici_data_parallelism
    if data < 0:
        data = max(1, devices // fsdp)
    if data * fsdp != devices:
        raise PingLlmError(
            f"ici_data_parallelism × ici_fsdp_parallelism = {data} × {fsdp}, but there are {devices} devices"
        )
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Splits the sequences of a batch over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def _weight_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Splits the largest axis that `fsdp` divides over `fsdp`, and copies over `data`."""
    fsdp = mesh.shape["fsdp"]
    axes: list[str | None] = [None] * len(shape)
    divisible = [i for i, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and divisible and np.prod(shape) >= _SMALLEST_SHARDED:
        axes[max(divisible, key=lambda i: shape[i])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*axes))


def initial_state(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step: a function of the configuration alone, whatever the devices."""
    weights = nnx.split(task_of(config).make(nnx.Rngs(config.init_weights_seed)))[1]
    average = jax.tree.map(jnp.copy, weights) if config.average_decay else None
    return TrainState(weights=weights, optimizer=optimizer.init(weights), average=average)


def state_shapes(config: Config, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes and shardings of the state, without the values."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_weight_sharding(mesh, leaf.shape)),
        jax.eval_shape(lambda: initial_state(config, optimizer)),
    )


def create_state(config: Config, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The initial state, computed on the devices that hold it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(config, optimizer, mesh))
    return jax.jit(lambda: initial_state(config, optimizer), out_shardings=shardings)()


# -- checkpoints


def _items(state: TrainState) -> dict[str, Any]:
    return {name: tree for name, tree in state._asdict().items() if tree is not None}


class Checkpoints:
    """The checkpoints of a run, numbered by the steps done before each."""

    def __init__(self, folder: Path, config: Config) -> None:
        quieten_orbax()
        self._folder = folder
        best = checkpoint_managers.BestN(
            get_metric_fn=lambda metrics: metrics["eval_loss"],
            reverse=True,
            n=config.keep_best_checkpoints,
            keep_checkpoints_without_metrics=False,
        )
        latest = checkpoint_managers.LatestN(config.max_num_checkpoints_to_keep)
        kept = [latest, best] if config.keep_best_checkpoints else [latest]
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(kept),
            enable_async_checkpointing=config.async_checkpointing,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=self._options)

    def save(self, step: int, state: TrainState, data: DataState, config: str, eval_loss: float | None) -> None:
        """Begin to save; returns when the state may be changed. `eval_loss`: only if evaluated after this step."""
        if step in self._manager.all_steps():
            return
        trees = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
        record = sealed({"data": data.to_json(), "config": config, "digests": digests(state)})
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        items = ocp.args.Composite(**trees, run=ocp.args.JsonSave(record))
        with self._saving():
            self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore(self, like: TrainState) -> tuple[int, TrainState, DataState] | None:
        """The newest sound checkpoint, laid out over devices like `like`; None if there are no checkpoints.

        Damaged newer ones are set aside. If none is sound, all stay in place and an error is raised.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored, failure = None, ""
            try:
                restored = self._read(step, like)
            except Exception as error:  # whatever a damaged file makes the reader raise
                failure = one_line(error)
            failures = [text for text in of_all_processes(failure) if text]
            if restored and not failures:
                if damaged:
                    self._set_aside(damaged)
                return restored
            damaged[step] = failures[0]
        if damaged:
            raise PingLlmError(
                f"none of the {len(damaged)} checkpoints in {self._folder} can be read ({next(iter(damaged.values()))}"
                "); restore them from a copy, or use another run_name to begin again"
            )
        return None

    def _read(self, step: int, like: TrainState) -> tuple[int, TrainState, DataState]:
        trees = {name: ocp.args.StandardRestore(tree) for name, tree in _items(like).items()}
        items = self._manager.restore(step, args=ocp.args.Composite(**trees, run=ocp.args.JsonRestore()))
        state = TrainState(**{name: items[name] for name in trees})
        record = unsealed(items["run"])
        if record["digests"] != digests(state):
            raise ValueError("its arrays are not those that were saved")
        return step, state, DataState.from_json(record["data"])

    def _set_aside(self, damaged: dict[int, str]) -> None:
        self._manager.close()
        for step, problem in damaged.items():
            err.print(
                f"[bold yellow]warning:[/] checkpoint {step} is damaged ({problem}); going back to the one before"
            )
            if jax.process_index() == 0:
                target = self._folder.parent / _DAMAGED / str(step)
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                shutil.move(self._folder / str(step), target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("set aside")
        self._manager = ocp.CheckpointManager(self._folder.absolute(), options=self._options)

    def wait(self) -> None:
        """Until everything is on disk."""
        with self._saving():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._saving():
            self._manager.close()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore's; or those of a broken connection between processes
            if jax.process_count() > 1 and tells_of_a_lost_process(error):
                raise
            problem = f"cannot save to {self._folder} (is the disk full?); earlier checkpoints are kept"
            raise PingLlmError(f"{problem}: {one_line(error)}") from None


def data_state(loader: TrainLoader, begun_with: DataState, step: int) -> DataState:
    """The data state after `step` steps (the loader itself is ahead of them). For text that is read in order, it holds
    the position of each host."""
    state = replace(begun_with, next_step=step)
    if not isinstance(loader, StreamLoader):
        return state
    positions = [json.loads(text) for text in of_all_processes(loader.position(step))]
    return replace(state, identity={**state.identity, POSITIONS: positions})


# -- what may change between the sessions of a run

_FIXED: Final = (
    "base_num_decoder_layers", "base_emb_dim", "base_num_query_heads", "head_dim", "base_mlp_dim", "rope_max_timescale",
    "final_logits_soft_cap", "use_qk_norm", "byte_features", "weight_dtype", "init_weights_seed", "opt_type",
    "completer_identity",
)  # fmt: skip
"""Keys that must not change: weights and optimizer state depend on them. (The data is checked by its own state.)"""

_NOTED: Final = (
    "learning_rate", "learning_rate_schedule", "steps", "dtype", "quantization", "adam_weight_decay",
    "z_loss_multiplier", "rtt_loss_weight",
)  # fmt: skip
"""Keys that may change, with a note: the result differs from that of an uninterrupted run."""


def check_resumable(stored: Path, config: Config) -> None:
    """Refuse a configuration that does not fit the run's checkpoints, before they are taken for damaged ones.

    `stored`: the run's config.yml.
    """
    if not stored.exists():
        return
    before = load_config(stored)
    then, now = _identity(before), _identity(config)
    if before.vocab_size != config.vocab_size:
        then["vocab_size"], now["vocab_size"] = vocabulary(before), vocabulary(config)
    if different := _shown([name for name in then if then[name] != now[name]], before, config):
        raise PingLlmError(
            f"the run {stored.parent} was started with another model or optimizer: {different}. "
            "Use the same settings to resume it, or another run_name"
        )
    noted = [name for name in _NOTED if getattr(before, name) != getattr(config, name)]
    if noted:
        err.print(f"[bold yellow]note:[/] other settings than before: {_shown(noted, before, config)}")


def _identity(config: Config) -> dict[str, Any]:
    """What must stay the same: the fixed keys, whether there is an average (not its decay), and the kind of model."""
    is_completer = config.dataset_type in COMPLETER_DATA
    return {name: getattr(config, name) for name in _FIXED} | {
        "average_decay": bool(config.average_decay),
        "dataset_type": config.dataset_type if is_completer else "language model",
    }


def _shown(names: list[str], before: Config, config: Config) -> str:
    return "; ".join(f"{name}: {getattr(before, name)} then, {getattr(config, name)} now" for name in names)
