"""Files wherever they are: a local path, `s3://bucket/key` or `gs://bucket/key`, through one class.

A `Location` is only a name: it can be compared, pickled and sent to other processes and machines. Connections are
opened where it is used, with the credentials, region and endpoint of that environment (docs/storage.md). `pyarrow.fs`
does the work. This module adds that transient failures are retried (`stores.py`), every remote read is checked for its
length, writes are atomic, and errors are one line.
"""

import builtins
import io
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

import pyarrow as pa
from pyarrow import fs

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import atomic_file, file_sha256, write_atomically
from ping_llm.storage.stores import FAILURES, MissingError, Result, StorageError, TruncatedError, file_system, retried

COPY_BYTES: Final = 8 << 20


def locate(text: "str | Path | Location") -> "Location":
    """The location that a path or an address such as `s3://bucket/key` names."""
    if isinstance(text, Location):
        return text
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", str(text), re.DOTALL)
    if match is None or not (match[2] or match[1] in {"s3", "gs"}):
        return Location(path=str(text))
    scheme, rest = match[1].lower(), match[3]
    if not match[2] and isinstance(text, str):  # in a `Path` the second slash was taken away
        raise PingLlmError(f"{text}: write {scheme}:// with two slashes")
    if scheme == "file":
        if not rest.startswith("/"):
            raise PingLlmError(f"{text}: a file:// address has three slashes, such as file:///data/rows")
        return Location(path=rest)
    if scheme not in {"s3", "gs"}:
        raise PingLlmError(f"{text}: {scheme}:// is not supported; use a local path, s3://, gs:// or file:///")
    path = "/".join(part for part in rest.split("/") if part)
    if not path:
        raise PingLlmError(f"{text} names no bucket; write {scheme}://bucket/path")
    return Location(scheme=scheme, path=path)


def split_pattern(path: str) -> tuple[str, str]:
    """The folders before the first one with a wildcard, and the rest."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


@dataclass(frozen=True, kw_only=True, order=True)
class Location:
    scheme: str = ""  # "s3" or "gs"; empty for a local path
    path: str  # local path, or `bucket/key`
    known_size: int | None = field(default=None, compare=False)  # bytes, if a listing has said so

    # -- names

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    @property
    def is_remote(self) -> bool:
        return bool(self.scheme)

    @property
    def is_local(self) -> bool:
        return not self.scheme

    @property
    def local(self) -> Path:
        if self.is_remote:
            raise PingLlmError(f"{self} is not on this machine: a local path is needed here")
        return Path(self.path)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> "Location":
        """Of a bucket, the bucket itself."""
        return self if self.is_remote and "/" not in self.path else self._at(str(PurePosixPath(self.path).parent))

    def __truediv__(self, name: str) -> "Location":
        return self._at(str(PurePosixPath(self.path) / (name.lstrip("/") if self.is_remote else name)))

    def absolute(self) -> "Location":
        return self if self.is_remote else self._at(str(Path(self.path).absolute()))

    def relative_to(self, folder: "Location") -> str:
        return str(PurePosixPath(self.path).relative_to(folder.path))

    def _at(self, path: str) -> "Location":
        return replace(self, path=path, known_size=None)

    # -- queries

    def exists(self) -> bool:
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        return self._info().type == fs.FileType.Directory

    def is_file(self) -> bool:
        return self._info().type not in {fs.FileType.NotFound, fs.FileType.Directory}

    def stat(self) -> fs.FileInfo:
        """Size and time of modification (`size`, `mtime_ns`) of a file: whether it is still the same."""
        info = self._info()
        if info.type == fs.FileType.NotFound or (self.is_remote and info.type != fs.FileType.File):
            raise self._missing()
        return info

    def size(self) -> int:
        return self.stat().size if self.known_size is None else self.known_size

    def list(self, recursive: bool = False) -> "builtins.list[Location]":
        """The files of a folder, sorted, with their sizes. A folder that does not exist has none."""
        selector = fs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        infos = self.attempt(lambda: self.store.get_file_info(selector))
        files = [info for info in infos if info.type == fs.FileType.File]
        return sorted(replace(self, path=str(PurePosixPath(file.path)), known_size=file.size) for file in files)

    def glob(self, pattern: str) -> "builtins.list[Location]":
        """Files below this folder that match: `*`, `?` and `[…]` within a name, `**` through any folders."""
        from fsspec.utils import glob_translate

        parts = (part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/"))
        matches = re.compile(glob_translate("/".join(parts))).match
        return [file for file in self.list(recursive="/" in pattern) if matches(file.relative_to(self))]

    # -- reading

    def read_bytes(self) -> bytes:
        if self.is_local:
            return self.attempt(self.local.read_bytes)
        file = RandomFile(self)
        return file.read_at(file.size(), 0)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open_random(self) -> "RandomFile":
        """A seekable file, also for Arrow readers. Several threads may call its `read_at(nbytes, offset)`."""
        return RandomFile(self) if self.is_remote else self.attempt(lambda: pa.OSFile(self.path))

    def open_stream(self) -> BinaryIO:
        """A file to be read from beginning to end; remote ones are fetched in large blocks."""
        if self.is_remote:
            return io.BufferedReader(RandomFile(self), COPY_BYTES)
        return self.attempt(lambda: Path(self.path).open("rb"))

    def download(self, target: Path, *, sha256: str = "", size: int | None = None) -> None:
        """Copy to a local file, atomically. Size, and checksum where given, are verified."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as unfinished:
            self.fill(unfinished, sha256=sha256, size=size)

    def fill(self, target: Path, *, sha256: str = "", size: int | None = None) -> None:
        """Write this file's bytes over those of a local one, and verify them."""

        def copy() -> None:
            mode = "r+b" if target.exists() else "wb"
            with self.store.open_input_file(self.path) as source, target.open(mode) as file:
                expected = source.size() if size is None else size
                shutil.copyfileobj(source, file, COPY_BYTES)
                file.truncate()
                if file.tell() != expected:
                    raise TruncatedError(f"{file.tell():,} bytes came instead of {expected:,}")

        for _ in range(2 if self.is_remote else 1):  # it may have been damaged on the way
            self.attempt(copy)
            if not sha256 or (found := file_sha256(target)) == sha256:
                return
        raise StorageError(f"{self} is damaged: its checksum is {found[:12]}…, not {sha256[:12]}…")

    # -- writing

    def write_bytes(self, data: Any, *, check: bool = False) -> None:
        """Write atomically, as all methods here do. With `check`, ask the store afterwards whether it has all bytes."""

        def write() -> None:
            if self.is_local:
                self.local.parent.mkdir(parents=True, exist_ok=True)
                return write_atomically(self.local, data)
            # Leaving the block completes the object whatever happened, and Arrow cannot abort it. So all bytes are
            # written in one call, which no signal interrupts.
            with self.store.open_output_stream(self.path, compression=None) as stream:
                stream.write(data)
            if check and (stored := self.store.get_file_info(self.path).size) != len(data):
                raise TruncatedError(f"the store has {stored} bytes instead of {len(data):,}")

        self.attempt(write)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def check_writable(self) -> None:
        """Fail now, not after hours of work, if nothing can be written to a remote folder."""
        if self.is_remote:
            probe = self / f".writable-{uuid.uuid4().hex[:12]}"
            probe.write_bytes(b"")
            probe.delete()

    def upload(self, source: Path) -> None:
        with pa.memory_map(str(source)) as file:
            self.write_bytes(memoryview(file.read_buffer()), check=True)

    def copy_to(self, target: "Location") -> None:
        """A copy under another name. Within one store the bytes do not pass through this machine."""
        if self.is_local:
            self.attempt(lambda: target.upload(self.local))
        elif self.scheme == target.scheme:
            self.attempt(lambda: self.store.copy_file(self.path, target.path))
        else:
            self.download(target.local)

    def delete(self) -> None:
        """Remove a file, if it is there."""
        with suppress(MissingError):
            self.attempt(lambda: self.store.delete_file(self.path))

    def delete_tree(self) -> None:
        """Remove a folder and all that is in it, if it is there. A bucket itself is left alone."""
        if self.is_local:
            shutil.rmtree(self.path, ignore_errors=True)
        elif "/" in self.path:
            with suppress(MissingError):
                self.attempt(lambda: self.store.delete_dir(self.path))
        else:
            self.attempt(lambda: self.store.delete_dir_contents(self.path, accept_root_dir=True))

    # -- the store

    @property
    def store(self) -> fs.FileSystem:
        return file_system(self.scheme)

    def _info(self) -> fs.FileInfo:
        return self.attempt(lambda: self.store.get_file_info(self.path))

    def attempt(self, action: Callable[[], Result]) -> Result:
        """The action's result. Remote actions are retried; a failure becomes one line that says why."""
        try:
            return retried(self, action) if self.is_remote else action()
        except MissingError as error:
            raise self._missing() from error.__cause__
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing() from None
        except OSError as error:
            raise StorageError(f"{self}: {os.strerror(error.errno) if error.errno else error}") from error

    def _missing(self) -> MissingError:
        """The error for a missing file. Stores do not say whether the object or the whole bucket is missing: ask."""
        if self.is_local:
            return MissingError(f"{self}: no such file")
        bucket = self.path.partition("/")[0]
        with suppress(*FAILURES):  # a store that does not tell
            if self.store.get_file_info(bucket).type == fs.FileType.NotFound:
                return MissingError(f"{self}: no such bucket: {bucket}")
        return MissingError(f"{self}: no such object")


class RandomFile(io.RawIOBase):
    """A seekable remote file. Each read is one request, retried by itself and checked for its length."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self._location = location
        self._file: pa.NativeFile = location.attempt(lambda: location.store.open_input_file(location.path))
        self._size: int = self._file.size()
        self._position = 0

    def size(self) -> int:
        return self._size

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Bytes from an offset, fewer only where the file ends. May be called by several threads."""
        expected = max(0, min(nbytes, self._size - offset))

        def read() -> bytes:
            data: bytes = self._file.read_at(expected, offset)
            if len(data) != expected:
                raise TruncatedError(f"{len(data):,} bytes came instead of {expected:,}")
            return data

        return self._location.attempt(read) if expected else b""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError("negative position")
        self._position = position
        return position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
