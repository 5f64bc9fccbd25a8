"""Any batch by its step: a spec brought to life, with its rows open."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ping_llm.batches.batch import PackedTokens, Stages, expand
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.plan import RowFacts, SequencePlan
from ping_llm.batches.segments import Segments, write_segments
from ping_llm.batches.spec import Batch, DataSpec
from ping_llm.rows.dataset import CorruptRowError, RowSet
from ping_llm.rows.reader import RowReader

_ENDLESS = 1 << 40


class BatchBuilder:
    """Builds any sequences of a plan from the rows it was made for."""

    def __init__(
        self, rows: RowSet, plan: SequencePlan, stages: Stages | None = None, *, skip_corrupt_rows: bool = False
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.stages = stages or Stages()
        self.skip_corrupt_rows = skip_corrupt_rows
        self.corrupt_rows: dict[int, str] = {}
        """Rows that were left out, with what is wrong with them."""
        self._reader = RowReader(rows)

    def build(self, sequences: Sequence[int]) -> Batch:
        """The arrays of these sequences, in this order."""
        return expand(self.segments(sequences).packed, len(sequences), self.plan.settings.length)

    def segments(self, sequences: Sequence[int]) -> Segments:
        with self.stages("plan"):
            samples, sequence = self.plan.samples_of(sequences)
        while True:
            if self.corrupt_rows:
                sound = ~np.isin(samples.row, list(self.corrupt_rows))
                samples, sequence = samples.take(sound), sequence[sound]
            try:
                return write_segments(samples, sequence, self._reader, self.plan.settings.length, self.stages)
            except CorruptRowError as error:
                if not self.skip_corrupt_rows:
                    raise
                self.corrupt_rows[error.row] = str(error)


class BatchSource:
    """Batches by number. Rows are opened at first use, so a source can be sent to a worker process before.

    It is a random access data source as Grain has them: `grain.MapDataset.source(BatchSource(spec))` is the dataset of
    all global batches.
    """

    def __init__(self, spec: DataSpec, mixture: Mixture | None = None) -> None:
        self.spec, self.mixture, self.stages = spec, mixture or Mixture.of(spec.weights), Stages()

    def __len__(self) -> int:
        return self.batches_per_epoch if self.spec.finite else _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        """The global batch of a step by itself, without going through those before it."""
        size = self.spec.global_batch_size
        return expand(self.packed(int(step), 0, size), size, self.spec.contexts.length)

    @cached_property
    def builders(self) -> tuple[BatchBuilder, ...]:
        """One for each row set."""
        spec, builders = self.spec, []
        for named in spec.rows:
            rows = RowSet(named.folder, named.split)
            plan = SequencePlan(RowFacts.of(rows), spec.seed, spec.contexts)
            builders.append(BatchBuilder(rows, plan, self.stages, skip_corrupt_rows=spec.skip_corrupt_rows))
        return tuple(builders)

    @property
    def sequences_per_epoch(self) -> int:
        """Of all row sets together."""
        return sum(builder.plan.sequences_per_epoch for builder in self.builders)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.sequences_per_epoch // self.spec.global_batch_size)

    @property
    def corrupt_rows(self) -> int:
        """That were left out so far."""
        return sum(len(builder.corrupt_rows) for builder in self.builders)

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""
        offset = step * self.spec.global_batch_size
        if len(self.builders) == 1 and not self.spec.finite:
            return self.builders[0].segments(range(offset + begin, offset + end)).packed
        located = [self.locate(offset + i) for i in range(begin, end)]
        parts = []
        for number, builder in enumerate(self.builders):
            mine = [(index, at[1]) for index, at in enumerate(located) if at and at[0] == number]
            if mine:
                packed = builder.segments([local for _, local in mine]).packed
                sequence = np.array([index for index, _ in mine], dtype=np.int32)[packed.sequence]
                parts.append(PackedTokens(tokens=packed.tokens, sizes=packed.sizes, sequence=sequence))
        return _interleaved(parts)

    def max_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments. From the plan alone, so every host knows it."""
        offset, size = step * self.spec.global_batch_size, self.spec.global_batch_size
        if len(self.builders) == 1 and not self.spec.finite:
            stride = self.builders[0].plan.sequences_per_block
            located = [(0, min(at, offset + size - 1)) for at in range(offset, offset + size + stride, stride)]
        else:
            located = [at for i in range(size) if (at := self.locate(offset + i))]
        blocks = {(number, *self.builders[number].plan.locate(sequence)[:2]) for number, sequence in located}
        bounds = (np.diff(self.builders[n].plan.block(epoch, block).first).max() for n, epoch, block in blocks)
        return int(max(bounds, default=1))

    def locate(self, sequence: int) -> tuple[int, int] | None:
        """The row set of a global sequence and its number there; None where finite data has ended."""
        if not self.spec.finite:
            return self.mixture.locate(sequence)
        for number, builder in enumerate(self.builders):
            if sequence < builder.plan.sequences_per_epoch:
                return number, sequence
            sequence -= builder.plan.sequences_per_epoch
        return None


def _interleaved(parts: list[PackedTokens]) -> PackedTokens:
    """Segments of several row sets in the order of their sequences."""
    none = np.zeros(0, dtype=np.int32)
    tokens = np.concatenate([none.astype(np.uint16), *(p.tokens for p in parts)])
    sizes, sequence = (np.concatenate([none, *(getattr(p, name) for p in parts)]) for name in ("sizes", "sequence"))
    order = np.argsort(sequence, kind="stable")
    starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return PackedTokens(
        tokens=tokens[np.repeat(starts, sizes) + within], sizes=sizes.astype(np.int32), sequence=sequence[order]
    )
