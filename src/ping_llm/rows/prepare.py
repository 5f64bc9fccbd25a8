"""From measurement files to probe rows: plan the work, run its two steps, publish the result.

    partition   pieces of input files  ->  a run of measurements cut by source hash   (`partition.py`)
    shard       a range of buckets     ->  sorted, cut into rows, one shard per split (`shards.py`)
    publish     all shards             ->  named, one index per split, the manifest

Unfinished work lies in the work folder, by default `OUTPUT/.work`: `plan.json`, the runs in `runs`, the shards in
`shards`, and a marker for each finished task. After a kill, the same command resumes from there: tasks without a marker
are run again. The dataset appears in `OUTPUT` only at the end, its manifest last. Neither the engine nor the number of
workers nor the memory limit changes a byte of it.
"""

import errno
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.core.console import progress
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.core.files import file_sha256, sole_writer, sync
from ping_llm.rows.format import FORMAT_VERSION
from ping_llm.rows.manifest import MANIFEST, SPLITS, Manifest, ShardInfo, SplitInfo
from ping_llm.rows.partition import BUCKETS, Marker, Task, bucket_spans, deliver, finished, partition, temporary_folder
from ping_llm.rows.shards import join_indexes, read_index, write_shard
from ping_llm.sources import NODES_FILE, files
from ping_llm.sources.columns import AS_FOUND, InputOptions
from ping_llm.sources.files import InputFile, Piece, Reading
from ping_llm.sources.nodes import Node, Nodes, read_nodes, write_nodes
from ping_llm.storage import Location, MissingError, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import LEDGER, Ledger
from ping_llm.tasks.engines import Engine, EngineChoice, OnTiming
from ping_llm.tasks.pool import side_by_side

MIB: Final = 1 << 20

DATASET_SUFFIXES: Final = (".arrayrecord", ".index")
LAYOUT: Final = 3  # version of the work folder's files: work in another layout is not resumed


@dataclass(frozen=True, kw_only=True)
class TaskSizes:
    """How work is cut into tasks. Only `shard_measurements` shapes the dataset."""

    piece_rows: int = 2_000_000  # rows of an input file that one piece has
    shard_measurements: int = 2_500_000  # at most, about (30-60 MB), unless each of the 4096 buckets is a shard already
    max_runs: int = 1024
    """Every shard reads from every run: at most 4 million reads in all, of 130 KB each at 35 billion measurements."""

    def piece_groups(self, pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
        """The pieces of each task of step one: one, or several adjacent ones if there would be too many runs."""
        if len(pieces) <= self.max_runs:
            return [(piece,) for piece in pieces]
        before = np.cumsum([0] + [max(1, piece.bytes) for piece in pieces])
        group = before[:-1] * self.max_runs // before[-1]
        starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
        return [tuple(pieces[a:b]) for a, b in zip(starts, [*starts[1:], len(pieces)], strict=True)]

    def bucket_ranges(self, measurements: int) -> list[tuple[int, int]]:
        """The buckets of each shard: a power of two of equal ranges, by the number of measurements alone."""
        shards = 1
        while shards < BUCKETS and measurements > shards * self.shard_measurements:
            shards *= 2
        width = BUCKETS // shards
        return [(first, first + width) for first in range(0, BUCKETS, width)]


DEFAULT_SIZES: Final = TaskSizes()


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(EngineChoice):
    inputs: tuple[str, ...]  # files, folders or globs
    output: Path | str
    max_row_bytes: int = 8 * MIB
    train_ratio: float = 0.9
    input_options: InputOptions = AS_FOUND
    strict: bool = False
    overwrite: bool = False
    work: str | None = None  # folder for unfinished work, which all machines of the engine reach
    sizes: TaskSizes = DEFAULT_SIZES

    @cached_property
    def nodes(self) -> Nodes:
        return read_nodes(self.input_options.nodes) if self.input_options.nodes else {}

    def __post_init__(self) -> None:
        if not 0.0 <= self.train_ratio <= 1.0:
            raise PingLlmError(f"the train ratio must be between 0 and 1, not {self.train_ratio}")
        if not 4096 <= self.max_row_bytes <= 256 * MIB:
            raise PingLlmError("the largest row size must be between 4 KB and 256 MB")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 256 * MIB:
            raise PingLlmError("the memory limit must be at least 0.25 GB")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be read, and the options that shape the rows. Its digest identifies the work folder."""

    settings: PrepareSettings
    files: tuple[InputFile, ...]
    pieces: tuple[Piece, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"max_row_bytes": self.settings.max_row_bytes, "train_ratio": self.settings.train_ratio}

    @cached_property
    def digest(self) -> str:
        content = {
            "format": FORMAT_VERSION,
            "files": [{**asdict(f), "path": str(locate(f.path).absolute())} for f in self.files],
            "columns": [[p.columns, asdict(p.spelling), p.layout and asdict(p.layout)] for p in self.pieces],
            "nodes": {name: asdict(node) for name, node in self.settings.nodes.items()},
            "options": self.options,
        }
        if self.settings.sizes != DEFAULT_SIZES:
            content["sizes"] = asdict(self.settings.sizes)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_plan(settings: PrepareSettings) -> Plan:
    paths, described = files.expand(settings.inputs), []
    describe = partial(files.describe, options=settings.input_options, piece_rows=settings.sizes.piece_rows)
    with progress("looking at input files", total=len(paths)) as advance:
        for result in side_by_side(describe, paths):
            described.append(result)
            advance()
    pieces = tuple(piece for _, pieces in described for piece in pieces)
    return Plan(settings=settings, files=tuple(file for file, _ in described), pieces=pieces)


def prepare(
    settings: PrepareSettings,
    on_timing: OnTiming | None = None,
    on_reading: Callable[[Reading], None] = lambda reading: None,
) -> tuple[Manifest, bool]:
    """Make the dataset, or finish making it. The second result is whether anything had to be done.

    `on_timing` is called with what each task of this run took, `on_reading` with how the input was understood.
    """
    plan = make_plan(settings)
    output, work = locate(settings.output), _locate_work(settings, plan.digest)
    # An output folder is for one preparation at a time. In a store nothing can be locked; of those that write to it,
    # two of the same plan write the same bytes, and on one machine they share the work folder.
    locked = output.absolute() if output.is_local else work
    try:
        if not work.exists() and (manifest := _published(output, plan)):
            return manifest, False
        output.check_writable()
        with settings.open() as engine, sole_writer(locked.local) if locked.is_local else nullcontext():
            if manifest := _published(output, plan):  # what is left of the work was in its way
                work.delete_tree()
                return manifest, False
            _adopt(work, output.absolute(), plan.digest, overwrite=settings.overwrite)
            try:
                manifest = _run(plan, engine, work, on_timing or (lambda timing: None), on_reading)
            except MeasurementError:  # which no rerun would finish, and which must not stand in the way of better input
                work.delete_tree()
                raise
            work.delete_tree()
            return manifest, True
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        is_full = error.errno == errno.ENOSPC
        advice = "; free some space and run the same command again: finished work is kept" if is_full else ""
        raise PingLlmError(f"cannot write to {output}{where}: {error.strerror or error}{advice}") from error


def _locate_work(settings: PrepareSettings, digest: str) -> Location:
    """The work folder of a plan: below `settings.work`, on this machine's disk if only the output is remote, or in the
    output folder."""
    output = locate(settings.output).absolute()
    if settings.work is not None:  # other preparations may use it, too
        key = hashlib.sha256(f"{digest} {output}".encode()).hexdigest()[:16]
        return locate(settings.work).absolute() / f"prepare-{key}"
    if output.is_remote and settings.engine == "local":
        return locate(work_folder(output))
    return output / ".work"


def _adopt(work: Location, output: Location, digest: str, *, overwrite: bool) -> None:
    """Resume the work in the work folder if it is of this plan; otherwise start anew, if that is allowed."""
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
    plan.write_text(json.dumps(mine, indent=1) + "\n")


def _published(output: Location, plan: Plan) -> Manifest | None:
    """The dataset in the output folder, if there is one and it is not to be replaced."""
    if plan.settings.overwrite or not (output / MANIFEST).exists():
        return None
    manifest = Manifest.load(output)
    if manifest.plan != plan.digest:
        raise PingLlmError(
            f"{output} already holds a dataset made from other input or options; "
            "choose another --output, or replace it with --overwrite"
        )
    return manifest


_STAGES: Final = {  # by what its tasks make: name of the stage in timings, and its title for people
    "run": ("partition", "1/2 reading and partitioning"),
    "shard": ("shard", "2/2 sorting and writing rows"),
}


def _run(
    plan: Plan, engine: Engine, work: Location, on_timing: OnTiming, on_reading: Callable[[Reading], None]
) -> Manifest:
    settings, pieces = plan.settings, plan.pieces

    def markers(kind: str, function: Callable[[Any], Marker], inputs: Iterable[Any], total: int) -> list[Marker]:
        """The markers of all tasks, in order, after running those that no earlier run has finished."""
        results, (stage, title) = finished(work / f"{kind}s"), _STAGES[kind]
        common: dict[str, Any] = {"settings": settings, "work": work, "memory_bytes": engine.memory_bytes}
        left = [number not in results for number in range(total)]
        tasks = (Task(kind=kind, number=n, input=one, **common) for n, one in enumerate(inputs) if left[n])
        with progress(title, total=total) as advance:
            advance(len(results))
            for marker, timing in engine.map(function, tasks):
                results[marker["number"]] = marker
                moved = {name: marker[name] for name in ("bytes_in", "bytes_out")}
                on_timing(replace(timing, stage=stage, task=marker["number"], **moved))
                advance()
        return [results[number] for number in sorted(results)]

    if not engine.is_this_machine:
        pieces = tuple(replace(piece, path=str(locate(piece.path).absolute())) for piece in pieces)
    groups = settings.sizes.piece_groups(pieces)
    parts = markers("run", partition, groups, len(groups))
    account, reading = _account(plan, parts)
    on_reading(reading)
    reading.check(allow_bad_rows=settings.input_options.allow_bad_rows)
    kept = reading.used

    spans = bucket_spans(work / "runs", [run for part in parts for run in part["files"]])
    ranges = settings.sizes.bucket_ranges(kept)
    shards = markers("shard", write_shard, itertools.starmap(spans, ranges), len(ranges))
    copies = sum(marker["dropped"].get("duplicate", 0) for marker in shards)
    if copies:
        account["dropped"] = dict(sorted({**account["dropped"], "duplicate": copies}.items()))
    names = {name: address for part in parts for name, address in part["names"].items()}
    return _publish(plan, work, shards, account, names)


def _account(plan: Plan, parts: list[Marker]) -> tuple[dict[str, Any], Reading]:
    """What step one read and dropped, in all and by input file: for the manifest, and for people."""
    read: Counter[str] = Counter()
    by_path: dict[str, Counter[str]] = {f.path: Counter() for f in plan.files}
    examples: dict[str, str] = {}
    for piece, counts in zip(plan.pieces, (counts for part in parts for counts in part["pieces"]), strict=True):
        read[piece.path] += counts["read"]
        by_path[piece.path].update(counts["dropped"])
        examples = {**counts["examples"], **examples}
    dropped = dict(sorted(sum(by_path.values(), Counter[str]()).items()))
    reading = Reading(
        understood=tuple(dict.fromkeys(piece.understood or piece.format for piece in plan.pieces)),
        rows=read.total(),
        used=read.total() - sum(dropped.values()),
        dropped=dropped,
        examples=examples,
    )
    return {
        "options": plan.options,
        "inputs": tuple(
            {"path": f.path, "bytes": f.bytes, "read": read[f.path], "dropped": dict(sorted(by_path[f.path].items()))}
            for f in plan.files
        ),
        "read": read.total(),
        "dropped": dropped,
        "plan": plan.digest,
    }, reading


def _publish(
    plan: Plan, work: Location, markers: list[Marker], account: dict[str, Any], names: Mapping[str, str]
) -> Manifest:
    """Make the dataset in the output folder: name the shards, join their indexes, write the manifest last.

    It can be repeated after a kill at any point. A dataset to be replaced stays in place until all indexes are joined.
    """
    output, shards, splits = locate(plan.settings.output).absolute(), work / "shards", {}
    sources: dict[str, Location] = {}  # of each file of the dataset
    with temporary_folder(work) as scratch:
        for split in SPLITS:
            found = [ShardInfo(**marker[split]) for marker in markers if marker[split]["rows"]]
            named = [replace(i, file=f"{split}-{n:05d}-of-{len(found):05d}.arrayrecord") for n, i in enumerate(found)]
            sources |= {new.file: shards / old.file for new, old in zip(named, found, strict=True)}
            parts = [shards / info.file.replace(*DATASET_SUFFIXES) for info in found]
            path = scratch / f"{split}.index"
            join_indexes(side_by_side(read_index, parts), sum(info.rows for info in found), path)
            splits[split] = SplitInfo(
                shards=tuple(named),
                index_file=path.name,
                index_bytes=path.stat().st_size,
                index_sha256=file_sha256(path),
            )
            sources[path.name] = shards / path.name
            deliver(path, sources[path.name])
    manifest = Manifest(splits=splits, written=sum(split.measurements for split in splits.values()), **account)
    dropped = sum(manifest.dropped.values())
    if manifest.written + dropped != manifest.read:
        raise PingLlmError(
            f"internal error: {manifest.read} measurements were read, but {manifest.written} written and {dropped} "
            "dropped; nothing was published"
        )
    published: dict[str, str] = {}
    with suppress(PingLlmError):  # there is none, or it is of another version
        published = {name: sha256 for name, (_, sha256) in Manifest.load(output).files.items()}
    # The ledger knows what need not be uploaded again: after a kill, or if an older dataset had the same shards.
    with Ledger(output, published) if output.is_remote else nullcontext() as ledger:
        (output / MANIFEST).delete()  # from here on the old dataset, if any, is no dataset
        for file in output.list():
            if file.suffix in DATASET_SUFFIXES and file.name not in sources:
                file.delete()

        def put(name: str) -> None:
            size, sha256 = manifest.files[name]
            if ledger is None or not ledger.has(name, size=size, sha256=sha256):
                _link(sources[name], output / name)
                if ledger is not None:
                    ledger.add(name, sha256)

        with progress("publishing", total=len(sources)) as advance:
            for _ in side_by_side(put, sorted(sources)) if output.is_remote else map(put, sorted(sources)):
                advance()
        if output.is_local:
            sync(output.local)  # the manifest comes after what it names
        described = plan.settings.nodes
        names = {**{node.name: node.address for node in described.values() if node.address}, **names}
        nodes = [replace(described.get(name, Node(name=name)), address=names[name]) for name in sorted(names)]
        (output / NODES_FILE).write_text(write_nodes(nodes)) if nodes else (output / NODES_FILE).delete()
        (output / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n")
    return manifest


def _link(source: Location, target: Location) -> None:
    """Give a file a second name, without copying its bytes if possible."""
    if source.is_local and target.is_local:
        target.delete()
        with suppress(OSError):  # another disk, or one without links
            os.link(source.local, target.local)
            return
    source.copy_to(target)
