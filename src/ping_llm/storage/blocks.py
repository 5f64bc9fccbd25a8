"""Parts of a remote file on the local disk: a sparse file of the same size, mapped, whose blocks come when asked for.

Behind the data lies a table with one byte per block: is it there? A block's bytes are written before its mark, so a
process that dies leaves nothing half-done behind, and two processes that fetch the same block write the same bytes. No
lock is needed. What the marks cannot promise (a computer that lost power, a damaged disk) the checksum of each row
finds; `forget` then drops the blocks.
"""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.storage.entry import RandomFile

BLOCK: Final = 1 << 16
"""A request costs tens of milliseconds whether it brings 1 KB or 64; see docs/storage.md for the measurement."""

LONGEST_READ: Final = 8 << 20

Ints = npt.NDArray[np.int64]


class BlockFile:
    """One remote file, as far as it is here."""

    def __init__(self, path: Path, size: int, connect: Callable[[], RandomFile]) -> None:
        self._path = path
        self._size = size
        self._connect = connect
        self._remote: RandomFile | None = None
        self._connecting = threading.Lock()
        self._blocks = -(-size // BLOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        total = self._blocks * (BLOCK + 1)
        if os.fstat(self._descriptor).st_size != total:
            os.ftruncate(self._descriptor, total)
            # Marks are set through the map, where a full disk would be a crash instead of an error.
            os.posix_fallocate(self._descriptor, self._blocks * BLOCK, self._blocks)
        content = np.frombuffer(mmap.mmap(self._descriptor, total), dtype=np.uint8)
        self._marks = content[self._blocks * BLOCK :]
        self.array: npt.NDArray[np.uint8] = content[:size]
        """The file's bytes; those of blocks that are not here read as zero."""
        self.array.flags.writeable = False

    @property
    def is_evicted(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def blocks(self, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """The blocks of byte ranges, end to end, and the range that each belongs to."""
        first, last = begin // BLOCK, (end - 1) // BLOCK
        counts = last - first + 1
        owner = np.repeat(np.arange(len(begin)), counts)
        return first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts), owner

    def missing(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        return self._marks[blocks] == 0

    def reads(self, blocks: Ints) -> list[tuple[int, int]]:
        """Byte ranges of distinct blocks, in order: neighbours together, none too long."""
        if not len(blocks):
            return []
        ends = np.flatnonzero(np.diff(blocks) > 1)
        first = blocks[np.concatenate([[0], ends + 1])] * BLOCK
        last = np.minimum((blocks[np.concatenate([ends, [len(blocks) - 1]])] + 1) * BLOCK, self._size)
        return [
            (begin, min(begin + LONGEST_READ, end))
            for run, end in zip(first.tolist(), last.tolist(), strict=True)
            for begin in range(run, end, LONGEST_READ)
        ]

    def fetch(self, begin: int, end: int) -> None:
        """Bring a range of whole blocks. May be called by several threads."""
        with self._connecting:
            if self._remote is None:
                self._remote = self._connect()
        data = self._remote.read_at(end - begin, begin)
        os.pwrite(self._descriptor, data, begin)
        self._marks[begin // BLOCK : -(-end // BLOCK)] = 1

    def forget(self, begin: int, end: int) -> None:
        """Have the blocks of a range fetched again."""
        self._marks[begin // BLOCK : -(-end // BLOCK)] = 0

    def touch(self) -> None:
        """Note that the file was used: the least recently used are removed first."""
        os.utime(self._descriptor)

    def close(self) -> None:
        """The map goes when its last user has let go of `array`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.array = np.zeros(0, dtype=np.uint8)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
