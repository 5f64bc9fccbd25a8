"""The layout of a preparation's work folder, and who may use it.

plan.json   whose work this is          runs/     shuffle files and markers of step one
lock        held while it is worked on  shards/   shards, their indexes and markers of step two
"""

import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ping_llm.errors import PingLlmError
from ping_llm.rows import spill
from ping_llm.rows.manifest import MANIFEST
from ping_llm.rows.publish import DATASET_SUFFIXES
from ping_llm.rows.tasks import SPLITS, PartitionTask, shard_marker
from ping_llm.rows.work import REQUESTS_AT_ONCE, Span, SpanReader, read_json, write_json
from ping_llm.storage import Location, locate
from ping_llm.storage.ledger import LEDGER

LAYOUT: Final = 2
"""Work of a program version that laid files out in another way is not continued."""


@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    root: Location
    output: Location

    @classmethod
    def of(cls, output: Location, work: str | None, digest: str, *, this_machine: bool) -> Self:
        """Where the work of a plan lies: `work` if given, the output folder, or on this machine's disk if that is where
        all tasks run and the output is remote."""
        if output.is_local:
            output = locate(output.local.absolute())
        if work is not None:  # others may use it too
            key = hashlib.sha256(f"{digest} {output}".encode()).hexdigest()[:16]
            base = locate(work)
            root = (locate(base.local.absolute()) if base.is_local else base) / f"prepare-{key}"
        elif output.is_remote and this_machine:
            from ping_llm.storage.cache import work_folder

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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A local folder is for one preparation at a time. In a store nothing can be locked; there, two preparations of
        the same plan write the same bytes, and two of different plans do not share a folder."""
        if self.root.is_remote:
            yield
            return
        self.root.local.mkdir(parents=True, exist_ok=True)
        with (self.root.local / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PingLlmError(f"another preparation is writing to {self.output} right now") from None
            yield

    def adopt(self, digest: str, *, overwrite: bool) -> None:
        """Continue what lies here if it is of this plan; otherwise start anew, if that is allowed."""
        mine = {"digest": digest, "layout": LAYOUT}
        known = read_json(self.root / "plan.json")
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
        if self.root.is_remote:
            self.root.delete_tree()
        else:
            for entry in self.root.local.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
            for name in ("runs", "shards", "scratch"):
                (self.root.local / name).mkdir()
            if self.output.is_local:
                self.output.local.mkdir(parents=True, exist_ok=True)
        write_json(self.root / "plan.json", mine)

    def finished_partitions(self, tasks: Sequence[PartitionTask]) -> dict[int, dict[str, Any]]:
        """What tasks of step one that are done said, by number. One whose run is gone or cut off is not done."""
        sizes = _sizes(self.runs)
        found = _read_all(self.runs, {task.number: task.marker for task in tasks if task.marker in sizes})
        runs = {task.number: task.run for task in tasks}
        return {n: part for n, part in found.items() if part["bytes_out"] == sizes.get(runs[n], 0)}

    def finished_shards(self, count: int) -> dict[int, dict[str, Any]]:
        sizes = _sizes(self.shards)
        markers = {number: shard_marker(number) for number in range(count)}
        found = _read_all(self.shards, {number: name for number, name in markers.items() if name in sizes})
        return {
            number: shard
            for number, shard in found.items()
            if all(sizes.get(shard[split]["file"]) == shard[split]["bytes"] for split in SPLITS)
        }

    def run_positions(self, runs: Sequence[str]) -> list[spill.Offsets]:
        """Where the buckets begin in each run."""
        headers = SpanReader(self.runs).read([Span(run, 0, spill.HEADER_BYTES) for run in runs])
        return [spill.byte_positions(spill.read_offsets(header)) for header in headers]

    def remove(self) -> None:
        self.root.delete_tree()


def _sizes(folder: Location) -> dict[str, int]:
    return {file.name: file.size() for file in folder.list()}


def _read_all(folder: Location, names: dict[int, str]) -> dict[int, dict[str, Any]]:
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        values = threads.map(lambda name: read_json(folder / name), names.values())
        return {number: value for number, value in zip(names, values, strict=True) if value is not None}


def explain(error: OSError, output: Location) -> str:
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space and run the same command again: finished work is kept" if error.errno == 28 else ""
    return f"cannot write to {output}{where}: {error.strerror or error}{advice}"
