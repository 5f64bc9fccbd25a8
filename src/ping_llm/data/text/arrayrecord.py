"""Documents to sequences: one after the other, cut where a sequence ends. Each piece is a segment of its own.

So no place stays empty but at the end of the data, no text is lost, and where a sequence begins is plain arithmetic.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints, Purpose, key, permute
from ping_llm.data.text.files import NotAnExampleError, check_kind, fingerprint, matching, text_feature
from ping_llm.data.text.tokenizer import TokenizerSpec, Tokens, load_tokenizer

EMPTY: Final[tuple[Tokens, Ints]] = np.zeros(0, np.uint32), np.zeros(0, np.int64)
"""A sequence that is all padding."""


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    length: int
    most_segments: int
    """Of a sequence. What would come after them is left out, and padding stands there."""

    @classmethod
    def of(cls, length: int, most_segments: int) -> "PackSettings":
        return cls(length=length, most_segments=most_segments if most_segments > 0 else max(8, length // 32))


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Documents laid out one after the other."""

    tokens: Tokens
    ends: Ints
    """Where each document ends."""
    settings: PackSettings

    @classmethod
    def of(cls, tokens: Tokens, lengths: Ints, settings: PackSettings) -> "Laid":
        return cls(tokens=tokens, ends=np.cumsum(lengths[lengths > 0]), settings=settings)

    @property
    def full_sequences(self) -> int:
        return len(self.tokens) // self.settings.length

    @property
    def sequences(self) -> int:
        """With the last one, which may not be full."""
        return -(-len(self.tokens) // self.settings.length)

    def sequence(self, number: int) -> tuple[Tokens, Ints]:
        """Tokens of a sequence, and the sizes of its segments; nothing, behind the last one."""
        length = self.settings.length
        begin, end = (min(at * length, len(self.tokens)) for at in (number, number + 1))
        inner = self.ends[np.searchsorted(self.ends, begin, side="right") : np.searchsorted(self.ends, end)]
        sizes = np.diff(inner, prepend=begin, append=end)[: self.settings.most_segments]
        sizes = sizes[sizes > 0]
        return self.tokens[begin : begin + int(sizes.sum())], sizes

    def without(self, tokens: int) -> "Laid":
        """What is left when so many tokens were used."""
        left = self.ends[np.searchsorted(self.ends, tokens, side="right") :]
        return replace(self, tokens=self.tokens[tokens:], ends=left - tokens)


def pack(parts: Sequence[tuple[Tokens, Ints]]) -> PackedTokens:
    """Sequences as they travel between processes; an empty one has no segment."""
    return PackedTokens(
        tokens=np.concatenate([tokens for tokens, _ in parts]),
        sizes=np.concatenate([sizes for _, sizes in parts]).astype(np.int32),
        sequence=np.repeat(np.arange(len(parts)), [len(sizes) for _, sizes in parts]).astype(np.int32),
    )


# ArrayRecord text: a batch is a function of its step, although nobody knows how many tokens a document has.
#
# Glossary
#   epoch      a random permutation of all documents, another one each time
#   block      about a thousand consecutive documents of that permutation, tokenised together and laid out one after the
#              other; each block makes the same number of sequences, so the place of a sequence is plain arithmetic
#   lanes      16 neighbouring blocks are used side by side, some sequences of each in turn: so hosts and workers, which
#              take different parts of the batches, work on different blocks most of the time
#
# Documents differ in size, so what blocks hold differs by a few per cent. Sequences are counted such that a block has
# three per cent too much on average: that is not seen in this epoch. Where a block has too little, padding stands.

TEXT_VERSION: Final = 1
"""Raised whenever the same files would give other batches."""

BLOCK_DOCUMENTS: Final = 1024
LANES: Final = 16
_OVERFILL_PERCENT: Final = 103
_BLOCKS_KEPT: Final = LANES + 4
_SAMPLED: Final = 8192
_SAMPLED_TOKENS: Final = 512
"""Documents whose size in bytes is looked at, and those of them that are tokenised, to foresee the size of a block."""


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """One source of documents."""

    pattern: str
    files: tuple[str, ...]
    fingerprint: str

    @classmethod
    def find(cls, pattern: str, key: str) -> "TextFiles":
        files = matching(pattern, key)
        check_kind(files, "arrayrecord", key)
        return cls(pattern=pattern, files=tuple(map(str, files)), fingerprint=fingerprint(files))


class Documents:
    """The documents of some files by number."""

    def __init__(self, files: TextFiles, column: str) -> None:
        self._files = files
        self._column = column
        try:
            self._records: Any = ArrayRecordDataSource(list(files.files))
            self._count = len(self._records)
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise PingLlmError(f"{files.pattern}: {' '.join(str(error).split())[:200]}") from None
        if not self._count:
            raise PingLlmError(f"{files.pattern}: the files hold no document")

    def __len__(self) -> int:
        return self._count

    def texts(self, numbers: Ints) -> list[str]:
        if not len(numbers):
            return []
        try:
            records = self._records.__getitems__(numbers.tolist())
        except Exception as error:  # as above
            raise PingLlmError(f"{self._files.pattern} is damaged: {' '.join(str(error).split())[:200]}") from None
        return [self._text(record, number) for record, number in zip(records, numbers.tolist(), strict=True)]

    def _text(self, record: bytes, number: int) -> str:
        try:
            return text_feature(record, self._column).decode("utf-8", "replace")
        except NotAnExampleError as error:
            where = f"record {number} of {self._files.pattern}"
            raise PingLlmError(f"{where} cannot be used: {error}; train_data_columns names the text") from None


class TextPlan:
    """The sequences of one source, each by its number alone."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: TokenizerSpec,
        packing: PackSettings,
        *,
        seed: int,
        chunk: int,
        stages: Stages | None = None,
    ) -> None:
        self.stages = stages or Stages()
        self._documents = documents
        self._tokenizer = load_tokenizer(tokenizer)
        self._packing = packing
        self._seed = seed
        self._chunk = chunk
        self.blocks = max(1, round(len(documents) / BLOCK_DOCUMENTS))
        self._kept: OrderedDict[tuple[int, int], Laid] = OrderedDict()

    @cached_property
    def sequences_per_block(self) -> int:
        """From a sample, in whole numbers: this must come out the same on every machine."""
        count = len(self._documents)
        sample = np.unique(np.arange(min(count, _SAMPLED)) * count // min(count, _SAMPLED))
        texts = self._documents.texts(sample)
        sizes = np.array([len(text.encode()) for text in texts], dtype=np.int64)
        some = np.arange(min(len(texts), _SAMPLED_TOKENS)) * len(texts) // min(len(texts), _SAMPLED_TOKENS)
        tokens, _ = self._tokenizer.encode([texts[i] for i in some.tolist()])
        if not len(tokens):
            raise PingLlmError("the documents are empty: there is no text to train on")
        in_all = len(tokens) * int(sizes.sum()) * count  # over bytes of the tokenised × documents looked at
        per_block = int(sizes[some].sum()) * len(sample) * self.blocks * self._packing.length
        return max(1, in_all * 100 // (per_block * _OVERFILL_PERCENT))

    @property
    def sequences_per_epoch(self) -> int:
        return self.sequences_per_block * self.blocks

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and place in the block of a sequence, counted from the beginning of all epochs."""
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        group, within = divmod(within, self.sequences_per_block * LANES)
        lanes = min(LANES, self.blocks - group * LANES)
        rounds, rest = divmod(self.sequences_per_block, self._chunk)
        whole = rounds * self._chunk * lanes
        if within < whole:
            turn, place = divmod(within, self._chunk)
            return epoch, group * LANES + turn % lanes, turn // lanes * self._chunk + place
        lane, place = divmod(within - whole, rest)  # what is left of each block after its last whole chunk
        return epoch, group * LANES + lane, rounds * self._chunk + place

    def sequence(self, sequence: int) -> tuple[Tokens, Ints]:
        epoch, block, place = self.locate(sequence)
        return self._block(epoch, block).sequence(place)

    def _block(self, epoch: int, block: int) -> Laid:
        at = epoch, block
        if at not in self._kept:
            begin, end = (b * len(self._documents) // self.blocks for b in (block, block + 1))
            with self.stages("plan"):
                order = key(self._seed, epoch, Purpose.EPOCH_ORDER)
                numbers = permute(order, len(self._documents), np.arange(begin, end))
            with self.stages("read"):
                texts = self._documents.texts(numbers)
            with self.stages("encode"):
                tokens, lengths = self._tokenizer.encode(texts)
            self._kept[at] = Laid.of(tokens, lengths, self._packing)
            if len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        return self._kept[at]
