"""Remote files on the local disk: a bounded LRU cache, shared by all processes of a machine.

*Whole files* are stored under their checksum, so a dataset that was replaced cannot be mistaken for its successor. A
file appears once it was downloaded completely and verified. Its time of modification is then set to a value derived
from its checksum; if anything modifies the file later, that time differs, and the file is verified again before it is
used. If two processes need the same file, one downloads it and the other waits for its lock, which the system releases
if the process dies. A file that is evicted while it is mapped stays valid until it is unmapped (`rows/dataset.py` does
that soon).

*Parts of files* lie in sparse files of the full size, whose blocks are fetched when they are needed (`BlockFile`).
"""

import fcntl
import hashlib
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import file_sha256, sha256_digest, sync
from ping_llm.core.randomness import Ints
from ping_llm.storage.location import Location, RandomFile
from ping_llm.storage.stores import number_from_environment

DIRECTORY_VARIABLE: Final = "PING_LLM_CACHE_DIR"
LIMIT_VARIABLE: Final = "PING_LLM_CACHE_GB"


def configure(folder: str = "", gigabytes: float = 0.0) -> None:
    """Set the cache of this process and of those it starts. "" and 0 leave the environment as it is."""
    if folder:
        os.environ[DIRECTORY_VARIABLE] = folder
    if gigabytes:
        os.environ[LIMIT_VARIABLE] = str(gigabytes)


def cache_folder() -> Path:
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ping-llm"


def work_folder(output: Location) -> Path:
    """The local folder for work whose result goes to a store: always the same one, so that work can be resumed."""
    return cache_folder() / "work" / _key(output)


def model_folder(source: Location) -> Path:
    """The local copy of a remote model. Not the work folder, in which a run may be further than in the store."""
    return cache_folder() / "models" / _key(source)


def _key(location: Location) -> str:
    return f"{location.name}-{hashlib.sha256(str(location).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True)
class Cache:
    folder: Path
    limit_bytes: int

    @classmethod
    def from_environment(cls) -> "Cache":
        """As set by PING_LLM_CACHE_DIR and PING_LLM_CACHE_GB; by default up to half of the free space."""
        limit = number_from_environment(LIMIT_VARIABLE, 0.0)
        if not limit >= 0:
            raise PingLlmError(f"{LIMIT_VARIABLE}={limit} must not be negative")
        given = cls(folder=cache_folder(), limit_bytes=int(limit * 1e9))
        if limit:
            return given
        with given._usable():
            given.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(given.folder).free
        return cls(folder=given.folder, limit_bytes=(free + given.used_bytes()) // 2)

    def whole(self, source: Location, *, size: int, sha256: str) -> Path:
        """A verified local copy of a remote file. It may be evicted at any time, so open it soon."""
        path = self._path(sha256)
        unfinished = path.with_suffix(".part")
        with self._usable():
            path.parent.mkdir(parents=True, exist_ok=True)
            while (found := self.find(size=size, sha256=sha256)) is None:
                with unfinished.open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if not _is_same(unfinished, lock):  # another process finished or removed it while we waited
                        continue
                    try:
                        if path.exists() and path.stat().st_size == size and file_sha256(path) == sha256:
                            _touch(path, sha256)  # its time was changed, but not its content
                        else:
                            path.unlink(missing_ok=True)
                            self._download(source, unfinished, size, sha256)
                    finally:
                        unfinished.unlink(missing_ok=True)
            return found

    def find(self, *, size: int, sha256: str) -> Path | None:
        """The local copy, if there is one that was not modified since it was verified."""
        path = self._path(sha256)
        with suppress(FileNotFoundError):
            stat = path.stat()
            if stat.st_size == size and stat.st_mtime_ns == _stamp(sha256):
                _touch(path, sha256)
                return path
        return None

    def forget(self, sha256: str) -> None:
        """Delete the copy, so that the file is fetched again."""
        self._path(sha256).unlink(missing_ok=True)

    def blocks_path(self, sha256: str) -> Path:
        """For a `BlockFile`."""
        return self._path(sha256, "blocks")

    def used_bytes(self) -> int:
        """Bytes on the disk; holes in sparse files take none."""
        return sum(stat.st_blocks * 512 for _, stat in self._entries())

    def make_room(self, needed: int) -> None:
        """Evict the least recently used files until `needed` more bytes fit below the limit."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = sorted(self._entries(), key=lambda entry: entry[1].st_atime_ns)
            excess = sum(stat.st_blocks * 512 for _, stat in entries) + needed - self.limit_bytes
            for path, stat in entries:
                if excess <= 0:
                    break
                if path.suffix != ".part" or _is_abandoned(path):
                    path.unlink(missing_ok=True)
                    excess -= stat.st_blocks * 512

    def _usable(self) -> AbstractContextManager[None]:
        return explained(f"the cache folder {self.folder} cannot be used ({DIRECTORY_VARIABLE} sets another)", OSError)

    def _path(self, sha256: str, kind: str = "files") -> Path:
        return self.folder / kind / sha256[:2] / sha256_digest(sha256, "a list of files")

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for kind in ("files", "blocks"):
            for path in (self.folder / kind).glob("*/*"):
                with suppress(FileNotFoundError):
                    yield path, path.stat()

    def _download(self, source: Location, unfinished: Path, size: int, sha256: str) -> None:
        if size > self.limit_bytes:
            raise PingLlmError(
                f"{source} has {size / 1e9:.3g} GB, more than the cache may hold ({self.limit_bytes / 1e9:.3g} GB): "
                f"raise {LIMIT_VARIABLE} (data_cache_gb)"
            )
        self.make_room(size)
        with unfinished.open("r+b") as file:  # allocated at once: other processes count it, and a full disk shows now
            os.posix_fallocate(file.fileno(), 0, max(1, size))
        source.fill(unfinished, sha256=sha256, size=size)
        sync(unfinished)
        _touch(unfinished, sha256)
        unfinished.replace(self._path(sha256))


def _stamp(sha256: str) -> int:
    """The time of modification that marks a file as verified: a function of its checksum, in the years 2001 to 2010."""
    return (1_000_000_000 + int(sha256[:7], 16)) * 1_000_000_000


def _touch(path: Path, sha256: str) -> None:
    """Mark the file as verified, and as used now."""
    with suppress(FileNotFoundError):
        os.utime(path, ns=(time.time_ns(), _stamp(sha256)))


def _is_same(path: Path, opened: IO[bytes]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(opened.fileno()))
    return False


def _is_abandoned(path: Path) -> bool:
    """Whether the process that was downloading it has died."""
    try:
        with suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


BLOCK: Final = 1 << 16  # a request takes tens of ms whether it brings 1 KB or 64: docs/storage.md has the measurement
LONGEST_READ: Final = 8 << 20


class BlockFile:
    """Those parts of a remote file that were needed so far: a sparse file of the same size, mapped as `array`.

    Behind the data lies a table with one byte per block: 1 if it was fetched. Blocks that were not read as zeros. A
    block's bytes are written before its mark, so a process that dies leaves nothing half-done behind, and two processes
    that fetch the same block write the same bytes: no lock is needed. Blocks that are damaged all the same (a power
    failure, a bad disk) are found by the checksum of each row, and `forget` drops them.
    """

    def __init__(self, path: Path, size: int, connect: Callable[[], RandomFile]) -> None:
        self._size = size
        self._connect = cache(connect)
        self._connecting = threading.Lock()
        blocks = -(-size // BLOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        descriptor, total = self._file.fileno(), blocks * (BLOCK + 1)
        if os.fstat(descriptor).st_size != total:
            os.ftruncate(descriptor, total)
            # Marks are set through the map, where a full disk would be a crash instead of an error.
            os.posix_fallocate(descriptor, blocks * BLOCK, blocks)
        content = np.frombuffer(mmap.mmap(descriptor, total), dtype=np.uint8)
        self._marks = content[blocks * BLOCK :]
        self.array: npt.NDArray[np.uint8] = content[:size]
        self.array.flags.writeable = False

    @property
    def is_evicted(self) -> bool:
        return os.fstat(self._file.fileno()).st_nlink == 0

    def missing(self, begin: Ints, end: Ints) -> tuple[Ints, list[tuple[int, int]]]:
        """Which of these byte ranges are not complete, and the reads that complete them.

        Reads are of whole blocks; adjacent blocks are read together, up to LONGEST_READ.
        """
        counts = (end - 1) // BLOCK - begin // BLOCK + 1
        owner = np.repeat(np.arange(len(begin)), counts)
        blocks = (begin // BLOCK)[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        absent = self._marks[blocks] == 0
        if not absent.any():
            return owner[absent], []
        os.utime(self._file.fileno())  # marks it as used now: the least recently used files are evicted first
        needed = np.unique(blocks[absent])
        runs = np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1)
        ranges = [(int(run[0]) * BLOCK, min((int(run[-1]) + 1) * BLOCK, self._size)) for run in runs]
        reads = [(b, min(b + LONGEST_READ, end)) for begin, end in ranges for b in range(begin, end, LONGEST_READ)]
        return np.unique(owner[absent]), reads

    def fetch(self, begin: int, end: int) -> None:
        """Fetch a range of whole blocks. Safe for several threads."""
        with self._connecting:
            remote = self._connect()
        os.pwrite(self._file.fileno(), remote.read_at(end - begin, begin), begin)
        self._marks[begin // BLOCK : -(-end // BLOCK)] = 1

    def forget(self, begin: int, end: int) -> None:
        """Have the blocks of a range fetched again."""
        self._marks[begin // BLOCK : -(-end // BLOCK)] = 0

    def close(self) -> None:
        """Close the file. The map is freed with the last reference to `array`."""
        self._file.close()
        self.array = np.zeros(0, dtype=np.uint8)
