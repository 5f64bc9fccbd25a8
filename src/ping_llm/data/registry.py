"""The backends by name, and what they read from a configuration alike."""

import importlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from ping_llm.batches.spec import Batch, DataSpec, DataState, LoaderSettings
from ping_llm.config import Config
from ping_llm.config.keys import DATASET_TYPES, GROUP, added
from ping_llm.core.errors import PingLlmError


def batch_size(config: Config, devices: int) -> int:
    """Sequences of a global batch."""
    batch = config.per_device_batch_size * devices
    if batch != int(batch) or batch < 1:
        raise PingLlmError(
            f"per_device_batch_size × {devices} device(s) = {batch:g} is not a whole number of sequences"
        )
    return int(batch)


def loader_settings(config: Config, host: int, hosts: int) -> LoaderSettings:
    return LoaderSettings(
        worker_count=config.grain_worker_count,
        buffer_size=config.grain_per_worker_buffer_size,
        ram_budget_mb=config.grain_ram_budget_mb,
        debug=config.grain_debug_mode,
        visualization_dir=config.grain_visualization_dir,
        host=host,
        hosts=hosts,
    )


# Which module serves a `dataset_type`: ours by name, those of other packages by their entry points.


class AnyEvalLoader(Protocol):
    """This host's part of one global batch after the other: arrays by name, int32, host-local."""

    def most_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments: the same number on every host."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class AnyLoader(AnyEvalLoader, Protocol):
    """The same without end, and with a state: what a run stores, and goes on from."""

    def state(self) -> DataState: ...


class Backend(Protocol):
    """A module (or object) with these two functions."""

    def train_loader(
        self, config: Config, *, devices: int, host: int, hosts: int, state: DataState | None
    ) -> AnyLoader:
        """Endless batches, from the beginning or from a state of a run with the same data."""

    def eval_loader(self, config: Config, *, devices: int, host: int, hosts: int) -> AnyEvalLoader:
        """Finite batches, the same every time; the same number of them on every host."""


_MODULES: Final = {name: name for name in DATASET_TYPES} | {"worlds": "completer", "measured": "completer"}


def find(name: str) -> Backend:
    """The backend of a `dataset_type`."""
    if name in _MODULES:
        return cast(Backend, importlib.import_module(f"ping_llm.data.{_MODULES[name]}"))
    if name not in added():
        raise PingLlmError(f"there is no backend {name!r}: no installed package has an entry point for it in {GROUP}")
    entry = added()[name]
    try:
        backend = entry.load()
    except Exception as error:  # whatever another package's import ends in
        raise PingLlmError(f"the backend {name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    missing = [need for need in ("train_loader", "eval_loader") if not callable(getattr(backend, need, None))]
    if missing:
        raise PingLlmError(f"the backend {name!r} ({entry.value}) has no function {' and no '.join(missing)}")
    return cast(Backend, backend)


def check(config: Config) -> None:
    """Let the backend say what is wrong before a model is made, not at the first evaluation, if it can."""
    backend: Any = find(config.dataset_type)
    if hasattr(backend, "check"):
        backend.check(config)


# Loaders from a configuration: the functions that training asks for its data. The backends themselves are apart.

__all__ = ["AnyEvalLoader", "AnyLoader", "check_files", "make_eval_loader", "make_train_loader", "spec_from_config"]


def make_train_loader(
    config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1, state: DataState | None = None
) -> AnyLoader:
    """Endless batches for training, from the beginning or from a state of any run with the same data."""
    backend = find(config.dataset_type)
    return backend.train_loader(config, devices=devices, host=host, hosts=hosts, state=state)


def make_eval_loader(config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1) -> AnyEvalLoader:
    """Batches for evaluation: finite, and the same every time. The last one is filled up with empty sequences."""
    backend = find(config.dataset_type)
    return backend.eval_loader(config, devices=devices, host=host, hosts=hosts)


def check_files(config: Config) -> None:
    """Is there data to train and to evaluate on? Said before a model is made, not at the first evaluation."""
    check(config)


def spec_from_config(config: Config, split: str = "train", devices: int = 1) -> DataSpec:
    """What decides every batch of a run with this configuration (of prepared rows)."""
    from ping_llm.data.network import spec_of

    if config.dataset_type != "network":
        raise PingLlmError(f"dataset_type={config.dataset_type} has no rows to look at; use dataset_type=network")
    if config.network_data_format != "probe_chunks":
        raise PingLlmError("only prepared rows can be looked at: set network_data_format=probe_chunks")
    return spec_of(config, split, devices)[0]
