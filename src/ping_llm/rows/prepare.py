"""From measurement files to probe rows: plan the work, run it, publish the result.

Everything that is not finished lives in `OUTPUT/.work`: the plan, a marker per finished task, the shuffle files, the
shards. A run that was killed is continued from there by the same command. The dataset appears in `OUTPUT` only at the
end, its manifest last. Neither the number of workers nor the memory limit changes a byte of it.
"""

import fcntl
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import psutil

from ping_llm.console import Advance, progress
from ping_llm.errors import MeasurementError, PingLlmError
from ping_llm.rows import spill
from ping_llm.rows.format import FORMAT_VERSION
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.rows.publish import DATASET_SUFFIXES, Account, assemble, publish
from ping_llm.rows.tasks import PartitionTask, ShardTask, partition, write_json, write_shard
from ping_llm.sources import files
from ping_llm.sources.pieces import InputFile, Piece
from ping_llm.workers import available_cores, map_in_order, worker_pool

MIB: Final = 1 << 20

PIECE_ROWS: Final = 2_000_000
SHARD_MEASUREMENTS: Final = 2_500_000
"""A shard has at most about so many (30-60 MB), until all 4096 buckets are shards of their own."""

_BYTES_PER_ROW_IN_FLIGHT: Final = 480
"""Memory that step one takes for each measurement of a batch, strings and sorted copies included (measured)."""

Task = TypeVar("Task", PartitionTask, ShardTask)


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    inputs: tuple[str, ...]
    """Files, folders or globs."""
    output: Path
    max_row_bytes: int = 8 * MIB
    train_ratio: float = 0.9
    columns: Mapping[str, str] = field(default_factory=dict)
    """The files' names of schema columns that have other names there."""
    strict: bool = False
    overwrite: bool = False
    workers: int | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.train_ratio <= 1.0:
            raise PingLlmError(f"the train ratio must be between 0 and 1, not {self.train_ratio}")
        if not 4096 <= self.max_row_bytes <= 256 * MIB:
            raise PingLlmError("the largest row size must be between 4 KB and 256 MB")
        if self.workers is not None and self.workers < 1:
            raise PingLlmError("at least one worker is needed")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 256 * MIB:
            raise PingLlmError("the memory limit must be at least 0.25 GB")


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
            "files": [{**asdict(f), "path": str(Path(f.path).resolve())} for f in self.files],
            "columns": [p.columns for p in self.pieces],
            "options": self.options,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prepare(settings: PrepareSettings) -> tuple[Manifest, bool]:
    """Make the dataset, or finish making it. Also says whether anything had to be done."""
    plan = _plan(settings)
    output = settings.output
    work = output / ".work"
    try:
        if (output / MANIFEST).exists() and not settings.overwrite:
            return _already_there(output, plan), False
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work):
            _adopt(work, output, plan, settings)
            if not (work / "dataset" / MANIFEST).exists():
                _run(plan, settings, work)
            publish(work, output)
    except OSError as error:
        raise PingLlmError(_explain(error, output)) from error
    except MeasurementError:  # which no rerun would finish, and which must not stand in the way of better input
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):
            output.rmdir()
        raise
    return Manifest.load(output), True


def _plan(settings: PrepareSettings) -> Plan:
    described = []
    paths = files.expand(settings.inputs)
    with progress("looking at input files", total=len(paths)) as advance:
        for path in paths:
            described.append(files.describe(path, settings.columns, PIECE_ROWS))
            advance()
    return Plan(
        files=tuple(file for file, _ in described),
        pieces=tuple(piece for _, pieces in described for piece in pieces),
        options={"max_row_bytes": settings.max_row_bytes, "train_ratio": settings.train_ratio},
    )


def _already_there(output: Path, plan: Plan) -> Manifest:
    manifest = Manifest.load(output)
    if manifest.plan != plan.digest:
        raise PingLlmError(
            f"{output} already holds a dataset made from other input or options; "
            "choose another --output, or replace it with --overwrite"
        )
    shutil.rmtree(output / ".work", ignore_errors=True)
    return manifest


def _adopt(work: Path, output: Path, plan: Plan, settings: PrepareSettings) -> None:
    """Continue what lies in the work folder if it is of this plan; otherwise start anew, if that is allowed."""
    plan_file = work / "plan.json"
    known = json.loads(plan_file.read_text())["digest"] if plan_file.exists() else None
    if known == plan.digest:
        return
    if known is not None and not settings.overwrite:
        raise PingLlmError(
            f"{output} holds an unfinished preparation of other input or options; "
            "finish that one, choose another --output, or discard it with --overwrite"
        )
    foreign = [p.name for p in output.iterdir() if p.suffix in DATASET_SUFFIXES]
    if foreign and not (output / MANIFEST).exists():
        raise PingLlmError(f"{output} holds files of another dataset ({foreign[0]}, …); choose another --output")
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    for name in ("runs", "shards", "scratch"):
        (work / name).mkdir()
    write_json(plan_file, {"digest": plan.digest})


def _run(plan: Plan, settings: PrepareSettings, work: Path) -> None:
    workers = settings.workers or available_cores()
    limit = settings.memory_limit_bytes or psutil.virtual_memory().available // 2
    memory = limit // workers
    partition_tasks = [
        PartitionTask(
            number=number,
            piece=piece,
            folder=str(work / "runs"),
            batch_rows=int(np.clip(memory // _BYTES_PER_ROW_IN_FLIGHT, 65_536, PIECE_ROWS)),
            strict=settings.strict,
        )
        for number, piece in enumerate(plan.pieces)
    ]
    with worker_pool(workers) as pool:

        def run_all(description: str, function: Callable[[Task], dict[str, Any]], tasks: Sequence[Task]) -> list[Any]:
            with progress(description, total=len(tasks)) as advance:
                return list(_results(pool, function, tasks, advance))

        parts = run_all("1/2 reading and partitioning", partition, partition_tasks)
        kept = sum(part["kept"] for part in parts)
        if not kept:
            dropped = sum((Counter(part["dropped"]) for part in parts), Counter[str]())
            raise MeasurementError(
                f"no usable measurement in the input; dropped: {dict(dropped) or 'none, it is empty'}"
            )
        shard_tasks = [
            ShardTask(
                number=number,
                first_bucket=first,
                last_bucket=last,
                runs_folder=str(work / "runs"),
                folder=str(work / "shards"),
                scratch=str(work / "scratch"),
                max_row_bytes=settings.max_row_bytes,
                train_ratio=settings.train_ratio,
                memory_bytes=memory,
            )
            for number, (first, last) in enumerate(bucket_ranges(kept))
        ]
        shards = run_all("2/2 sorting and writing rows", write_shard, shard_tasks)
    assemble(work, shards, _account(plan, parts))


def bucket_ranges(measurements: int) -> list[tuple[int, int]]:
    """The buckets of each shard: a power of two of equal ranges, by the number of measurements alone."""
    shards = 1
    while shards < spill.BUCKETS and measurements > shards * SHARD_MEASUREMENTS:
        shards *= 2
    width = spill.BUCKETS // shards
    return [(first, first + width) for first in range(0, spill.BUCKETS, width)]


def _results(
    pool: Any, function: Callable[[Task], dict[str, Any]], tasks: Sequence[Task], advance: Advance
) -> Iterator[dict[str, Any]]:
    """Results in the order of the tasks; those with a marker were finished by an earlier run."""
    finished = {task.number: task.marker.read_text() for task in tasks if task.marker.exists()}
    todo = [task for task in tasks if task.number not in finished]
    fresh = map_in_order(pool, function, todo, window=max(1, len(todo)))
    for task in tasks:
        yield json.loads(finished[task.number]) if task.number in finished else next(fresh)
        advance()


def _account(plan: Plan, parts: list[dict[str, Any]]) -> Account:
    """Add up what step one read and dropped, in all and by input file."""
    by_path: dict[str, Counter[str]] = {f.path: Counter() for f in plan.files}
    read: Counter[str] = Counter()
    for piece, part in zip(plan.pieces, parts, strict=True):
        read[piece.path] += part["read"]
        by_path[piece.path].update(part["dropped"])
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


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PingLlmError(f"another preparation is writing to {work.parent} right now") from None
        yield


def _explain(error: OSError, output: Path) -> str:
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space and run the same command again: finished work is kept" if error.errno == 28 else ""
    return f"cannot write to {output}{where}: {error.strerror or error}{advice}"
