"""The two kinds of work that make probe rows. Both are stateless: all they know is in the task, all they say is in
the marker they write last, so any engine may run them anywhere, and a task without a marker is simply run again.

    partition   pieces of input files  ->  a run of measurements cut by source hash   (`spill.py`)
    shard       a range of buckets     ->  sorted, cut into rows, one shard a split   (`sort.py`, `shard.py`)
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ping_llm.core.addresses import source_hash
from ping_llm.core.console import progress
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.core.measurements import DROP_REASONS, ValidMeasurements, validate
from ping_llm.core.randomness import mix64, uniform
from ping_llm.rows import partition as spill
from ping_llm.rows.format import SourceRuns
from ping_llm.rows.manifest import INDEX_SCHEMA, MANIFEST, Manifest, ShardInfo, ShardWriter, SplitInfo
from ping_llm.rows.partition import cut_into_rows, sorted_batches
from ping_llm.rows.work import REQUESTS_AT_ONCE, Span, SpanReader, copy, deliver, write_json
from ping_llm.sources import files
from ping_llm.sources.pieces import Piece, RawBatch
from ping_llm.storage import Location
from ping_llm.storage.mirror import Ledger
from ping_llm.tasks.pool import map_in_order

SPLITS: Final = ("train", "eval")

_SPLIT_SALT: Final = np.uint64(0x5EED_0F_5B117)
"""Makes the split independent of the bucket, which is cut from the same hash."""

_SORT_MEMORY_SHARE: Final = 0.5
"""DuckDB's part of a worker's memory; the rest is for what goes in and comes out."""


@dataclass(frozen=True, kw_only=True)
class PartitionTask:
    number: int
    pieces: tuple[Piece, ...]
    folder: Location
    """For the run and the marker."""
    scratch: str | None
    """For temporary files; by default the system's folder for them, on whatever machine the task runs."""
    batch_rows: int
    strict: bool

    @property
    def run(self) -> str:
        return f"piece-{self.number:06d}.run"

    @property
    def marker(self) -> str:
        return f"piece-{self.number:06d}.json"


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    number: int
    spans: dict[int, tuple[Span, ...]]
    """By family, where the shard's measurements lie in the runs."""
    runs_folder: Location
    folder: Location
    scratch: str | None
    max_row_bytes: int
    train_ratio: float
    memory_bytes: int

    @property
    def marker(self) -> str:
        return shard_marker(self.number)


def shard_marker(number: int) -> str:
    return f"shard-{number:05d}.json"


def partition(task: PartitionTask) -> dict[str, Any]:
    """Read, check and cut some pieces. The marker adds up: `read` is `kept` plus all of `dropped`."""
    counts: list[dict[str, Any]] = []
    size = 0
    with temporary_folder(task.scratch) as name:
        batches = chain.from_iterable(_checked(task, piece, counts) for piece in task.pieces)
        parts = []
        for number, batch in enumerate(batches):
            parts.append(Path(name) / f"{number:06d}.run")
            spill.write_run(parts[-1], batch)
        if parts:
            run = parts[0]
            if len(parts) > 1:
                run = Path(name) / task.run
                spill.merge_runs(parts, run)
            size = run.stat().st_size
            deliver(run, task.folder / task.run)
    result = {"pieces": counts, "bytes_in": sum(piece.bytes for piece in task.pieces), "bytes_out": size}
    write_json(task.folder / task.marker, result)
    return result


def _checked(task: PartitionTask, piece: Piece, counts: list[dict[str, Any]]) -> Iterator[ValidMeasurements]:
    """The usable measurements of a piece. At its end, `counts` gets what became of all of them."""
    kept = 0
    dropped: Counter[str] = Counter()
    for raw in files.read(piece, task.batch_rows, strict=task.strict):
        valid = validate(raw.batch)
        if task.strict and valid.first_dropped:
            raise _first_bad_row(piece, raw, *valid.first_dropped)
        dropped.update(raw.dropped)
        dropped.update(valid.dropped)
        kept += len(valid)
        if len(valid):
            yield valid
    counts.append({"read": kept + dropped.total(), "kept": kept, "dropped": dict(+dropped)})


def temporary_folder(inside: str | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ping-llm-", dir=inside, ignore_cleanup_errors=True)


def _first_bad_row(piece: Piece, raw: RawBatch, position: int, reason: str) -> MeasurementError:
    row = raw.first_row + position
    place = f"line {row + 2}" if piece.format == "csv" else f"row {row}"
    values = {name: raw.batch.column(name)[position].as_py() for name in raw.batch.schema.names}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return MeasurementError(f"{piece.path}, {place}: {reason} ({DROP_REASONS[reason]}): {shown}")


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Sort a range of buckets and write its rows. Sources go to the split that their hash says."""
    result: dict[str, Any] = {}
    with temporary_folder(task.scratch) as name:
        scratch = Path(name)
        paths = {split: scratch / f"{split}-{task.number:05d}.arrayrecord" for split in SPLITS}
        writers = {split: ShardWriter(path) for split, path in paths.items()}
        runs = SpanReader(task.runs_folder)
        for family in spill.FAMILIES:
            batches = sorted_batches(
                spill.record_batches(runs.read(task.spans[family]), family),
                family,
                memory_bytes=int(task.memory_bytes * _SORT_MEMORY_SHARE),
                scratch=scratch,
            )
            for rows in cut_into_rows(batches, family, task.max_row_bytes):
                in_train = is_train(rows, task.train_ratio)
                writers["train"].add(_choose(rows, in_train))
                writers["eval"].add(_choose(rows, ~in_train))
        for split, writer in writers.items():
            info, index = writer.close()
            write_index(index, paths[split].with_suffix(".index"))
            result[split] = info.to_json()
            for file in (paths[split], paths[split].with_suffix(".index")):
                deliver(file, task.folder / file.name)
    result["bytes_in"] = sum(span.end - span.start for spans in task.spans.values() for span in spans)
    result["bytes_out"] = sum(result[split]["bytes"] for split in SPLITS)
    write_json(task.folder / task.marker, result)
    return result


def is_train(rows: SourceRuns, train_ratio: float) -> Any:
    """Which rows belong to the training split: a function of the source address alone."""
    packed = np.zeros((len(rows.sources), 16), dtype=np.uint8)
    packed[:, : rows.sources.shape[1]] = rows.sources
    families = np.full(len(packed), rows.family, dtype=np.uint8)
    return uniform(mix64(source_hash(families, packed) ^ _SPLIT_SALT)) < train_ratio


def _choose(rows: SourceRuns, chosen: Any) -> SourceRuns:
    """The chosen rows alone, with their measurements closed up."""
    if chosen.all():
        return rows
    measurements = np.repeat(chosen, rows.counts)
    counts = rows.counts[chosen]
    return SourceRuns(
        family=rows.family,
        sources=rows.sources[chosen],
        starts=np.cumsum(counts) - counts,
        counts=counts,
        time_us=rows.time_us[: len(measurements)][measurements],
        destinations=rows.destinations[: len(measurements)][measurements],
        rtt_ms=rows.rtt_ms[: len(measurements)][measurements],
    )


def write_index(index: pa.Table, path: Path) -> None:
    """Uncompressed Arrow IPC: it is mapped, not read, so start-up touches only the columns it uses."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, index.schema) as writer:
        writer.write_table(index)


# The last step of preparation: the shards get their names, their indexes are joined, and the manifest is written last.
#
# It can be repeated after a kill at any point. Until the indexes are joined, a dataset that will be replaced stays.

DATASET_SUFFIXES: Final = frozenset({".arrayrecord", ".index"})


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the measurements came from and what became of them."""

    inputs: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    plan: str
    read: int
    dropped: dict[str, int]


def publish(
    shards: Location, output: Location, results: list[dict[str, Any]], account: Account, scratch: str | None
) -> Manifest:
    """Make the dataset in `output` of the shards that the tasks left, of which `results` tells."""
    with temporary_folder(scratch) as name:
        splits = {}
        sources: dict[str, Location] = {}
        """Of each file of the dataset."""
        for split in SPLITS:
            found = [ShardInfo.from_json(result[split]) for result in results if result[split]["rows"]]
            named = [replace(i, file=f"{split}-{n:05d}-of-{len(found):05d}.arrayrecord") for n, i in enumerate(found)]
            sources |= {new.file: shards / old.file for new, old in zip(named, found, strict=True)}
            path = Path(name) / f"{split}.index"
            join_indexes(_indexes(shards, found), sum(info.rows for info in found), path)
            splits[split] = SplitInfo(
                shards=tuple(named),
                index_file=path.name,
                index_bytes=path.stat().st_size,
                index_sha256=file_sha256(path),
            )
            sources[path.name] = shards / path.name
            deliver(path, sources[path.name])
        manifest = _manifest(splits, account)
    with _ledger(output) as ledger:
        (output / MANIFEST).delete()  # from here on the old dataset, if any, is no dataset
        for file in output.list():
            if file.suffix in DATASET_SUFFIXES and file.name not in sources:
                file.delete()
        _place(sources, output, manifest, ledger)
        write_json(output / MANIFEST, manifest.to_json())
    return manifest


def _ledger(output: Location) -> AbstractContextManager[Ledger | None]:
    """What need not be uploaded again: after a kill, or where an older dataset had the same shards."""
    if output.is_local:
        return nullcontext()
    known: dict[str, str] = {}
    with suppress(PingLlmError):  # there is none, or it is of another version
        known = {name: sha256 for name, (_, sha256) in Manifest.load(output).files.items()}
    return Ledger(output, known)


def _manifest(splits: dict[str, SplitInfo], account: Account) -> Manifest:
    written = sum(split.measurements for split in splits.values())
    dropped = sum(account.dropped.values())
    if written + dropped != account.read:
        raise PingLlmError(
            f"internal error: {account.read} measurements were read, but {written} written and {dropped} dropped; "
            "nothing was published"
        )
    return Manifest(
        splits=splits,
        options=account.options,
        inputs=account.inputs,
        read=account.read,
        written=written,
        dropped=account.dropped,
        plan=account.plan,
    )


def _place(sources: dict[str, Location], output: Location, manifest: Manifest, ledger: Ledger | None) -> None:
    def place(name: str) -> None:
        size, sha256 = manifest.files[name]
        if ledger is None:
            copy(sources[name], output / name)
        elif not ledger.has(name, size=size, sha256=sha256):
            copy(sources[name], output / name)
            ledger.add(name, sha256)

    with (
        progress("publishing", total=len(sources)) as advance,
        ThreadPoolExecutor(REQUESTS_AT_ONCE if output.is_remote else 1) as threads,
    ):
        for _ in map_in_order(threads, place, sorted(sources), window=2 * REQUESTS_AT_ONCE):
            advance()


def _indexes(shards: Location, infos: list[ShardInfo]) -> Iterator[pa.Table]:
    def read(info: ShardInfo) -> pa.Table:
        with (shards / info.file.replace(".arrayrecord", ".index")).open_input() as file:
            return pa.ipc.open_file(pa.BufferReader(file.readall())).read_all()

    with ThreadPoolExecutor(REQUESTS_AT_ONCE if shards.is_remote else 1) as threads:
        yield from map_in_order(threads, read, infos, window=2 * REQUESTS_AT_ONCE)


def join_indexes(parts: Iterable[pa.Table], rows: int, path: Path) -> None:
    """One index of all shards. Columns are gathered on disk: a large dataset's index may be larger than the memory."""
    if not rows:
        write_index(INDEX_SCHEMA.empty_table(), path)
        return
    columns = []
    for field in INDEX_SCHEMA:
        kind = np.dtype("V16") if field.name == "source" else np.dtype(field.type.to_pandas_dtype())
        columns.append(np.memmap(path.with_suffix(f".{field.name}"), dtype=kind, mode="w+", shape=rows))
    begin = 0
    for number, part in enumerate(parts):
        end = begin + len(part)
        for field, column in zip(INDEX_SCHEMA, columns, strict=True):
            for chunk in part[field.name].chunks[:1]:
                column[begin:end] = np.frombuffer(chunk.buffers()[1], dtype=column.dtype, count=len(part))
        columns[0][begin:end] = number
        begin = end
    arrays = [
        pa.Array.from_buffers(field.type, rows, [None, pa.py_buffer(column)])
        for field, column in zip(INDEX_SCHEMA, columns, strict=True)
    ]
    write_index(pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA), path)
