"""Batches in NumPy, many sequences in one pass over flat columns: the specification of the compiled pipeline."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

import reference_rows
from ping_llm.batches.batch import Batch, BatchBuilder, PackedTokens
from ping_llm.batches.contexts import Flags, RowFacts, Units
from ping_llm.batches.plan import PackedBlock, SequencePlan, _make_room
from ping_llm.core.randomness import Ints, Purpose, key
from ping_llm.tokens.encode import EncodableMeasurements, encode
from reference_contexts import (
    Arrangement,
    arrange,
    candidate_limit,
    count_tokens,
    draw_positions,
    draw_units,
    first_measurement,
    keeps_time,
    largest_increase,
    late_absolute_time,
    measurement_words,
)
from reference_randomness import permute

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


def draw_block_units(plan: SequencePlan, epoch: int, block: int) -> Units:
    """The units of a block before they are packed."""
    begin, end = (b * plan.units_per_epoch // plan.blocks for b in (block, block + 1))
    count, failed, long_gaps, family = plan._facts
    facts = RowFacts(count=count, failed=failed, long_gaps=long_gaps, family=family)
    epoch_key = key(plan._seed, epoch)
    number = permute(key(epoch_key, Purpose.EPOCH_ORDER), plan.units_per_epoch, np.arange(begin, end))
    row = np.searchsorted(plan._first_unit, number, side="right") - 1
    return draw_units(epoch_key, row, number, facts.take(row), plan.settings)


def pack_block(plan: SequencePlan, epoch: int, number: int) -> PackedBlock:
    """A block as the plan should pack it."""
    length, sequences = plan.settings.length, plan.sequences_per_block
    units = draw_block_units(plan, epoch, number)
    wanted = np.where(units.likely > length, length * 85 // 100, units.likely)
    sequence = share_out(wanted, sequences)
    least = np.minimum(first_measurement(units), units.most)
    _make_room(sequence, least, sequences, length)
    order_key = key(plan._seed, epoch, Purpose.SEQUENCE_ORDER, number)
    sequence = permute(order_key, sequences, np.arange(sequences))[sequence]
    order = np.lexsort((-units.most, units.whole, sequence))
    units, wanted, sequence, least = units.take(order), wanted[order], sequence[order], least[order]
    first = np.searchsorted(sequence, np.arange(sequences + 1))

    given = np.cumsum(units.most - least) - (units.most - least)
    given_before = given - given[first[sequence]]
    most_in_all = np.bincount(sequence, units.most, sequences).astype(np.int64)[sequence]
    elastic = (np.arange(len(units)) == first[sequence]) | (most_in_all - given_before > length)
    return PackedBlock(units=units, elastic=elastic, wanted=wanted, first=first)


def share_out(wanted: Ints, sequences: int) -> Ints:
    """The sequence of each unit: the largest first, each to the sequence with the least in it so far."""
    sequence_of = np.empty(len(wanted), dtype=np.int64)
    filled = [(0, sequence) for sequence in range(sequences)]
    for unit in np.argsort(-wanted, kind="stable").tolist():
        load, sequence_of[unit] = filled[0]
        heapq.heapreplace(filled, (load + int(wanted[unit]), filled[0][1]))
    return sequence_of


@dataclass(frozen=True, kw_only=True)
class ReferenceSegments:
    """What `BatchBuilder.segments` should give."""

    units: Units
    unit: Ints
    position: Ints
    arrangement: Arrangement
    packed: PackedTokens


def segments(builder: BatchBuilder, sequences: Sequence[int]) -> ReferenceSegments:
    """The contexts of these sequences, from the plan's blocks to tokens. Blocks and rows are taken to be sound."""
    length = builder.plan.settings.length
    parts = []
    for number in sequences:
        epoch, block_number, place = builder.plan.locate(number)
        block = pack_block(builder.plan, epoch, block_number)
        parts.append((block, slice(int(block.first[place]), int(block.first[place + 1]))))
    names = Units.__dataclass_fields__
    units = Units(**{n: np.concatenate([getattr(block.units, n)[part] for block, part in parts]) for n in names})
    elastic = np.concatenate([block.elastic[part] for block, part in parts])
    wanted = np.concatenate([block.wanted[part] for block, part in parts])
    sequence = np.repeat(np.arange(len(parts)), [part.stop - part.start for _, part in parts])

    unit, position, rank = draw_positions(units, candidate_limit(units, length), elastic)
    words = measurement_words(units, unit, position)
    timed = keeps_time(units, unit, words)
    picked = reference_rows.pick(builder.rows, units.row[unit], position)
    candidates = Candidates(
        units=units, unit=unit, rank=rank, time_s=picked.time_s, timed=timed, failed=np.isnan(picked.rtt_ms)
    )
    used = np.flatnonzero(rank < fill(candidates, elastic, wanted, sequence, len(sequences), length)[unit])
    unit = unit[used]
    arrangement = arrange(unit, words[used], picked.time_s[used], timed[used])
    chosen, unit = used[arrangement.order], unit[arrangement.order]
    tokens, lengths = encode(
        EncodableMeasurements(
            family=units.family[unit],
            source=builder.rows.column("source")[units.row[unit]],
            destination=picked.destination[chosen],
            rtt_ms=picked.rtt_ms[chosen],
            time_kind=arrangement.time_kind,
            time_value=arrangement.time_value,
            order=arrangement.field_order,
        )
    )
    sizes = np.bincount(unit, weights=lengths, minlength=len(units)).astype(np.int32)
    return ReferenceSegments(
        units=units,
        unit=unit,
        position=position[chosen],
        arrangement=arrangement,
        packed=PackedTokens(tokens=tokens, sizes=sizes, sequence=sequence.astype(np.int32)),
    )


def expand(packed: PackedTokens, sequences: int, length: int) -> Batch:
    """Lay segments side by side in the arrays of the batch contract."""
    tokens, sizes, sequence = packed.tokens, packed.sizes.astype(np.int64), packed.sequence
    used = np.bincount(sequence, sizes, sequences).astype(np.int64)
    ends = np.cumsum(used)
    inputs = np.zeros((sequences, length), dtype=np.int32)
    for row, (end, size) in enumerate(zip(ends.tolist(), used.tolist(), strict=True)):
        inputs[row, :size] = tokens[end - size : end]

    # Segment numbers and positions are running sums: of 1 at each segment's first token, and of 1 at every token but
    # the first ones, which take back what the segment before them has counted.
    column = np.cumsum(sizes) - sizes - (ends - used)[sequence]
    is_new_sequence = np.diff(sequence, prepend=-1) != 0
    steps = np.zeros((sequences, length), dtype=np.int32)
    steps[sequence, column] = 1
    segment = np.cumsum(steps, axis=1, dtype=np.int32)
    steps.fill(1)
    steps[sequence, column] = np.where(is_new_sequence, 0, 1 - np.roll(sizes, 1))
    position = np.cumsum(steps, axis=1, dtype=np.int32)
    padding = np.arange(length) >= used[:, None]
    segment[padding] = 0
    position[padding] = 0

    # A segment's last token has nothing to predict within it: that place carries no loss.
    predicts = np.zeros((sequences, length), dtype=np.int32)
    predicts[:, :-1] = (segment[:, 1:] == segment[:, :-1]) & (segment[:, :-1] > 0)
    targets = np.zeros_like(inputs)
    np.multiply(inputs[:, 1:], predicts[:, :-1], out=targets[:, :-1])
    return {
        "inputs": inputs,
        "inputs_position": position,
        "inputs_segmentation": segment,
        "targets": targets,
        "targets_position": position * predicts,
        "targets_segmentation": segment * predicts,
    }
