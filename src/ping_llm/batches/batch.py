"""Where the time goes: seconds spent in each named stage of the pipeline."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ping_llm.batches.plan import SequencePlan
from ping_llm.rows.dataset import CorruptRowError, RowSet

if TYPE_CHECKING:
    from ping_llm.batches.segments import Segments


class Stages:
    """Adds up the time of stages. A stage that is entered inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._switch()
        self._running.append(name)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            current = self._running[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now


# Sequences to arrays.

Batch = dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """All that is needed to lay out a batch: a twelfth of its bytes, which is what travels between processes."""

    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    """Of probe rows 16 bits, of text 32."""
    sizes: npt.NDArray[np.int32]
    """Tokens of each segment."""
    sequence: npt.NDArray[np.int32]
    """Sequence of each segment."""


class BatchBuilder:
    """Builds any sequences of a plan from the rows it was made for."""

    def __init__(
        self,
        rows: RowSet,
        plan: SequencePlan,
        stages: Stages | None = None,
        *,
        skip_corrupt_rows: bool = False,
    ) -> None:
        from ping_llm.batches.segments import write_segments
        from ping_llm.rows.reader import RowReader

        self.rows = rows
        self.plan = plan
        self.stages = stages or Stages()
        self.skip_corrupt_rows = skip_corrupt_rows
        self.corrupt_rows: dict[int, str] = {}
        """Rows that were left out, with what is wrong with them."""
        self._reader = RowReader(rows)
        self._write = write_segments

    def build(self, sequences: Sequence[int]) -> Batch:
        """The arrays of these sequences, in this order."""
        return expand(self.tokens(sequences), len(sequences), self.plan.settings.length)

    def tokens(self, sequences: Sequence[int]) -> PackedTokens:
        return self.segments(sequences).packed

    def segments(self, sequences: Sequence[int]) -> "Segments":
        with self.stages("plan"):
            planned = self.plan.units_of(sequences)
        while True:
            if self.corrupt_rows:
                planned = planned.take(~np.isin(planned.units.row, list(self.corrupt_rows)))
            try:
                return self._write(planned, self._reader, self.plan.settings.length, self.stages)
            except CorruptRowError as error:
                if not self.skip_corrupt_rows:
                    raise
                self.corrupt_rows[error.row] = str(error)


def expand(packed: PackedTokens, sequences: int, length: int) -> Batch:
    """Lay segments side by side in the arrays of the batch contract."""
    from ping_llm.batches.kernels.writing import NAMES, lay_out_16, lay_out_32

    arrays = np.empty((len(NAMES), sequences, length), dtype=np.int32)
    lay_out = lay_out_16 if packed.tokens.dtype == np.uint16 else lay_out_32
    lay_out(packed.tokens, packed.sizes, packed.sequence, arrays)
    return dict(zip(NAMES, arrays, strict=True))
