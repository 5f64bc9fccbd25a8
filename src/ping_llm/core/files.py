"""Atomic writes, locks, and names that come from outside.

A file or a folder appears whole under its name, or not at all: everything is written under a hidden name beside its
target, synced to the disk, and renamed. A crash at any moment leaves either what was there before or what is new; a
hidden name that a killed process left behind is never read.

Manifests, mirrors and model folders may come from untrusted sources. Where such a file is parsed, `relative_name` and
`sha256_digest` check every name and digest in it before any becomes part of a path.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
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

STAGING: Final = ".unfinished"
_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_NAME: Final = re.compile(r"[^/\\\x00-\x1f\ud800-\udfff]{1,255}(/[^/\\\x00-\x1f\ud800-\udfff]{1,255})*")
_UNFINISHED: Final = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def unfinished_name(path: Path) -> Path:
    """A hidden name beside `path`, to write to before renaming; `remove_unfinished` knows it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file to write to. It replaces `path` when the block succeeds, and is removed otherwise."""
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
    """An empty folder to write to. It replaces `path`, and all that was in it, when the block succeeds.

    What a killed process left of an earlier attempt is removed. If another process creates `path` meanwhile, this is an
    `OSError`.
    """
    existed = path.exists()
    unfinished, lock = _claimed_folder(path)
    try:
        yield unfinished
        sync_all(unfinished)
        _exchange(unfinished, path) if existed else unfinished.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.close(lock)


def _claimed_folder(path: Path) -> tuple[Path, int]:
    """A new hidden folder beside `path`, and a descriptor that locks it as long as this process lives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if _UNFINISHED.fullmatch(leftover.name) and leftover.is_dir():
            with suppress(OSError), _opened(leftover) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
    while True:
        unfinished = unfinished_name(path)
        unfinished.mkdir()
        with suppress(FileNotFoundError):
            descriptor = os.open(unfinished, os.O_RDONLY)
            with suppress(OSError):  # a network file system may have no locks; then no process removes it, either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if unfinished.exists():  # no process removed it as a leftover before it was locked
                return unfinished, descriptor
            os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap the names of two folders in one step, or in two where the system cannot."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
        if swap(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
    except AttributeError:
        pass
    replaced = unfinished_name(old)
    old.rename(replaced)
    try:
        new.rename(old)
    except OSError:
        replaced.rename(old)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def staged_files(folder: Path, *patterns: str, overwrite: bool) -> Iterator[Path]:
    """A folder inside `folder` to write to. When the block succeeds, its files replace those that match a pattern.

    They are moved one by one, in the order of their names. If a process was killed while it moved files, the next one
    replaces them. Only one process at a time can do this.
    """
    if folder.exists() and not folder.is_dir():
        raise PingLlmError(f"{folder} is a file; the output must be a folder")
    staging = folder / STAGING
    complete = staging / ".complete"
    with sole_writer(folder):
        existing = sorted(path for pattern in patterns for path in folder.glob(pattern))
        if existing and not overwrite and not complete.exists():
            raise PingLlmError(f"{folder} already holds measurements: choose another folder, or --overwrite them")
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        try:
            yield staging
            sync_all(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        write_atomically(complete, "")
        for old in reversed(existing):
            old.unlink()
        for file in sorted(staging.glob("[!.]*")):
            file.replace(folder / file.name)
        sync(folder)
        shutil.rmtree(staging)


def write_atomically(path: Path, data: str | bytes | memoryview) -> None:
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[None]:
    """Holds a lock file; a second process gets an error that names the host and process of the first.

    The lock ends with its process, even if that is killed. Whoever holds it last removes the file. `what` is locked, in
    words for the error.
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
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
    with exclusive(lock, what):  # the last holder removed the file while this process opened it
        yield


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Locks a folder against other writers, after removing the unfinished files of writers that were killed.

    A folder that did not exist before and is empty afterwards is removed.
    """
    existed = folder.exists()
    try:
        with exclusive(folder / ".lock", str(folder)):
            remove_unfinished(folder)
            yield
    finally:
        if not existed:
            with suppress(OSError):
                folder.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove files that were begun in a folder and never renamed. No other process may be writing there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink()


def relative_name(name: Any, where: object) -> str:
    """Check the name that `where` (a manifest, a mirror, …) has for a file: it must not lead out of its folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise PingLlmError(f"{where} names the file {str(name)[:80]!r}, which is not inside its folder; do not use it")
    return name


def sha256_digest(digest: Any, where: object) -> str:
    """Check a SHA-256 digest from `where`: 64 hexadecimal digits."""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise PingLlmError(f"{where} holds {str(digest)[:80]!r} where a SHA-256 digest should be; do not use it")
    return digest


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Values to be stored as JSON, with a checksum; `unsealed` checks and removes it."""
    return {**values, "sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def unsealed(stored: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in stored.items() if name != "sha256"}
    if stored != sealed(values):
        raise ValueError("its values are not those that were saved")
    return values
