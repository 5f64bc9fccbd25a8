"""The one thread that computes: requests in turn, a piece of each, and the forecasts of several together.

A job is a generator. Where it yields None, other jobs get their turn. Where it yields prompts, it is sent their
forecasts: those of all waiting jobs are computed in one batch, as far as that is faster on the device.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from queue import PriorityQueue
from typing import Any, Final

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import RttDistribution
from ping_llm.predict.prompts import Prompt

Job = Generator[Sequence[Prompt] | None, RttDistribution | None, Any]
Forecast = Callable[[Sequence[Prompt]], RttDistribution]

_PROMPTS_PER_CALL: Final = 32  # unless one job has more: the first of many clients must not wait for the last
_STOP, _REQUEST, _BACKGROUND = range(3)
"""Priorities of turns. A job that is not done always has a turn in the queue, or waits for a forecast that has one."""


class BusyError(PingLlmError):
    """No answer now; the client can try again after `retry_after` seconds."""

    retry_after = 2


class WarmingError(BusyError):
    retry_after = 10


@dataclass(frozen=True, eq=False)
class _Running:
    job: Job
    priority: int
    future: Future[Any] = field(default_factory=Future)


class ModelThread:
    """Runs jobs. Use it in a `with` block, at the end of which all remaining jobs are cancelled."""

    def __init__(self, forecast: Forecast, max_jobs: int) -> None:
        self._forecast, self._max_jobs = forecast, max_jobs
        self._turns: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._number = itertools.count()
        self._running: set[_Running] = set()
        self._waiting: deque[tuple[_Running, Sequence[Prompt]]] = deque()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def __enter__(self) -> "ModelThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._add_turn(_STOP, None)
        self._thread.join(timeout=10)

    def submit(self, job: Job, *, background: bool = False) -> Future[Any]:
        """Run a job, in the background only while no request waits. Cancelling the future ends it at its next turn."""
        if not background and sum(one.priority == _REQUEST for one in tuple(self._running)) >= self._max_jobs:
            raise BusyError("the server is busy: try again in a few seconds")
        running = _Running(job, _BACKGROUND if background else _REQUEST)
        self._running.add(running)
        self._add_turn(running.priority, partial(self._resume, running))
        return running.future

    def _add_turn(self, priority: int, turn: Callable[[], None] | None) -> None:
        self._turns.put((priority, next(self._number), turn))

    def _work(self) -> None:
        while turn := self._turns.get()[-1]:
            turn()
        for running in tuple(self._running):
            running.job.close()
            running.future.cancel()

    def _resume(self, running: _Running, answer: RttDistribution | None = None, error: Exception | None = None) -> None:
        """Do the next piece of a job (with an error: its last)."""
        future = running.future
        error = CancelledError() if future.cancelled() else error
        try:
            prompts = running.job.send(answer) if error is None else running.job.throw(error)
        except StopIteration as done:
            settle = partial(future.set_result, done.value)
        except Exception as failure:
            settle = partial(future.set_exception, failure)
        else:
            if prompts is not None:
                self._waiting.append((running, prompts))
            return self._add_turn(running.priority, partial(self._resume, running) if prompts is None else self._answer)
        self._running.remove(running)
        if future.set_running_or_notify_cancel():
            settle()

    def _answer(self) -> None:
        """Compute the forecasts of the first waiting jobs, unless a turn of another job did so already."""
        now: list[_Running] = []
        prompts: list[Prompt] = []
        edges, answers, error = [0], None, None
        while self._waiting and (not now or len(prompts) + len(self._waiting[0][1]) <= _PROMPTS_PER_CALL):
            running, own = self._waiting.popleft()
            now.append(running)
            prompts += own
            edges.append(len(prompts))
        try:
            answers = self._forecast(prompts) if now else None
        except Exception as failure:
            error = failure
        for running, some in zip(now, map(slice, edges, edges[1:]), strict=True):
            self._resume(running, None if answers is None else answers.take(some), error)
