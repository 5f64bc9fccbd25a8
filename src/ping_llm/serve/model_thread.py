"""The one thread that computes with the model, a piece of each waiting job in turn.

A job is a generator. Where it yields None, others get their turn. Where it yields prompts, it gets their forecasts
back: those of all jobs that wait for some are computed together, as far as that is quicker on the device.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import RttDistribution
from ping_llm.predict.prompts import Prompt

Job = Generator[Sequence[Prompt] | None, RttDistribution | None, Any]
Forecast = Callable[[Sequence[Prompt]], RttDistribution]

_PROMPTS_PER_CALL: Final = 32
"""Unless a single job has more: the first of many clients is not to wait for the last."""


class BusyError(PingLlmError):
    """Too many jobs are waiting already."""


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[Any] = Future()
        self.prompts: Sequence[Prompt] | None = None

    def resume(self, answer: RttDistribution | None = None, *, error: Exception | None = None) -> bool:
        """Do the next piece (with an error: end). Gives whether there is more to do."""
        if self.future.cancelled():
            self.job.close()
            return False
        try:
            self.prompts = self.job.send(answer) if error is None else self.job.throw(error)
            return True
        except StopIteration as done:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(done.value)
        except Exception as failure:
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(failure)
        return False


class ModelThread:
    """Use it in a `with` block, at the end of which whatever still waits is cancelled."""

    def __init__(self, forecast: Forecast, max_jobs: int) -> None:
        self._forecast, self._max_jobs = forecast, max_jobs
        self._new: deque[_Running] = deque()
        self._changed = threading.Condition()
        self._running: list[_Running] = []
        self._background: list[_Running] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def __enter__(self) -> "ModelThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=10)

    def submit(self, job: Job, *, background: bool = False) -> Future[Any]:
        """Have a job done; in the background, while nobody waits. A cancelled future ends its job at its next turn."""
        running = _Running(job)
        with self._changed:
            if not background and len(self._new) + len(self._running) >= self._max_jobs:
                raise BusyError("the server is busy: try again in a few seconds")
            (self._background if background else self._new).append(running)
            self._changed.notify()
        return running.future

    def _work(self) -> None:
        while self._take_new():
            if not self._running:
                self._background = [running for running in self._background if running.resume()]
                continue
            ongoing = [running for running in self._running if running.prompts is not None or running.resume()]
            waiting = [running for running in ongoing if running.prompts is not None]
            self._running = [running for running in ongoing if running.prompts is None] + self._answer(waiting)
        for running in [*self._running, *self._new, *self._background]:
            running.job.close()
            running.future.cancel()

    def _take_new(self) -> bool:
        """Take over new jobs, waiting for one if there is nothing else to do. False: it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._running or self._background or self._stopped)
            self._running += self._new
            self._new.clear()
            return not self._stopped

    def _answer(self, waiting: list[_Running]) -> list[_Running]:
        """Forecast the prompts of the first jobs that wait. Gives the jobs that are not done."""
        now: list[_Running] = []
        prompts: list[Prompt] = []
        for running in waiting:
            if now and len(prompts) + len(running.prompts or ()) > _PROMPTS_PER_CALL:
                break
            now.append(running)
            prompts += running.prompts or ()
        if not now:
            return []
        answers, error = None, None
        try:
            answers = self._forecast(prompts)
        except Exception as failure:
            error = failure
        ongoing, begin = [], 0
        for running in now:
            end = begin + len(running.prompts or ())
            running.prompts = None
            if running.resume(None if answers is None else answers.take(slice(begin, end)), error=error):
                ongoing.append(running)
            begin = end
        return ongoing + waiting[len(now) :]
