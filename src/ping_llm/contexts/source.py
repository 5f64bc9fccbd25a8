"""Sequences of probe rows: any of a plan, from the rows it was made for."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.contexts.plan import RowFacts, SequencePlan
from ping_llm.contexts.segments import Segments, write_segments
from ping_llm.contexts.spec import RowsSpec
from ping_llm.rows.dataset import CorruptRowError, RowSet
from ping_llm.rows.reader import RowReader


class RowSequences:
    """Builds any sequences of a plan from the rows it was made for."""

    def __init__(
        self, rows: RowSet, plan: SequencePlan, stages: Stages | None = None, *, skip_corrupt_rows: bool = False
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.stages = stages or Stages()
        self.skip_corrupt_rows = skip_corrupt_rows
        self.left_out: dict[int, str] = {}
        """Rows that were left out, with what is wrong with them."""
        self._reader = RowReader(rows)

    @classmethod
    def of(cls, spec: RowsSpec, seed: int, stages: Stages) -> Self:
        rows = RowSet(spec.folder, spec.split)
        plan = SequencePlan(RowFacts.of(rows), seed, spec.contexts)
        return cls(rows, plan, stages, skip_corrupt_rows=spec.skip_corrupt_rows)

    @property
    def sequences_per_epoch(self) -> int:
        return self.plan.sequences_per_epoch

    def packed(self, sequences: Sequence[int]) -> PackedTokens:
        return self.segments(sequences).packed

    def max_segments(self, sequences: range) -> int:
        stride = self.plan.sequences_per_block
        blocks = {self.plan.locate(sequence)[:2] for sequence in (*sequences[::stride], sequences[-1])}
        return int(max(np.diff(self.plan.block(*block).first).max() for block in blocks))

    def explain(self, sequence: int) -> dict[str, Any]:
        from ping_llm.contexts.explain import segments_of  # which needs this module

        epoch, block, index = self.plan.locate(sequence)
        return {
            "rows": str(self.rows.folder),
            "split": self.rows.split,
            "epoch": epoch,
            "block": block,
            "index_in_block": index,
            "segments": list(segments_of(self, sequence)),
        }

    def segments(self, sequences: Sequence[int]) -> Segments:
        with self.stages("plan"):
            samples, sequence = self.plan.samples_of(sequences)
        while True:
            if self.left_out:
                sound = ~np.isin(samples.row, list(self.left_out))
                samples, sequence = samples.take(sound), sequence[sound]
            try:
                return write_segments(samples, sequence, self._reader, self.plan.settings, self.stages)
            except CorruptRowError as error:
                if not self.skip_corrupt_rows:
                    raise
                self.left_out[error.row] = str(error)
