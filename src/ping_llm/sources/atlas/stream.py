"""A file of RIPE Atlas results becomes chunks of whole lines, one result per line, in bounded memory.

What the file is (bzip2, gzip or plain; JSON lines or one JSON array) is told from its content, not from its name.
"""

import bz2
import gzip
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from ping_llm.errors import PingLlmError
from ping_llm.sources.atlas.array import array_as_lines
from ping_llm.storage import Location, locate

CHUNK_BYTES: Final = 4 << 20
"""One task of a worker: some 9,000 results, 50 ms of parsing. Larger only costs memory."""

BLOCK_BYTES: Final = 1 << 20
MAX_RESULT_BYTES: Final = 16 << 20
"""A result has a few hundred bytes. A line this long is another kind of file, and would fill the memory."""

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

FOREIGN: Final = {
    b"\xfd7zXZ": "xz-compressed",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
}
"""First bytes of files that people have, and that need another tool first."""

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Whole lines of a file."""

    data: bytes
    first: int
    """Number of the first line, from 1. In a JSON array each element counts as a line."""
    in_array: bool
    position: int
    """Bytes of the file, as stored, that were read up to here."""


def read_chunks(path: Path | str | Location, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The results of a file. Raises a one-line error for a file that cannot be read to its end."""
    source = _Source(locate(path))
    blocks = source.blocks()
    head = b""
    for block in blocks:
        head += block
        if len(head.strip()) > len(BYTE_ORDER_MARK):
            break
    head = head.removeprefix(BYTE_ORDER_MARK)
    start = head.lstrip()[:8]
    if not start:
        raise PingLlmError(f"{path}: the file is empty")
    if start[:1] not in (b"[", b"{"):
        raise PingLlmError(f"{path}: not RIPE Atlas JSON: it starts with {start!r}, not with '{{' or '['")
    in_array = start[:1] == b"["
    lines: Iterable[bytes] = chain([head], blocks)
    if in_array:
        lines = array_as_lines(lines, str(path))

    first = 1
    parts: list[bytes] = []
    size = 0
    for part in lines:
        parts.append(part)
        size += len(part)
        if size >= chunk_bytes:
            data = b"".join(parts)
            end = data.rfind(b"\n") + 1
            if end:
                yield Chunk(data=data[:end], first=first, in_array=in_array, position=source.position)
                first += data.count(b"\n", 0, end)
            elif size > MAX_RESULT_BYTES:
                unit = "element" if in_array else "line"
                raise PingLlmError(f"{path}: {unit} {first:,} is over {MAX_RESULT_BYTES:,} bytes: not RIPE Atlas JSON")
            parts, size = [data[end:]], size - end
    if size:
        yield Chunk(data=b"".join(parts), first=first, in_array=in_array, position=source.position)


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one always being made in a thread: decompression runs beside parsing."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, end)
        while (item := upcoming.result()) is not end:
            upcoming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


class _Source:
    """A file and how far it has been read."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.position = 0

    def blocks(self) -> Iterator[bytes]:
        """The decompressed content."""
        try:
            with self._open() as file:
                for block in self._decompressed(file):
                    self.position = file.tell()
                    yield block
        except (EOFError, gzip.BadGzipFile, zlib.error, _Bzip2Error) as error:
            how = "cut off" if isinstance(error, EOFError) else "damaged"
            size = self.path.size()
            raise PingLlmError(
                f"{self.path}: the compressed data is {how} (read {self.position:,} of {size:,} bytes); "
                "download the file again"
            ) from error
        except OSError as error:
            raise PingLlmError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _open(self) -> BinaryIO:
        return self.path.open_stream() if self.path.is_remote else self.path.local.open("rb")

    def _decompressed(self, file: BinaryIO) -> Iterator[bytes]:
        magic = file.read(8)
        file.seek(0)
        for start, kind in FOREIGN.items():
            if magic.startswith(start):
                raise PingLlmError(f"{self.path}: is {kind}; expected JSON, plain or compressed with bzip2 or gzip")
        if magic.startswith(b"BZh"):
            return _decompress_bzip2(file)
        opened = gzip.GzipFile(fileobj=file) if magic.startswith(b"\x1f\x8b") else file
        return iter(lambda: opened.read(BLOCK_BYTES), b"")


class _Bzip2Error(Exception):
    """The bytes are not a bzip2 stream."""


def _decompress_bzip2(file: BinaryIO) -> Iterator[bytes]:
    """All streams of the file. (`bz2.BZ2File` would stop without a word where a later stream is damaged.)"""
    decompressor = bz2.BZ2Decompressor()
    while True:
        compressed = b""
        if decompressor.eof:
            compressed = decompressor.unused_data or file.read(BLOCK_BYTES // 4)
            if not compressed:
                return
            decompressor = bz2.BZ2Decompressor()
        elif decompressor.needs_input:
            compressed = file.read(BLOCK_BYTES // 4)
            if not compressed:
                raise EOFError
        try:
            block = decompressor.decompress(compressed, BLOCK_BYTES)
        except OSError as error:
            raise _Bzip2Error from error
        if block:
            yield block
