"""A run that is asked to stop (SIGTERM, Ctrl-C) finishes its step, saves and ends. A second Ctrl-C ends it at once."""

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

_AGREE_EVERY: Final = 8
"""Steps between the moments at which several processes agree on whether to stop."""


class StopRequest:
    """Use it in a `with` around the training loop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

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
        if self.signal is not None:
            self._before[number](number, frame)
        self.signal = number

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step. All processes of a run get the same answer."""
        if jax.process_count() == 1:
            return self.signal is not None
        if step % _AGREE_EVERY:
            return False
        signals = multihost_utils.process_allgather(np.array(self.signal or 0))
        self.signal = int(signals.max()) or None
        return self.signal is not None
