"""Backends: which module serves a `dataset_type`, the loaders that training asks it for, and what loaders share.

Adding one takes a module in this folder with the functions of `Backend`, and its line in `config.keys.DATASET_TYPES`;
or, from another package, an entry point of the group `ping_llm.backends`. `synthetic.py` is the shortest example.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from ping_llm.batches.spec import Batch, DataSpec, DataState, EvalLoader, LoaderSettings, TrainLoader, host_share
from ping_llm.config import Config, parse_schedule, parse_steps
from ping_llm.config.keys import BACKEND_ENTRY_POINTS, DATASET_TYPES, installed_backends
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    from ping_llm.batches.loader import Loader

TEXT_STAGES: Final = {  # of making a batch of text
    "plan": "which documents come next → int64 numbers",
    "read": "get them from their files → documents",
    "encode": "tokenise them → uint32 tokens",
    "arrange": "put sequences together → uint32 tokens, sizes",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of each global batch that one of several hosts makes."""

    devices: int = 1  # of all hosts together
    host: int = 0
    hosts: int = 1

    def batch_size(self, config: Config) -> int:
        """Sequences of a global batch."""
        batch = config.per_device_batch_size * self.devices
        if batch != int(batch) or batch < 1:
            raise PingLlmError(
                f"per_device_batch_size × {self.devices} device(s) = {batch:g} is not a whole number of sequences"
            )
        return int(batch)

    def rows(self, config: Config) -> slice:
        """The rows of a global batch that belong to this host."""
        share = host_share(self.batch_size(config), self.host, self.hosts)
        return slice(share.start, share.stop)


ONE_HOST: Final = Part()


class Backend(Protocol):
    """A module (or object) with these two functions, and optionally `check(config)`."""

    def train_loader(self, config: Config, part: Part, state: DataState | None) -> TrainLoader:
        """Endless batches, from the beginning or from a state of a run with the same data."""

    def eval_loader(self, config: Config, part: Part) -> EvalLoader:
        """Finite batches, the same every time; the same number of them on every host."""


def find(name: str) -> Backend:
    """The backend of a `dataset_type`."""
    if name in DATASET_TYPES:
        return cast(Backend, importlib.import_module(f"ping_llm.data.{DATASET_TYPES[name]}"))
    entry = installed_backends().get(name)
    if entry is None:
        raise PingLlmError(
            f"there is no backend {name!r}: no installed package has an entry point for it in {BACKEND_ENTRY_POINTS}"
        )
    try:
        backend = entry.load()
    except Exception as error:  # whatever another package's import ends in
        raise PingLlmError(f"the backend {name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    missing = [need for need in ("train_loader", "eval_loader") if not callable(getattr(backend, need, None))]
    if missing:
        raise PingLlmError(f"the backend {name!r} ({entry.value}) has no function {' and no '.join(missing)}")
    return cast(Backend, backend)


def make_train_loader(config: Config, *, state: DataState | None = None, **part: int) -> TrainLoader:
    """Endless batches for training (of one `Part`), from the beginning or from a state of a run with the same data."""
    return find(config.dataset_type).train_loader(config, Part(**part), state)


def make_eval_loader(config: Config, **part: int) -> EvalLoader:
    """Batches for evaluation: finite, and the same every time. The last one is filled up with empty sequences."""
    if size := config.eval_per_device_batch_size:
        config = config.replace(per_device_batch_size=size)
    return find(config.dataset_type).eval_loader(config, Part(**part))


def check_files(config: Config) -> None:
    """Have the backend check its data, training and evaluation, before a model is made."""
    backend: Any = find(config.dataset_type)
    if hasattr(backend, "check"):
        backend.check(config)


def loader_settings(config: Config, part: Part) -> LoaderSettings:
    return LoaderSettings(
        worker_count=config.grain_worker_count,
        buffer_size=config.grain_per_worker_buffer_size,
        ram_budget_mb=config.grain_ram_budget_mb,
        debug=config.grain_debug_mode,
        visualization_dir=config.grain_visualization_dir,
        host=part.host,
        hosts=part.hosts,
    )


def spec_from_config(config: Config, split: str = "train", devices: int = 1) -> DataSpec:
    """What decides every batch of a run with this configuration."""
    backend: Any = find(config.dataset_type)
    if not hasattr(backend, "spec_from_config"):
        raise PingLlmError(
            f"batches of dataset_type={config.dataset_type} are not planned: none can be made by its step"
        )
    return cast(DataSpec, backend.spec_from_config(config, split, Part(devices=devices)))


def changes_of(config: Config) -> dict[str, Any]:
    """The settings of a `DataSpec` that change batches from certain steps on."""
    return {"schedule": parse_schedule(config.mixture_schedule), "skipped": parse_steps(config.skip_steps)}


def loader_of(
    spec: DataSpec, config: Config, part: Part, state: DataState | None, *, keep_alive: object = None
) -> "Loader":
    """Batches of a spec, from the beginning or from a state."""
    from ping_llm.batches.loader import Loader  # it loads the compiled kernels

    if state is not None:
        spec, state = state.resume(spec, allow_change=config.allow_data_change)
    return Loader(spec, loader_settings(config, part), state, keep_alive=keep_alive)


def eval_loader_of(spec: DataSpec, config: Config, part: Part, *, keep_alive: object = None) -> "Loader":
    """One epoch of a finite spec, or as much of it as `eval_steps` says."""
    from ping_llm.batches.loader import Loader
    from ping_llm.batches.source import BatchSource

    batches = BatchSource(spec).batches_per_epoch
    if config.eval_steps > 0:
        batches = min(batches, config.eval_steps)
    return Loader(spec, loader_settings(config, part), last_step=batches - 1, keep_alive=keep_alive)


class StepLoader(TrainLoader):
    """Batches that `batch_of` makes of their step, in this process; with `last_step`, they end after it.

    `segments` is an upper bound on the segments of a sequence.
    """

    def __init__(
        self,
        batch_of: Callable[[int], Batch],
        identity: Mapping[str, Any],
        *,
        segments: int = 1,
        state: DataState | None = None,
        last_step: int | None = None,
    ) -> None:
        self._batch_of, self._segments, self._last_step = batch_of, segments, last_step
        self._state = DataState(next_step=0, identity=identity)
        if state is not None:
            state.check(identity)
            self._state = replace(self._state, next_step=state.next_step)

    def state(self) -> DataState:
        return self._state

    def max_segments(self, step: int) -> int:
        return self._segments

    def __next__(self) -> Batch:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        self._state = replace(self._state, next_step=step + 1)
        return self._batch_of(step)

    def close(self) -> None:
        """Nothing is open."""
