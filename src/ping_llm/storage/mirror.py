"""Folders in an object store that one machine at a time writes to: resumable uploads, and copies of runs.

`Ledger`: which files of a dataset were uploaded, so that an upload that was killed resumes.

`Mirror`: training writes to a local folder, which is copied to the store after every checkpoint and at the end, and
back from the store when a run is resumed on a machine where that folder is missing or older. `mirror.json`, written
last, names the files that belong together; others are removed afterwards. So from its first checkpoint on, the store
always holds a complete one.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.core.files import atomic_folder, file_sha256, relative_name, sha256_digest
from ping_llm.storage.cache import model_folder
from ping_llm.storage.location import Location
from ping_llm.storage.stores import MissingError, StorageError

LEDGER: Final = ".upload.json"
STATE: Final = "mirror.json"
CHECKPOINTS: Final = "checkpoints"

_LEDGER_PERIOD_S: Final = 5.0
_LEFT_OUT: Final = frozenset({"damaged-checkpoints"})
_COPIES_AT_ONCE: Final = 4
_POLL_S: Final = 0.25
_PATIENCE_S: Final = 1800.0

Files = dict[str, dict[str, Any]]  # bytes and checksum of each file of a folder, by its name there


class Ledger:
    """The checksums of files already uploaded to a folder, as long as the upload lasts. Safe for several threads.

    It is stored beside the files, so that another machine can resume, too. Stores can be asked for sizes but not for
    checksums; without the ledger, a file that is already there would have to be read to be trusted.

    >>> with Ledger(folder, known={}) as ledger:
    ...     if not ledger.has("a", size=3, sha256=checksum):
    ...         (folder / "a").upload(path)
    ...         ledger.add("a", checksum)
    """

    def __init__(self, folder: Location, known: Mapping[str, str]) -> None:
        """`known`: checksums of files that are there already, from a manifest."""
        self._file = folder / LEDGER
        self._lock = threading.Lock()
        self._checksums = dict(known)
        with suppress(MissingError, ValueError, TypeError):  # damaged: what it says is uploaded again
            self._checksums |= json.loads(self._file.read_text())
        self._sizes = {file.name: file.size() for file in folder.list()}
        self._written = time.monotonic()

    def has(self, name: str, *, size: int, sha256: str) -> bool:
        """Whether a file with this name, size and checksum is there."""
        return self._sizes.get(name) == size and self._checksums.get(name) == sha256

    def add(self, name: str, sha256: str) -> None:
        """Note an upload. The ledger itself is stored every few seconds."""
        with self._lock:
            self._checksums[name] = sha256
            if time.monotonic() - self._written > _LEDGER_PERIOD_S:
                self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._file.write_text(json.dumps(self._checksums))

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """After a success, the manifest says the same, and there is nothing to resume."""
        if kind is None:
            self._file.delete()
        else:
            with suppress(StorageError):  # the error to report is the first one
                self._write()


class Mirror:
    """Keeps a remote copy of a local run folder."""

    def __init__(self, folder: Path, remote: Location, *, copies_at_once: int = _COPIES_AT_ONCE) -> None:
        self._folder, self._remote, self._copies_at_once = folder, remote, copies_at_once
        self._thread: threading.Thread | None = None

    def pull(self) -> None:
        """Copy the run from the store, if it is further there than here. A store must be writable, too."""
        self._remote.check_writable()
        step, files = _read_state(self._remote)
        if step > newest_step(self._folder):
            err.print(f"fetching the run from {self._remote}, {step:,} steps", markup=False)
            _download(self._remote, files, self._folder)

    def push_soon(self, step: int) -> None:
        """Copy to the store in the background, once the checkpoint of this step is on disk.

        If a copy is still in progress, this does nothing: the next one, or the end of the run, copies the rest.
        """
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._push_when_saved, args=(step,), name="mirror", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Copy the folder as it is now, and return when all of it is in the store."""
        self.wait()
        try:
            self._push()
        except StorageError as error:
            raise PingLlmError(f"{error}. All is saved in {self._folder}; the same command tries again") from error

    def wait(self) -> None:
        """Wait until a copy in progress has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _push_when_saved(self, step: int) -> None:
        began = time.monotonic()
        while not (self._folder / CHECKPOINTS / str(step)).is_dir():
            if time.monotonic() - began > _PATIENCE_S:
                return
            time.sleep(_POLL_S)
        try:
            self._push()
        except StorageError as error:
            err.print(f"[bold yellow]warning:[/] the run could not be copied: {error}")

    def _push(self) -> None:
        _, before = _read_state(self._remote)
        with ThreadPoolExecutor(self._copies_at_once) as pool:
            jobs = {name: pool.submit(self._upload, name, before.get(name)) for name in sorted(self._names())}
            entries = {name: job.result() for name, job in jobs.items()}
        deleted = {_step_of(name) for name, entry in entries.items() if entry is None} - {""}
        files = {name: entry for name, entry in entries.items() if entry and _step_of(name) not in deleted}
        (self._remote / STATE).write_text(json.dumps({"step": _newest(files), "files": files}, indent=1) + "\n")
        gone = before.keys() - files.keys()
        steps = set(map(_step_of, gone)) - {"", *map(_step_of, files)}
        for step in steps:  # checkpoints as a whole
            (self._remote / CHECKPOINTS / step).delete_tree()
        for name in gone:
            if _step_of(name) not in steps:
                (self._remote / name).delete()

    def _names(self) -> list[str]:
        """The files of the run, without checkpoints that are being written or deleted."""
        names = []
        for path in self._folder.rglob("*"):
            parts = path.relative_to(self._folder).parts
            unfinished = parts[0] == CHECKPOINTS and len(parts) > 1 and not parts[1].isdigit()
            hidden = parts[0].startswith(".") or path.name.endswith(".tmp")
            if not (unfinished or hidden or parts[0] in _LEFT_OUT or path.name == STATE) and path.is_file():
                names.append("/".join(parts))
        return names

    def _upload(self, name: str, before: dict[str, Any] | None) -> dict[str, Any] | None:
        """The entry of a file that is now in the store; None if it was deleted meanwhile, with its checkpoint."""
        path = self._folder / name
        try:
            stat = path.stat()
            entry = {"bytes": stat.st_size, "sha256": _checksum(path, stat.st_size, stat.st_mtime_ns)}
            if entry != before:
                (self._remote / name).upload(path)
            return entry
        except FileNotFoundError:
            return None


@cache
def _checksum(path: Path, size: int, modified_ns: int) -> str:
    """The checksum of a file, computed again when its size or time of modification changes."""
    return file_sha256(path)


def _step_of(name: str) -> str:
    """The step of the checkpoint that a file belongs to, or ""."""
    parts = name.split("/")
    return parts[1] if parts[0] == CHECKPOINTS and len(parts) > 2 else ""


def _newest(names: Iterable[str]) -> int:
    return max((int(step) for step in map(_step_of, names) if step.isdigit()), default=-1)


def newest_step(folder: Path) -> int:
    """Steps of the newest checkpoint in a run's folder; -1 if there is none."""
    return max((int(p.name) for p in (folder / CHECKPOINTS).glob("[0-9]*") if p.name.isdigit()), default=-1)


def fetch(remote: Location) -> Path:
    """Download a remote run (its newest checkpoint) or a folder of model files; returns the local folder."""
    folder = model_folder(remote)
    step, files = _read_state(remote)
    if not files:
        found = remote.list(recursive=True)
        files = {relative_name(file.relative_to(remote), remote): {"bytes": file.size()} for file in found}
        if not files:
            raise MissingError(f"{remote}: no such folder, or an empty one")
        _download(remote, files, folder)
    elif step != newest_step(folder):
        _download(remote, {n: entry for n, entry in files.items() if _step_of(n) in {"", str(step)}}, folder)
    return folder


def _read_state(remote: Location) -> tuple[int, Files]:
    """The step and the files that `mirror.json` names; -1 and none without one. Untrusted: names become paths here."""
    where = remote / STATE
    try:
        value = json.loads(where.read_text())
        files = {
            relative_name(name, where): {"bytes": int(entry["bytes"]), "sha256": sha256_digest(entry["sha256"], where)}
            for name, entry in value["files"].items()
        }
        if int(value["step"]) != _newest(files):
            raise ValueError("the step is not that of its newest checkpoint")
        return int(value["step"]), files
    except MissingError:
        return -1, {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PingLlmError(f"{where} is damaged: {one_line(error)}") from error


def _download(remote: Location, files: Files, folder: Path) -> None:
    """Replace a folder by verified copies of these files."""

    def copy(name: str) -> int:
        entry = files[name]
        if _step_of(name) or "sha256" not in entry:
            (remote / name).download(unfinished / name, sha256=entry.get("sha256", ""), size=entry["bytes"])
        else:  # may have been written again before `mirror.json` was
            (remote / name).download(unfinished / name)
        return int(entry["bytes"])

    total = sum(entry["bytes"] for entry in files.values())
    with (
        atomic_folder(folder) as unfinished,
        progress("fetching (bytes)", total=total) as advance,
        ThreadPoolExecutor(_COPIES_AT_ONCE) as pool,
    ):
        for size in pool.map(copy, files):
            advance(size)
