"""The loader: worker processes make batches ahead of time, the training process takes them in order of their steps.

Grain drives the workers. Its element i is batch `first step + i`, whole: so nothing depends on how many workers there
are, and where to go on after a restart is one number. What travels between processes is tokens and segment sizes; the
six arrays of the batch contract are laid out here, in half a millisecond.
"""

import itertools
import logging
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import psutil

from ping_llm.errors import PingLlmError
from ping_llm.pipeline.batch import Batch, PackedTokens, expand
from ping_llm.pipeline.report import PipelineReport
from ping_llm.pipeline.source import BatchSource
from ping_llm.pipeline.spec import DataSpec, DataState
from ping_llm.workers import available_cores, exit_with_parent

STAGES: Final = ("plan", "sample", "read", "fill", "arrange", "encode")
_ENDLESS: Final = 1 << 40
_SHOW_EVERY_S: Final = 60.0
_SHARED_MEMORY: Final = Path("/dev/shm")

_log = logging.getLogger(__name__)

_WORKER_MB: Final = 300
"""A worker's own memory: Python with Grain and its imports, and a block of the plan."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How batches are delivered. None of this changes what is in them."""

    worker_count: int = -1
    """Worker processes: -1 chooses, 0 makes batches in this process."""
    buffer_size: int = -1
    """Batches that each worker makes ahead: -1 chooses."""
    ram_budget_mb: int = 4096
    debug: bool = False
    """Log the time of each stage every minute, with the bottleneck and what to change."""
    visualization_dir: str = ""
    """Folder for the pipeline graph and its numbers, written every minute and at the end."""
    host: int = 0
    hosts: int = 1

    def resolved(self, batch_bytes: int) -> "LoaderSettings":
        """With the choices made: half the cores, and buffers for half of the memory that workers leave."""
        affordable = max(1, self.ram_budget_mb // 2 // _WORKER_MB)
        workers = self.worker_count
        if workers < 0:
            workers = max(1, min(available_cores() // 2, affordable, 8))
        buffer = self.buffer_size
        if buffer < 1:
            free = self.ram_budget_mb * 2**20 // 2
            buffer = int(np.clip(free // max(1, batch_bytes * max(1, workers)), 1, 8))
        return replace(self, worker_count=workers, buffer_size=buffer)


class Loader:
    """An iterator over this host's part of each global batch, from a step on. Close it, or use it in a `with`.

    With `last_step` it ends after that step: finite data for evaluation.
    """

    def __init__(
        self,
        spec: DataSpec,
        settings: LoaderSettings,
        state: DataState | None = None,
        *,
        last_step: int | None = None,
        keep_alive: object = None,
    ) -> None:
        if spec.global_batch_size % settings.hosts:
            raise PingLlmError(
                f"a global batch of {spec.global_batch_size} cannot be shared evenly by {settings.hosts} hosts"
            )
        self.spec = spec
        self.batch_size = spec.global_batch_size // settings.hosts
        self.settings = settings.resolved(6 * 4 * self.batch_size * spec.contexts.length)
        self._state = state or DataState.start(spec)
        self._last_step = last_step
        self._keep_alive = keep_alive  # what the rows need to stay where they are
        self._shown = time.monotonic()
        self._elements: Any = None
        self._workers: list[psutil.Process] = []
        self._source: BatchSource | None = None  # of this process, made when it is asked for
        self._memory_name = f"ping-llm-{os.getpid()}-{secrets.token_hex(4)}-"
        self.report = PipelineReport(stages=STAGES, workers=self.settings.worker_count)

    def state(self) -> DataState:
        """Where to go on: the step of the batch that `next` would give."""
        return self._state

    def most_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments: the same on every host."""
        if self._source is None:
            self._source = BatchSource(self.spec, self._state.mixture)
        return self._source.most_segments(step)

    def restore(self, state: DataState, *, allow_change: bool = False) -> None:
        """Go on from a state, of this or another number of hosts and workers."""
        resumed = state.resume(self.spec, allow_change=allow_change)
        self.close()
        self._state = resumed
        self._source = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        asked = time.perf_counter()
        element = self._next_element()
        waited = time.perf_counter() - asked
        packed, costs = _unpack(np.array(element))  # a copy: what came through shared memory is given back at once
        batch = expand(packed, self.batch_size, self.spec.contexts.length)
        real = len(packed.tokens)
        self.report.add(
            wait_s=waited,
            stage_s=costs[:-1],
            tokens=real,
            padding=self.batch_size * self.spec.contexts.length - real,
            corrupt_rows=int(costs[-1]),
        )
        self._state = replace(self._state, next_step=step + 1)
        if time.monotonic() - self._shown > _SHOW_EVERY_S:
            self._show()
        return batch

    def _next_element(self) -> Any:
        if self._elements is not None:
            return self._checked_next()
        before = set(psutil.Process().children(recursive=True))
        self._elements = self._start()
        element = self._checked_next()
        self._workers = [p for p in psutil.Process().children(recursive=True) if p not in before and _is_worker(p)]
        return element

    def _checked_next(self) -> Any:
        try:
            return next(self._elements)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise PingLlmError(
                "a data worker process died, perhaps for lack of memory; lower grain_worker_count or "
                f"grain_per_worker_buffer_size ({str(error).splitlines()[0]})"
            ) from error

    def _show(self) -> None:
        self._shown = time.monotonic()
        if self.settings.debug:
            _log.info("%s", self.report.table())
        if self.settings.visualization_dir:
            self.report.write(Path(self.settings.visualization_dir))

    def _start(self) -> Any:
        host, size = self.settings.host, self.batch_size
        elements = _Elements(
            BatchSource(self.spec, self._state.mixture),
            self._state.next_step,
            host * size,
            (host + 1) * size,
            self._memory_name,
        )
        if self.settings.worker_count == 0:
            return iter(elements)
        return _grain_iterator(elements, self.settings.worker_count, self.settings.buffer_size)

    def close(self) -> None:
        """End the worker processes and give back their shared memory."""
        elements, self._elements = self._elements, None
        if elements is not None:
            self._show()
        if hasattr(elements, "close"):
            with suppress(Exception):  # a pool that broke already says so again
                elements.close()
        del elements
        psutil.wait_procs(self._workers, timeout=10)  # they end by themselves; none is to be left when this returns
        self._workers = []
        for left_over in _SHARED_MEMORY.glob(f"{self._memory_name}*"):  # batches that were on their way
            left_over.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "spawn_main" in " ".join(process.cmdline())
    return False


class _Elements:
    """What Grain sees: an endless list of batches, of which it may ask for any, in any process."""

    def __init__(self, source: BatchSource, first_step: int, begin: int, end: int, memory_name: str) -> None:
        self._source = source
        self._memory_name = memory_name
        self._first_step = first_step
        self._range = begin, end
        self._watched = False

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        """A batch, and what it cost."""
        if not self._watched:
            _prepare_worker(self._memory_name)
            self._watched = True
        stages = self._source.stages
        stages.seconds.clear()
        packed = self._source.packed(self._first_step + int(index), *self._range)
        corrupt_rows = sum(len(builder.corrupt_rows) for builder in self._source.builders)
        return _pack(packed, np.array([*(stages.seconds.get(name, 0.0) for name in STAGES), float(corrupt_rows)]))

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return map(self.__getitem__, range(_ENDLESS))


def _prepare_worker(memory_name: str) -> None:
    """In a worker process: end with the parent, and name shared memory so that the parent finds what is left of it."""
    if multiprocessing.parent_process() is None:
        return
    exit_with_parent()
    shared_memory._SHM_NAME_PREFIX = f"/{memory_name}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(memory_name) + 17  # type: ignore[attr-defined]


def _pack(packed: PackedTokens, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """All in one array: Grain makes a shared memory segment for each, which costs more than the copy."""
    head = np.array([len(packed.sizes), len(packed.tokens)], dtype=np.int64)
    parts = (head, costs, packed.sizes, packed.sequence, packed.tokens)
    return np.concatenate([part.view(np.uint8) for part in parts])


def _unpack(data: npt.NDArray[np.uint8]) -> tuple[PackedTokens, npt.NDArray[np.float64]]:
    segments, tokens = data[:16].view(np.int64).tolist()
    ends = np.cumsum([16, 8 * (len(STAGES) + 1), 4 * segments, 4 * segments, 2 * tokens]).tolist()
    costs, sizes, sequence, spelled = (data[begin:end] for begin, end in itertools.pairwise(ends))
    packed = PackedTokens(tokens=spelled.view(np.uint16), sizes=sizes.view(np.int32), sequence=sequence.view(np.int32))
    return packed, costs.view(np.float64)


def _grain_iterator(elements: _Elements, workers: int, buffer: int) -> Any:
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain's worker processes ask for absl flags
        flags.FLAGS.mark_as_parsed()
    # No read threads in the workers: an element is a whole batch, and Grain's default (16 threads) only adds overhead.
    dataset = grain.MapDataset.source(elements).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)
    return iter(dataset.mp_prefetch(options))
