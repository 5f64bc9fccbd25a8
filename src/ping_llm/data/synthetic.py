"""Batches of random tokens: what training costs when data costs nothing, and a check that needs no data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np

from ping_llm.batches.batch import PackedTokens, expand
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.spec import Batch, DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import batch_size
from ping_llm.tokens import VOCABULARY_SIZE

_DIFFERENT_BATCHES: Final = 8
_MOST_SEGMENTS: Final = 4
_PADDING: Final = 0.015


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    global_batch_size: int
    length: int
    seed: int = 0


class SyntheticLoader:
    """As a `Loader`: this host's part of batches that are functions of seed and step. Eight of them, over and over."""

    def __init__(
        self,
        settings: SyntheticSettings,
        *,
        host: int = 0,
        hosts: int = 1,
        state: DataState | None = None,
        last_step: int | None = None,
    ) -> None:
        batch_size = settings.global_batch_size
        if batch_size % hosts:
            raise PingLlmError(f"a global batch of {batch_size} cannot be shared evenly by {hosts} hosts")
        self._part = slice(host * batch_size // hosts, (host + 1) * batch_size // hosts)
        self._last_step = last_step
        identity = {
            "dataset_type": "synthetic",
            "seed": settings.seed,
            "global_batch_size": batch_size,
            "contexts.length": settings.length,
        }
        start = DataState(next_step=0, identity=identity, mixture=Mixture.of((Fraction(1),)))
        if state is not None:
            state.check(identity)
            start = replace(start, next_step=state.next_step)
        self._state = start
        self._batches = [_batch(settings, number) for number in range(_DIFFERENT_BATCHES)]

    def state(self) -> DataState:
        return self._state

    def most_segments(self, step: int) -> int:
        return _MOST_SEGMENTS

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        self._state = replace(self._state, next_step=step + 1)
        return {name: value[self._part] for name, value in self._batches[step % _DIFFERENT_BATCHES].items()}

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> "SyntheticLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _batch(settings: SyntheticSettings, number: int) -> Batch:
    sequences, length = settings.global_batch_size, settings.length
    random = np.random.default_rng([settings.seed, number])
    used = length - int(length * _PADDING)
    cuts = np.sort(random.integers(1, used, (sequences, _MOST_SEGMENTS - 1)), axis=1)
    edges = np.concatenate([np.zeros((sequences, 1), int), cuts, np.full((sequences, 1), used)], axis=1)
    sizes = np.diff(edges, axis=1).reshape(-1)
    sequence = np.repeat(np.arange(sequences), _MOST_SEGMENTS)[sizes > 0]
    packed = PackedTokens(
        tokens=random.integers(1, VOCABULARY_SIZE, sequences * used, dtype=np.uint16),
        sizes=sizes[sizes > 0].astype(np.int32),
        sequence=sequence.astype(np.int32),
    )
    return expand(packed, sequences, length)


# `dataset_type=synthetic`: random tokens.


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> SyntheticLoader:
    return SyntheticLoader(_settings(config, devices), host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> SyntheticLoader:
    last = max(1, config.eval_steps) - 1
    return SyntheticLoader(_settings(config, devices), host=host, hosts=hosts, last_step=last)


def _settings(config: Config, devices: int) -> SyntheticSettings:
    return SyntheticSettings(
        global_batch_size=batch_size(config, devices), length=config.max_target_length, seed=config.data_shuffle_seed
    )
