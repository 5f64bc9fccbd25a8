"""The layout of a preparation's work folder, and who may use it.

plan.json   whose work this is          runs/     shuffle files and markers of step one
lock        held while it is worked on  shards/   shards, their indexes and markers of step two
"""

import fcntl
import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np

from ping_llm.core.console import progress
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.rows import partition as spill
from ping_llm.rows.format import FORMAT_VERSION
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.rows.tasks import (
    DATASET_SUFFIXES,
    SPLITS,
    Account,
    PartitionTask,
    ShardTask,
    partition,
    publish,
    shard_marker,
    write_shard,
)
from ping_llm.rows.work import REQUESTS_AT_ONCE, Span, SpanReader, read_json, write_json
from ping_llm.sources import files
from ping_llm.sources.pieces import InputFile, Piece
from ping_llm.storage import Location, locate
from ping_llm.storage.mirror import LEDGER
from ping_llm.tasks.engines import Done, Engine, EngineChoice, OnTiming, Timing
from ping_llm.tasks.pool import map_in_order

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


# From measurement files to probe rows: plan the work, run it, publish the result.
#
# Everything that is not finished lives in the work folder, `OUTPUT/.work` unless told otherwise: the plan, a marker per
# finished task, the shuffle files, the shards. A run that was killed is continued from there by the same command. The
# dataset appears in `OUTPUT` only at the end, its manifest last. Neither the engine nor the number of workers nor the
# memory limit changes a byte of it.

MIB: Final = 1 << 20

PIECE_ROWS: Final = 2_000_000
SHARD_MEASUREMENTS: Final = 2_500_000
"""A shard has at most about so many (30-60 MB), until all 4096 buckets are shards of their own."""

MAX_RUNS: Final = 1024
"""A shard reads from every run, so their number times that of the shards is how many reads there are in all: 4 million
at most, of 130 KB each at 35 billion measurements."""

BYTES_PER_ROW_IN_FLIGHT: Final = 480
"""Memory that step one takes for each measurement of a batch, strings and sorted copies included (measured)."""

Task = TypeVar("Task", PartitionTask, ShardTask)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    inputs: tuple[str, ...]
    """Files, folders or globs."""
    output: Path | str
    max_row_bytes: int = 8 * MIB
    train_ratio: float = 0.9
    columns: Mapping[str, str] = field(default_factory=dict)
    """The files' names of schema columns that have other names there."""
    strict: bool = False
    overwrite: bool = False
    workers: int | None = None
    memory_limit_bytes: int | None = None
    """For all workers together; with Ray, for each task."""
    engine: str = "local"
    address: str | None = None
    """Of the Ray cluster."""
    work: str | None = None
    """Folder for unfinished work, which all machines of the engine reach."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.train_ratio <= 1.0:
            raise PingLlmError(f"the train ratio must be between 0 and 1, not {self.train_ratio}")
        if not 4096 <= self.max_row_bytes <= 256 * MIB:
            raise PingLlmError("the largest row size must be between 4 KB and 256 MB")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 256 * MIB:
            raise PingLlmError("the memory limit must be at least 0.25 GB")
        _ = self.engine_choice  # checks the rest

    @property
    def engine_choice(self) -> EngineChoice:
        return EngineChoice(
            name=self.engine,
            address=self.address,
            workers=self.workers,
            memory_limit_bytes=self.memory_limit_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be read, and the options that shape the rows. Its digest names the work."""

    files: tuple[InputFile, ...]
    pieces: tuple[Piece, ...]
    options: dict[str, Any]

    @property
    def digest(self) -> str:
        content = {
            "format": FORMAT_VERSION,
            "files": [{**asdict(f), "path": absolute(f.path)} for f in self.files],
            "columns": [p.columns for p in self.pieces],
            "options": self.options,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def absolute(path: str) -> str:
    """The name by which a file is known from any folder."""
    return path if locate(path).is_remote else str(Path(path).resolve())


def prepare(settings: PrepareSettings, on_timing: OnTiming | None = None) -> tuple[Manifest, bool]:
    """Make the dataset, or finish making it. Also says whether anything had to be done.

    `on_timing` is told what each task of this run took.
    """
    plan = make_plan(settings)
    output = locate(settings.output)
    folder = WorkFolder.of(output, settings.work, plan.digest, this_machine=settings.engine == "local")
    try:
        if (output / MANIFEST).exists() and not settings.overwrite:
            manifest = _already_there(output, plan)
            folder.remove()
            return manifest, False
        output.check_writable()
        with settings.engine_choice.open() as engine, folder.locked():
            folder.adopt(plan.digest, overwrite=settings.overwrite)
            manifest = _run(plan, settings, engine, folder, on_timing or (lambda timing: None))
            folder.remove()
    except OSError as error:
        raise PingLlmError(explain(error, output)) from error
    except MeasurementError:  # which no rerun would finish, and which must not stand in the way of better input
        folder.remove()
        if output.is_local:
            with suppress(OSError):
                output.local.rmdir()
        raise
    return manifest, True


def make_plan(settings: PrepareSettings) -> Plan:
    paths = files.expand(settings.inputs)

    def describe(path: Location) -> tuple[InputFile, list[Piece]]:
        return files.describe(path, settings.columns, PIECE_ROWS)

    with (
        progress("looking at input files", total=len(paths)) as advance,
        ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads,
    ):
        described = []
        for result in map_in_order(threads, describe, paths, window=4 * REQUESTS_AT_ONCE):
            described.append(result)
            advance()
    return Plan(
        files=tuple(file for file, _ in described),
        pieces=tuple(piece for _, pieces in described for piece in pieces),
        options={"max_row_bytes": settings.max_row_bytes, "train_ratio": settings.train_ratio},
    )


def _already_there(output: Location, plan: Plan) -> Manifest:
    manifest = Manifest.load(output)
    if manifest.plan != plan.digest:
        raise PingLlmError(
            f"{output} already holds a dataset made from other input or options; "
            "choose another --output, or replace it with --overwrite"
        )
    return manifest


def _run(plan: Plan, settings: PrepareSettings, engine: Engine, folder: WorkFolder, on_timing: OnTiming) -> Manifest:
    scratch = folder.scratch if engine.is_this_machine else None
    groups = piece_groups(plan.pieces)
    partition_tasks = [
        PartitionTask(
            number=number,
            pieces=pieces if engine.is_this_machine else tuple(replace(p, path=absolute(p.path)) for p in pieces),
            folder=folder.runs,
            scratch=scratch,
            batch_rows=int(np.clip(engine.memory_bytes // BYTES_PER_ROW_IN_FLIGHT, 65_536, PIECE_ROWS)),
            strict=settings.strict,
        )
        for number, pieces in enumerate(groups)
    ]
    stage = _Stage(name="partition", title="1/2 reading and partitioning", engine=engine, on_timing=on_timing)
    finished = folder.finished_partitions(partition_tasks)
    parts = stage.run(partition, partition_tasks, len(partition_tasks), finished)
    account = _account(plan, parts)
    kept = account.read - sum(account.dropped.values())
    if not kept:
        raise MeasurementError(f"no usable measurement in the input; dropped: {account.dropped or 'none, it is empty'}")

    runs = [task.run for task, part in zip(partition_tasks, parts, strict=True) if part["bytes_out"]]
    ranges = bucket_ranges(kept)
    shard_tasks = (
        ShardTask(
            number=number,
            spans=spans,
            runs_folder=folder.runs,
            folder=folder.shards,
            scratch=scratch,
            max_row_bytes=settings.max_row_bytes,
            train_ratio=settings.train_ratio,
            memory_bytes=engine.memory_bytes,
        )
        for number, spans in enumerate(_spans(folder.run_positions(runs), runs, ranges))
    )
    stage = _Stage(name="shard", title="2/2 sorting and writing rows", engine=engine, on_timing=on_timing)
    shards = stage.run(write_shard, shard_tasks, len(ranges), folder.finished_shards(len(ranges)))
    return publish(folder.shards, folder.output, shards, account, folder.scratch)


def piece_groups(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces of each task of step one: one, or several neighbours where that would make too many runs."""
    if len(pieces) <= MAX_RUNS:
        return [(piece,) for piece in pieces]
    before = np.cumsum([0] + [max(1, piece.bytes) for piece in pieces])
    group = before[:-1] * MAX_RUNS // before[-1]
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    return [tuple(pieces[a:b]) for a, b in zip(starts, [*starts[1:], len(pieces)], strict=True)]


def bucket_ranges(measurements: int) -> list[tuple[int, int]]:
    """The buckets of each shard: a power of two of equal ranges, by the number of measurements alone."""
    shards = 1
    while shards < spill.BUCKETS and measurements > shards * SHARD_MEASUREMENTS:
        shards *= 2
    width = spill.BUCKETS // shards
    return [(first, first + width) for first in range(0, spill.BUCKETS, width)]


def _spans(
    positions: Sequence[spill.Offsets], runs: Sequence[str], ranges: Sequence[tuple[int, int]]
) -> Iterator[dict[int, tuple[Span, ...]]]:
    """Where the measurements of each range of buckets lie: by family, a span of every run that has any."""
    for first, last in ranges:
        yield {
            family: tuple(
                Span(run, int(begins[number, first]), int(begins[number, last]))
                for run, begins in zip(runs, positions, strict=True)
                if begins[number, last] > begins[number, first]
            )
            for number, family in enumerate(spill.FAMILIES)
        }


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The tasks of one kind."""

    name: str
    title: str
    engine: Engine
    on_timing: OnTiming

    def run(
        self,
        function: Callable[[Task], dict[str, Any]],
        tasks: Iterable[Task],
        total: int,
        finished: Mapping[int, dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """What all tasks said, in their order. Those that an earlier run finished are not done again."""
        results = dict(finished)
        begun: deque[int] = deque()

        def todo() -> Iterator[Task]:
            for task in tasks:
                if task.number not in finished:
                    begun.append(task.number)
                    yield task

        with progress(self.title, total=total) as advance:
            advance(len(finished))
            for done in self.engine.map(function, todo()):
                number = begun.popleft()
                results[number] = done.value
                self.on_timing(_timing(self.name, number, done))
                advance()
        return [results[number] for number in range(total)]


def _timing(stage: str, number: int, done: Done[dict[str, Any]]) -> Timing:
    return Timing(
        stage=stage,
        task=number,
        node=done.node,
        started=done.started,
        seconds=done.seconds,
        bytes_in=done.value["bytes_in"],
        bytes_out=done.value["bytes_out"],
    )


def _account(plan: Plan, parts: list[dict[str, Any]]) -> Account:
    """Add up what step one read and dropped, in all and by input file."""
    by_path: dict[str, Counter[str]] = {f.path: Counter() for f in plan.files}
    read: Counter[str] = Counter()
    for piece, counts in zip(plan.pieces, (counts for part in parts for counts in part["pieces"]), strict=True):
        read[piece.path] += counts["read"]
        by_path[piece.path].update(counts["dropped"])
    dropped = sum(by_path.values(), Counter[str]())
    return Account(
        inputs=tuple(
            {"path": f.path, "bytes": f.bytes, "read": read[f.path], "dropped": dict(sorted(by_path[f.path].items()))}
            for f in plan.files
        ),
        options=plan.options,
        plan=plan.digest,
        read=read.total(),
        dropped=dict(sorted(dropped.items())),
    )
