"""Batches of simulated worlds for the completer: what travels is their numbers, the device makes them itself."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.completer.settings import WorldSettings
from ping_llm.config import Config
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.mixture import Mixture
from ping_llm.pipeline.spec import DataState

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
