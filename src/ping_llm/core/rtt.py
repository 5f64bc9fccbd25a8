"""Round-trip times, observed and predicted: what predictors learn from, what they are queried for, what they answer.

    observations   measurements to learn from, as columns of numbers
    questions      the same columns without the answer
    history        what was measured before a time, for any key
    distribution   the answer

Nodes are whole numbers in one id space for sources and destinations, so that a host that is both is one node. An id
that was not in the training data, and any negative one, is an unknown node: it gets a fallback, never an exception.

Likelihoods are those of 16-bit *RTT codes*, so that densities and probability masses can be compared. A code is a small
floating-point number that two bytes spell: a 5-bit exponent e and an 11-bit mantissa m stand for m·2^e µs. It is
normalised (e = 0, or m ≥ 1024), so each value has one code, codes are ordered like the values, and rounding to the
nearest changes a value from 1.024 ms on by at most one part in 2^11. Below that the step is 1 µs. Nothing is shorter
than 1 µs.

A measurement *fails* if it gets no answer; everything but `p_failed` is conditional on an answer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

DEFAULT_RTT_MS: Final = 50.0
"""The answer where nothing at all is known: about the median of a RIPE Atlas extract (50.3 ms)."""

MIN_RTT_MS: Final = 0.01
"""Floor of every RTT before its logarithm is taken. A ping tool can print 0.0; no wire is that short."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
        return Questions(source=low, destination=high, time_s=self.time_s).pair

    def reversed(self) -> "Questions":
        return Questions(source=self.destination, destination=self.source, time_s=self.time_s)


@dataclass(frozen=True, kw_only=True, eq=False)
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


class History:
    """For a key (a pair, a node, anything) and a time: the earlier measurements with that key.

    Measurements lie sorted by (key, time), so that the history of any question is one range of rows, found by binary
    search for all questions at once: sorting five million measurements takes 3 s, a million questions then take as
    long.
    """

    def __init__(self, key: Ints, time_s: Floats, value: npt.NDArray[Any]) -> None:
        order = np.lexsort((time_s, key))
        self._keys, self._first, number = np.unique(key[order], return_index=True, return_inverse=True)
        self._times, moment = np.unique(time_s[order], return_inverse=True)
        self._rank = number * (len(self._times) + 1) + moment  # orders rows by key, then by time
        values = value[order].astype(np.float64)
        self._time_s, self._value = np.append(time_s[order], -np.inf), np.append(values, np.nan)  # last: of no row
        self._total = np.append(0.0, np.cumsum(values))  # of the values before each row

    @classmethod
    def about(cls, asked: Ints, key: Ints, time_s: Floats, value: npt.NDArray[Any]) -> Self:
        """That of the keys that are asked about: to sort that of all others, too, takes most of the memory."""
        rows = pc.is_in(pa.array(key), value_set=pa.array(np.unique(asked).astype(key.dtype)))
        rows = rows.to_numpy(zero_copy_only=False)
        return cls(key[rows], time_s[rows], value[rows])

    def span(self, key: Ints, time_s: Floats) -> tuple[Ints, Ints]:
        """Rows [start, stop) of the measurements with that key strictly before that time; NaN is after all of them."""
        if not len(self._keys):
            return np.zeros(len(key), np.int64), np.zeros(len(key), np.int64)
        number = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        start = self._first[number]
        moment = np.searchsorted(self._times, time_s, side="left")
        stop = np.searchsorted(self._rank, number * (len(self._times) + 1) + moment, side="left")
        return start, np.where(self._keys[number] == key, stop, start)

    def mean_before(self, key: Ints, time_s: Floats, *, prior: Floats | float, strength: float) -> Floats:
        """The mean of the earlier values, as if `strength` more had been seen with the value `prior`."""
        start, stop = self.span(key, time_s)
        return np.asarray((self._total[stop] - self._total[start] + strength * prior) / (stop - start + strength))

    def latest(self, start: Ints, stop: Ints, count: int) -> Floats:
        """The last `count` values of each range, newest first, NaN where there are fewer."""
        row = stop[:, None] - 1 - np.arange(count)
        return self._value[np.where(row >= start[:, None], row, -1)]

    def age(self, key: Ints, time_s: Floats) -> Floats:
        """Seconds since the latest earlier measurement with that key, infinite where there is none or no time."""
        start, stop = self.span(key, time_s)
        age = time_s - self._time_s[np.where(stop > start, stop - 1, -1)]
        return np.where(np.isnan(age), np.inf, age)


# Predicted RTTs.

TOO_LONG_US: Final = 2047.5 * 2**31
"""From here on an RTT, 51 days, would round beyond the largest code."""


def encode_rtt(rtt_ms: Any) -> npt.NDArray[np.uint16]:
    """The code nearest to each RTT. What is not a number gets code 0, which no RTT has."""
    micros = np.fmax(np.asarray(rtt_ms, dtype=np.float64) * 1000.0, 1.0)
    micros = np.where(np.isnan(rtt_ms), 0.0, micros)
    if np.any(micros >= TOO_LONG_US):
        raise OverflowError(f"an RTT of {np.nanmax(rtt_ms)} ms has no code")
    _, bits = np.frexp(micros)  # micros < 2^bits
    exponent = np.maximum(bits - 11, 0)
    mantissa = np.rint(np.ldexp(micros, -exponent)).astype(np.int64)
    carry = mantissa >> 11  # 2047.5 and more round up to the next exponent's 1024
    exponent, mantissa = exponent + carry, mantissa >> carry
    return (exponent << 11 | mantissa).astype(np.uint16)


def decode_rtt(codes: Any) -> npt.NDArray[np.float64]:
    """Milliseconds of each code (of any 16-bit number: one that is not normalised has a value too)."""
    codes = np.asarray(codes, dtype=np.int64)
    return np.ldexp((codes & 0x7FF).astype(np.float64), codes >> 11) / 1000.0


_ALL: Final = np.arange(1, 1 << 16)
CODES: Final[Ints] = _ALL[(_ALL < 1 << 11) | ((_ALL & 0x7FF) >= 1024)]
"""All codes that an RTT can have, in order: the support of a predicted distribution."""
CODE_MS: Final = decode_rtt(CODES)
_EDGES_MS: Final = np.concatenate([[0.0], (CODE_MS[1:] + CODE_MS[:-1]) / 2, [TOO_LONG_US / 1000.0]])


def code_bounds(rtt_ms: Any) -> tuple[Floats, Floats]:
    """The two RTTs between which all have the same code: its probability is what a distribution has between them."""
    index = np.searchsorted(CODES, encode_rtt(rtt_ms))
    return _EDGES_MS[index], _EDGES_MS[index + 1]


_LEAST: Final = 1e-300
"""Probability of what a distribution holds to be impossible: log-likelihoods stay finite."""

# Levels at which integrals over all quantiles are taken, dense towards 0 and 1 where RTTs have long tails.
_STEPS: Final = np.linspace(0.0, 1.0, 201)
_MIDDLES: Final = (_STEPS[1:] + _STEPS[:-1]) / 2
_LEVELS: Final = _MIDDLES**2 * (3 - 2 * _MIDDLES)
_SHARES: Final = np.diff(_STEPS**2 * (3 - 2 * _STEPS))


@dataclass(frozen=True, kw_only=True, eq=False)
class RttDistribution(ABC):
    """Predicted results of n questions. RTTs are in ms, and conditional on an answer.

    A predictor's own kind says how probable an RTT is (`_cdf`) and which RTT belongs to a probability (`_quantile`);
    all else follows, and is overridden where there is an exact or cheaper way.
    """

    p_failed: Floats
    """[n]"""

    _SHARED: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that all questions have in common; every other one has a row for each question."""

    @abstractmethod
    def _cdf(self, rtt_ms: Floats) -> Floats:
        """P(RTT <= rtt_ms), [n, k] for [n, k]."""

    @abstractmethod
    def _quantile(self, level: Floats) -> Floats:
        """The least RTT whose `_cdf` is at least the level, [n, k] for [n, k]."""

    def __len__(self) -> int:
        return len(self.p_failed)

    def __repr__(self) -> str:
        """The first few answers. Subclasses are data classes with `repr=False`: their fields are large arrays."""
        some = self.take(slice(0, 3))
        each = zip(some.median, *some.interval(0.9), some.p_failed, strict=True)
        texts = [f"{m:.4g} ms ({low:.4g} to {high:.4g}; timeout {p:.2g})" for m, low, high, p in each]
        return f"<{type(self).__name__} of {len(self):,}: {', '.join(texts + ['…'] * (len(self) > len(some)))}>"

    def take(self, rows: Any) -> Self:
        """The questions of a mask, of a slice or of indices."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{name: c if name in self._SHARED else c[rows] for name, c in columns.items()})

    def cdf(self, rtt_ms: Any) -> Floats:
        """P(RTT <= rtt_ms): [n] for one RTT or one for each question; [n, k] for [n, k] or [1, k]."""
        rtt_ms = np.asarray(rtt_ms, dtype=np.float64)
        if rtt_ms.ndim == 2:
            return self._cdf(np.broadcast_to(rtt_ms, (len(self), rtt_ms.shape[1])))
        return self._cdf(self._column(rtt_ms))[:, 0]

    def quantile(self, levels: Any) -> Floats:
        """The RTT that is not exceeded with this probability: [n], or [n, levels] for several levels.

        0 and 1 are none: at these, a distribution says only where its tails were cut off.
        """
        levels = np.asarray(levels, dtype=np.float64)
        if not np.all((levels > 0) & (levels < 1)):
            raise ValueError(f"levels must lie between 0 and 1, which are none themselves; got {levels}")
        found = self._quantile(np.broadcast_to(np.atleast_1d(levels), (len(self), levels.size)))
        return found.reshape(len(self), *levels.shape)

    @property
    def median(self) -> Floats:
        return self.quantile(0.5)

    @property
    def mean(self) -> Floats:
        """By default from 200 quantiles, the outermost at 2e-5 and 1 - 2e-5, which bounds what a heavy tail can do."""
        return self._all_levels() @ _SHARES

    def interval(self, share: float = 0.9) -> tuple[Floats, Floats]:
        """Between which RTTs the answer lies with this probability; as likely to be below as above."""
        if not 0 < share < 1:
            raise ValueError(f"share must lie between 0 and 1, which are none themselves; got {share}")
        low, high = self.quantile([(1 - share) / 2, (1 + share) / 2]).T
        return low, high

    def pmf(self, question: int) -> tuple[Floats, Floats]:
        """All RTTs that have a code, in order, and the exact probability of each code for one question."""
        return CODE_MS, self.take([question])._code_probability(CODES[None])[0]

    def log_likelihood(self, rtt_ms: Any) -> Floats:
        """Natural logarithm of the probability of each observed result: its RTT code, or that it failed (NaN)."""
        observed = self._column(rtt_ms)
        failed = np.isnan(observed)
        code = encode_rtt(np.where(failed, 1.0, observed)).astype(np.int64)
        answered = (1 - self.p_failed) * self._code_probability(code)[:, 0]
        return np.log(np.maximum(np.where(failed[:, 0], self.p_failed, answered), _LEAST))

    def bits(self, rtt_ms: Any) -> Floats:
        """Negative log-likelihood of each observed result in bits; NaN stands for failed."""
        return self.log_likelihood(rtt_ms) / -np.log(2)

    def crps(self, rtt_ms: Any) -> Floats:
        """Continuous ranked probability score in ms: the absolute error of a certain answer; NaN where it failed.

        It is the integral of the pinball loss over all levels, here over 200 quantiles: within 0.01 % of it
        for log-normal RTTs.
        """
        observed = self._column(rtt_ms)
        quantile = self._all_levels()
        loss = np.where(observed < quantile, 1 - _LEVELS, -_LEVELS) * (quantile - observed)
        return 2 * loss @ _SHARES

    def sample(self, count: int, seed: int = 0) -> Floats:
        """[n, count] results; NaN for failed ones."""
        rng = np.random.default_rng(seed)
        rtt_ms = self._quantile(rng.random((len(self), count)))
        return np.where(rng.random((len(self), count)) < self.p_failed[:, None], np.nan, rtt_ms)

    def _code_probability(self, codes: Ints) -> Floats:
        """[n, k] for codes [n, k], given an answer."""
        at = np.searchsorted(CODES, codes)
        return self.cdf(_EDGES_MS[at + 1]) - self.cdf(_EDGES_MS[at])

    def _all_levels(self) -> Floats:
        return self._quantile(np.broadcast_to(_LEVELS, (len(self), len(_LEVELS))))

    def _column(self, rtt_ms: Any) -> Floats:
        """[n, 1] of one RTT, or of one for each question."""
        column = np.asarray(rtt_ms, dtype=np.float64)
        return np.broadcast_to(column.reshape(-1, 1) if column.ndim else column, (len(self), 1))


def search_rows(table: Floats, rows: Ints, levels: Floats) -> Ints:
    """The first index in each of these rows of cumulative probabilities (which rise to 1) that reaches its level."""
    apart = 2.0 * np.arange(len(table))  # one sorted array of all rows
    at = np.searchsorted((table + apart[:, None]).reshape(-1), levels + apart[rows])
    return np.clip(at - rows * table.shape[1], 0, table.shape[1] - 1)
