"""Blending several row sets: which of them a sequence comes from, and which of its sequences it is.

Weights are laid out over a period of 1024 sequences, each source as evenly as its share allows. So how many sequences
a source has given before any point is plain arithmetic. When weights change, at a step of the schedule or at a resume,
a new *phase* begins: each source continues where it was, so nothing that was planned is repeated or lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final, Self

import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints

PERIOD: Final = 1024


@dataclass(frozen=True)
class Phase:
    """From global sequence `start` on, sources have these shares (of `PERIOD`), and have given `given` before."""

    start: int
    shares: tuple[int, ...]
    given: tuple[int, ...]

    @cached_property
    def schedule(self) -> Ints:
        """The source of each slot of a period: always the one that is furthest behind its share."""
        shares = np.array(self.shares, dtype=np.int64)
        counts = np.zeros(len(shares), dtype=np.int64)
        slots = np.empty(PERIOD, dtype=np.int64)
        for slot in range(PERIOD):
            behind = shares * (slot + 1) - counts * PERIOD
            slots[slot] = np.argmax(np.where(shares > 0, behind, -PERIOD * PERIOD))
            counts[slots[slot]] += 1
        return slots

    @cached_property
    def before(self) -> Ints:
        """(sources, PERIOD + 1): sequences of each source before each slot of a period."""
        given = np.arange(len(self.shares))[:, None] == self.schedule
        return np.concatenate([np.zeros((len(self.shares), 1), dtype=np.int64), np.cumsum(given, axis=1)], axis=1)

    def given_before(self, sequence: int) -> tuple[int, ...]:
        periods, slot = divmod(sequence - self.start, PERIOD)
        counts = np.array(self.given) + periods * np.array(self.shares) + self.before[:, slot]
        return tuple(counts.tolist())


@dataclass(frozen=True)
class Mixture:
    """All phases so far."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Self:
        return cls((Phase(0, _shares(weights), (0,) * len(weights)),))

    def until(self, sequence: int) -> "Mixture":
        """The phases that have begun at a sequence."""
        return Mixture(tuple(phase for phase in self.phases if phase.start <= sequence))

    def changed(self, weights: Sequence[Fraction], sequence: int) -> "Mixture":
        """The mixture that has these weights from a sequence on; itself, if it has them already."""
        current = self.phases[-1]
        shares = _shares(weights)
        if shares == current.shares:
            return self
        if len(shares) != len(current.shares):
            raise PingLlmError(
                f"a blend of {len(current.shares)} sources has {len(shares)} weights; a source may have weight 0"
            )
        before = tuple(phase for phase in self.phases if phase.start < sequence)
        return Mixture((*before, Phase(sequence, shares, current.given_before(sequence))))

    def locate(self, sequence: int) -> tuple[int, int]:
        """The source of a global sequence, and its number among that source's sequences."""
        phase = next(p for p in reversed(self.phases) if p.start <= sequence)
        source = int(phase.schedule[(sequence - phase.start) % PERIOD])
        return source, phase.given_before(sequence)[source]


UNMIXED: Final = Mixture((Phase(0, (PERIOD,), (0,)),))  # a single source


def _shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Whole shares of the period, by largest remainder; a weight above 0 gets at least one slot."""
    if not weights or min(weights) < 0 or sum(weights) != 1:
        raise PingLlmError(f"weights must be at least 0 and add up to 1, not {[str(w) for w in weights]}")
    exact = [w * PERIOD for w in weights]
    shares = [max(int(e), 1 if e else 0) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    while sum(shares) < PERIOD:
        shares[by_remainder[sum(shares) % len(shares)]] += 1
    while sum(shares) > PERIOD:
        shares[int(np.argmax(shares))] -= 1
    return tuple(shares)
