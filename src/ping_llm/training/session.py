"""How fast a run goes: real tokens a second, utilisation, and the share of time spent waiting for data."""

import signal
import time
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from ping_llm.runs.metrics import read_metrics

_WINDOW: Final = 20
"""Steps over which the rate of a record is taken."""


class Pace:
    """Counts steps as their results come in. Compiling, evaluating and saving are not training time."""

    def __init__(self, flops_per_token: int, peak_flops: float | None) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak_flops
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_WINDOW)
        self._last: float | None = None
        self._waited = 0.0
        self.training_s = self.waited_s = 0.0
        self.tokens = 0

    def wait(self, seconds: float) -> None:
        self._waited += seconds

    def step(self, tokens: int) -> None:
        """A step's results are here. The first one after a pause only starts the clock."""
        now = time.perf_counter()
        if self._last is not None:
            self._recent.append((now - self._last, self._waited, tokens))
            self.training_s += now - self._last
            self.waited_s += self._waited
            self.tokens += tokens
        self._last, self._waited = now, 0.0

    def pause(self) -> None:
        """What follows until the next step's results is not training."""
        self._last = None

    def recent(self) -> dict[str, float | None]:
        seconds = sum(s for s, _, _ in self._recent)
        return self._rates(seconds, sum(w for _, w, _ in self._recent), sum(t for _, _, t in self._recent))

    def overall(self) -> dict[str, float | None]:
        return self._rates(self.training_s, self.waited_s, self.tokens)

    def _rates(self, seconds: float, waited: float, tokens: int) -> dict[str, float | None]:
        if seconds <= 0:
            return {"real_tokens_per_s": None, "mfu": None, "data_wait_fraction": None}
        rate = tokens / seconds
        mfu = rate * self._flops_per_token / self._peak if self._peak else None
        return {
            "real_tokens_per_s": round(rate),
            "mfu": None if mfu is None else round(mfu, 4),
            "data_wait_fraction": round(waited / seconds, 4),
        }


# The loss curve of a run as a picture.


def draw_losses(metrics: Path, picture: Path) -> bool:
    """Training loss (smoothed over a fiftieth of the run) and evaluation loss by step. False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = list(read_metrics(metrics))
    trained = [(r["step"] + 1, r["loss"]) for r in records if r.get("loss") is not None]
    evaluated = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if trained:
        steps, losses = np.array(trained).T
        width = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps[width - 1 :], smooth, color="tab:blue", label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="tab:orange", markersize=4, label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy a token (nats)")
    axes.grid(alpha=0.3)
    if trained or evaluated:
        axes.legend()
    figure.savefig(picture, dpi=150)
    return True


# A run that is asked to stop (SIGTERM, Ctrl-C) finishes its step, saves and ends. A second Ctrl-C ends it at once.

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
