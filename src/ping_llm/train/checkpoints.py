"""Checkpoints: written while training goes on, whole or not at all, and checked when they are read.

A checkpoint holds weights, optimizer, the data state and the configuration, and with them a digest of every array, made
on the device before anything was written. What is read back must have the same digest; a checkpoint that has not is set
aside and the one before it is used.
"""

import logging
import shutil
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from ping_llm.console import err
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.spec import DataState
from ping_llm.train.state import TrainState, digest

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
