"""Which contexts share a sequence: from the row index alone, for any sequence of any epoch by itself.

Glossary
  unit       one context of one row: number u of an epoch's U units, rows in order
  epoch      a random permutation of all units, another one each time; every unit is in it exactly once
  block      some 16 thousand consecutive units of that permutation, packed together into sequences
  sequence   `length` tokens that several units share
  elastic    a unit that gives way: it uses as many measurements of its window as fit what the others leave open

How many sequences a block makes is the same for all blocks and epochs: as many as its tokens probably fill, less one
per cent. So the place of a sequence is plain arithmetic, and only the block it is in has to be worked out. Blocks are
large enough that their sizes hardly differ, and what differs is taken up by the elastic units.
"""

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.errors import PingLlmError
from ping_llm.pipeline.contexts import (
    LONGEST_MEASUREMENT,
    ContextSettings,
    RowFacts,
    Units,
    draw_units,
    first_measurement,
)
from ping_llm.pipeline.randomness import Ints, Purpose, Words, key, permute

BLOCK_UNITS: Final = 16_384
_SAMPLED_UNITS: Final = 1 << 18
_SAMPLED_EPOCHS: Final = 16
_OVERFILL_PERCENT: Final = 101
"""Tokens planned for a sequence, relative to its length. What is too much is left out of an elastic unit's sample."""
_LONG_PERCENT: Final = 85
"""Part of a sequence that is planned for a window that would fill it alone: the rest is for small units beside it."""
_BLOCKS_KEPT: Final = 4


@dataclass(frozen=True, kw_only=True)
class PackedBlock:
    """The units of a block, by sequence: those of sequence s are `first[s]` to `first[s + 1]`."""

    units: Units
    elastic: npt.NDArray[np.bool_]
    wanted: Ints
    """Tokens planned for each unit."""
    first: Ints

    @property
    def most_units(self) -> int:
        """No sequence has more."""
        return int(np.diff(self.first).max())


class SequencePlan:
    """The endless series of sequences that a set of rows gives for a seed."""

    def __init__(self, facts: RowFacts, seed: int, settings: ContextSettings) -> None:
        if not len(facts.count):
            raise PingLlmError("there is no row to make sequences from")
        if settings.length < LONGEST_MEASUREMENT:
            raise PingLlmError(f"a sequence must have at least {LONGEST_MEASUREMENT} tokens, not {settings.length}")
        self.settings = settings
        self._seed = seed
        self._facts = facts
        per_row = settings.per_row(facts.count)
        self._first_unit = np.zeros(len(per_row) + 1, dtype=np.int64)
        np.cumsum(per_row, out=self._first_unit[1:])
        self.units_per_epoch = int(self._first_unit[-1])
        self.blocks = -(-self.units_per_epoch // BLOCK_UNITS)
        self._kept: OrderedDict[tuple[int, int], PackedBlock] = OrderedDict()

    @cached_property
    def sequences_per_block(self) -> int:
        """From the likely sizes of the units: of several epochs if there are few, of a sample if there are many.

        Sums are of whole numbers: this must come out the same on every machine, or all batches would be others.
        """
        epochs = min(max(_SAMPLED_UNITS // self.units_per_epoch, 1), _SAMPLED_EPOCHS)
        parts = [self._units_at(epoch, 0, min(self.units_per_epoch, _SAMPLED_UNITS)) for epoch in range(epochs)]
        sampled = sum(map(len, parts))
        units = -(-self.units_per_epoch // self.blocks)
        wanted = sum(int(self._wanted(part).sum()) for part in parts)
        filled = wanted * units * 100 // (sampled * self.settings.length * _OVERFILL_PERCENT)

        # Of every unit at least one measurement must have room, in any epoch: six standard deviations of slack.
        least = np.concatenate([_least(part) for part in parts])
        mean = int(least.sum()) / sampled
        deviation = math.sqrt(max(0.0, int((least * least).sum()) / sampled - mean * mean))
        room = self.settings.length - int(least.max()) + 1
        needed = math.ceil((mean * units + 6 * deviation * math.sqrt(units)) / room)
        return min(max(1, filled, needed), units)

    @property
    def sequences_per_epoch(self) -> int:
        return self.sequences_per_block * self.blocks

    def _units_at(self, epoch: int, begin: int, end: int) -> Units:
        """The units at places `begin` to `end` of an epoch's permutation."""
        epoch_key = key(self._seed, epoch)
        order = key(epoch_key, Purpose.EPOCH_ORDER)
        number = permute(order, self.units_per_epoch, np.arange(begin, end))
        row = np.searchsorted(self._first_unit, number, side="right") - 1
        return draw_units(epoch_key, row, number, self._facts.take(row), self.settings)

    def _wanted(self, units: Units) -> Ints:
        length = self.settings.length
        return np.where(units.likely > length, length * _LONG_PERCENT // 100, units.likely)

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and place in the block of a sequence, counted from the beginning of all epochs."""
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        return epoch, *divmod(within, self.sequences_per_block)

    def block(self, epoch: int, block: int) -> PackedBlock:
        place = epoch, block
        if place not in self._kept:
            begin, end = (b * self.units_per_epoch // self.blocks for b in (block, block + 1))
            order = key(self._seed, epoch, Purpose.SEQUENCE_ORDER, block)
            self._kept[place] = self._pack(self._units_at(epoch, begin, end), order)
            if len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]

    def _pack(self, units: Units, order_key: Words) -> PackedBlock:
        wanted = self._wanted(units)
        sequence = _share_out(wanted, self.sequences_per_block)
        _make_room(sequence, _least(units), self.sequences_per_block, self.settings.length)
        # Shared out largest first, the first sequences would have few long contexts and the last ones many short.
        sequence = permute(order_key, self.sequences_per_block, np.arange(self.sequences_per_block))[sequence]
        # Within a sequence: windows before whole rows, then large before small. The first ones are elastic.
        order = np.lexsort((-units.most, units.whole, sequence))
        units, wanted, sequence = units.take(order), wanted[order], sequence[order]
        first = np.searchsorted(sequence, np.arange(self.sequences_per_block + 1))

        # Units are made elastic, one after the other, until the sequence cannot overflow whatever the data are.
        gives_way = units.most - _least(units)
        given_before = _cumulative_before(gives_way, first[sequence])
        most_in_all = np.bincount(sequence, units.most, self.sequences_per_block).astype(np.int64)[sequence]
        is_first = np.arange(len(units)) == first[sequence]
        elastic = is_first | (most_in_all - given_before > self.settings.length)
        return PackedBlock(units=units, elastic=elastic, wanted=wanted, first=first)


def _share_out(wanted: Ints, sequences: int) -> Ints:
    """The sequence of each unit: the largest first, each to the sequence with the least in it so far."""
    sequence_of = np.empty(len(wanted), dtype=np.int64)
    filled = [(0, sequence) for sequence in range(sequences)]
    order = np.argsort(-wanted, kind="stable")
    sizes = wanted[order].tolist()
    places = []
    for size in sizes:
        load, sequence = filled[0]
        places.append(sequence)
        heapq.heapreplace(filled, (load + size, sequence))
    sequence_of[order] = places
    return sequence_of


def _make_room(sequence: Ints, least: Ints, sequences: int, length: int) -> None:
    """Move units out of sequences that could not hold one measurement of each. Rare: it takes many tiny rows."""
    load = np.bincount(sequence, least, sequences).astype(np.int64)
    while load.max() > length:
        fullest, emptiest = int(np.argmax(load)), int(np.argmin(load))
        unit = int(np.flatnonzero(sequence == fullest)[-1])
        if load[emptiest] + least[unit] > length:
            raise PingLlmError(f"internal error: {len(sequence)} contexts do not fit {sequences} sequences of {length}")
        sequence[unit] = emptiest
        load[fullest] -= least[unit]
        load[emptiest] += least[unit]


def _least(units: Units) -> Ints:
    """Tokens that one measurement of each unit can take."""
    return np.minimum(first_measurement(units), units.most)


def _cumulative_before(values: Ints, first: Ints) -> Ints:
    """Sum of the values before each, within its group, which begins at index `first`."""
    total = np.cumsum(values) - values
    return total - total[first]
