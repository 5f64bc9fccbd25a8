"""What a store says about a path, and what it opens."""

import contextlib
import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from ping_llm.core.errors import PingLlmError
from ping_llm.storage.retry import MissingError, Result, StorageError, TruncatedError, retried


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: Literal["file", "folder", "missing"]
    size: int = 0
    modified_ns: int = 0


class RandomFile(Protocol):
    """Reads at any place, by several threads if need be."""

    def read_at(self, nbytes: int, offset: int) -> bytes: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


# Connections to object stores, opened at first use in each process.
#
# Everything that belongs to a connection comes from the environment, as the provider's own tools read it:
#
#     s3://   AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, ~/.aws, instance roles;
#             AWS_REGION or AWS_DEFAULT_REGION; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; AWS_CA_BUNDLE
#     gs://   GOOGLE_APPLICATION_CREDENTIALS, gcloud's default credentials, the metadata server; STORAGE_EMULATOR_HOST
#
# `PING_LLM_ANONYMOUS=1` sends no credentials (public buckets).

SCHEMES: Final = ("s3", "gs")

_CONNECT_TIMEOUT_S: Final = 10.0

_opened: dict[str, fs.FileSystem] = {}


def file_system(scheme: str) -> fs.FileSystem:
    """The file system of a scheme. It knows its files by `bucket/key`."""
    if scheme not in _opened:
        _opened[scheme] = _s3() if scheme == "s3" else _gcs()
    return _opened[scheme]


def forget() -> None:
    """Open anew at next use: the environment has changed, or this is the child of a fork."""
    _opened.clear()


os.register_at_fork(after_in_child=forget)


def _s3() -> fs.FileSystem:
    # One attempt: retries are ours (`retry.py`), so that their number and time are what we say they are.
    options: dict[str, Any] = {
        "anonymous": _is_anonymous(),
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "request_timeout": _stall_timeout_s(),
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
        "allow_delayed_open": True,  # a small object is one request, not three
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options |= _endpoint(endpoint, "AWS_ENDPOINT_URL")
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    elif endpoint:  # stores that are not Amazon's seldom care, but a request must name one
        options["region"] = "us-east-1"
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        options["tls_ca_file_path"] = bundle
    return fs.S3FileSystem(**options)


def _gcs() -> fs.FileSystem:
    options: dict[str, Any] = {"anonymous": _is_anonymous(), "retry_time_limit": timedelta(seconds=10)}
    if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
        options |= _endpoint(endpoint, "STORAGE_EMULATOR_HOST") | {"anonymous": True}
    return fs.GcsFileSystem(**options)


def _endpoint(text: str, name: str) -> dict[str, Any]:
    parts = urlsplit(text if "//" in text else f"https://{text}")
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
        raise PingLlmError(f"{name}={text!r} is not an address such as https://storage.example.org:9000")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc}


def _is_anonymous() -> bool:
    return os.environ.get("PING_LLM_ANONYMOUS", "").lower() in {"1", "true", "yes"}


def _stall_timeout_s() -> float:
    """A request on which nothing moves for so long is given up and tried again."""
    text = os.environ.get("PING_LLM_STALL_S", "20")
    try:
        return max(1.0, float(text))
    except ValueError:
        raise PingLlmError(f"PING_LLM_STALL_S={text!r} is not a number of seconds") from None


# The file system of this machine, seen as a store.


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


# Reading a remote object at random: every read is checked for its length and tried again on its own.


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


# An object store, seen through `pyarrow.fs`. Paths are `bucket/key`.

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
