"""An object store, seen through `pyarrow.fs`. Paths are `bucket/key`."""

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
from pyarrow import fs

from ping_llm.storage.entry import Entry
from ping_llm.storage.filesystems import file_system
from ping_llm.storage.reader import RetryingFile
from ping_llm.storage.retry import MissingError, Result, StorageError, TruncatedError, retried

COPY_BYTES: Final = 8 << 20

_KINDS: Final = {fs.FileType.File: "file", fs.FileType.Directory: "folder", fs.FileType.NotFound: "missing"}


@dataclass(frozen=True)
class RemoteStore:
    scheme: str

    @property
    def _fs(self) -> fs.FileSystem:
        return file_system(self.scheme)

    def info(self, path: str) -> Entry:
        info = self._try(path, lambda: self._fs.get_file_info(path))
        kind = _KINDS.get(info.type, "file")
        return Entry(kind=kind, size=info.size or 0, modified_ns=info.mtime_ns or 0)  # type: ignore[arg-type]

    def file(self, path: str) -> Entry:
        entry = self.info(path)
        if entry.kind != "file":
            raise self._missing(path)
        return entry

    def files(self, path: str, recursive: bool) -> list[tuple[str, int]]:
        selector = fs.FileSelector(path, recursive=recursive, allow_not_found=True)
        infos = self._try(path, lambda: self._fs.get_file_info(selector))
        return [(info.path, info.size) for info in infos if info.type == fs.FileType.File]

    def read(self, path: str) -> bytes:
        with self.open_random(path) as file:
            return file.readall()

    def open_random(self, path: str) -> RetryingFile:
        with self._naming_bucket(path):
            return RetryingFile(self._where(path), lambda: self._fs.open_input_file(path))

    def open_stream(self, path: str) -> BinaryIO:
        return io.BufferedReader(self.open_random(path), COPY_BYTES)

    def open_input(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.open_random(path), mode="r")

    def fill(self, path: str, target: Path, *, sha256: str | None, size: int | None) -> None:
        """Write the object's bytes over a local file's."""

        def copy() -> str:
            digest = hashlib.sha256()
            with self._fs.open_input_file(path) as source, target.open("r+b" if target.exists() else "wb") as file:
                expected = source.size() if size is None else size
                while block := source.read(COPY_BYTES):
                    file.write(block)
                    if sha256 is not None:
                        digest.update(block)
                file.truncate()
                if file.tell() != expected:
                    raise TruncatedError(f"{file.tell():,} bytes came instead of {expected:,}")
            return digest.hexdigest()

        found = self._try(path, copy)
        if sha256 is not None and found != sha256:
            found = self._try(path, copy)  # it may have been the way, not the object
            if found != sha256:
                raise StorageError(f"{self._where(path)} is damaged: its checksum is {found[:12]}…, not {sha256[:12]}…")

    def write(self, path: str, data: bytes) -> None:
        def put() -> None:
            with self._fs.open_output_stream(path, compression=None) as stream:
                stream.write(data)

        self._try(path, put)

    def upload(self, path: str, source: Path) -> None:
        size = source.stat().st_size

        def put() -> None:
            with source.open("rb") as file, self._fs.open_output_stream(path, compression=None) as stream:
                while block := file.read(COPY_BYTES):
                    stream.write(block)
            stored = self._fs.get_file_info(path).size
            if stored != size:
                raise TruncatedError(f"the store has {stored} bytes instead of {size:,}")

        self._try(path, put)

    def copy(self, path: str, target: str) -> None:
        self._try(path, lambda: self._fs.copy_file(path, target))

    def delete(self, path: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.delete_file(path)

        self._try(path, remove)

    def delete_tree(self, path: str) -> None:
        def remove() -> None:
            if "/" in path:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.delete_dir(path)
            else:
                self._fs.delete_dir_contents(path, accept_root_dir=True)

        self._try(path, remove)

    def _where(self, path: str) -> str:
        return f"{self.scheme}://{path}"

    def _try(self, path: str, action: Callable[[], Result]) -> Result:
        with self._naming_bucket(path):
            return retried(self._where(path), action)

    @contextlib.contextmanager
    def _naming_bucket(self, path: str) -> Iterator[None]:
        try:
            yield
        except MissingError as error:
            raise self._missing(path) from error.__cause__

    def _missing(self, path: str) -> MissingError:
        """Stores answer alike whether the object or the whole bucket is missing; people want to know which."""
        bucket = path.partition("/")[0]
        try:
            there = self._fs.get_file_info(bucket).type != fs.FileType.NotFound
        except (OSError, pa.ArrowException):
            there = True  # it does not say
        return MissingError(f"{self._where(path)}: " + ("no such object" if there else f"no such bucket: {bucket}"))
