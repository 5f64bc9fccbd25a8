"""Files of documents: which ones a pattern means, whether they are of the right kind, and what identifies them."""

import hashlib
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Final

from ping_llm.config import Blend, Config, parse_blend
from ping_llm.core.errors import PingLlmError

_PIECE: Final = 1 << 16

_RIEGELI: Final = bytes.fromhex("83af70d10d884a3f0000000000000000")
"""The header that every ArrayRecord file begins with."""

_KINDS: Final = {"arrayrecord": "ArrayRecord", "parquet": "Parquet", "tfrecord": "TFRecord"}


def matching(pattern: str, key: str) -> tuple[Path, ...]:
    """The files that a pattern names, in the order of their names."""
    if "://" in pattern:
        raise PingLlmError(f"{key}: {pattern} is not a local path; documents are read from this machine's disks only")
    path = Path(pattern).expanduser()
    found = tuple(sorted(p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()))
    if not found:
        raise PingLlmError(f"{key}: no file matches {pattern}")
    return found


def check_kind(files: tuple[Path, ...], wanted: str, key: str) -> None:
    """Every file begins as those of its kind do."""
    for file in files:
        found = _kind(file)
        if found != wanted:
            what = f"is a {_KINDS[found]} file" if found else "is not"
            advice = f"; set grain_file_type={found}" if found and key.startswith("grain") else ""
            raise PingLlmError(f"{key}: {_KINDS[wanted]} files are wanted, but {file} {what}{advice}")


def _kind(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as data:
        head = data.read(16)
        data.seek(max(0, size - 4))
        tail = data.read()
    if head[:4] == b"PAR1" and tail == b"PAR1":
        return "parquet"
    if head.startswith(_RIEGELI):
        return "arrayrecord"
    length = int.from_bytes(head[:8], "little")
    return "tfrecord" if size == 0 or (len(head) > 12 and length + 16 <= size) else None


def fingerprint(files: tuple[Path, ...]) -> str:
    """Of names, sizes, and the first and last bytes of files, where their tables of contents are: not all is read."""
    hashed = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        hashed.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            hashed.update(data.read(_PIECE))
            data.seek(max(0, size - _PIECE))
            hashed.update(data.read(_PIECE))
    return hashed.hexdigest()[:16]


def blend_of(config: Config) -> Blend:
    """The patterns that `grain` trains on with their shares: from the key, or from the JSON file that it names."""
    if path := config.grain_train_mixture_config_path:
        if config.grain_train_files:
            raise PingLlmError("set grain_train_files or grain_train_mixture_config_path, not both")
        return _mixture(Path(path))
    if not config.grain_train_files:
        raise PingLlmError("grain_train_files is not set: give a pattern of the training files")
    return parse_blend(config.grain_train_files)


def _mixture(file: Path) -> Blend:
    wrong = f"grain_train_mixture_config_path={file}"
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise PingLlmError(f"{wrong} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PingLlmError(f"{wrong} is not JSON: {error}") from None
    if not isinstance(value, dict) or not value:
        raise PingLlmError(f'{wrong}: write {{"name": {{"path": pattern, "weight": number}}, …}}')
    parts: dict[str, Fraction] = {}
    for name, part in value.items():
        if not isinstance(part, dict) or not isinstance(part.get("path"), str) or "weight" not in part:
            raise PingLlmError(f'{wrong}: {name!r} needs a "path" and a "weight"')
        weight = part["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e15:
            raise PingLlmError(f"{wrong}: the weight of {name!r} must be a number from 0 up, not {weight!r}")
        if part["path"] in parts:
            raise PingLlmError(f"{wrong}: {part['path']} is there twice; give it once, with the sum of the weights")
        parts[part["path"]] = Fraction(str(weight))
    total = sum(parts.values())
    if not total:
        raise PingLlmError(f"{wrong}: the weights are all 0; at least one must be positive")
    return tuple((pattern, weight / total) for pattern, weight in parts.items())


# Records of TensorFlow's formats, read without TensorFlow: `tf.train.Example` messages, and TFRecord files of them.

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
