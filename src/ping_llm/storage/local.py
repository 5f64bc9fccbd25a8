"""The file system of this machine, seen as a store."""

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ping_llm.storage.entry import Entry, RandomFile
from ping_llm.storage.retry import MissingError, StorageError


class LocalStore:
    def info(self, path: str) -> Entry:
        try:
            stat = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return Entry(kind="missing")
        kind = "folder" if Path(path).is_dir() else "file"
        return Entry(kind=kind, size=stat.st_size, modified_ns=stat.st_mtime_ns)  # type: ignore[arg-type]

    def file(self, path: str) -> Entry:
        entry = self.info(path)
        if entry.kind == "missing":
            raise MissingError(f"{path}: no such file")
        return entry

    def files(self, path: str, recursive: bool) -> list[tuple[str, int]]:
        found = Path(path).rglob("*") if recursive else Path(path).glob("*")
        files = []
        for file in found:
            with suppress(FileNotFoundError):  # a temporary file of somebody else, gone by now
                if file.is_file():
                    files.append((str(file), file.stat().st_size))
        return files

    def read(self, path: str) -> bytes:
        with _one_line(path):
            return Path(path).read_bytes()

    def open_input(self, path: str) -> pa.NativeFile:
        with _one_line(path):
            return pa.OSFile(path)

    def open_stream(self, path: str) -> BinaryIO:
        with _one_line(path):
            return Path(path).open("rb")

    def open_random(self, path: str) -> RandomFile:
        return self.open_input(path)

    def fill(self, path: str, target: Path, *, sha256: str | None, size: int | None) -> None:
        with _one_line(path):
            shutil.copyfile(path, target)
        if size is not None and target.stat().st_size != size:
            raise StorageError(f"{path} has {target.stat().st_size:,} bytes instead of {size:,}")
        if sha256 is not None:
            with target.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise StorageError(f"{path} is damaged: its checksum is {found[:12]}…, not {sha256[:12]}…")

    def write(self, path: str, data: bytes) -> None:
        _replace(path, lambda unfinished: unfinished.write_bytes(data))

    def upload(self, path: str, source: Path) -> None:
        _replace(path, lambda unfinished: shutil.copyfile(source, unfinished))

    def copy(self, path: str, target: str) -> None:
        with _one_line(path):
            self.upload(target, Path(path))

    def delete(self, path: str) -> None:
        with _one_line(path):
            Path(path).unlink(missing_ok=True)

    def delete_tree(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)


def _replace(name: str, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    path = Path(name)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    with _one_line(name):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _one_line(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{path}: no such file") from None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
