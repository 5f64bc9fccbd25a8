"""Atomic writes: a file or a folder appears whole under its name, or not at all.

Everything is written under a hidden name beside its target, synced to the disk, and renamed. A crash at any moment
leaves either what was there before or what is new; a hidden name that a killed process left behind is never read.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to. When the block ends well, what was written there replaces `path`; otherwise it is gone."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
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


def write_atomically(path: Path, data: str | bytes) -> None:
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
