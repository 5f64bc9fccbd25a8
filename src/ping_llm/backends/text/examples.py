"""Records of TensorFlow's formats, read without TensorFlow: `tf.train.Example` messages, and TFRecord files of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ping_llm.errors import PingLlmError

_LENGTH: Final = 12
"""A record of a TFRecord file: its length in 8 bytes, a checksum of that in 4, its bytes, a checksum of them in 4."""
_CHECKSUM: Final = 4
_LONGEST: Final = 1 << 31


class NotAnExampleError(ValueError):
    pass


def text_feature(record: bytes, name: str) -> bytes:
    """The first value of a feature of bytes."""
    begin, end = _feature(record, name)
    for kind, first, last in _fields(record, begin, end):
        if kind == 1:
            for _, start, stop in _fields(record, first, last):
                return record[start:stop]
            return b""
    raise NotAnExampleError(f"its feature {name!r} holds no text")


def int_feature(record: bytes, name: str) -> list[int]:
    """All values of a feature of whole numbers, packed or not."""
    begin, end = _feature(record, name)
    values = []
    for kind, first, last in _fields(record, begin, end):
        if kind == 3:
            for _, start, stop in _fields(record, first, last):
                at = start
                while at < stop:
                    value, at = _varint(record, at)
                    values.append(value)
    return values


def _feature(record: bytes, name: str) -> tuple[int, int]:
    wanted, found = name.encode(), []
    try:
        for _, begin, end in _fields(record, 0, len(record)):
            for _, first, last in _fields(record, begin, end):
                (_, key_begin, key_end), (_, value_begin, value_end) = _fields(record, first, last)
                if record[key_begin:key_end] == wanted:
                    return value_begin, value_end
                found.append(record[key_begin:key_end].decode())
    except (IndexError, ValueError) as error:
        raise NotAnExampleError("it is not a tf.train.Example") from error
    has = f"only {', '.join(sorted(found)[:8])}" if found else "it is not a tf.train.Example"
    raise NotAnExampleError(f"it has no feature {name!r}, {has}")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field of a protocol buffer message. Fields that are plain numbers begin at them."""
    while at < end:
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field ends behind its message")
            yield tag >> 3, at, at + size
            at += size
        elif tag & 7 == 0:
            begin = at
            _, at = _varint(data, at)
            yield tag >> 3, begin, at
        else:
            raise ValueError("a field of an unknown kind")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7


class RecordFile:
    """A TFRecord file from its beginning to its end. Records may be skipped, which reads only how long they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")

    def read(self) -> bytes | None:
        """The next record; None at the end."""
        size = self._size()
        if size is None:
            return None
        data = self._file.read(size + _CHECKSUM)
        if len(data) < size + _CHECKSUM:
            raise PingLlmError(f"{self._path} is cut off in the middle of a record")
        return data[:size]

    def skip(self) -> bool:
        """Go past the next record; False at the end."""
        size = self._size()
        if size is not None:
            self._file.seek(size + _CHECKSUM, 1)
        return size is not None

    def _size(self) -> int | None:
        head = self._file.read(_LENGTH)
        if not head:
            return None
        size = int.from_bytes(head[:8], "little")
        if len(head) < _LENGTH or size > _LONGEST:
            raise PingLlmError(f"{self._path} is not a TFRecord file, or is damaged")
        return size

    def close(self) -> None:
        self._file.close()
