"""Predicted results of several questions: P(failed), and a distribution over RTT codes given an answer."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ping_llm.tokens.rtt_code import decode_rtt, encode_rtt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RttForecast:
    """The probability of an RTT code is that of its first byte times that of its second byte, given the first.

    Second bytes are kept for the first bytes that matter; for the others, which have next to no probability, all second
    bytes count as equally likely.
    """

    p_failed: Floats
    first: Floats
    """[questions, 256]: of the first byte, given an answer."""
    kept: npt.NDArray[np.int64]
    """[questions, 256]: row of `second` that belongs to a first byte; the last row of it stands for all others."""
    second: npt.NDArray[np.float32]
    """[kept + 1, 256]"""

    def __len__(self) -> int:
        return len(self.p_failed)

    def take(self, rows: Any) -> Self:
        return type(self)(
            p_failed=self.p_failed[rows], first=self.first[rows], kept=self.kept[rows], second=self.second
        )

    def pmf(self, question: int) -> tuple[Floats, Floats]:
        """All RTTs that one question may have, in ms, and the probability of each, given an answer."""
        probability = self.first[question][:, None] * self.second[self.kept[question]]
        codes = np.flatnonzero(probability)
        return decode_rtt(codes), probability.reshape(-1)[codes]

    def quantile(self, level: float) -> Floats:
        """The RTT in ms that an answer stays below or at with this probability."""
        rows = np.arange(len(self))
        until = np.cumsum(self.first, axis=1)
        byte = np.minimum((until < level * until[:, -1:]).sum(axis=1), 255)
        inside = level * until[:, -1] - (until[rows, byte] - self.first[rows, byte])
        within = np.cumsum(self.second[self.kept[rows, byte]], axis=1, dtype=np.float64)
        within *= (self.first[rows, byte] / within[:, -1])[:, None]
        last = np.minimum((within < inside[:, None]).sum(axis=1), 255)
        return decode_rtt(byte << 8 | last)

    def median(self) -> Floats:
        return self.quantile(0.5)

    def interval(self, coverage: float = 0.9) -> tuple[Floats, Floats]:
        """Between which two RTTs an answer lies with this probability; as likely to be below as above."""
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def mean(self) -> Floats:
        """Of the RTT in ms, given an answer."""
        return np.array([np.dot(*self.pmf(question)) for question in range(len(self))])

    def log_likelihood(self, rtt_ms: npt.ArrayLike) -> Floats:
        """Natural logarithm of the probability of each observed result: its RTT code, or that it failed (NaN)."""
        rtt_ms = np.asarray(rtt_ms, dtype=np.float64)
        failed = np.isnan(rtt_ms)
        code = encode_rtt(np.where(failed, 1.0, rtt_ms)).astype(np.int64)
        rows = np.arange(len(self))
        second = self.second[self.kept[rows, code >> 8], code & 0xFF].astype(np.float64)
        with np.errstate(divide="ignore"):
            answered = np.log1p(-self.p_failed) + np.log(self.first[rows, code >> 8]) + np.log(second)
            return np.where(failed, np.log(self.p_failed), answered)

    def sample(self, count: int, seed: int = 0) -> Floats:
        """[questions, count] results in ms, NaN for failed ones."""
        random = np.random.default_rng(seed)
        drawn = np.empty((len(self), count))
        for question in range(len(self)):
            rtt, probability = self.pmf(question)
            drawn[question] = random.choice(rtt, count, p=probability / probability.sum())
        return np.where(random.random(drawn.shape) < self.p_failed[:, None], np.nan, drawn)
