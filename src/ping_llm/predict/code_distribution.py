"""The language model's answer: a distribution over RTT codes, from the two bytes that spell them."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ping_llm.distribution import CODE_MS, CODES, Floats, Ints, RttDistribution, search_rows
from ping_llm.tokens.rtt_code import decode_rtt

_BYTES = np.arange(256)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodeDistribution(RttDistribution):
    """The probability of an RTT code is that of its first byte times that of its second byte, given the first.

    Second bytes are kept for the first bytes that matter; for the others, which have next to no probability, all second
    bytes count as equally likely. Code 0, which no RTT has, counts as code 1.
    """

    first: Floats
    """[n, 256]: of the first byte, given an answer."""
    kept: Ints
    """[n, 256]: row of `second` that belongs to a first byte; the last row of it stands for all others."""
    second: npt.NDArray[np.float32]
    """[kept + 1, 256]"""

    _SHARED: ClassVar[frozenset[str]] = frozenset({"second"})

    @property
    def mean(self) -> Floats:
        """Exact: of a code, the value is mantissa·2^exponent µs, and the second byte is the end of the mantissa."""
        mantissa = ((_BYTES & 7) << 8) + (self._second @ _BYTES)[self.kept]
        return (self._first * np.ldexp(mantissa, _BYTES >> 3)).sum(axis=1) / 1000.0

    def _cdf(self, rtt_ms: Floats) -> Floats:
        at = np.searchsorted(CODE_MS, rtt_ms, side="right") - 1
        code = CODES[np.maximum(at, 0)]
        return np.where(at < 0, 0.0, self._until(code))

    def _quantile(self, level: Floats) -> Floats:
        rows = np.broadcast_to(np.arange(len(self))[:, None], level.shape)
        byte = search_rows(self._first_until, rows, level)
        first = self._first[rows, byte]
        inside = (level - self._first_until[rows, byte] + first) / np.maximum(first, 1e-300)
        last = search_rows(self._second_until, self.kept[rows, byte], np.clip(inside, 0.0, 1.0))
        return decode_rtt(np.maximum(byte << 8 | last, CODES[0]))

    def _code_probability(self, codes: Ints) -> Floats:
        rows = np.arange(len(self))[:, None]
        first, last = codes >> 8, codes & 0xFF
        second = self._second[self.kept[rows, first], last]
        second = np.where(codes == CODES[0], second + self._second[self.kept[rows, 0], 0], second)
        return self._first[rows, first] * second

    def _until(self, code: Ints) -> Floats:
        """Probability of this code and all that are less."""
        rows = np.arange(len(self))[:, None]
        first = code >> 8
        within = self._second_until[self.kept[rows, first], code & 0xFF]
        until = self._first_until[rows, first] - self._first[rows, first] * (1.0 - within)
        return np.maximum(until, 0.0)  # rounding

    @cached_property
    def _first(self) -> Floats:
        return self.first / self.first.sum(axis=1, keepdims=True)

    @cached_property
    def _second(self) -> Floats:
        second = self.second.astype(np.float64)
        return second / second.sum(axis=1, keepdims=True)

    @cached_property
    def _first_until(self) -> Floats:
        return _cumulated(self._first)

    @cached_property
    def _second_until(self) -> Floats:
        return _cumulated(self._second)


def _cumulated(probability: Floats) -> Floats:
    until = np.cumsum(probability, axis=1)
    return until / until[:, -1:]  # rounding must not leave the last one below 1
