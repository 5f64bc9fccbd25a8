"""Atomic writes, locks, and names that come from outside.

A file or a folder appears whole under its name, or not at all: everything is written under a hidden name beside its
target, synced to the disk, and renamed. A crash at any moment leaves either what was there before or what is new; a
hidden name that a killed process left behind is never read.

Manifests, mirrors and model folders may come from strangers. A name or a digest in one of them becomes part of a path
only after `relative_name` or `sha256_digest` has checked it, where the file is parsed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ping_llm.core.errors import PingLlmError

_NAME: Final = re.compile(r"[^/\\\x00-\x1f\ud800-\udfff]{1,255}(/[^/\\\x00-\x1f\ud800-\udfff]{1,255})*")
_UNFINISHED: Final = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def unfinished_name(path: Path) -> Path:
    """A hidden name beside `path`, to write to before renaming; `remove_unfinished` knows it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to. When the block ends well, what was written there replaces `path`; otherwise it is gone."""
    unfinished = unfinished_name(path)
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes the place of `path` (and of all that was in it) when the block ends."""
    suffix = uuid.uuid4().hex[:12]
    unfinished, replaced = (path.with_name(f".{path.name}.{suffix}.{kind}") for kind in ("tmp", "old"))
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            sync(file)
        sync(unfinished)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        sync(path.parent)
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def write_atomically(path: Path, data: str | bytes | memoryview) -> None:
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[None]:
    """Holds the lock file; a second process gets an error that names the host and process of the first.

    The lock ends with the process that holds it, however that ends; the file stays, unless the holder removes it.
    `what`: what is locked, for people.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(300).strip() or "another process"
            raise PingLlmError(f"{what} is in use by {holder}; wait until it ends, or choose another folder") from None
        if os.fstat(file.fileno()).st_nlink:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield
            return
    with exclusive(lock, what):  # the last holder removed the file while this process opened it
        yield


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Locks a folder against other writers, and removes unfinished files at the end and those that a killed one left.

    A folder that was not there before, and has nothing in it afterwards, is removed again.
    """
    existed, lock = folder.exists(), folder / ".lock"
    with exclusive(lock, str(folder)):
        try:
            remove_unfinished(folder)
            yield
        finally:
            remove_unfinished(folder)
            lock.unlink(missing_ok=True)
            if not existed:
                with suppress(OSError):
                    folder.rmdir()


def remove_unfinished(folder: Path) -> None:
    """What was begun in a folder and not renamed. Nobody else may be writing there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink()


def relative_name(name: Any, where: object) -> str:
    """A name that `where` (a manifest, a mirror, …) gives a file of its own folder: never outside of that folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise PingLlmError(f"{where} names the file {str(name)[:80]!r}, which is not inside its folder; do not use it")
    return name


def sha256_digest(digest: Any, where: object) -> str:
    """A SHA-256 digest that stands in `where`, in hexadecimal digits."""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise PingLlmError(f"{where} holds {str(digest)[:80]!r} where a SHA-256 digest should be; do not use it")
    return digest
