"""A spec brought to life: opens the rows and builds any part of any batch."""

from functools import cached_property

import numpy as np

from ping_llm.batches import kernels
from ping_llm.batches.batch import BatchBuilder, PackedTokens, Stages
from ping_llm.batches.contexts import RowFacts
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.plan import SequencePlan
from ping_llm.batches.spec import DataSpec
from ping_llm.rows.dataset import RowSet


class BatchSource:
    """Batches by number. Rows are opened at first use, so a source can be sent to a worker process before."""

    def __init__(self, spec: DataSpec, mixture: Mixture | None = None) -> None:
        kernels.load()
        self.spec = spec
        self.mixture = mixture or Mixture.of(spec.weights)

    @cached_property
    def stages(self) -> Stages:
        return Stages()

    @cached_property
    def builders(self) -> tuple[BatchBuilder, ...]:
        return tuple(self._builder(rows.folder, rows.split) for rows in self.spec.rows)

    def _builder(self, folder: str, split: str) -> BatchBuilder:
        rows = RowSet(folder, split)
        facts = RowFacts(**{name: rows.column(name) for name in ("count", "failed", "long_gaps", "family")})
        plan = SequencePlan(facts, self.spec.seed, self.spec.contexts)
        return BatchBuilder(rows, plan, self.stages, skip_corrupt_rows=self.spec.skip_corrupt_rows)

    @property
    def sequences_per_epoch(self) -> int:
        """Of all row sets together."""
        return sum(builder.plan.sequences_per_epoch for builder in self.builders)

    @property
    def corrupt_rows(self) -> int:
        """That were left out so far."""
        return sum(len(builder.corrupt_rows) for builder in self.builders)

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""
        offset = step * self.spec.global_batch_size
        if len(self.builders) == 1 and not self.spec.finite:
            return self.builders[0].tokens(range(offset + begin, offset + end))
        places = [self.locate(offset + i) for i in range(begin, end)]
        parts = [_NOTHING]
        for number, builder in enumerate(self.builders):
            wanted = [i for i, place in enumerate(places) if place and place[0] == number]
            if wanted:
                packed = builder.tokens([place[1] for place in places if place and place[0] == number])
                moved = np.array(wanted, dtype=np.int32)[packed.sequence]
                parts.append(PackedTokens(tokens=packed.tokens, sizes=packed.sizes, sequence=moved))
        return _interleaved(parts)

    def max_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments. From the plan alone, so every host knows it."""
        offset, size = step * self.spec.global_batch_size, self.spec.global_batch_size
        if len(self.builders) == 1 and not self.spec.finite:
            stride = self.builders[0].plan.sequences_per_block
            places = [(0, min(at, offset + size - 1)) for at in range(offset, offset + size + stride, stride)]
        else:
            places = [place for i in range(size) if (place := self.locate(offset + i))]
        blocks = {(number, *self.builders[number].plan.locate(sequence)[:2]) for number, sequence in places}
        return max((self.builders[n].plan.block(epoch, block).most_units for n, epoch, block in blocks), default=1)

    def locate(self, sequence: int) -> tuple[int, int] | None:
        """The row set of a global sequence and its number there; None where finite data has ended."""
        if not self.spec.finite:
            return self.mixture.locate(sequence)
        for number, builder in enumerate(self.builders):
            if sequence < builder.plan.sequences_per_epoch:
                return number, sequence
            sequence -= builder.plan.sequences_per_epoch
        return None

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.sequences_per_epoch // self.spec.global_batch_size)


_NOTHING = PackedTokens(
    tokens=np.zeros(0, dtype=np.uint16), sizes=np.zeros(0, dtype=np.int32), sequence=np.zeros(0, dtype=np.int32)
)


def _interleaved(parts: list[PackedTokens]) -> PackedTokens:
    """Segments of several sources in the order of their sequences."""
    tokens = np.concatenate([p.tokens for p in parts])
    sizes = np.concatenate([p.sizes for p in parts]).astype(np.int64)
    sequence = np.concatenate([p.sequence for p in parts])
    order = np.argsort(sequence, kind="stable")
    starts = np.cumsum(sizes) - sizes
    sorted_sizes = sizes[order]
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(sorted_sizes) - sorted_sizes, sorted_sizes)
    return PackedTokens(
        tokens=tokens[np.repeat(starts[order], sorted_sizes) + within],
        sizes=sorted_sizes.astype(np.int32),
        sequence=sequence[order],
    )
