"""Tasks of a preparation, and what they leave in its work folder for other tasks and for the next run.

All machines reach that folder by the same name. A file appears in it whole or not at all, and a task writes its marker
last. Two attempts at a task (one on a machine that was given up too early) write the same bytes, so they do no harm.
"""

import errno
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ping_llm.core.files import sync
from ping_llm.storage import Location
from ping_llm.tasks.pool import side_by_side

if TYPE_CHECKING:
    from ping_llm.rows.prepare import PrepareSettings

Item = TypeVar("Item")
Marker = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task(Generic[Item]):
    """All that a task of either step knows. All it says is in its marker, so any engine may run it anywhere."""

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


def write_json(target: Location, value: Any) -> None:
    target.write_text(json.dumps(value, indent=1) + "\n")
