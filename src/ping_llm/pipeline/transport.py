"""Batches on their way from worker processes to the training process: one array each, driven by Grain.

Grain makes a shared memory segment for each array of an element, which costs more than copying all into one. What
travels is tokens (2 bytes each, 4 where the vocabulary is larger), segment sizes, and what the batch cost.
"""

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ping_llm.pipeline.batch import PackedTokens
from ping_llm.pipeline.timing import Stages
from ping_llm.workers import exit_with_parent

ENDLESS: Final = 1 << 40


class Source(Protocol):
    """Makes any part of any batch, and counts its time by stages."""

    @property
    def stages(self) -> Stages: ...

    @property
    def corrupt_rows(self) -> int:
        """That were left out so far."""

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""


class Elements:
    """What Grain sees: an endless list of batches, of which it may ask for any, in any process."""

    def __init__(
        self, source: Source, stages: tuple[str, ...], first_step: int, part: tuple[int, int], memory_name: str
    ) -> None:
        """`part` is this host's, of the sequences of each batch."""
        self._source = source
        self._stages = stages
        self._first_step = first_step
        self._part = part
        self._memory_name = memory_name
        self._prepared = False

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        if not self._prepared:
            _prepare_worker(self._memory_name)
            self._prepared = True
        seconds = self._source.stages.seconds
        seconds.clear()
        packed = self._source.packed(self._first_step + int(index), *self._part)
        costs = [*(seconds.get(name, 0.0) for name in self._stages), float(self._source.corrupt_rows)]
        return _pack(packed, np.array(costs))

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return map(self.__getitem__, range(ENDLESS))


def deliver(elements: Elements, workers: int, buffer: int) -> Any:
    """An iterator over the elements, which so many worker processes make ahead (0: this one, when asked)."""
    if workers == 0:
        return iter(elements)
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain's worker processes ask for absl flags
        flags.FLAGS.mark_as_parsed()
    # No read threads in the workers: an element is a whole batch, and Grain's default (16 threads) only adds overhead.
    dataset = grain.MapDataset.source(elements).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)
    return iter(dataset.mp_prefetch(options))


def unpack(data: npt.NDArray[np.uint8], stages: int) -> tuple[PackedTokens, npt.NDArray[np.float64], int]:
    """The tokens of an element, the seconds of its stages, and how many corrupt rows its source has met."""
    segments, tokens = data[:16].view(np.int64).tolist()
    ends = np.cumsum([16, 8 * (stages + 1), 4 * segments, 4 * segments]).tolist()
    costs, sizes, sequence = (data[begin:end] for begin, end in itertools.pairwise(ends))
    spelled = data[ends[-1] :]
    packed = PackedTokens(
        tokens=spelled.view(np.uint16) if len(spelled) == 2 * tokens else spelled.view(np.uint32),
        sizes=sizes.view(np.int32),
        sequence=sequence.view(np.int32),
    )
    found = costs.view(np.float64)
    return packed, found[:-1], int(found[-1])


def _pack(packed: PackedTokens, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    head = np.array([len(packed.sizes), len(packed.tokens)], dtype=np.int64)
    parts = (head, costs, packed.sizes, packed.sequence, packed.tokens)
    return np.concatenate([part.view(np.uint8) for part in parts])


def _prepare_worker(memory_name: str) -> None:
    """In a worker process: end with the parent, and name shared memory so that the parent finds what is left of it."""
    if multiprocessing.parent_process() is None:
        return
    exit_with_parent()
    shared_memory._SHM_NAME_PREFIX = f"/{memory_name}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(memory_name) + 17  # type: ignore[attr-defined]
