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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import sync
from ping_llm.rows.manifest import MANIFEST
from ping_llm.storage import Location, MissingError, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import LEDGER
from ping_llm.tasks.pool import side_by_side

if TYPE_CHECKING:
    from ping_llm.rows.prepare import PrepareSettings

Item = TypeVar("Item")
Marker = dict[str, Any]

LAYOUT: Final = 3  # work of a program version that laid files out in another way is not continued

DATASET_SUFFIXES: Final = (".arrayrecord", ".index")


def locate_work(settings: "PrepareSettings", digest: str) -> Location:
    """Where the work of a plan lies: in the folder given for it, in the output folder, or on this machine's disk if
    that is where all tasks run and the output is remote."""
    output = locate(settings.output).absolute()
    if settings.work is not None:  # others may use it too
        key = hashlib.sha256(f"{digest} {output}".encode()).hexdigest()[:16]
        return locate(settings.work).absolute() / f"prepare-{key}"
    if output.is_remote and settings.engine == "local":
        return locate(work_folder(output))
    return output / ".work"


def adopt(work: Location, output: Location, digest: str, *, overwrite: bool) -> None:
    """Continue what lies in the work folder if it is of this plan; otherwise start anew, if that is allowed."""
    mine, plan = {"digest": digest, "layout": LAYOUT}, work / "plan.json"
    known = None
    with suppress(MissingError, ValueError):  # damaged: begun again
        known = json.loads(plan.read_text())
    if known == mine:
        return
    if known is not None and known.get("digest") != digest and not overwrite:
        raise PingLlmError(
            f"{output} holds an unfinished preparation of other input or options; "
            "finish that one, choose another --output, or discard it with --overwrite"
        )
    names = [file.name for file in output.list()]
    foreign = [name for name in names if Path(name).suffix in DATASET_SUFFIXES]
    if foreign and MANIFEST not in names and LEDGER not in names:
        raise PingLlmError(f"{output} holds files of another dataset ({foreign[0]}, …); choose another --output")
    for folder in (work / "runs", work / "shards", work / "scratch"):
        folder.delete_tree()
        if folder.is_local:
            folder.local.mkdir(parents=True)
    write_json(plan, mine)


@dataclass(frozen=True, kw_only=True)
class Task(Generic[Item]):
    """A task of either step. All it knows is in the task, and all it says in the marker that it writes last."""

    kind: str  # `run` or `shard`: what it makes
    number: int
    input: Item
    settings: "PrepareSettings"
    work: Location
    memory_bytes: int  # that it may use

    def temporary_folder(self) -> AbstractContextManager[Path]:
        return temporary_folder(self.work if self.settings.engine == "local" else None)

    def finish(self, files: Sequence[Path], **facts: Any) -> Marker:
        """Deliver what was made, then the marker, which names it."""
        marker = {"number": self.number, "files": {path.name: path.stat().st_size for path in files}, **facts}
        folder = self.work / f"{self.kind}s"
        for path in files:
            deliver(path, folder / path.name)
        write_json(folder / f"{self.kind}-{self.number:05d}.json", marker)
        return marker


def finished(folder: Location) -> dict[int, Marker]:
    """The markers of finished tasks, by number. A task whose files are gone or cut off is not finished."""
    sizes = {file.name: file.size() for file in folder.list()}
    names = [name for name in sizes if name.endswith(".json")]
    markers = side_by_side(lambda name: json.loads((folder / name).read_text()), names)
    return {marker["number"]: marker for marker in markers if marker["files"].items() <= sizes.items()}


@contextmanager
def temporary_folder(work: Location | None) -> Iterator[Path]:
    """In the work folder, or on the disk of whatever machine this is."""
    inside = work.local / "scratch" if work and work.is_local else None
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
