"""The loader: worker processes make batches ahead of time, the training process takes them in order of their steps.

Grain drives the workers. Its elements are whole batches, from the first step on: so nothing depends on how many workers
there are, and where to go on after a restart is one number. What travels between processes is tokens and segment sizes;
the six arrays of the batch contract are laid out here, which takes a tenth of the time of making them.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import psutil

from ping_llm.batches.batch import Batch, expand
from ping_llm.batches.report import PipelineReport
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import DataSpec, DataState
from ping_llm.batches.transport import ELEMENT_BYTES, Elements, Made, Ring, Source, deliver
from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.pool import available_cores

STAGES: Final = ("plan", "sample", "read", "fill", "encode")
_SHOW_EVERY_S: Final = 60.0
_END_S: Final = 5.0

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
            buffer = int(np.clip(free // max(1, batch_bytes * max(1, workers)), 1, 32))
        return replace(self, worker_count=workers, buffer_size=buffer)


class Loader:
    """An iterator over this host's part of each global batch, from a step on. Close it, or use it in a `with`.

    With `last_step` it ends after that step: finite data for evaluation.
    """

    stages: tuple[str, ...] = STAGES

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
        self.report = self._make_report()

    def state(self) -> DataState:
        """Where to go on: the step of the batch that `next` would give."""
        return self._state

    def max_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments: the same on every host."""
        if self._source is None:
            self._source = BatchSource(self.spec, self._state.mixture)
        return self._source.max_segments(step)

    def restore(self, state: DataState, *, allow_change: bool = False) -> None:
        """Go on from a state, of this or another number of hosts and workers."""
        resumed = state.resume(self.spec, allow_change=allow_change)
        self._stop()
        self._state = resumed
        self._source = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        asked = time.perf_counter()
        made = self._next_made()
        arrived = time.perf_counter()
        batch = expand(made.packed, self.batch_size, self.spec.contexts.length)
        real = len(made.packed.tokens)
        self.report.add(
            wait_s=arrived - asked,
            stage_s=made.stage_s,
            lay_out_s=time.perf_counter() - arrived,
            tokens=real,
            padding=self.batch_size * self.spec.contexts.length - real,
            corrupt_rows=made.corrupt_rows,
        )
        self._state = replace(self._state, next_step=step + 1)
        if time.monotonic() - self._shown > _SHOW_EVERY_S:
            self._show()
        return batch

    def _next_made(self) -> Made:
        if self._elements is not None:
            return self._checked_next()
        before = set(psutil.Process().children(recursive=True))
        self._elements = self._start()
        made = self._checked_next()
        self._workers = [p for p in psutil.Process().children(recursive=True) if p not in before and _is_worker(p)]
        return made

    def _checked_next(self) -> Made:
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
        part = self.settings.host * self.batch_size, (self.settings.host + 1) * self.batch_size
        workers, buffer = self.settings.worker_count, self.settings.buffer_size
        batch_tokens = self.batch_size * self.spec.contexts.length
        steps = max(1, min(ELEMENT_BYTES // (2 * batch_tokens), buffer))
        ahead = max(1, buffer // steps)
        # Where a place is too small (a segment takes 8 bytes, a token at most 4), the element goes another way.
        place_bytes = steps * (4 * batch_tokens + 1024 * self.batch_size + 4096)
        ring = Ring.create(workers * (ahead + 2), place_bytes) if workers else None
        elements = Elements(
            self._make_source(),
            self.stages,
            self._state.next_step,
            part,
            self._memory_name,
            steps=steps,
            ring=ring,
        )
        return deliver(elements, workers, ahead)

    def _make_report(self) -> PipelineReport:
        return PipelineReport(stages=self.stages, workers=self.settings.worker_count)

    def _make_source(self) -> Source:
        return BatchSource(self.spec, self._state.mixture)

    def close(self) -> None:
        """End the worker processes and give back all memory. Nothing can be taken any more."""
        self._stop()
        self._keep_alive = None

    def _stop(self) -> None:
        elements, self._elements = self._elements, None
        if elements is not None:
            self._show()
            elements.close()
        del elements
        _end(self._workers)
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


def _end(workers: list[psutil.Process]) -> None:
    """They end by themselves, now that no one wants their batches; any that does not is ended here."""
    _, still_there = psutil.wait_procs(workers, timeout=_END_S)
    for worker in still_there:
        with suppress(psutil.Error):
            worker.kill()
    psutil.wait_procs(still_there, timeout=_END_S)


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "spawn_main" in " ".join(process.cmdline())
    return False
