"""Contexts: what of a row's history a model gets to see at once.

A row of n measurements gives a few contexts an epoch, its *units*. Each has a window of the history (log-uniform in
size, so that minutes and months are seen equally often), a timestamp mode and a field order per measurement. A row that
fits whole is used whole.

    full      every measurement has its time; they are in time order
    partial   some lose their time; these are put in random places among the others, which stay in time order
    none      no times; random order
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.randomness import Ints, Words
from ping_llm.tokens.encode import TimeKind, token_counts

Flags = npt.NDArray[np.bool_]


class Mode(IntEnum):
    FULL = 0
    PARTIAL = 1
    NONE = 2


MODE_SHARES: Final = (0.4, 0.3, 0.3)
UNTIMED_SHARES: Final = (0.1, 0.9)
"""In partial mode each measurement loses its time with a probability that is uniform in this range."""

# Tokens of a measurement by family without its time, what its time adds, and what is saved if it failed.
BARE_4: Final = int(token_counts(4, False, TimeKind.NONE))
BARE_6: Final = int(token_counts(6, False, TimeKind.NONE))
ABSOLUTE: Final = int(token_counts(4, False, TimeKind.ABSOLUTE)) - BARE_4
DELTA1: Final = int(token_counts(4, False, TimeKind.DELTA1)) - BARE_4
DELTA4: Final = int(token_counts(4, False, TimeKind.DELTA4)) - BARE_4
FAILED_SAVES: Final = BARE_4 - int(token_counts(4, True, TimeKind.NONE))

LONGEST_MEASUREMENT: Final = BARE_6 + ABSOLUTE


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How rows become contexts. Part of what a data state is checked against."""

    measurements_per_context: int = 30
    max_contexts: int = 16
    length: int = 1024
    """Tokens of a sequence, and so the most that a context may have."""

    def per_row(self, counts: Any) -> Ints:
        """Contexts that rows of these sizes give in an epoch."""
        per_context = self.measurements_per_context
        return np.minimum(-(-np.asarray(counts, dtype=np.int64) // per_context), self.max_contexts)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What the index knows of each row that matters for sizes."""

    count: npt.NDArray[Any]
    failed: npt.NDArray[Any]
    long_gaps: npt.NDArray[Any]
    family: npt.NDArray[Any]

    def take(self, rows: Any) -> "RowFacts":
        return RowFacts(
            count=self.count[rows].astype(np.int64),
            failed=self.failed[rows].astype(np.int64),
            long_gaps=self.long_gaps[rows].astype(np.int64),
            family=self.family[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Units:
    """Contexts before their measurements are read: everything that follows from index and key."""

    row: Ints
    number: Ints
    """The unit's number in the epoch: its identity for all random choices."""
    key: Words
    family: npt.NDArray[np.uint8]
    mode: npt.NDArray[np.uint8]
    start: Ints
    """First measurement of the window in its row."""
    size: Ints
    """Measurements in the window."""
    whole: npt.NDArray[np.bool_]
    """The window is the whole row, because that fits."""
    most: Ints
    """Tokens that using the whole window could take at most."""
    likely: Ints
    """Tokens that it will probably take. A whole number, so that sums are exact on every machine."""

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def empty(cls, count: int) -> "Units":
        """Room for so many."""
        kinds = {"key": np.uint64, "family": np.uint8, "mode": np.uint8, "whole": np.bool_}
        return cls(**{name: np.empty(count, dtype=kinds.get(name, np.int64)) for name in cls.__dataclass_fields__})

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def take(self, chosen: Any) -> "Units":
        return Units(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})
