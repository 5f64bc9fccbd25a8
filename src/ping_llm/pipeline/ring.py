"""A ring of places in shared memory, which worker processes fill and the training process empties, in order.

A new shared memory segment for every element costs more than what is written to it: each of its pages has to be made,
cleared and mapped twice. Here the same pages are used over and over. The only thing to agree on is one number, how many
elements were taken: element i goes to place i modulo the number of places, once element i less that number was taken.

The memory has no name in the file system: it needs no room in /dev/shm (64 MB in a container, unless one asks for
more), and it is gone with the last process that uses it, however that ends.
"""

import mmap
import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

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
