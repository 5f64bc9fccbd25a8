"""Reading a remote object at random: every read is checked for its length and tried again on its own."""

import io
from collections.abc import Callable
from typing import Any

from ping_llm.storage.retry import TruncatedError, retried


class RetryingFile(io.RawIOBase):
    """A seekable file whose reads survive broken connections. Opening and reading again costs one request each."""

    def __init__(self, where: str, connect: Callable[[], Any], size: int | None = None) -> None:
        super().__init__()
        self._where = where
        self._connect = connect
        self._file: Any = retried(where, connect)
        self._size: int = self._file.size() if size is None else size
        self._position = 0

    @property
    def name(self) -> str:
        return self._where

    def size(self) -> int:
        return self._size

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Bytes from a place, fewer only where the file ends. May be called by several threads."""
        wanted = max(0, min(nbytes, self._size - offset))
        if not wanted:
            return b""

        def read() -> bytes:
            file = self._file  # another thread may put it aside meanwhile
            if file is None:
                file = self._file = self._connect()
            try:
                data: bytes = file.read_at(wanted, offset)
                if len(data) != wanted:
                    raise TruncatedError(f"{len(data):,} bytes came instead of {wanted:,}")
            except OSError:
                self._file = None
                raise
            return data

        return retried(self._where, read)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self.read_at(self._size - self._position, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
