"""Sequences to arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ping_llm.pipeline.plan import SequencePlan
from ping_llm.pipeline.timing import Stages
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.mapped import CorruptRowError

if TYPE_CHECKING:
    from ping_llm.pipeline.segments import Segments

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
        from ping_llm.pipeline.segments import write_segments
        from ping_llm.rows.reading import RowReader

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
    from ping_llm.pipeline.kernels.layout import NAMES, lay_out_16, lay_out_32

    arrays = np.empty((len(NAMES), sequences, length), dtype=np.int32)
    lay_out = lay_out_16 if packed.tokens.dtype == np.uint16 else lay_out_32
    lay_out(packed.tokens, packed.sizes, packed.sequence, arrays)
    return dict(zip(NAMES, arrays, strict=True))
