"""The one thread that computes with the model, a piece of each waiting job in turn.

A job is a generator. Where it yields None, others may go on. Where it yields prompts, it gets their forecasts back:
those of all jobs that wait for some are computed together, as far as that is quicker on the device.
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

_PROMPTS_AT_ONCE: Final = 32
"""Unless a single job asks for more: the first of many clients is not to wait for the last."""


class BusyError(PingLlmError):
    """Too many are waiting already."""


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[Any] = Future()
        self.prompts: Sequence[Prompt] | None = None

    def go_on(self, answer: RttDistribution | None = None) -> bool:
        """Do the next piece. Gives whether there is more to do."""
        if self.future.cancelled():
            self.job.close()
            return False
        try:
            self.prompts = self.job.send(answer)
            return True
        except StopIteration as done:
            self._finish(result=done.value)
        except Exception as error:
            self._finish(error=error)
        return False

    def fail(self, error: Exception) -> None:
        self.job.close()
        self._finish(error=error)

    def _finish(self, *, result: Any = None, error: Exception | None = None) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class ModelThread:
    """Use it in a `with` block, at the end of which whatever still waits is cancelled."""

    def __init__(self, forecast: Forecast, most: int) -> None:
        self._forecast, self._most = forecast, most
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
            if not background and len(self._new) + len(self._running) >= self._most:
                raise BusyError("the server is busy: try again in a few seconds")
            (self._background if background else self._new).append(running)
            self._changed.notify()
        return running.future

    def _work(self) -> None:
        while self._take():
            if not self._running:
                self._background = [running for running in self._background if running.go_on()]
                continue
            still = [running for running in self._running if running.prompts is not None or running.go_on()]
            asking = [running for running in still if running.prompts is not None]
            idle = [running for running in still if running.prompts is None]
            self._running = idle + self._answered(asking)
        for running in [*self._running, *self._new, *self._background]:
            running.job.close()
            running.future.cancel()

    def _take(self) -> bool:
        """Take over what is new, waiting for it if there is nothing else to do. False: it is time to stop."""
        with self._changed:
            while not (self._new or self._running or self._background or self._stopped):
                self._changed.wait()
            self._running += self._new
            self._new.clear()
            return not self._stopped

    def _answered(self, asking: list[_Running]) -> list[_Running]:
        """Forecast what is asked for. Gives the jobs that go on."""
        now: list[_Running] = []
        count = 0
        for running in asking:
            size = len(running.prompts or ())
            if now and count + size > _PROMPTS_AT_ONCE:
                break
            now.append(running)
            count += size
        if not now:
            return []
        prompts = [prompt for running in now for prompt in running.prompts or ()]
        try:
            answers = self._forecast(prompts)
        except Exception as error:
            for running in now:
                running.fail(error)
            return asking[len(now) :]
        going_on, begin = [], 0
        for running in now:
            size = len(running.prompts or ())
            running.prompts = None
            if running.go_on(answers.take(slice(begin, begin + size))):
                going_on.append(running)
            begin += size
        return going_on + asking[len(now) :]
