"""Documents to sequences: one after the other, cut where a sequence ends. Each piece is a segment of its own.

So no place stays empty but at the end of the data, no text is lost, and where a sequence begins is plain arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ping_llm.backends.text.tokenizer import Tokens
from ping_llm.pipeline.batch import PackedTokens
from ping_llm.pipeline.randomness import Ints

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
