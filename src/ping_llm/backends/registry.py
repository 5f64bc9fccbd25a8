"""Which module serves a `dataset_type`: ours by name, those of other packages by their entry points."""

import importlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

from ping_llm.config import Config
from ping_llm.config.kinds import DATASET_TYPES, GROUP, added
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.batch import Batch
from ping_llm.pipeline.spec import DataState


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
        return cast(Backend, importlib.import_module(f"ping_llm.backends.{_MODULES[name]}"))
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
