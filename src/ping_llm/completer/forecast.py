"""Predicted distributions of RTTs, for as many questions as were asked.

ln RTT has a density that is a straight line from bin centre to bin centre (see `bins`), so that every number here is
exact: distribution function and quantiles come from quadratic equations, not from sampling.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from ping_llm.baselines.interface import Floats
from ping_llm.completer.bins import LEAST_MS, MOST_MS, Bins
from ping_llm.tokens.rtt_code import decode_rtt, encode_rtt, normalised_codes

_CODE_MS: Final = decode_rtt(normalised_codes())
_CODE_EDGES_MS: Final = np.concatenate([[0.0], (_CODE_MS[1:] + _CODE_MS[:-1]) / 2, [np.inf]])


@dataclass(frozen=True, kw_only=True)
class RttForecast:
    """One row for each question. RTTs are in ms, and given that the measurement does not fail."""

    p_failed: Floats
    probability: Floats
    """[questions, bins], each row sums to 1."""

    def __post_init__(self) -> None:
        if np.ndim(self.probability) != 2 or len(self.probability) != len(self.p_failed):
            raise ValueError(f"{len(self.p_failed)} questions, but probabilities {np.shape(self.probability)}")

    def __len__(self) -> int:
        return len(self.p_failed)

    def take(self, rows: Any) -> Self:
        return type(self)(p_failed=self.p_failed[rows], probability=self.probability[rows])

    @property
    def bins(self) -> Bins:
        return Bins(self.probability.shape[1])

    @property
    def median(self) -> Floats:
        return self.quantile(0.5)

    @property
    def mean(self) -> Floats:
        width = self.bins.width
        of_triangle = (2 * np.sinh(width / 2) / width) ** 2  # mean of exp over a triangle around 0
        return np.asarray(self.probability @ np.exp(self.bins.centres) * of_triangle)

    def interval(self, share: float = 0.9) -> tuple[Floats, Floats]:
        """Between which RTTs the answer lies with this probability; as likely below as above."""
        return self.quantile((1 - share) / 2), self.quantile((1 + share) / 2)

    def quantile(self, levels: Any) -> Floats:
        """The RTT not exceeded with this probability: [questions], or [questions, levels] for several levels."""
        asked = np.asarray(levels, dtype=np.float64)
        if not np.all((asked >= 0) & (asked <= 1)):
            raise ValueError(f"levels of quantiles lie between 0 and 1, not {levels}")
        padded, below = self._corners()
        level = np.broadcast_to(np.atleast_1d(asked), (len(self), max(1, asked.size)))
        return self._inverse(padded, below, level).reshape(len(self), *asked.shape)

    def cdf(self, rtt_ms: Any) -> Floats:
        """P(RTT <= rtt_ms) for one RTT of each question, or the same RTT for all."""
        corner, share = self._place(rtt_ms)
        padded, below = self._corners()
        row = np.arange(len(self))
        left, right = padded[row, corner], padded[row, corner + 1]
        return np.clip(below[row, corner] + left * (share - share**2 / 2) + right * share**2 / 2, 0.0, 1.0)

    def log_density(self, rtt_ms: Any) -> Floats:
        """Of ln RTT, in nats. What lies outside the bins counts as the nearest RTT inside, as it did in training."""
        corner, share = self._place(np.clip(rtt_ms, *_inside(self.bins)))
        padded, _ = self._corners()
        row = np.arange(len(self))
        mixed = (1 - share) * padded[row, corner] + share * padded[row, corner + 1]
        return np.log(np.maximum(mixed / self.bins.width, 1e-300))

    def bits(self, rtt_ms: Any) -> Floats:
        """-log2 of the probability of what was observed, as an RTT code; NaN stands for failed."""
        observed = np.broadcast_to(np.asarray(rtt_ms, dtype=np.float64), (len(self),))
        failed = np.isnan(observed)
        code_ms = decode_rtt(encode_rtt(np.clip(np.where(failed, 1.0, observed), *_inside(self.bins))))
        at = np.searchsorted(_CODE_EDGES_MS, code_ms) - 1
        mass = self.cdf(_CODE_EDGES_MS[at + 1]) - self.cdf(_CODE_EDGES_MS[at])
        chance = np.where(failed, self.p_failed, (1 - self.p_failed) * mass)
        return -np.log2(np.maximum(chance, 1e-300))

    def sample(self, count: int, *, seed: int = 0) -> Floats:
        """[questions, count] RTTs; NaN where the measurement fails."""
        rng = np.random.default_rng(seed)
        rtt = self._inverse(*self._corners(), rng.random((len(self), count)))
        return np.where(rng.random((len(self), count)) < self.p_failed[:, None], np.nan, rtt)

    def _corners(self) -> tuple[Floats, Floats]:
        """Probabilities at the corners of the density, one more at either end, and the distribution function there."""
        padded = np.pad(self.probability, ((0, 0), (1, 1)))
        below = np.cumsum((padded[:, 1:] + padded[:, :-1]) / 2, axis=1)
        return padded, np.pad(below, ((0, 0), (1, 0)))

    def _place(self, rtt_ms: Any) -> tuple[npt.NDArray[np.int64], Floats]:
        """The corner at or below each RTT, and how far it is on the way to the next."""
        with np.errstate(divide="ignore"):
            log_rtt = np.log(np.broadcast_to(np.asarray(rtt_ms, dtype=np.float64), (len(self),)))
        at = np.clip((log_rtt - self.bins.centres[0]) / self.bins.width + 1, 0.0, self.bins.count + 1)
        corner = np.minimum(at.astype(np.int64), self.bins.count)
        return corner, at - corner

    def _inverse(self, padded: Floats, below: Floats, level: Floats) -> Floats:
        corner = (
            np.stack([np.searchsorted(row, wanted, side="right") - 1 for row, wanted in zip(below, level, strict=True)])
            if len(self)
            else np.zeros(level.shape, np.int64)
        )
        corner = np.clip(corner, 0, self.bins.count)
        left, right = np.take_along_axis(padded, corner, 1), np.take_along_axis(padded, corner + 1, 1)
        rest = np.maximum(level - np.take_along_axis(below, corner, 1), 0.0)
        root = np.sqrt(np.maximum(left**2 + 2 * (right - left) * rest, 0.0))
        share = np.clip(2 * rest / np.maximum(left + root, 1e-300), 0.0, 1.0)
        return np.exp(self.bins.centres[0] + (corner - 1 + share) * self.bins.width)


def averaged(forecasts: list[RttForecast]) -> RttForecast:
    """The mixture of several forecasts of the same questions."""
    return RttForecast(
        p_failed=np.mean([f.p_failed for f in forecasts], axis=0),
        probability=np.mean([f.probability for f in forecasts], axis=0),
    )


def _inside(bins: Bins) -> tuple[float, float]:
    half = np.exp(bins.width / 2)
    return float(LEAST_MS * half), float(MOST_MS / half)
