"""Best-fit packing: which documents of known lengths share a sequence. Any sequence of any epoch is planned by itself.

An epoch is a random permutation of the documents, cut into blocks of about a thousand sequences. Within a block:

split   a document longer than a sequence gives whole sequences and a rest; everything else stays in one piece
pack    the pieces go, longest first, each to the sequence where it leaves the least room (best-fit decreasing)
cut     a block of T tokens has ceil(T / length) sequences, or one more. Where the pieces do not fit them, the emptiest
        sequences are taken apart, and their pieces follow each other in what is left, cut where a sequence ends
order   sequences with parts of one long document are put side by side, and runs of eight are shuffled: so hardly any
        document has to be tokenised by several processes, and none fills a batch

So every token of an epoch is in exactly one sequence, nothing is dropped, padding is at most one or two sequences per
block, and few documents are cut that would have fitted (Ding et al. 2024, "Fewer truncations improve language
modeling"). Each epoch has the same number of sequences, so the epoch and the block of a sequence are plain arithmetic.

Without a seed, documents keep their order: they follow each other, cut where a sequence ends.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ping_llm.core.compiled import Array, kernel, mapped, types
from ping_llm.core.draws import permute_run
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints, Purpose, key, permute

PACKING_VERSION: Final = 1  # raised whenever the same documents would give other sequences
BLOCK_SEQUENCES: Final = 1024
_RUN: Final = 8
"""Sequences shuffled together: with 8 processes, C4 and sequences of 1,024 tokens, 1.18 times the tokens have to be
made, because cut documents are tokenised by several processes; if sequences are shuffled one by one, 1.62 times."""
_BLOCKS_KEPT: Final = 8
_EPOCHS_KEPT: Final = 2


class Pieces(NamedTuple):
    """Parts of documents that become segments, one after the other."""

    sequence: Ints
    document: Ints
    begin: Ints
    size: Ints

    def take(self, chosen: Any) -> "Pieces":
        return Pieces(*(values[chosen] for values in self))


_NOTHING: Final = Pieces(*[np.zeros(0, dtype=np.int64)] * 4)


class PackingPlan:
    """The endless series of sequences that documents of these lengths give for a seed, or in their order."""

    def __init__(self, lengths: npt.NDArray[np.uint32], length: int, seed: int | None) -> None:
        if length < 2:
            raise PingLlmError(f"a sequence must have at least 2 tokens, not {length}")
        self.lengths = np.asarray(lengths)  # of a file that is mapped to memory, a view: documents may be very many
        self.lengths.flags.writeable = False
        self.length, self.seed = length, seed
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        if not self.tokens:
            raise PingLlmError("the documents are empty: there is nothing to make sequences from")
        self.blocks = min(max(1, self.tokens // (BLOCK_SEQUENCES * length)), len(self.lengths))
        self.sequences_per_epoch = -(-self.tokens // length) + self.blocks
        self._first_sequence = lru_cache(maxsize=_EPOCHS_KEPT)(self._count_sequences)
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._pack)

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and index in the block of a sequence, counted from the beginning of all epochs."""
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        first = self._first_sequence(epoch)
        block = int(np.searchsorted(first, within, side="right")) - 1
        return epoch, block, within - int(first[block])

    def pieces_of(self, sequences: range) -> Pieces:
        """What consecutive sequences are made of; `sequence` of the result counts from the first of them."""
        parts, done = [_NOTHING], 0
        while done < len(sequences):
            epoch, block, index = self.locate(sequences[done])
            pieces, first = self._block(epoch, block)
            end = min(index + len(sequences) - done, len(first) - 1)
            part = pieces.take(slice(int(first[index]), int(first[end])))
            parts.append(part._replace(sequence=part.sequence - index + done))
            done += end - index
        return Pieces(*map(np.concatenate, zip(*parts, strict=True)))

    def _count_sequences(self, epoch: int) -> Ints:
        """The first sequence of each block, and of the next epoch. One pass over all lengths: about 20 ns each."""
        tokens = np.zeros(self.blocks, dtype=np.int64)
        if self.seed is None:
            first = np.arange(self.blocks) * len(self.lengths) // self.blocks
            np.add.reduceat(self.lengths, first, dtype=np.int64, out=tokens)
        else:
            _tokens_of_blocks(np.uint64(key(self.seed, epoch, Purpose.EPOCH_ORDER)), self.lengths, tokens)
        sequences = -(-tokens // self.length)
        # Sequences that rounding up has not used go to the first blocks with tokens, so that all epochs have as many.
        sequences[np.flatnonzero(tokens)[: self.sequences_per_epoch - int(sequences.sum())]] += 1
        sequences[-1] += self.sequences_per_epoch - int(sequences.sum())
        return np.append(0, np.cumsum(sequences))

    def _pack(self, epoch: int, block: int) -> tuple[Pieces, Ints]:
        """The pieces of a block by sequence: those of sequence s are `first[s]` to `first[s + 1]`."""
        sequences = int(np.diff(self._first_sequence(epoch)[block : block + 2])[0])
        documents = np.arange(*(b * len(self.lengths) // self.blocks for b in (block, block + 1)))
        if self.seed is not None:
            documents = permute(key(self.seed, epoch, Purpose.EPOCH_ORDER), len(self.lengths), documents)
        documents = documents[self.lengths[documents] > 0]
        sizes = self.lengths[documents].astype(np.int64)
        if self.seed is None:
            number = np.arange(len(documents))
            pieces = _cut(Pieces(number, number, np.zeros_like(number), sizes), sequences)
        else:
            pieces = packed(sizes, sequences, self.length)
            order = _in_runs(pieces, sizes, sequences, key(self.seed, epoch, Purpose.SEQUENCE_ORDER, block))
            pieces = pieces._replace(sequence=np.argsort(order)[pieces.sequence])
            pieces = pieces.take(np.argsort(pieces.sequence, kind="stable"))
        pieces = pieces._replace(document=documents[pieces.document])
        return pieces, np.searchsorted(pieces.sequence, np.arange(sequences + 1))


def _in_runs(pieces: Pieces, sizes: Ints, sequences: int, word: Any) -> Ints:
    """The order of a block's sequences: sorted by the document that each has a part of, then shuffled in runs."""
    leading = np.zeros(sequences, dtype=np.int64)
    is_cut = pieces.size < sizes[pieces.document]
    for chosen in (pieces.take(~is_cut), pieces.take(is_cut)):
        leading[chosen.sequence[::-1]] = chosen.document[::-1]  # the longest is written last
    runs = -(-sequences // _RUN)
    within = (permute(word, runs, np.arange(runs))[:, None] * _RUN + np.arange(_RUN)).ravel()
    return np.argsort(leading, kind="stable")[within[within < sequences]]


def packed(sizes: Ints, sequences: int, length: int) -> Pieces:
    """Put all tokens of documents of these sizes into this number of sequences, which must have room for them."""
    documents, whole = np.arange(len(sizes)), sizes // length
    within = np.arange(int(whole.sum())) - np.repeat(np.cumsum(whole) - whole, whole)
    full = Pieces(np.arange(len(within)), np.repeat(documents, whole), within * length, np.full(len(within), length))

    rest = sizes % length
    order = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]
    pieces = Pieces(np.zeros(len(order), dtype=np.int64), documents[order], (whole * length)[order], rest[order])
    bins = int(_best_fit(pieces.size, length, pieces.sequence)) if len(order) else 0

    gap = length - np.bincount(pieces.sequence, pieces.size, bins).astype(np.int64)
    fullest = np.argsort(gap, kind="stable")
    available, slack = sequences - len(within), sequences * length - int(sizes.sum())
    kept = int(np.searchsorted(np.cumsum(gap[fullest]), slack, side="right"))
    if kept == bins and 0 < bins < available:
        kept -= 1  # so that no sequence stays empty, something must be left to share out
    number = np.empty(bins, dtype=np.int64)
    number[fullest] = np.arange(bins)
    pieces = pieces._replace(sequence=number[pieces.sequence])
    is_kept = pieces.sequence < kept
    loose = pieces.take(np.flatnonzero(~is_kept)[np.argsort(pieces.sequence[~is_kept], kind="stable")])
    parts = (full, 0), (pieces.take(is_kept), len(within)), (_cut(loose, available - kept), len(within) + kept)
    shifted = (part._replace(sequence=part.sequence + first) for part, first in parts)
    return Pieces(*map(np.concatenate, zip(*shifted, strict=True)))


def _cut(pieces: Pieces, sequences: int) -> Pieces:
    """The pieces one after the other, in sequences of equal size."""
    if not len(pieces.size):
        return pieces
    ends = np.cumsum(pieces.size)
    total = int(ends[-1])
    borders = np.arange(sequences + 1) * total // sequences
    cuts = np.unique(np.concatenate([ends - pieces.size, borders[:-1]]))
    piece = np.searchsorted(ends, cuts, side="right")
    return Pieces(
        sequence=np.searchsorted(borders, cuts, side="right") - 1,
        document=pieces.document[piece],
        begin=pieces.begin[piece] + cuts - (ends - pieces.size)[piece],
        size=np.diff(cuts, append=total),
    )


# Kernels.

_CHUNK: Final = 4096


@kernel(types.uint64, mapped(types.uint32), types.int64[::1])
def _tokens_of_blocks(order_key: Any, lengths: Array, tokens: Array) -> None:
    """Adds up the tokens of each block of an epoch's permutation."""
    count, blocks = len(lengths), len(tokens)
    drawn = np.empty(_CHUNK, dtype=np.int64)
    for block in range(blocks):
        begin, end = block * count // blocks, (block + 1) * count // blocks
        total = np.int64(0)
        for at in range(begin, end, _CHUNK):
            documents = drawn[: min(_CHUNK, end - at)]
            permute_run(order_key, count, at, documents)
            for document in documents:
                total += lengths[document]
        tokens[block] = total


@kernel(types.int64[::1], types.int64, types.int64[::1], returns=types.int64)
def _best_fit(sizes: Array, length: Any, bins: Array) -> Any:
    """The bin of each piece, of pieces in falling order of size, and how many bins there are.

    Bins with the same room form a linked list, the latest first. A tree of counts over rooms finds the smallest room
    that is large enough.
    """
    width = 1
    while width <= length:
        width *= 2
    tree = np.zeros(2 * width, dtype=np.int64)
    newest, older = np.full(length + 1, -1, dtype=np.int64), np.full(len(sizes), -1, dtype=np.int64)
    opened = 0
    for i in range(len(sizes)):
        node = width + sizes[i]
        while node > 1 and tree[node] == 0:  # up, to where a room of at least this size is in the subtree
            while node > 1 and node % 2 == 1:
                node //= 2
            node += node > 1
        if node > 1:
            while node < width:  # down, to the leftmost
                node = 2 * node if tree[2 * node] else 2 * node + 1
            room = node - width
            chosen = newest[room]
            newest[room] = older[chosen]
            while node >= 1:
                tree[node] -= 1
                node //= 2
        else:
            chosen, room = opened, np.int64(length)
            opened += 1
        bins[i] = chosen
        room -= sizes[i]
        older[chosen], newest[room] = newest[room], chosen
        node = width + room
        while node >= 1:
            tree[node] += 1
            node //= 2
    return opened
