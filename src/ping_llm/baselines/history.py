"""What was measured before: for a key (a pair, a node, anything) and a time, the earlier measurements with that key.

Measurements lie sorted by (key, time), so that the history of any question is one range of rows, found by binary search
for all questions at once: sorting five million measurements takes 3 s, a million questions then take as long.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ping_llm.baselines.interface import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class History:
    """Values of measurements, sorted by key and time."""

    keys: Ints
    first: Ints
    times: Floats
    place: Ints
    time_s: Floats
    value: Floats
    total: Floats

    @classmethod
    def of(cls, key: Ints, time_s: Floats, value: npt.NDArray[Any]) -> "History":
        order = np.lexsort((time_s, key))
        keys, first, number = np.unique(key[order], return_index=True, return_inverse=True)
        times, rank = np.unique(time_s[order], return_inverse=True)
        ordered = value[order].astype(np.float64)
        return cls(
            keys=keys,
            first=first,
            times=times,
            place=number * (len(times) + 1) + rank,
            time_s=time_s[order],
            value=ordered,
            total=np.concatenate([[0.0], np.cumsum(ordered)]),
        )

    def span(self, key: Ints, time_s: Floats) -> tuple[Ints, Ints]:
        """Rows [start, stop) of the measurements with that key strictly before that time; NaN is after all of them."""
        if not len(self.keys):
            return np.zeros(len(key), np.int64), np.zeros(len(key), np.int64)
        number = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        start = self.first[number]
        rank = np.searchsorted(self.times, time_s, side="left")
        stop = np.searchsorted(self.place, number * (len(self.times) + 1) + rank, side="left")
        return start, np.where(self.keys[number] == key, stop, start)

    def mean_before(self, key: Ints, time_s: Floats, *, prior: Floats | float, strength: float) -> Floats:
        """The mean of the earlier values, as if `strength` more had been seen with the value `prior`."""
        start, stop = self.span(key, time_s)
        return np.asarray((self.total[stop] - self.total[start] + strength * prior) / (stop - start + strength))

    def latest(self, start: Ints, stop: Ints, count: int) -> Floats:
        """The last `count` values of each range, newest first, NaN where there are fewer."""
        at = stop[:, None] - 1 - np.arange(count)
        inside = at >= start[:, None]
        if not len(self.value):
            return np.full(at.shape, np.nan)
        return np.where(inside, self.value[np.where(inside, at, 0)], np.nan)

    def age(self, key: Ints, time_s: Floats) -> Floats:
        """Seconds since the latest earlier measurement with that key, infinite where there is none or no time."""
        start, stop = self.span(key, time_s)
        if not len(self.value):
            return np.full(len(key), np.inf)
        age = np.where(stop > start, time_s - self.time_s[np.maximum(stop - 1, 0)], np.inf)
        return np.where(np.isnan(age), np.inf, age)
