"""A run that is asked to stop (SIGTERM, Ctrl-C) finishes its step, saves and ends. A second Ctrl-C ends it at once."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Final, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

_AGREE_EVERY_S: Final = 2.0
"""Time between the moments at which several processes agree on whether to stop: each makes the devices wait."""

_MOST_STEPS: Final = 64
"""Between two such moments."""


class StopRequest:
    """Use it in a `with` around the training loop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._agreed_at: tuple[int, float] | None = None
        self._agree_next = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            self._before[number](number, frame)
        self.signal = number

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step. All processes of a run get the same answer."""
        if jax.process_count() == 1:
            return self.signal is not None
        if step < self._agree_next:
            return False
        now = time.monotonic()
        since, then = self._agreed_at or (step, now)
        seconds_a_step = (now - then) / max(1, step - since)
        asked = np.asarray(multihost_utils.process_allgather(np.array([self.signal or 0, seconds_a_step])))
        self._agreed_at = step, time.monotonic()
        self._agree_next = step + _steps_in(_AGREE_EVERY_S, float(asked[:, 1].max()))
        self.signal = int(asked[:, 0].max()) or None
        return self.signal is not None


def _steps_in(seconds: float, seconds_a_step: float) -> int:
    """At least one; few, as long as it is not known how long one takes."""
    if seconds_a_step <= 0:
        return 1
    return int(np.clip(seconds / seconds_a_step, 1, _MOST_STEPS))
