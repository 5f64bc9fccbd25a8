"""Where the bytes of a record lie inside an ArrayRecord file.

ArrayRecord files are Riegeli files. With `group_size:1,uncompressed` every record is one chunk that holds the record's
bytes as they are, so a reader that knows a record's place can map the file and touch only the pages it needs, where
ArrayRecord itself must read (and copy) the whole record: 5 ms for a row of 8 MB.

Glossary
  block      the file is cut into blocks of 64 KiB; each begins with a 24-byte block header
  physical   a position in the file
  logical    a position in the file with all block headers taken out
  chunk      40-byte chunk header, 1 byte of compression type, the size of the size list, the size list, the record

Chunks follow each other without gaps in logical space, so all positions follow from the record sizes alone. Shards
are checked against this arithmetic when they are written: an ArrayRecord release that lays files out differently is
an error at preparation time, never a wrong read later.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

WRITER_OPTIONS: Final = "group_size:1,uncompressed"

BLOCK: Final = 65536
BLOCK_HEADER: Final = 24
BLOCK_PAYLOAD: Final = BLOCK - BLOCK_HEADER

FIRST_CHUNK: Final = 40
"""Logical position of the first record's chunk: the file signature, an empty chunk, comes before it."""

_CHUNK_HEADER: Final = 40


def varint_length(value: Any) -> Any:
    """Bytes of a base-128 number (of each, for an array)."""
    return 1 + sum((value >= 1 << bits) * 1 for bits in (7, 14, 21, 28, 35))


def record_prefix(size: Any) -> Any:
    """Bytes of the chunk that come before the record's own `size` bytes."""
    length = varint_length(size)
    return _CHUNK_HEADER + 1 + varint_length(length) + length


def physical(logical: Any) -> Any:
    """The position in the file of a logical position."""
    return logical + BLOCK_HEADER * (logical // BLOCK_PAYLOAD + 1)


def gather_bytes(file: npt.NDArray[np.uint8], logical: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.uint8]:
    """`width` bytes at each logical position of a mapped file, shape (positions, width)."""
    return file[physical(logical[:, None] + np.arange(width))]
