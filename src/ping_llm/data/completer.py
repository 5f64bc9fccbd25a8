"""`dataset_type=worlds` and `measured`: contexts for the completer, which the device itself makes within each step.

A batch holds only what they are made from: seed, step and row of the global batch. `worlds` are simulated Internets
drawn from the prior (`ping_llm.prior`); `measured` fine-tunes on real measurements, which are read once and then stay
on the device.
"""

import hashlib
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import Part, StepLoader
from ping_llm.prior.fine_tuning import on_device_measurements
from ping_llm.prior.prng import Columns
from ping_llm.prior.worlds import WorldSettings
from ping_llm.rows.measurement_set import MeasurementSet, read_observations

WORLDS_VERSION: Final = 7  # raised whenever the same numbers would give other worlds
_UNSEEN_WORLDS: Final = 0x5EED  # added to the seed for evaluation


def train_loader(config: Config, part: Part, state: DataState | None) -> StepLoader:
    digest = _digest(_read(_files(config))) if config.dataset_type == "measured" else ""
    return _loader(config, part, seed=config.data_shuffle_seed, measurements=digest, state=state)


def eval_loader(config: Config, part: Part) -> StepLoader:
    last_step = max(1, config.eval_steps) - 1
    return _loader(config, part, seed=config.data_shuffle_seed + _UNSEEN_WORLDS, last_step=last_step)


def _loader(config: Config, part: Part, *, seed: int, measurements: str = "", **range_of_steps: Any) -> StepLoader:
    """`measurements` is the digest of the real measurements that contexts are made from; "" if they are simulated."""
    size = part.batch_size(config)
    rows = np.arange(size, dtype=np.int32)[part.rows(config)]
    identity = {
        "dataset_type": "measured" if measurements else "worlds",
        **({"measurements": measurements} if measurements else {}),
        "seed": seed,
        "global_batch_size": size,
        "worlds_version": WORLDS_VERSION,
        **{f"worlds.{name}": value for name, value in asdict(world_settings(config)).items()},
    }
    return StepLoader(
        lambda step: {"seed": np.full_like(rows, seed), "step": np.full_like(rows, step), "row": rows},
        identity,
        **range_of_steps,
    )


def world_settings(config: Config) -> WorldSettings:
    return WorldSettings(
        context=config.worlds_context, questions=config.worlds_questions, most_nodes=config.worlds_most_nodes
    )


def measurements_on_device(config: Config) -> Columns:
    """The measurements that a run with `dataset_type=measured` learns from."""
    return _on_device(_files(config))


def _digest(measured: MeasurementSet) -> str:
    hashed = hashlib.sha256()
    for column in vars(measured.observations).values():
        hashed.update(column.tobytes())
    hashed.update("\n".join(measured.nodes).encode())
    return hashed.hexdigest()[:16]


def _files(config: Config) -> str:
    if not config.network_train_files:
        raise PingLlmError("network_train_files is not set: give measurement files, or the train folder of a split")
    return config.network_train_files


@lru_cache(maxsize=1)
def _read(files: str) -> MeasurementSet:
    return read_observations([files])


@lru_cache(maxsize=1)
def _on_device(files: str) -> Columns:
    return on_device_measurements(_read(files).observations, _read(files).nodes)
