"""The loader: worker processes make batches ahead of time, the training process takes them in the order of their steps.

Steps are dealt out to the workers in turn, a short run of them at a time. So nothing depends on how many workers there
are, and the position to resume from is one number. Workers send packed tokens, a twelfth of a batch; the arrays are
laid out in this process, which takes a tenth of the time that making them takes.

A worker writes each batch to one of its slots in shared memory and sends one message per run of batches (waking a
process takes as long as making a batch), or earlier if batches are slow. Once they are taken, a message back says that
their slots are free. Both directions use one pipe per worker: if either process ends, however that happens, the other
reads the end of the pipe. The memory has no name in the file system: it needs no space in /dev/shm (64 MB in a
container by default) and is freed with its processes.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import PackedTokens, expand
from ping_llm.batches.report import LAY_OUT, PipelineReport
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataSpec, DataState, LoaderSettings, TrainLoader, host_share
from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.pool import exit_with_parent, free_memory_bytes

_END_S: Final = 5.0
_RUN_BYTES: Final = 2 << 20
_SEND_AFTER_S: Final = 0.02  # a finished batch waits for the rest of its run no longer than this and one more batch


class Loader(TrainLoader):
    """An iterator over this host's part of each global batch, from a step on. Close it, or use it in a `with`.

    With `last_step` it ends after that step, for evaluation. `keep_alive` is held until the loader is closed: what the
    sources read may lie in it.
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
        self.spec = spec
        self._share = host_share(spec.global_batch_size, settings.host, settings.hosts)
        self.batch_size = len(self._share)
        self.settings = settings.resolved(6 * 4 * self.batch_size * spec.length)
        self._state = state or DataState.start(spec)
        self._last_step, self._keep_alive = last_step, keep_alive
        self._made: Iterator[Made] | None = None
        self._workers: list[_Worker] = []
        self._source: BatchSource | None = None  # for the bound on segments
        self.report = PipelineReport(spec.stages, self.settings, (self.batch_size, spec.length))

    def state(self) -> DataState:
        """Where to resume: the step of the batch that `next` would give."""
        return self._state

    def max_segments(self, step: int) -> int:
        if self._source is None:
            self._source = BatchSource(self.spec, self._state.mixture)
        return self._source.max_segments(step)

    def restore(self, state: DataState, *, allow_change: bool = False) -> None:
        """Continue from a state that was saved with any number of hosts and workers."""
        resumed = state.resume(self.spec, allow_change=allow_change)
        self._stop()
        self.spec, self._state = resumed
        self._source = None

    def __next__(self) -> Batch:
        step = self._state.next_step
        if self._last_step is not None and step > self._last_step:
            raise StopIteration
        asked = time.perf_counter()
        if self._made is None:
            self._made = self._start()
        made = next(self._made)
        arrived = time.perf_counter()
        batch, tokens = expand(made.packed, self.batch_size, self.spec.length), len(made.packed.tokens)
        self.report.add(
            made.stage_s | {LAY_OUT: time.perf_counter() - arrived},
            wait_s=arrived - asked,
            tokens=tokens,
            corrupt_rows=made.corrupt_rows,
        )
        self._state = replace(self._state, next_step=step + 1)
        return batch

    def _start(self) -> "Iterator[Made]":
        buffer = self.settings.buffer_size
        run = int(np.clip(_RUN_BYTES // (2 * self.batch_size * self.spec.length), 1, buffer // 2 or 1))
        job = _Job(
            source=BatchSource(self.spec, self._state.mixture),
            first_step=self._state.next_step,
            share=self._share,
            workers=self.settings.worker_count,
            run=run,
            slots=(-(-buffer // run) + 1) * run,  # whole runs: one of them is being read
            # A token takes at most 4 bytes, a segment 8: enough for all but odd batches, which go through the pipe.
            slot_bytes=4 * self.batch_size * self.spec.length + 1024 * self.batch_size + 4096,
        )
        if not job.workers:
            return map(job.make, count())
        for number in range(job.workers):  # one by one: if one cannot be started, those before it are still stopped
            self._workers.append(_Worker(job, number))
        return (self._workers[number // job.run % job.workers].take() for number in count())

    def close(self) -> None:
        self._stop()
        self._keep_alive = None

    def _stop(self) -> None:
        self.report.show()
        self._made = None
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + _END_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


@dataclass(frozen=True, kw_only=True)
class Made:
    """A batch, and what making it took."""

    packed: PackedTokens
    stage_s: dict[str, float]  # seconds of each stage
    corrupt_rows: int  # skipped by its source so far


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a worker process is told when it starts."""

    source: BatchSource
    first_step: int
    share: range  # the sequences of each global batch that this host makes
    workers: int
    run: int  # consecutive batches that one worker makes
    slots: int  # per worker
    slot_bytes: int

    def make(self, number: int) -> Made:
        """The batch `number` steps after the first one."""
        stage_s = self.source.stages.seconds = {}
        packed = self.source.packed(self.first_step + number, self.share.start, self.share.stop)
        return Made(packed=packed, stage_s=stage_s, corrupt_rows=self.source.left_out)

    def open_slots(self, path: str) -> npt.NDArray[np.uint8]:
        """Shape (slots, bytes). Without a shared file, slots are empty and batches are sent through the pipe."""
        if not path:
            return np.empty((self.slots, 0), dtype=np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r+", shape=(self.slots, self.slot_bytes)))


class _Worker:
    """A worker process, seen from the process that takes its batches."""

    def __init__(self, job: _Job, number: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        path = ""
        if job.slots * job.slot_bytes < free_memory_bytes() // 2 and hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("ping-llm-batches"), "r+b")
            self._file.truncate(job.slots * job.slot_bytes)
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._slots = job.open_slots(path)
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(job, number, theirs, path), daemon=True)
        self._process.start()
        theirs.close()
        self._ready: list[Made | tuple[Any, ...]] = []
        self._received = self._taken = 0

    def take(self) -> Made:
        """Its next batch, a view of shared memory that is valid until the one after it is taken."""
        if self._taken == self._received:
            self._receive()
        message = self._ready[self._taken - self._received]  # a negative index: counted from the end
        slot = self._slots[self._taken % len(self._slots)]
        self._taken += 1
        return message if isinstance(message, Made) else _from_slot(slot, *message)

    def _receive(self) -> None:
        """Free the slots of the batches that were taken, and wait for the next ones."""
        try:
            if self._ready:
                with suppress(OSError):  # what it sent before it ended, perhaps an error, can still be read
                    self._connection.send(len(self._ready))
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            raise PingLlmError(
                "a data worker process died, perhaps for lack of memory; lower grain_worker_count or "
                f"grain_per_worker_buffer_size (exit code {self._process.exitcode})"
            ) from error
        if isinstance(message, Exception):
            raise message
        self._ready = message
        self._received += len(message)

    def stop(self) -> None:
        """Make the worker end when it next sends or waits for a message."""
        self._connection.close()

    def join(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)


def _work(job: _Job, number: int, connection: Connection, path: str) -> None:
    """A worker process: makes every `workers`-th run of batches until the pipe to its parent is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    exit_with_parent()
    with suppress(EOFError, FileNotFoundError, BrokenPipeError, ConnectionResetError):
        slots, free = job.open_slots(path), job.slots
        unsent: list[Made | tuple[Any, ...]] = []
        sent = time.monotonic()
        for index in count():
            run, within = divmod(index, job.run)
            try:
                made = job.make((run * job.workers + number) * job.run + within)
            except Exception as error:
                if unsent:
                    connection.send(unsent)
                if not isinstance(error, PingLlmError):  # with where it was raised
                    text = "".join(traceback.format_exception(error)).strip()
                    error = RuntimeError(f"in a data worker process:\n{text}")
                return connection.send(error)
            while not free or connection.poll():
                free += connection.recv()
            unsent.append(_to_slot(made, slots[index % job.slots]) or made)
            free -= 1
            if within == job.run - 1 or time.monotonic() - sent > _SEND_AFTER_S:
                connection.send(unsent)
                unsent, sent = [], time.monotonic()


def _to_slot(made: Made, slot: npt.NDArray[np.uint8]) -> tuple[Any, ...] | None:
    """Write a batch to its slot. Returns the arguments of `_from_slot`, or None if it does not fit."""
    packed = made.packed
    columns = [column.view(np.uint8) for column in (packed.sizes, packed.sequence, packed.tokens)]
    size = sum(map(len, columns))
    if size > len(slot):
        return None
    np.concatenate(columns, out=slot[:size])
    return len(packed.sizes), len(packed.tokens), packed.tokens.dtype.str, made.stage_s, made.corrupt_rows


def _from_slot(
    slot: npt.NDArray[np.uint8], segments: int, tokens: int, kind: str, stage_s: dict[str, float], corrupt: int
) -> Made:
    packed = PackedTokens(
        sizes=np.frombuffer(slot, np.int32, segments),
        sequence=np.frombuffer(slot, np.int32, segments, 4 * segments),
        tokens=np.frombuffer(slot, np.dtype(kind), tokens, 8 * segments),
    )
    return Made(packed=packed, stage_s=stage_s, corrupt_rows=corrupt)
