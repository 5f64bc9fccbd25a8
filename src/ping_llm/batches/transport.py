"""A ring of places in shared memory, which worker processes fill and the training process empties, in order.

A new shared memory segment for every element costs more than what is written to it: each of its pages has to be made,
cleared and mapped twice. Here the same pages are used over and over. The only thing to agree on is one number, how many
elements were taken: element i goes to place i modulo the number of places, once element i less that number was taken.

The memory has no name in the file system: it needs no room in /dev/shm (64 MB in a container, unless one asks for
more), and it is gone with the last process that uses it, however that ends.
"""

import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.tasks.pool import exit_with_parent

Bytes = npt.NDArray[np.uint8]

_HEAD: Final = 4096
_LOOK_AGAIN_S: Final = 0.0005
_CLOSED: Final = 1 << 62


class Ring:
    """Can be sent to other processes; each maps the memory when it first uses it."""

    def __init__(self, path: Path, inode: int, places: int, place_bytes: int, *, descriptor: int | None = None) -> None:
        """`path` leads to the memory as long as the process that made it keeps its `descriptor` open."""
        self._path = path
        self._inode = inode
        self._places = places
        self._place_bytes = place_bytes
        self._descriptor = descriptor

    @classmethod
    def create(cls, places: int, place_bytes: int) -> "Ring | None":
        """A new ring, or None where there is no memory to spare, or none that processes can share."""
        size = _HEAD + places * place_bytes
        if size > psutil.virtual_memory().available // 2:
            return None
        try:
            descriptor = os.memfd_create("ping-llm-ring")
        except (AttributeError, OSError):
            return None
        os.ftruncate(descriptor, size)
        path, inode = Path(f"/proc/{os.getpid()}/fd/{descriptor}"), os.fstat(descriptor).st_ino
        return cls(path, inode, places, place_bytes, descriptor=descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (self._path, self._inode, self._places, self._place_bytes)

    @cached_property
    def _memory(self) -> Bytes:
        with self._path.open("r+b") as file:
            if os.fstat(file.fileno()).st_ino != self._inode:  # another file has the number of a closed ring
                raise FileNotFoundError("the ring was closed")
            return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)

    @cached_property
    def _taken(self) -> npt.NDArray[np.int64]:
        return self._memory[:8].view(np.int64)

    def _place(self, index: int) -> Bytes:
        begin = _HEAD + index % self._places * self._place_bytes
        return self._memory[begin : begin + self._place_bytes]

    def put(self, index: int, parts: Sequence[Bytes]) -> bool:
        """Write an element to its place, as soon as that is free. Does it fit?"""
        size = sum(len(part) for part in parts)
        if size > self._place_bytes:
            return False
        while index - self._places >= self._taken[0]:
            time.sleep(_LOOK_AGAIN_S)
        np.concatenate(parts, out=self._place(index)[:size])
        return True

    def get(self, index: int) -> Bytes:
        """The place of an element that was put."""
        return self._place(index)

    def take(self, index: int) -> None:
        """Elements up to this one are not needed any more."""
        self._taken[0] = index + 1

    def close(self) -> None:
        """No one waits for a place any more. The memory goes when no process has it mapped."""
        self._taken[0] = _CLOSED
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# Batches on their way from worker processes to the training process: several at a time, driven by Grain.
#
# Grain's own work for an element takes as long as making a batch. So an element is several batches in a row, about
# `ELEMENT_BYTES` of them. What travels of each is tokens (2 bytes each, 4 where the vocabulary is larger), segment
# sizes, and what it cost: through a ring in shared memory, so that Grain has only the element's number to carry.

ENDLESS: Final = 1 << 40
ELEMENT_BYTES: Final = 2 << 20
_CLOSE_S: Final = 5.0


class Source(Protocol):
    """Makes any part of any batch, and counts its time by stages."""

    @property
    def stages(self) -> Stages: ...

    @property
    def corrupt_rows(self) -> int:
        """That were left out so far."""

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A batch as a worker made it."""

    packed: PackedTokens
    stage_s: npt.NDArray[np.float64]
    """Seconds of each stage."""
    corrupt_rows: int
    """That its source has met so far."""


class Elements:
    """What Grain sees: an endless list of runs of batches, of which it may ask for any, in any process."""

    def __init__(
        self,
        source: Source,
        stages: tuple[str, ...],
        first_step: int,
        part: tuple[int, int],
        memory_name: str,
        *,
        steps: int = 1,
        ring: Ring | None = None,
    ) -> None:
        """`part` is this host's, of the sequences of each batch; `steps` are the batches of an element."""
        self._source = source
        self._stages = stages
        self._first_step = first_step
        self._part = part
        self._memory_name = memory_name
        self._steps = steps
        self.ring = ring
        self._prepared = False

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Bytes | int:
        """Some batches as `split` takes them, or the number under which they are in the ring."""
        if not self._prepared:
            _prepare_worker(self._memory_name)
            self._prepared = True
        index = int(index)
        parts = join([self.made(index * self._steps + number) for number in range(self._steps)])
        if self.ring is not None and self.ring.put(index, parts):
            return index
        return np.concatenate(parts)

    def made(self, number: int) -> Made:
        """The batch of so many steps after the first one."""
        seconds = self._source.stages.seconds
        seconds.clear()
        packed = self._source.packed(self._first_step + number, *self._part)
        costs = np.array([seconds.get(name, 0.0) for name in self._stages])
        return Made(packed=packed, stage_s=costs, corrupt_rows=self._source.corrupt_rows)


class InThisProcess:
    """Batches that are made when they are asked for."""

    def __init__(self, elements: Elements) -> None:
        self._made = map(elements.made, range(ENDLESS))

    def __next__(self) -> Made:
        return next(self._made)

    def close(self) -> None:
        """Nothing to give back."""


class FromWorkers:
    """Batches that worker processes make ahead."""

    def __init__(self, elements: Elements, workers: int, buffer: int) -> None:
        import grain
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain's worker processes ask for absl flags
            flags.FLAGS.mark_as_parsed()
        # No read threads in the workers: they have whole batches to make, and Grain's default (16) only adds overhead.
        dataset = grain.MapDataset.source(elements).to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)
        self._elements = iter(dataset.mp_prefetch(options))
        self._ring = elements.ring
        self._number = -1
        self._ready: Iterator[Made] = iter(())

    def __next__(self) -> Made:
        """The next batch, a view of shared memory: it is gone when the one after it is asked for."""
        for made in self._ready:
            return made
        if self._ring is not None:
            self._ring.take(self._number)
        element = next(self._elements)
        self._number += 1
        if isinstance(element, int) and self._ring is not None:
            element = self._ring.get(element)
        self._ready = split(element)
        return next(self._ready)

    def close(self) -> None:
        self._ready = iter(())
        if self._ring is not None:
            self._ring.close()
        # A Ctrl-C in the middle of one of Grain's queues may leave it such that Grain waits for it forever.
        closing = threading.Thread(target=self._close_grain, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close_grain(self) -> None:
        with suppress(Exception):  # workers that died already said so
            self._elements.close()


def deliver(elements: Elements, workers: int, buffer: int) -> InThisProcess | FromWorkers:
    """The batches of the elements, which so many worker processes make ahead (0: this one, when asked)."""
    return FromWorkers(elements, workers, buffer) if workers else InThisProcess(elements)


def join(batches: Sequence[Made]) -> list[Bytes]:
    """Batches as parts of one array: how many they are; for each its sizes, then its columns."""
    parts: list[npt.NDArray[Any]] = [np.array([len(batches)])]
    for made in batches:
        packed = made.packed
        head = (len(packed.sizes), len(packed.tokens), packed.tokens.itemsize, len(made.stage_s), made.corrupt_rows)
        parts += [np.array(head), made.stage_s, packed.sizes, packed.sequence, packed.tokens]
        parts.append(np.zeros(-packed.tokens.nbytes % 8, dtype=np.uint8))  # what follows is to be aligned
    return [part.view(np.uint8) for part in parts]


def split(data: Bytes) -> Iterator[Made]:
    """The batches that `join` put together, as views."""
    at = 8
    for _ in range(int(np.frombuffer(data, np.int64, 1)[0])):
        segments, tokens, width, stages, corrupt_rows = np.frombuffer(data, np.int64, 5, at).tolist()
        at += 40
        stage_s = np.frombuffer(data, np.float64, stages, at)
        at += 8 * stages
        sizes = np.frombuffer(data, np.int32, segments, at)
        sequence = np.frombuffer(data, np.int32, segments, at + 4 * segments)
        at += 8 * segments
        spelled: Any = np.frombuffer(data, np.uint16 if width == 2 else np.uint32, tokens, at)
        at += width * tokens + -(width * tokens) % 8
        packed = PackedTokens(tokens=spelled, sizes=sizes, sequence=sequence)
        yield Made(packed=packed, stage_s=stage_s, corrupt_rows=corrupt_rows)


def _prepare_worker(memory_name: str) -> None:
    """In a worker process: end with the parent, and name shared memory so that the parent finds what is left of it."""
    if multiprocessing.parent_process() is None:
        return
    exit_with_parent()
    shared_memory._SHM_NAME_PREFIX = f"/{memory_name}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(memory_name) + 17  # type: ignore[attr-defined]
