"""Where the time goes: seconds spent in each named stage of the pipeline."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Adds up the time of stages. A stage that is entered inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            current = self._running[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now
