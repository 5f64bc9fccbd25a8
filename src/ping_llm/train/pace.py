"""How fast a run goes: real tokens a second, utilisation, and the share of time spent waiting for data."""

import time
from collections import deque
from typing import Final

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
