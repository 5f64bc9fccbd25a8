"""Batches in NumPy, many sequences in one pass over flat columns: the specification of the compiled pipeline."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

import reference_rows
from ping_llm.batches.batch import PackedTokens
from ping_llm.batches.spec import Batch
from ping_llm.contexts.plan import Block, Flags, Samples, SequencePlan, make_room
from ping_llm.contexts.source import RowSequences
from ping_llm.core.randomness import Ints, Purpose, extend, key, uniform
from ping_llm.tokens.encode import encode
from reference_contexts import (
    Arrangement,
    arrange,
    candidate_limit,
    count_tokens,
    draw_positions,
    draw_samples,
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
    """Measurements that samples may use, by sample and in time order. One that uses k takes those of rank below k."""

    samples: Samples
    sample: Ints
    rank: Ints
    time_s: Ints
    timed: Flags
    failed: Flags

    def take(self, chosen: Flags | Ints) -> "Candidates":
        """Some of the candidates."""
        columns = ("sample", "rank", "time_s", "timed", "failed")
        return Candidates(samples=self.samples, **{name: getattr(self, name)[chosen] for name in columns})

    def of_samples(self, which: Ints) -> "Candidates":
        """The candidates of some of the samples, numbered anew."""
        number = np.full(len(self.samples.row), -1)
        number[which] = np.arange(len(which))
        mine = self.take(np.flatnonzero(number[self.sample] >= 0))
        return replace(mine, samples=self.samples.take(which), sample=number[mine.sample])

    def tokens(self, counts: Ints) -> Ints:
        """Tokens of each sample's context when it uses so many measurements."""
        used = self.rank < counts[self.sample]
        return count_tokens(self.samples, self.sample[used], self.time_s[used], self.timed[used], self.failed[used])


def fill(candidates: Candidates, sequence: Ints, sequences: int, length: int) -> Ints:
    """The measurements of each sample: its whole window or, if it is shrinkable, as many as still fit its sequence.

    Shrinkable samples first share what the others leave free, in proportion to what was planned for them. Then one in
    each sequence grows while another measurement of any length fits; finally one more is added if it happens to fit.
    """
    samples, shrinkable = candidates.samples, candidates.samples.shrinkable
    of_rigid = candidates.take(~shrinkable[candidates.sample])
    rigid_tokens = np.bincount(sequence, of_rigid.tokens(samples.size), sequences).astype(np.int64)
    which = np.flatnonzero(shrinkable)
    counts = samples.size.copy()
    counts[which] = _fill_shrinkable(candidates.of_samples(which), sequence[which], length - rigid_tokens)
    return counts


def _fill_shrinkable(candidates: Candidates, sequence: Ints, open_tokens: Ints) -> Ints:
    """The same for shrinkable samples alone, and what the others leave open in each sequence."""
    samples = candidates.samples
    most = np.bincount(candidates.sample, minlength=len(samples.row))  # candidates of each sample
    increase, late = largest_increase(samples), late_absolute_time(samples)

    def summed(values: Ints) -> Ints:
        return np.bincount(sequence, values, len(open_tokens)).astype(np.int64)

    share = samples.target_tokens / np.bincount(sequence, samples.target_tokens, len(open_tokens))[sequence]
    spare = (open_tokens - summed(samples.min_tokens))[sequence]
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
    """Of each sequence that has an eligible sample, the index of the one with the highest score."""
    candidates = np.flatnonzero(eligible)
    order = candidates[np.lexsort((-score[candidates], sequence[candidates]))]
    return order[np.flatnonzero(np.diff(sequence[order], prepend=-1))]


def pack_block(plan: SequencePlan, epoch: int, number: int) -> Block:
    """A block as the plan should pack it."""
    length, sequences = plan.settings.length, plan.sequences_per_block
    begin, end = (b * plan.samples_per_epoch // plan.blocks for b in (number, number + 1))
    epoch_key = key(plan.seed, epoch)
    drawn = permute(key(epoch_key, Purpose.EPOCH_ORDER), plan.samples_per_epoch, np.arange(begin, end))
    row = np.searchsorted(plan.first_sample, drawn, side="right") - 1
    samples = draw_samples(epoch_key, row, drawn, plan.facts, plan.settings)

    sequence = share_out(samples.target_tokens, sequences)
    make_room(sequence, samples.min_tokens, sequences, length)
    order_key = key(plan.seed, epoch, Purpose.SEQUENCE_ORDER, number)
    sequence = permute(order_key, sequences, np.arange(sequences))[sequence]
    order = np.lexsort((-samples.max_tokens, samples.whole, sequence))
    samples, first = samples.take(order), np.searchsorted(sequence[order], np.arange(sequences + 1))
    for begin, end in pairwise(first.tolist()):
        tokens = int(samples.max_tokens[begin:end].sum())
        for sample in range(begin, end):
            samples.shrinkable[sample] = sample == begin or tokens > length
            tokens -= int(samples.max_tokens[sample] - samples.min_tokens[sample])
    return Block(samples=samples, first=first)


def share_out(target_tokens: Ints, sequences: int) -> Ints:
    """The sequence of each sample: the largest first, each to the sequence with the least in it so far."""
    sequence_of = np.empty(len(target_tokens), dtype=np.int64)
    filled = [(0, sequence) for sequence in range(sequences)]
    for sample in np.argsort(-target_tokens, kind="stable").tolist():
        load, sequence_of[sample] = filled[0]
        heapq.heapreplace(filled, (load + int(target_tokens[sample]), filled[0][1]))
    return sequence_of


@dataclass(frozen=True, kw_only=True)
class ReferenceSegments:
    """What `RowSequences.segments` should give."""

    samples: Samples
    sample: Ints
    position: Ints
    arrangement: Arrangement
    packed: PackedTokens


def segments(builder: RowSequences, sequences: Sequence[int]) -> ReferenceSegments:
    """The contexts of these sequences, from the plan's blocks to tokens. Blocks and rows are taken to be sound."""
    length = builder.plan.settings.length
    parts: list[Samples] = []
    blocks: dict[tuple[int, int], Block] = {}
    for number in sequences:
        epoch, block_number, index = builder.plan.locate(number)
        at = epoch, block_number
        blocks[at] = block = blocks[at] if at in blocks else pack_block(builder.plan, *at)
        parts.append(block.samples.take(slice(int(block.first[index]), int(block.first[index + 1]))))
    samples = Samples.concatenate(parts)
    sequence = np.repeat(np.arange(len(parts)), [len(part.row) for part in parts])

    sample, position, rank = draw_positions(samples, candidate_limit(samples, length), samples.shrinkable)
    words = measurement_words(samples, sample, position)
    timed = keeps_time(samples, sample, words)
    picked = reference_rows.pick(builder.rows, samples.row[sample], position)
    candidates = Candidates(
        samples=samples, sample=sample, rank=rank, time_s=picked.time_s, timed=timed, failed=np.isnan(picked.rtt_ms)
    )
    used = np.flatnonzero(rank < fill(candidates, sequence, len(sequences), length)[sample])
    sample = sample[used]
    result_last = uniform(extend(samples.key, Purpose.FIELD_ORDER)) < builder.plan.settings.result_last
    arrangement = arrange(sample, words[used], picked.time_s[used], timed[used], result_last)
    chosen, sample = used[arrangement.order], sample[arrangement.order]
    tokens, lengths = encode(
        family=samples.family[sample],
        source=builder.rows.column("source")[samples.row[sample]],
        destination=picked.destination[chosen],
        rtt_ms=picked.rtt_ms[chosen],
        time_kind=arrangement.time_kind,
        time_value=arrangement.time_value,
        order=arrangement.field_order,
    )
    sizes = np.bincount(sample, weights=lengths, minlength=len(samples.row)).astype(np.int32)
    return ReferenceSegments(
        samples=samples,
        sample=sample,
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

    # A segment's last token has nothing to predict within it: that index carries no loss.
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
