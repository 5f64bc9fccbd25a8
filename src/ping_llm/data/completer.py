"""Batches of simulated worlds for the completer: what travels is their numbers, the device makes them itself."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.mixture import Mixture
from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.observations import Observations
from ping_llm.data.registry import batch_size
from ping_llm.prior.fine_tuning import Measurements, on_device_measurements
from ping_llm.prior.worlds import WorldSettings
from ping_llm.rows.measurement_set import read_observations

WORLDS_VERSION = 6
"""Raised whenever the same numbers would give other worlds."""

COMPLETER_DATA: Final = ("worlds", "measured")
"""Kinds of data that the completer is trained on."""


def world_settings(config: Config) -> WorldSettings:
    return WorldSettings(
        context=config.worlds_context, questions=config.worlds_questions, most_nodes=config.worlds_most_nodes
    )


class WorldsLoader:
    """As a `Loader`: this host's part of the numbers of each step's worlds."""

    def __init__(
        self,
        settings: WorldSettings,
        *,
        batch_size: int,
        seed: int,
        host: int = 0,
        hosts: int = 1,
        state: DataState | None = None,
        last_step: int | None = None,
        measurements: str = "",
    ) -> None:
        """`measurements` is the digest of the real measurements that the contexts come from, if they do."""
        if batch_size % hosts:
            raise PingLlmError(f"a global batch of {batch_size} cannot be shared evenly by {hosts} hosts")
        self._rows = np.arange(host * batch_size // hosts, (host + 1) * batch_size // hosts, dtype=np.int32)
        self._seed = seed
        self._last_step = last_step
        identity: dict[str, Any] = {
            "dataset_type": "measured" if measurements else "worlds",
            **({"measurements": measurements} if measurements else {}),
            "seed": seed,
            "global_batch_size": batch_size,
            "worlds_version": WORLDS_VERSION,
            **{f"worlds.{name}": value for name, value in asdict(settings).items()},
        }
        start = DataState(next_step=0, identity=identity, mixture=Mixture.of((Fraction(1),)))
        if state is not None:
            state.check(identity)
            start = replace(start, next_step=state.next_step)
        self._state = start

    def state(self) -> DataState:
        return self._state

    def most_segments(self, step: int) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[np.int32]]]:
        return self

    def __next__(self) -> dict[str, npt.NDArray[np.int32]]:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        self._state = replace(self._state, next_step=step + 1)
        same = partial(np.full_like, self._rows)
        return {"seed": same(self._seed), "step": same(step), "row": self._rows}

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> "WorldsLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Real measurements for fine-tuning the completer: read once, then on the device.


@dataclass(frozen=True)
class MeasuredData:
    observations: Observations
    nodes: tuple[str, ...]
    """Addresses of the nodes' numbers."""

    @cached_property
    def digest(self) -> str:
        """Of what was measured: another digest is other data."""
        hashed = hashlib.sha256()
        for column in vars(self.observations).values():
            hashed.update(column.tobytes())
        hashed.update("\n".join(self.nodes).encode())
        return hashed.hexdigest()[:16]

    @cached_property
    def on_device(self) -> Measurements:
        return on_device_measurements(self.observations, self.nodes)


def measurements_of(config: Config) -> MeasuredData:
    """The measurements that a run with `dataset_type=measured` learns from."""
    if not config.network_train_files:
        raise PingLlmError("network_train_files is not set: give measurement files, or the train folder of a split")
    return _read(config.network_train_files)


@lru_cache(maxsize=1)
def _read(files: str) -> MeasuredData:
    measured = read_observations([files])
    return MeasuredData(measured.observations, measured.nodes)


# `dataset_type=worlds` and `measured`: the numbers of contexts that the device makes for the completer.

_UNSEEN_WORLDS: Final = 0x5EED
"""Added to the seed for evaluation."""


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> WorldsLoader:
    return WorldsLoader(
        world_settings(config),
        batch_size=batch_size(config, devices),
        seed=config.data_shuffle_seed,
        host=host,
        hosts=hosts,
        state=state,
        measurements=measurements_of(config).digest if config.dataset_type == "measured" else "",
    )


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> WorldsLoader:
    return WorldsLoader(
        world_settings(config),
        batch_size=batch_size(config, devices),
        seed=config.data_shuffle_seed + _UNSEEN_WORLDS,
        host=host,
        hosts=hosts,
        last_step=max(1, config.eval_steps) - 1,
    )
