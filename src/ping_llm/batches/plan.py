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

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.contexts import (
    ABSOLUTE,
    BARE_4,
    BARE_6,
    LONGEST_MEASUREMENT,
    ContextSettings,
    Flags,
    Mode,
    RowFacts,
    Units,
)
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints, Purpose, Words, key

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
    elastic: Flags
    wanted: Ints
    """Tokens planned for each unit."""
    first: Ints

    @property
    def most_units(self) -> int:
        """No sequence has more."""
        return int(np.diff(self.first).max())


@dataclass(frozen=True, kw_only=True)
class PlannedUnits:
    """The units of some sequences, as the plan has them."""

    units: Units
    elastic: Flags
    wanted: Ints
    sequence: npt.NDArray[np.int32]
    """Sequence of each unit, counted from 0 within the request."""

    def take(self, chosen: Flags) -> "PlannedUnits":
        return PlannedUnits(
            units=self.units.take(chosen),
            elastic=self.elastic[chosen],
            wanted=self.wanted[chosen],
            sequence=self.sequence[chosen],
        )

    @classmethod
    def joined(cls, parts: Sequence["PlannedUnits"]) -> "PlannedUnits":
        columns = map(np.concatenate, zip(*(part.units.columns for part in parts), strict=True))
        return cls(
            units=Units(**dict(zip(Units.__dataclass_fields__, columns, strict=True))),
            elastic=np.concatenate([part.elastic for part in parts]),
            wanted=np.concatenate([part.wanted for part in parts]),
            sequence=np.concatenate([part.sequence for part in parts]),
        )


class SequencePlan:
    """The endless series of sequences that a set of rows gives for a seed."""

    def __init__(self, facts: RowFacts, seed: int, settings: ContextSettings) -> None:
        if not len(facts.count):
            raise PingLlmError("there is no row to make sequences from")
        if settings.length < LONGEST_MEASUREMENT:
            raise PingLlmError(f"a sequence must have at least {LONGEST_MEASUREMENT} tokens, not {settings.length}")
        self.settings = settings
        self._seed = seed
        self._facts = tuple(
            _unwritable(column, kind)
            for column, kind in (
                (facts.count, np.uint32),
                (facts.failed, np.uint32),
                (facts.long_gaps, np.uint32),
                (facts.family, np.uint8),
            )
        )
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

    @cached_property
    def _signposts(self) -> Ints:
        """Row of every 16th unit: from there it is not far to that of any."""
        from ping_llm.batches.kernels.planning import SIGNPOST_UNITS

        units = np.arange(0, self.units_per_epoch + SIGNPOST_UNITS, SIGNPOST_UNITS)
        rows = np.searchsorted(self._first_unit, units, side="right") - 1
        return np.minimum(rows, len(self._first_unit) - 2)

    def _units_at(self, epoch: int, begin: int, end: int) -> Units:
        """The units at places `begin` to `end` of an epoch's permutation."""
        from ping_llm.batches.kernels.planning import draw_units

        epoch_key = key(self._seed, epoch)
        order_key = key(epoch_key, Purpose.EPOCH_ORDER)
        units = Units.empty(end - begin)
        draw_units(
            np.uint64(epoch_key),
            np.uint64(order_key),
            begin,
            self.settings.length,
            self._first_unit,
            self._signposts,
            *self._facts,
            *units.columns,
        )
        return units

    def _wanted(self, units: Units) -> Ints:
        length = self.settings.length
        return np.where(units.likely > length, length * _LONG_PERCENT // 100, units.likely)

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and place in the block of a sequence, counted from the beginning of all epochs."""
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        return epoch, *divmod(within, self.sequences_per_block)

    def units_of(self, sequences: Sequence[int]) -> PlannedUnits:
        """The units of any sequences. Consecutive ones, of one block, are a view of it."""
        parts, done = [], 0
        while done < len(sequences):
            epoch, number, place = self.locate(sequences[done])
            end = done + 1
            most = min(len(sequences), done + self.sequences_per_block - place)
            if isinstance(sequences, range) and sequences.step == 1:
                end = most
            while end < most and sequences[end] == sequences[end - 1] + 1:
                end += 1
            block = self.block(epoch, number)
            first = block.first[place : place + end - done + 1]
            chosen = slice(int(first[0]), int(first[-1]))
            parts.append(
                PlannedUnits(
                    units=block.units.take(chosen),
                    elastic=block.elastic[chosen],
                    wanted=block.wanted[chosen],
                    sequence=np.repeat(np.arange(done, end, dtype=np.int32), np.diff(first)),
                )
            )
            done = end
        return parts[0] if len(parts) == 1 else PlannedUnits.joined(parts)

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
        from ping_llm.batches.kernels.planning import choose_elastic, order_by_sequence, share_out

        length, sequences = self.settings.length, self.sequences_per_block
        wanted = self._wanted(units)
        sequence = share_out(wanted, sequences)
        _make_room(sequence, _least(units), sequences, length)
        order, first = order_by_sequence(np.uint64(order_key), sequences, sequence, units.most, units.whole)
        units, wanted = units.take(order), wanted[order]
        elastic = choose_elastic(first, units.family, units.mode, units.most, length)
        return PackedBlock(units=units, elastic=elastic, wanted=wanted, first=first)


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
    """The most tokens that one measurement of each unit can take."""
    one = np.where(units.family == 6, BARE_6, BARE_4) + np.where(units.mode == Mode.NONE, 0, ABSOLUTE)
    return np.minimum(one, units.most)


def _unwritable(column: npt.NDArray[Any], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """The column as kernels expect it: as it is, if it is one of the row index."""
    result = np.ascontiguousarray(column, dtype=kind).view()
    result.flags.writeable = False
    return result
