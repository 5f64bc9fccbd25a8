"""Which samples share a sequence: from the row index alone, for any sequence of any epoch by itself.

A row of n measurements gives a few *samples* per epoch. Each becomes one context: a window of the row's history
(log-uniform in size, so that minutes and months are seen equally often) in one of three timestamp modes, with the
fields of each measurement in a random order (in a share of contexts, `result_last`, with the result always last). A
row that fits whole is used whole.

    full      every measurement has its time; they are in time order
    partial   some lose their time; these stand at random positions among the others, which stay in time order
    none      no times; random order

An *epoch* is a random permutation of all samples, another one each time. A *block* is some 16 thousand consecutive
samples of it, which are packed into *sequences* of `length` tokens: the largest first, each into the emptiest sequence.
How many tokens a sample takes is known exactly only when its measurements are read. So one or more samples of each
sequence are *shrinkable*: they use as many measurements of their window as fit what the others leave free.

How many sequences a block makes is the same for all blocks and epochs: as many as its tokens probably fill, less one
per cent. So the block of a sequence is plain arithmetic, and only that block has to be worked out. Blocks are large
enough that their sizes hardly differ, and what differs is taken up by the shrinkable samples.

Importing this module loads (or compiles) the kernels.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.compiled import Array, kernel, mapped, part_of_kernels, types
from ping_llm.core.draws import below, extend, log_uniform, permute_run, uniform
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints, Purpose, Words, key, permute
from ping_llm.rows.dataset import RowSet
from ping_llm.tokens import TimeKind, token_counts

Flags = npt.NDArray[np.bool_]


class Mode(IntEnum):
    FULL = 0
    PARTIAL = 1
    NONE = 2


MODE_SHARES: Final = (0.4, 0.3, 0.3)

# Tokens of a measurement by family without its time, what its time adds, and what is saved if it failed.
BARE_4: Final = int(token_counts(4, False, TimeKind.NONE))
BARE_6: Final = int(token_counts(6, False, TimeKind.NONE))
ABSOLUTE: Final = int(token_counts(4, False, TimeKind.ABSOLUTE)) - BARE_4
DELTA1: Final = int(token_counts(4, False, TimeKind.DELTA1)) - BARE_4
DELTA4: Final = int(token_counts(4, False, TimeKind.DELTA4)) - BARE_4
FAILED_SAVES: Final = BARE_4 - int(token_counts(4, True, TimeKind.NONE))
LONGEST_MEASUREMENT: Final = BARE_6 + ABSOLUTE

BLOCK_SAMPLES: Final = 16_384
_OVERFILL_PERCENT: Final = 101  # tokens planned for a sequence; a shrinkable sample leaves out what is too much
_LONG_PERCENT: Final = 85  # planned for a window that could fill a sequence alone: small samples get the rest
_STATISTICS_SAMPLES: Final = 1 << 18
_STATISTICS_EPOCHS: Final = 16
_CACHED_BLOCKS: Final = 4


class RowFacts(NamedTuple):
    """The columns of the row index that decide sizes. The index was checked when it was opened."""

    count: npt.NDArray[Any]  # type: ignore[assignment]  # instead of tuple.count
    failed: npt.NDArray[Any]
    long_gaps: npt.NDArray[Any]
    family: npt.NDArray[Any]

    @classmethod
    def of(cls, rows: RowSet) -> "RowFacts":
        return cls(*map(rows.column, cls._fields))


class Samples(NamedTuple):
    """Contexts before their measurements are read: all that follows from the row index and a key."""

    row: Ints
    number: Ints  # the sample's number in the epoch: its identity for all random choices
    key: Words
    family: npt.NDArray[np.uint8]
    mode: npt.NDArray[np.uint8]
    start: Ints  # first measurement of the window in its row
    size: Ints  # measurements in the window
    whole: Flags  # the window is the whole row, because that fits
    max_tokens: Ints  # an upper bound on the tokens of the whole window
    min_tokens: Ints  # tokens that must be left for it: as many as one measurement can take
    target_tokens: Ints  # tokens planned for it: an estimate, in whole numbers so that sums are exact on every machine
    shrinkable: Flags  # set when the sample is packed

    @classmethod
    def empty(cls, count: int) -> "Samples":
        """Columns to be filled in."""
        kinds = {"key": np.uint64, "family": np.uint8, "mode": np.uint8, "whole": np.bool_, "shrinkable": np.bool_}
        return cls(*(np.empty(count, dtype=kinds.get(name, np.int64)) for name in cls._fields))

    @classmethod
    def concatenate(cls, parts: Iterable["Samples"]) -> "Samples":
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def take(self, chosen: Any) -> "Samples":
        return Samples(*(column[chosen] for column in self))


class Block(NamedTuple):
    """Packed samples, by sequence: those of sequence s are `first[s]` to `first[s + 1]`."""

    samples: Samples
    first: Ints


class SequencePlan:
    """The endless series of sequences that a set of rows gives for a seed.

    The samples of row r are those from `first_sample[r]` up to `first_sample[r + 1]`. `block(epoch, number)` gives a
    block of packed samples.
    """

    def __init__(self, facts: RowFacts, seed: int, settings: ContextSettings) -> None:
        if not len(facts.count):
            raise PingLlmError("there is no row to make sequences from")
        if settings.length < LONGEST_MEASUREMENT:
            raise PingLlmError(f"a sequence must have at least {LONGEST_MEASUREMENT} tokens, not {settings.length}")
        self.settings = settings
        self.seed = seed
        self.facts = facts
        self.first_sample = np.append(0, np.cumsum(settings.per_row(facts.count)))
        self.samples_per_epoch = int(self.first_sample[-1])
        self.blocks = -(-self.samples_per_epoch // BLOCK_SAMPLES)
        self.block = lru_cache(maxsize=_CACHED_BLOCKS)(self._pack)

    @cached_property
    def sequences_per_block(self) -> int:
        """From the target sizes of samples: those of several epochs if there are few, a part of them if there are many.

        Sums are of whole numbers: the result must be the same on every machine, or all batches would differ.
        """
        epochs = min(max(_STATISTICS_SAMPLES // self.samples_per_epoch, 1), _STATISTICS_EPOCHS)
        end = min(self.samples_per_epoch, _STATISTICS_SAMPLES)
        drawn = Samples.concatenate(self._draw(epoch, 0, end) for epoch in range(epochs))
        per_block = -(-self.samples_per_epoch // self.blocks)
        target = int(drawn.target_tokens.sum()) * per_block * 100
        filled = target // (len(drawn.row) * self.settings.length * _OVERFILL_PERCENT)

        # Every sample must have room for a measurement, in any epoch: six standard deviations of slack.
        least = drawn.min_tokens
        mean = int(least.sum()) / len(drawn.row)
        deviation = math.sqrt(max(0.0, int((least * least).sum()) / len(drawn.row) - mean * mean))
        room = self.settings.length - int(least.max()) + 1
        needed = math.ceil((mean * per_block + 6 * deviation * math.sqrt(per_block)) / room)
        return min(max(1, filled, needed), per_block)

    @property
    def sequences_per_epoch(self) -> int:
        return self.sequences_per_block * self.blocks

    @cached_property
    def _signposts(self) -> Ints:
        """The row of every 16th sample, where the search for the row of any sample begins."""
        numbers = np.arange(0, self.samples_per_epoch + _SIGNPOST_SAMPLES, _SIGNPOST_SAMPLES)
        rows = np.searchsorted(self.first_sample, numbers, side="right") - 1
        return np.minimum(rows, len(self.first_sample) - 2)

    def _draw(self, epoch: int, begin: int, end: int) -> Samples:
        """The samples at positions `begin` to `end` of an epoch's permutation."""
        epoch_key, samples = key(self.seed, epoch), Samples.empty(end - begin)
        keys = np.uint64(epoch_key), np.uint64(key(epoch_key, Purpose.EPOCH_ORDER))
        _draw_samples(*keys, begin, self.settings.length, self.first_sample, self._signposts, self.facts, samples)
        return samples

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and index in the block of a sequence, counted from the beginning of all epochs."""
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        return epoch, *divmod(within, self.sequences_per_block)

    def samples_of(self, sequences: Sequence[int]) -> tuple[Samples, npt.NDArray[np.int32]]:
        """The samples of any sequences, and for each of them the index into `sequences`.

        Those of consecutive sequences of one block are a view of it.
        """
        parts, counts, done = [], [], 0
        while done < len(sequences):
            epoch, number, index = self.locate(sequences[done])
            end, last = done + 1, min(len(sequences), done + self.sequences_per_block - index)
            if isinstance(sequences, range) and sequences.step == 1:
                end = last
            while end < last and sequences[end] == sequences[end - 1] + 1:
                end += 1
            block = self.block(epoch, number)
            first = block.first[index : index + end - done + 1]
            parts.append(block.samples.take(slice(int(first[0]), int(first[-1]))))
            counts.append(np.diff(first))
            done = end
        samples = parts[0] if len(parts) == 1 else Samples.concatenate(parts)
        return samples, np.repeat(np.arange(len(sequences), dtype=np.int32), np.concatenate(counts))

    def _pack(self, epoch: int, block: int) -> Block:
        begin, end = (b * self.samples_per_epoch // self.blocks for b in (block, block + 1))
        samples, length, sequences = self._draw(epoch, begin, end), self.settings.length, self.sequences_per_block
        # NumPy's stable sort of 16-bit numbers is a radix sort, several times as fast as that of larger ones.
        largest_first = np.argsort((length - samples.target_tokens).astype(np.min_scalar_type(length)), kind="stable")
        sequence = _share_out(largest_first, samples.target_tokens, sequences)
        make_room(sequence, samples.min_tokens, sequences, length)
        # Shared out largest first, the first sequences would have few long contexts and the last ones many short ones,
        # so the sequences are renumbered at random.
        order_key = key(self.seed, epoch, Purpose.SEQUENCE_ORDER, block)
        sequence = permute(order_key, sequences, np.arange(sequences))[sequence]
        # In a sequence windows come before whole rows, then large samples before small ones, then as they were drawn.
        drawn = np.arange(len(samples.row))
        order = np.sort(samples.whole.astype(np.int64) << 48 | (1 << 33) - samples.max_tokens << 14 | drawn) % (1 << 14)
        order = order[np.argsort(sequence[order].astype(np.uint16), kind="stable")]
        samples, sequence = samples.take(order), sequence[order]
        first = np.searchsorted(sequence, np.arange(sequences + 1))
        # Samples become shrinkable, one after the other, until the sequence cannot overflow whatever the data are.
        saved = np.append(0, np.cumsum(samples.max_tokens - samples.min_tokens))[:-1]
        total = np.bincount(sequence, samples.max_tokens, sequences).astype(np.int64)[sequence]
        overflows = total - (saved - saved[first[sequence]]) > length
        samples.shrinkable[:] = overflows | (np.arange(len(samples.row)) == first[sequence])
        return Block(samples=samples, first=first)


def make_room(sequence: Ints, min_tokens: Ints, sequences: int, length: int) -> None:
    """Move samples out of sequences that could not hold one measurement of each. Rare: it takes many tiny rows."""
    load = np.bincount(sequence, min_tokens, sequences).astype(np.int64)
    while load.max() > length:
        fullest, emptiest = int(np.argmax(load)), int(np.argmin(load))
        moved = int(np.flatnonzero(sequence == fullest)[-1])
        if load[emptiest] + min_tokens[moved] > length:
            raise PingLlmError(f"internal error: {len(sequence)} contexts do not fit {sequences} sequences of {length}")
        sequence[moved] = emptiest
        load[fullest] -= min_tokens[moved]
        load[emptiest] += min_tokens[moved]


# Kernels: mode, window and size of samples, from their numbers and the row index.

_NOT_FULL_FROM: Final = MODE_SHARES[0]
_NONE_FROM: Final = MODE_SHARES[0] + MODE_SHARES[1]
_SIGNPOST_SAMPLES: Final = 16

_I64, _U64, _U8, _BOOL = (kind[::1] for kind in (types.int64, types.uint64, types.uint8, types.bool_))
_FACTS: Final = types.NamedTuple([*[mapped(types.uint32)] * 3, mapped(types.uint8)], RowFacts)
SAMPLES: Final = types.NamedTuple([_I64, _I64, _U64, _U8, _U8, _I64, _I64, _BOOL, _I64, _I64, _I64, _BOOL], Samples)


@part_of_kernels
def bare_tokens(family: Any) -> Any:
    """Tokens of a measurement without a time that did not fail."""
    return BARE_6 if family == 6 else BARE_4


@part_of_kernels
def _max_tokens(family: Any, mode: Any, size: Any, count: Any, failed: Any, long_gaps: Any) -> Any:
    """The most tokens that `size` consecutive measurements of a row can take.

    With all times kept, every gap is one of the row's, and the index counts the long ones. Where times are lost, gaps
    merge, and any of them may become long.
    """
    tokens = bare_tokens(family) * size
    if mode == Mode.FULL:
        tokens += ABSOLUTE + DELTA1 * (size - 1) + (DELTA4 - DELTA1) * long_gaps
    elif mode == Mode.PARTIAL:
        tokens += ABSOLUTE + DELTA4 * (size - 1)
    return tokens - (failed * FAILED_SAVES if size == count else 0)


@part_of_kernels
def _likely_tokens(family: Any, mode: Any, size: Any, count: Any, failed: Any, long_gaps: Any) -> Any:
    """The tokens that they will probably take."""
    tokens = bare_tokens(family) * size
    if mode == Mode.FULL:
        tokens += ABSOLUTE + DELTA1 * (size - 1) + (DELTA4 - DELTA1) * (long_gaps * size // count)
    elif mode == Mode.PARTIAL:
        tokens += ABSOLUTE // 2 if size == 1 else ABSOLUTE - DELTA1 + (DELTA1 + 1) * size // 2
    return tokens - failed * size // count * FAILED_SAVES


@part_of_kernels
def _row_of(first_sample: Any, signposts: Any, number: Any) -> Any:
    """The row that a sample belongs to: the last one whose first sample does not come after it."""
    low, high = signposts[number // _SIGNPOST_SAMPLES], signposts[number // _SIGNPOST_SAMPLES + 1] + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if first_sample[middle] <= number:
            low = middle
        else:
            high = middle
    return low


@kernel(types.uint64, types.uint64, types.int64, types.int64, _I64, _I64, _FACTS, SAMPLES)
def _draw_samples(
    epoch_key: Any, order_key: Any, begin: Any, length: Any, first_sample: Any, signposts: Any, facts: Any, samples: Any
) -> None:
    """The samples at positions `begin` and after of an epoch's permutation: fills in their columns.

    `signposts` are the rows of every 16th sample. In several passes, so that the compiler can draw for several samples
    side by side.
    """
    row, number, key, family, mode, start, size, whole, max_tokens, min_tokens, target_tokens, shrinkable = samples
    permute_run(order_key, first_sample[len(first_sample) - 1], begin, number)
    for i in range(len(row)):
        row[i] = _row_of(first_sample, signposts, number[i])
        size[i] = facts.count[row[i]]
    for i in range(len(row)):
        key[i] = extend(epoch_key, number[i])
        size[i] = log_uniform(extend(key[i], Purpose.WINDOW_SIZE), size[i])
    for i in range(len(row)):
        r, word = row[i], key[i]
        count, failed, long_gaps = np.int64(facts.count[r]), np.int64(facts.failed[r]), np.int64(facts.long_gaps[r])
        drawn = uniform(extend(word, Purpose.MODE))
        m = Mode.FULL if drawn < _NOT_FULL_FROM else Mode.PARTIAL if drawn < _NONE_FROM else Mode.NONE
        f = facts.family[r]
        whole[i] = _max_tokens(f, m, count, count, failed, long_gaps) <= length
        n = count if whole[i] else size[i]
        gaps = min(long_gaps, n)
        family[i], mode[i], size[i] = f, m, n
        start[i] = below(extend(word, Purpose.WINDOW_OFFSET), count - n + 1)
        max_tokens[i] = _max_tokens(f, m, n, count, failed, gaps)
        min_tokens[i] = min(bare_tokens(f) + (0 if m == Mode.NONE else ABSOLUTE), max_tokens[i])
        likely = _likely_tokens(f, m, n, count, failed, gaps)
        target_tokens[i] = length * _LONG_PERCENT // 100 if likely > length else likely
        shrinkable[i] = False


_SEQUENCE_BITS = 24  # a heap entry is a sequence's load and, in its low bits, its number: of equal loads the first wins


@kernel(_I64, _I64, types.int64, returns=_I64)
def _share_out(order: Array, target_tokens: Array, sequences: Any) -> Any:
    """The sequence of each sample: in this order, each to the sequence with the least in it so far."""
    heap = [np.int64(sequence) for sequence in range(sequences)]
    result = np.empty(len(order), dtype=np.int64)
    for sample in order:
        result[sample] = heap[0] & ((1 << _SEQUENCE_BITS) - 1)
        heapq.heapreplace(heap, heap[0] + (target_tokens[sample] << _SEQUENCE_BITS))
    return result
