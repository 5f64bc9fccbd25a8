"""A run's folder in an object store.

Training writes to a local folder, which is copied to the store after every checkpoint and at the end, and from the
store when a run goes on where that folder is missing or older. `mirror.json`, written last, names the files that belong
together; what it does not name is removed afterwards. So the store always holds a whole checkpoint once it held one.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError
from ping_llm.storage.cache import model_folder
from ping_llm.storage.location import Location
from ping_llm.storage.retry import MissingError, StorageError

STATE: Final = "mirror.json"
CHECKPOINTS: Final = "checkpoints"
_LEFT_OUT: Final = frozenset({"damaged-checkpoints"})
_AT_ONCE: Final = 4
_POLL_S: Final = 0.25
_PATIENCE_S: Final = 1800.0


class Mirror:
    """Keeps a remote copy of a local run folder."""

    def __init__(self, folder: Path, remote: Location) -> None:
        self._folder = folder
        self._remote = remote
        self._checksums: dict[tuple[str, int, int], str] = {}
        self._thread: threading.Thread | None = None

    def pull(self) -> None:
        """Copy the run from the store, if it got further there than here. A store that refuses writes is said now."""
        self._remote.check_writable()
        state = _read_state(self._remote)
        if state is None or state["step"] <= newest_step(self._folder):
            return
        err.print(f"fetching the run from {self._remote}, {state['step']:,} steps", soft_wrap=True, markup=False)
        _download(self._remote, state["files"], self._folder)

    def push_soon(self, step: int) -> None:
        """Copy to the store, beside training, when the checkpoint of this step is on disk.

        A copy that is still under way is not waited for: the next one, or the end of the run, brings the rest.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._push_when_saved, args=(step,), name="mirror", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy what is there now, and return when it is in the store."""
        self.wait()
        try:
            self._push()
        except StorageError as error:
            raise PingLlmError(f"{error}. All is saved in {self._folder}; the same command tries again") from error

    def wait(self) -> None:
        """For a copy that is under way."""
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
            err.print(f"[bold yellow]warning:[/] the run could not be copied: {error}", soft_wrap=True)

    def _push(self) -> None:
        before = (_read_state(self._remote) or {"files": {}})["files"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            jobs = {name: pool.submit(self._upload, name, before.get(name)) for name in sorted(self._names())}
            entries = {name: job.result() for name, job in jobs.items()}
        deleted = {_step_of(name) for name, entry in entries.items() if entry is None} - {""}
        files = {name: entry for name, entry in entries.items() if entry and _step_of(name) not in deleted}
        state = {"step": max((int(step) for step in map(_step_of, files) if step), default=-1), "files": files}
        (self._remote / STATE).write_text(json.dumps(state, indent=1) + "\n")
        self._remove(before.keys() - files.keys(), files.keys())

    def _remove(self, gone: Set[str], kept: Set[str]) -> None:
        """Delete files in the store, and checkpoints as a whole."""
        steps = {_step_of(name) for name in gone} - {_step_of(name) for name in kept}
        for step in filter(None, steps):
            (self._remote / CHECKPOINTS / step).delete_tree()
        for name in gone:
            if _step_of(name) not in steps:
                (self._remote / name).delete()

    def _names(self) -> list[str]:
        """Files of the run, without those of checkpoints that are being written or deleted."""
        names = []
        for path in self._folder.rglob("*"):
            parts = path.relative_to(self._folder).parts
            unfinished = parts[0] == CHECKPOINTS and len(parts) > 1 and not parts[1].isdigit()
            hidden = any(part.startswith(".") for part in parts[:1]) or path.name.endswith(".tmp")
            if not (unfinished or hidden or parts[0] in _LEFT_OUT or path.name == STATE) and path.is_file():
                names.append("/".join(parts))
        return names

    def _upload(self, name: str, before: dict[str, Any] | None) -> dict[str, Any] | None:
        """What is in the store now; None if the file went away meanwhile, with the checkpoint it belonged to."""
        path = self._folder / name
        try:
            if not name.startswith(f"{CHECKPOINTS}/"):  # may grow while it is read
                data = path.read_bytes()
                entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                if entry != before:
                    (self._remote / name).write_bytes(data)
                return entry
            entry = {"bytes": path.stat().st_size, "sha256": self._checksum(name, path)}
            if entry != before:
                (self._remote / name).upload(path)
            return entry
        except FileNotFoundError:
            return None

    def _checksum(self, name: str, path: Path) -> str:
        stat = path.stat()
        key = (name, stat.st_size, stat.st_mtime_ns)
        if key not in self._checksums:
            with path.open("rb") as file:
                self._checksums[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._checksums[key]


def _step_of(name: str) -> str:
    """The checkpoint that a file belongs to, if any."""
    parts = name.split("/")
    return parts[1] if parts[0] == CHECKPOINTS and len(parts) > 2 else ""


def newest_step(folder: Path) -> int:
    """Steps of the newest checkpoint in a run's folder; -1 if there is none."""
    return max((int(p.name) for p in (folder / CHECKPOINTS).glob("[0-9]*") if p.name.isdigit()), default=-1)


def fetch(remote: Location) -> Path:
    """A local copy of a remote run (its newest checkpoint) or of a folder of model files."""
    folder = model_folder(remote)
    state = _read_state(remote)
    if state is None:
        found = {file.relative_to(remote): {"bytes": file.size()} for file in remote.list(recursive=True)}
        if not found:
            raise MissingError(f"{remote}: no such folder, or an empty one")
        _download(remote, found, folder)
    elif state["step"] != newest_step(folder):
        others = f"{CHECKPOINTS}/{state['step']}/"
        wanted = {
            n: e for n, e in state["files"].items() if not n.startswith(f"{CHECKPOINTS}/") or n.startswith(others)
        }
        _download(remote, wanted, folder)
    return folder


def _read_state(remote: Location) -> dict[str, Any] | None:
    try:
        state = json.loads((remote / STATE).read_text())
    except MissingError:
        return None
    except ValueError as error:
        raise PingLlmError(f"{remote / STATE} is damaged: {error}") from error
    return dict(state)


def _download(remote: Location, files: dict[str, dict[str, Any]], folder: Path) -> None:
    """Fill a new folder with verified copies and put it in the place of the old one."""
    staging = folder.with_name(f"{folder.name}.fetching")
    staging.mkdir(parents=True, exist_ok=True)

    def copy(name: str) -> int:
        entry = files[name]
        if name.startswith(f"{CHECKPOINTS}/") or "sha256" not in entry:
            (remote / name).download(staging / name, sha256=entry.get("sha256"), size=entry["bytes"])
        else:  # may have been written again before `mirror.json` was
            (remote / name).download(staging / name)
        return int(entry["bytes"])

    total = sum(entry["bytes"] for entry in files.values())
    with progress("fetching (bytes)", total=total) as advance, ThreadPoolExecutor(_AT_ONCE) as pool:
        for size in pool.map(copy, files):
            advance(size)
    shutil.rmtree(folder, ignore_errors=True)
    staging.replace(folder)
