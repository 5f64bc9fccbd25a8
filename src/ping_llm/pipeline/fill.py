"""How many measurements each context uses, so that sequences are as full as can be and never too full."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ping_llm.pipeline.contexts import (
    Flags,
    Units,
    count_tokens,
    first_measurement,
    largest_increase,
    late_absolute_time,
)
from ping_llm.pipeline.randomness import Ints

_GROWTH_ROUNDS: Final = 3
"""Each round fills all but a fifth of what is still open (a long delta is that much longer than a usual one)."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Measurements that units may use, by unit and in time order. A unit that uses k takes those of rank below k."""

    units: Units
    unit: Ints
    rank: Ints
    time_s: Ints
    timed: Flags
    failed: Flags

    def take(self, chosen: Flags | Ints) -> "Candidates":
        """Some of the candidates."""
        columns = ("unit", "rank", "time_s", "timed", "failed")
        return Candidates(units=self.units, **{name: getattr(self, name)[chosen] for name in columns})

    def of_units(self, which: Ints) -> "Candidates":
        """The candidates of some of the units, numbered anew."""
        number = np.full(len(self.units), -1)
        number[which] = np.arange(len(which))
        mine = self.take(np.flatnonzero(number[self.unit] >= 0))
        return replace(mine, units=self.units.take(which), unit=number[mine.unit])

    def tokens(self, counts: Ints) -> Ints:
        """Tokens of each unit's context when it uses so many measurements."""
        used = self.rank < counts[self.unit]
        return count_tokens(self.units, self.unit[used], self.time_s[used], self.timed[used], self.failed[used])


def fill(
    candidates: Candidates,
    elastic: Flags,
    wanted: Ints,
    sequence: Ints,
    sequences: int,
    length: int,
) -> Ints:
    """Measurements for each unit: all of its window, or for an elastic one as many as still fit its sequence.

    Elastic units first share what the others leave open in proportion to what was planned for them. Then one in each
    sequence grows while another measurement of any length fits; at last one that may just fit is tried.
    """
    units = candidates.units
    of_rigid = candidates.take(~elastic[candidates.unit])
    rigid_tokens = np.bincount(sequence, of_rigid.tokens(units.size), sequences).astype(np.int64)
    which = np.flatnonzero(elastic)
    counts = units.size.copy()
    counts[which] = _fill_elastic(candidates.of_units(which), wanted[which], sequence[which], length - rigid_tokens)
    return counts


def _fill_elastic(candidates: Candidates, wanted: Ints, sequence: Ints, open_tokens: Ints) -> Ints:
    """The same for elastic units alone, and what the others leave open in each sequence."""
    units = candidates.units
    most = np.bincount(candidates.unit, minlength=len(units))  # candidates of each unit
    increase, late = largest_increase(units), late_absolute_time(units)
    least = np.minimum(first_measurement(units), units.most)

    def summed(values: Ints) -> Ints:
        return np.bincount(sequence, values, len(open_tokens)).astype(np.int64)

    share = wanted / np.bincount(sequence, wanted, len(open_tokens))[sequence]
    spare = (open_tokens - summed(least))[sequence]
    counts = np.clip(1 + (spare * share).astype(np.int64) // increase, 1, most)
    tokens = candidates.tokens(counts)
    for last in (*[False] * _GROWTH_ROUNDS, True):
        still_open = open_tokens - summed(tokens)
        growing = _one_of_each(sequence, counts < most, most - counts)
        room = np.maximum(still_open[sequence[growing]] - late[growing], 0) // increase[growing]
        grown = counts.copy()
        grown[growing] += np.maximum(room, 1) if last else room
        grown = np.minimum(grown, most)
        if (grown == counts).all():
            continue
        new = candidates.tokens(grown)
        fits = (summed(new) <= open_tokens)[sequence]
        counts, tokens = np.where(fits, grown, counts), np.where(fits, new, tokens)
    return counts


def _one_of_each(sequence: Ints, eligible: Flags, score: Ints) -> Ints:
    """Of each sequence that has an eligible unit, the index of the one with the highest score."""
    candidates = np.flatnonzero(eligible)
    order = candidates[np.lexsort((-score[candidates], sequence[candidates]))]
    return order[np.flatnonzero(np.diff(sequence[order], prepend=-1))]
