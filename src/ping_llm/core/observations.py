"""Measurements as columns of numbers: what predictors learn from, and what they are queried for.

    observations   measurements to learn from
    questions      the same columns without the answer
    history        what was measured before a time, for any key

Nodes are whole numbers in one id space for sources and destinations, so that a host that is both is one node. An id
that was not in the training data, and any negative one, is an unknown node: it gets a fallback, never an exception.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

DEFAULT_RTT_MS: Final = 50.0
"""The answer where nothing at all is known: about the median of a RIPE Atlas extract (50.3 ms)."""

MIN_RTT_MS: Final = 0.01
"""Floor of every RTT before its logarithm is taken. A ping tool can print 0.0; no wire is that short."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What RTT has `source` to `destination` at `time_s`? The time NaN means after everything that is known."""

    source: Ints
    destination: Ints
    time_s: Floats

    def __post_init__(self) -> None:
        sizes = {name: np.shape(column) for name, column in vars(self).items()}
        if len(set(sizes.values())) != 1 or len(np.shape(self.source)) != 1:
            raise ValueError(f"the columns must be one-dimensional and of equal length, not {sizes}")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Any) -> Self:
        """The rows of a mask, of a slice or of indices."""
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})

    @property
    def pair(self) -> Ints:
        """One number for each (source, destination), for any ids below 2^31."""
        return np.asarray((self.source.astype(np.int64) << 32) | (self.destination.astype(np.int64) & 0xFFFFFFFF))

    @property
    def unordered_pair(self) -> Ints:
        """The same number for both directions of a pair."""
        low, high = np.minimum(self.source, self.destination), np.maximum(self.source, self.destination)
        return np.asarray((low.astype(np.int64) << 32) | (high.astype(np.int64) & 0xFFFFFFFF))

    def reversed(self) -> "Questions":
        return Questions(source=self.destination, destination=self.source, time_s=self.time_s)


@dataclass(frozen=True, kw_only=True)
class Observations(Questions):
    """Measurements. The RTT NaN means failed: such a row says nothing about RTTs, only about failures."""

    rtt_ms: npt.NDArray[np.floating[Any]]

    @property
    def questions(self) -> Questions:
        return Questions(source=self.source, destination=self.destination, time_s=self.time_s)

    @property
    def answered(self) -> Self:
        return self.take(~np.isnan(self.rtt_ms))

    @property
    def log_rtt(self) -> Floats:
        return np.log(np.maximum(self.rtt_ms.astype(np.float64), MIN_RTT_MS))


@dataclass
class NodeIds:
    """Numbers nodes in the order they are met: `ids(column)` for any column of hashables, for example addresses."""

    of: dict[Hashable, int] = field(default_factory=dict)

    def ids(self, values: Iterable[Hashable]) -> Ints:
        """The id of each value; a value met for the first time gets the next id."""
        numbers = self.of
        return np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64)

    def __len__(self) -> int:
        return len(self.of)


@dataclass(frozen=True, kw_only=True)
class History:
    """For a key (a pair, a node, anything) and a time: the earlier measurements with that key.

    Measurements lie sorted by (key, time), so that the history of any question is one range of rows, found by binary
    search for all questions at once: sorting five million measurements takes 3 s, a million questions then take as
    long.
    """

    keys: Ints
    """Distinct keys; `first` is the first row of each."""
    first: Ints
    times: Floats
    """Distinct times."""
    rank: Ints
    """Of each row: one number that orders by key, then by time."""
    time_s: Floats
    value: Floats
    total: Floats
    """Sums of the values before each row."""

    @classmethod
    def of(cls, key: Ints, time_s: Floats, value: npt.NDArray[Any]) -> "History":
        order = np.lexsort((time_s, key))
        keys, first, number = np.unique(key[order], return_index=True, return_inverse=True)
        times, moment = np.unique(time_s[order], return_inverse=True)
        ordered = value[order].astype(np.float64)
        return cls(
            keys=keys,
            first=first,
            times=times,
            rank=number * (len(times) + 1) + moment,
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
        moment = np.searchsorted(self.times, time_s, side="left")
        stop = np.searchsorted(self.rank, number * (len(self.times) + 1) + moment, side="left")
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
