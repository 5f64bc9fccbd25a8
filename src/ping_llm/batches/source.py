"""Any batch by its step: a spec brought to life, with its sources open."""

from collections.abc import Iterator
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import PackedTokens, Stages, expand
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.spec import Batch, DataSpec, SequenceSource, host_share

_ENDLESS = 1 << 40


class BatchSource:
    """Batches by step. Files are opened at first use, so that a source can be sent to a worker process before.

    It is a random-access data source as Grain and PyTorch define them: `grain.MapDataset.source(BatchSource(spec))` is
    the dataset of all global batches, and `DataLoader(BatchSource(spec), batch_size=None, sampler=steps)` loads some of
    them. With `host` and `hosts`, each batch is that host's part of the global batch. Threads (Grain has some) make one
    batch at a time: maps and caches of the sources are for one thread.
    """

    def __init__(self, spec: DataSpec, mixture: Mixture | None = None, *, host: int = 0, hosts: int = 1) -> None:
        self.spec, self.mixture, self.stages = spec, mixture or spec.mixture(), Stages()
        self._share = host_share(spec.global_batch_size, host, hosts)
        self._one_at_a_time = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open: another process opens the files itself."""
        return {name: value for name, value in vars(self).items() if name not in ("sources", "_one_at_a_time")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _one_at_a_time=RLock())

    def __len__(self) -> int:
        return self.batches_per_epoch if self.spec.finite else _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        """The batch of one step, without making those before it."""
        packed = self.packed(int(step), self._share.start, self._share.stop)
        return expand(packed, len(self._share), self.spec.length)

    @cached_property
    def sources(self) -> tuple[SequenceSource, ...]:
        return tuple(source.open(self.spec, self.stages) for source in self.spec.sources)

    @property
    def sequences_per_epoch(self) -> int:
        """Of all sources together."""
        return sum(source.sequences_per_epoch for source in self.sources)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.sequences_per_epoch // self.spec.global_batch_size)

    @property
    def left_out(self) -> int:
        """Damaged records that were skipped so far."""
        return sum(len(source.left_out) for source in self.sources)

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""
        parts = []
        with self._one_at_a_time:
            for number, sequences, index in self.shares(step, begin, end):
                packed = self.sources[number].packed(sequences)
                if len(sequences) == end - begin:
                    return packed
                parts.append(PackedTokens(tokens=packed.tokens, sizes=packed.sizes, sequence=index[packed.sequence]))
        return _interleaved(parts)

    def max_segments(self, step: int) -> int:
        """An upper bound on the segments of the step's sequences: from the plan alone, so the same on every host."""
        shares = self.shares(step, 0, self.spec.global_batch_size)
        return max((self.sources[number].max_segments(sequences) for number, sequences, _ in shares), default=1)

    def shares(self, step: int, begin: int, end: int) -> Iterator[tuple[int, range, npt.NDArray[np.int32]]]:
        """For each source that some of these sequences come from: its own sequence numbers, and their positions."""
        offset = self.spec.planned(step) * self.spec.global_batch_size
        if len(self.spec.sources) == 1 and not self.spec.finite:
            yield 0, range(offset + begin, offset + end), np.arange(end - begin, dtype=np.int32)
            return
        located = [self.locate(offset + number) for number in range(begin, end)]
        for source in range(len(self.spec.sources)):
            index = np.array([i for i, at in enumerate(located) if at and at[0] == source], dtype=np.int32)
            if len(index):
                first = located[index[0]]
                yield source, range(first[1], first[1] + len(index)), index  # a source's sequences are consecutive

    def explain(self, step: int, sequence: int) -> dict[str, Any]:
        """Where one sequence of a batch comes from, segment by segment."""
        explained: dict[str, Any] = {"step": step, "sequence": sequence, "segments": []}
        for number, mine, _ in self.shares(step, sequence, sequence + 1):
            explained |= {"source_number": number, **self.sources[number].explain(mine[0])}
            explained["tokens"] = sum(segment["tokens"] for segment in explained["segments"])
            explained["padding"] = self.spec.length - explained["tokens"]
        return explained

    def locate(self, sequence: int) -> tuple[int, int] | None:
        """The source of a global sequence and its number there; None where finite data has ended."""
        if not self.spec.finite:
            return self.mixture.locate(sequence)
        for number, source in enumerate(self.sources):
            if sequence < source.sequences_per_epoch:
                return number, sequence
            sequence -= source.sequences_per_epoch
        return None


def _interleaved(parts: list[PackedTokens]) -> PackedTokens:
    """Segments of several sources in the order of their sequences."""
    none = np.zeros(0, dtype=np.int32)
    tokens = np.concatenate([none.astype(np.uint16), *(p.tokens for p in parts)])
    sizes, sequence = (np.concatenate([none, *(getattr(p, name) for p in parts)]) for name in ("sizes", "sequence"))
    order = np.argsort(sequence, kind="stable")
    starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return PackedTokens(
        tokens=tokens[np.repeat(starts, sizes) + within], sizes=sizes.astype(np.int32), sequence=sequence[order]
    )
