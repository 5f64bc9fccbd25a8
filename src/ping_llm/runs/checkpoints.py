"""The state of a run: weights and optimizer, laid out over the devices."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.runs.devices import weight_sharding
from ping_llm.runs.task import Task, task_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    weights: Any
    optimizer: Any
    average: Any = None
    """Of the weights over the last steps, if the run keeps one."""

    @property
    def best_weights(self) -> Any:
        """What is evaluated and used."""
        return self.weights if self.average is None else self.average


def graph(task: Task) -> Any:
    """The model without its weights: what `nnx.merge` needs beside them."""
    return nnx.split(nnx.eval_shape(lambda: task.make(nnx.Rngs(0))))[0]


def weight_shapes(config: Config, mesh: Mesh | None = None) -> Any:
    """The weights of the configured model, without their values; with a mesh, also where each lies."""
    shapes = nnx.split(nnx.eval_shape(lambda: task_of(config).make(nnx.Rngs(0))))[1]
    return shapes if mesh is None else _placed(shapes, mesh)


def _placed(shapes: Any, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight_sharding(mesh, leaf.shape)), shapes
    )


def first_state(config: Config, change: optax.GradientTransformation) -> TrainState:
    """What a run begins with: a function of the configuration alone, whatever the devices."""
    weights = nnx.split(task_of(config).make(nnx.Rngs(config.init_weights_seed)))[1]
    average = jax.tree.map(jnp.copy, weights) if config.average_decay else None
    return TrainState(weights=weights, optimizer=change.init(weights), average=average)


def laid_out(config: Config, change: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The shapes of the state and where each array lies, without the values."""
    return _placed(jax.eval_shape(lambda: first_state(config, change)), mesh)


def create(config: Config, change: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The first state, made where it is to lie."""
    places = jax.tree.map(lambda leaf: leaf.sharding, laid_out(config, change, mesh))
    return jax.jit(lambda: first_state(config, change), out_shardings=places)()


@jax.jit
def digest(tree: Any) -> jax.Array:
    """One number per array that changes with every bit and place in it, and not with how it is spread over devices."""
    return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(tree)])


def _digest(leaf: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).reshape(-1)
    places = jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum(bits * (places * jnp.uint32(2654435761) | jnp.uint32(1)), dtype=jnp.uint32)


# Checkpoints: written while training goes on, whole or not at all, and checked when they are read.
#
# A checkpoint holds weights, optimizer, the data state and the configuration, and with them a digest of every array,
# made on the device before anything was written. What is read back must have the same digest; a checkpoint that has
# not is set aside and the one before it is used.

_DAMAGED: Final = "damaged-checkpoints"

# Orbax writes a line for every checkpoint it looks at or deletes; what matters to a user is said here.
for _name in ("orbax", "absl"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Checkpoints:
    """The checkpoints of a run, by the number of steps that were done."""

    def __init__(self, folder: Path, *, keep: int, keep_best: int, asynchronous: bool) -> None:
        self._folder = folder
        policies: list[Any] = [checkpoint_managers.LatestN(keep)]
        if keep_best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics["eval_loss"],
                    reverse=True,
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=True,
        )
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(self._folder.absolute(), options=self._options)

    def save(self, step: int, state: TrainState, data: DataState, config: str, eval_loss: float | None) -> None:
        """Begin to save; returns when the state may be changed again. `eval_loss`: measured after just this step."""
        if step in self._manager.all_steps():
            return
        arrays = {"weights": state.weights, "optimizer": state.optimizer, "digest": {"digest": digest(state)}}
        if state.average is not None:
            arrays["average"] = state.average
        items = ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
            run=ocp.args.JsonSave({"data": data.to_json(), "config": config}),
        )
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore(self, like: TrainState) -> tuple[int, TrainState, DataState] | None:
        """The newest checkpoint that is sound, laid out as `like` says; None if there never was any."""
        found = sorted(self._manager.all_steps(), reverse=True)
        for step in found:
            outcome = self._try(step, like)
            if not isinstance(outcome, str):
                return outcome
            err.print(
                f"[bold yellow]warning:[/] checkpoint {step} is damaged ({outcome}); going back to the one before",
                soft_wrap=True,
            )
            self._set_aside(step)
        if found:
            raise PingLlmError(
                f"none of the {len(found)} checkpoints in {self._folder} can be read; they are in "
                f"{self._folder.parent / _DAMAGED}. Use another run_name to begin again"
            )
        return None

    def _try(self, step: int, like: TrainState) -> tuple[int, TrainState, DataState] | str:
        leaves = jax.tree.leaves(like)
        everywhere = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
        digests = jax.ShapeDtypeStruct((len(leaves),), np.uint32, sharding=everywhere)
        failure, result = "", None
        try:
            arrays = {"weights": like.weights, "optimizer": like.optimizer, "digest": {"digest": digests}}
            if like.average is not None:
                arrays["average"] = like.average
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in arrays.items()},
                    run=ocp.args.JsonRestore(),
                ),
            )
            average = items["average"] if like.average is not None else None
            state = TrainState(weights=items["weights"], optimizer=items["optimizer"], average=average)
            result = step, state, DataState.from_json(items["run"]["data"])
            if not np.array_equal(np.asarray(items["digest"]["digest"]), np.asarray(digest(state))):
                failure = "its arrays are not those that were saved"
        except Exception as error:  # whatever a damaged file makes the reader raise
            failure = " ".join(str(error).split())[:200] or type(error).__name__
        if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.array(bool(failure)))):
            failure = failure or "another process could not read it"
        return failure or result or "empty"

    def _set_aside(self, step: int) -> None:
        self._manager.close()
        if jax.process_index() == 0:
            target = self._folder.parent / _DAMAGED / str(step)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(self._folder / str(step), target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")
        self._manager = self._open()

    def wait(self) -> None:
        """Until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def read_weights(folder: Path, like: Any) -> tuple[int, Any]:
    """Steps done and weights of the newest checkpoint, averaged if the run kept an average."""
    if not folder.is_dir():
        raise PingLlmError(f"{folder} is not there: give the folder of a run, such as runs/ping-llm/my-run")
    with ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = manager.latest_step()
        if step is None:
            raise PingLlmError(f"{folder} holds no checkpoint yet")
        name = "average" if (folder / str(step) / "average").exists() else "weights"
        items = manager.restore(step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(like)}))
        return step, items[name]
