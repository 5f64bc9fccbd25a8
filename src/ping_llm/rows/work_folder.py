"""The work folder of a preparation: where tasks leave what they finished, for other tasks and for the next run.

    plan.json   whose work this is
    runs/       shuffle files and markers of step one
    shards/     shards, their indexes and markers of step two

Every machine of the engine reaches it by the same name: on this machine's disk, on a shared one, or in an object store.
A file appears in it whole or not at all, and a task writes its marker last. Two attempts at the same task (one on a
machine that was given up too early) write the same bytes, so they do no harm.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import sole_writer, sync
from ping_llm.rows.manifest import MANIFEST
from ping_llm.storage import Location, MissingError, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import LEDGER
from ping_llm.tasks.pool import map_in_order

if TYPE_CHECKING:
    from ping_llm.rows.prepare import PrepareSettings

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Marker = dict[str, Any]

LAYOUT: Final = 3
"""Work of a program version that laid files out in another way is not continued."""

REQUESTS_AT_ONCE: Final = 16
"""To an object store."""

DATASET_SUFFIXES: Final = (".arrayrecord", ".index")


@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    root: Location
    output: Location

    @classmethod
    def of(cls, settings: "PrepareSettings", digest: str) -> Self:
        """Where the work of a plan lies: in the folder given for it, in the output folder, or on this machine's disk if
        that is where all tasks run and the output is remote."""
        output = locate(settings.output).absolute()
        if settings.work is not None:  # others may use it too
            key = hashlib.sha256(f"{digest} {output}".encode()).hexdigest()[:16]
            root = locate(settings.work).absolute() / f"prepare-{key}"
        elif output.is_remote and settings.engine == "local":
            root = locate(work_folder(output))
        else:
            root = output / ".work"
        return cls(root=root, output=output)

    @property
    def runs(self) -> Location:
        return self.root / "runs"

    @property
    def shards(self) -> Location:
        return self.root / "shards"

    @property
    def scratch(self) -> str | None:
        """For temporary files of this machine."""
        return None if self.root.is_remote else str(self.root.local / "scratch")

    def locked(self) -> AbstractContextManager[None]:
        """An output folder is for one preparation at a time. In a store nothing can be locked; of those that write to
        it, two of the same plan write the same bytes, and on one machine they share the work folder."""
        folder = self.output if self.output.is_local else self.root
        return nullcontext() if folder.is_remote else sole_writer(folder.local)

    def adopt(self, digest: str, *, overwrite: bool) -> None:
        """Continue what lies here if it is of this plan; otherwise start anew, if that is allowed."""
        mine, plan = {"digest": digest, "layout": LAYOUT}, self.root / "plan.json"
        known = None
        with suppress(MissingError, ValueError):  # damaged: begun again
            known = json.loads(plan.read_text())
        if known == mine:
            return
        if known is not None and known.get("digest") != digest and not overwrite:
            raise PingLlmError(
                f"{self.output} holds an unfinished preparation of other input or options; "
                "finish that one, choose another --output, or discard it with --overwrite"
            )
        names = [file.name for file in self.output.list()]
        foreign = [name for name in names if Path(name).suffix in DATASET_SUFFIXES]
        if foreign and MANIFEST not in names and LEDGER not in names:
            raise PingLlmError(
                f"{self.output} holds files of another dataset ({foreign[0]}, …); choose another --output"
            )
        for folder in (self.runs, self.shards, self.root / "scratch"):
            folder.delete_tree()
            if folder.is_local:
                folder.local.mkdir(parents=True)
        write_json(plan, mine)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of either step. All it knows is in the task, and all it says in the marker that it writes last."""

    KIND: ClassVar[str]
    number: int
    settings: "PrepareSettings"
    work: WorkFolder
    memory_bytes: int
    """That it may use."""

    @property
    def name(self) -> str:
        return f"{self.KIND}-{self.number:05d}"

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """In the work folder, or on the disk of whatever machine the task runs on."""
        return temporary_folder(self.work.scratch if self.settings.engine == "local" else None)

    def finish(self, files: Sequence[Path], **facts: Any) -> Marker:
        """Deliver what was made, then the marker, which names it."""
        marker = {"number": self.number, "files": {path.name: path.stat().st_size for path in files}, **facts}
        folder = self.work.root / f"{self.KIND}s"
        for path in files:
            deliver(path, folder / path.name)
        write_json(folder / f"{self.name}.json", marker)
        return marker


def finished(folder: Location) -> dict[int, Marker]:
    """The markers of finished tasks, by number. A task whose files are gone or cut off is not finished."""
    sizes = {file.name: file.size() for file in folder.list()}
    names = [name for name in sizes if name.endswith(".json")]
    markers = side_by_side(lambda name: json.loads((folder / name).read_text()), names)
    return {marker["number"]: marker for marker in markers if marker["files"].items() <= sizes.items()}


def side_by_side(function: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
    """Outcomes in order. An object store answers one request in some 30 ms whatever its size, but many at a time."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        yield from map_in_order(threads, function, items, window=2 * REQUESTS_AT_ONCE)


@contextmanager
def temporary_folder(inside: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=inside, ignore_cleanup_errors=True) as name:
        yield Path(name)


def deliver(source: Path, target: Location) -> None:
    """Put a finished local file where it belongs. It may be moved away."""
    if target.is_local:
        sync(source)
        try:
            source.replace(target.local)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    target.upload(source)


def link(source: Location, target: Location) -> None:
    """The same file under another name, without copying its bytes where that can be."""
    if source.is_local and target.is_local:
        target.delete()
        with suppress(OSError):  # another disk, or one without links
            os.link(source.local, target.local)
            return
    source.copy_to(target)


def write_json(target: Location, value: Any) -> None:
    target.write_text(json.dumps(value, indent=1) + "\n")


def explain(error: OSError, output: Location) -> str:
    where = f" ({error.filename})" if error.filename else ""
    is_full = error.errno == errno.ENOSPC
    advice = "; free some space and run the same command again: finished work is kept" if is_full else ""
    return f"cannot write to {output}{where}: {error.strerror or error}{advice}"
