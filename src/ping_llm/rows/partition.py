"""Step one of preparation: read and check the input, and divide it into buckets by the hash of the source.

A task reads some pieces of input files and writes a *run*: its measurements, family by family, in the order of their
buckets. Step two (`shards.py`) reads a range of buckets from every run, which is one span of bytes per family. There
are always 4096 buckets; how many of them make a shard is decided when the total number of measurements is known, so the
shards do not depend on how the input is divided into files.

A run file is: for each family, 4097 bucket offsets (int64, counted in measurements); then for each family its
measurements, one after the other. Within a bucket they keep the order of the input, so a run does not depend on how its
task was divided into batches.
"""

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.core.files import sync
from ping_llm.core.measurements import DROP_REASONS, AddressColumn, ValidMeasurements, source_hash, validate
from ping_llm.rows.format import Ints
from ping_llm.sources import files
from ping_llm.sources.files import Piece, RawBatch
from ping_llm.storage import Location
from ping_llm.tasks.pool import side_by_side

if TYPE_CHECKING:
    from ping_llm.rows.prepare import PrepareSettings

BUCKETS: Final = 4096
FAMILIES: Final = (4, 6)

RECORDS: Final = {
    4: np.dtype([("src", "<u4"), ("time", "<i8"), ("dst", "<u4"), ("rtt", "<f4")]),
    6: np.dtype(
        [("src", "<u8"), ("src_low", "<u8"), ("time", "<i8"), ("dst", "<u8"), ("dst_low", "<u8"), ("rtt", "<f4")]
    ),
}
"""A measurement in a run: 20 bytes with IPv4 addresses, 44 with IPv6. Addresses are numbers, which sort fast: one for
IPv4, two for IPv6."""

BYTES_PER_ROW_IN_FLIGHT: Final = 480  # memory of a task for each measurement of a batch, with strings and sorted copies

HEADER_BYTES: Final = len(FAMILIES) * (BUCKETS + 1) * 8

_BATCH_ROWS: Final = 131_072  # in which spans of many runs are joined: DuckDB handles few large batches faster


# The work folder, in which tasks of both steps leave their output for each other and for the next run. All machines
# reach it under the same name. A file appears in it whole or not at all, and a task writes its marker last. If a task
# runs twice (because its machine was given up too early), both write the same bytes and do no harm.

Item = TypeVar("Item")
Marker = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task(Generic[Item]):
    """The input of a task of either step. Its output is its marker and the files that this names: see `finish`."""

    kind: str  # `run` or `shard`: what it makes
    number: int
    input: Item
    settings: "PrepareSettings"
    work: Location
    memory_bytes: int  # that it may use

    def temporary_folder(self) -> AbstractContextManager[Path]:
        return temporary_folder(self.work if self.settings.engine == "local" else None)

    def finish(self, files: Sequence[Path], **facts: Any) -> Marker:
        """Move the files that were made to the work folder, then write the marker that names them."""
        marker = {"number": self.number, "files": {path.name: path.stat().st_size for path in files}, **facts}
        folder = self.work / f"{self.kind}s"
        for path in files:
            deliver(path, folder / path.name)
        (folder / f"{self.kind}-{self.number:05d}.json").write_text(json.dumps(marker, indent=1) + "\n")
        return marker


def finished(folder: Location) -> dict[int, Marker]:
    """The markers of finished tasks, by number. A task whose files are gone or cut off is not finished."""
    sizes = {file.name: file.size() for file in folder.list()}
    names = [name for name in sizes if name.endswith(".json")]
    markers = side_by_side(lambda name: json.loads((folder / name).read_text()), names)
    return {marker["number"]: marker for marker in markers if marker["files"].items() <= sizes.items()}


@contextmanager
def temporary_folder(work: Location | None) -> Iterator[Path]:
    """A folder that is removed afterwards: inside a local work folder, or else on this machine's disk."""
    inside = work.local / "scratch" if work and work.is_local else None
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=inside, ignore_cleanup_errors=True) as name:
        yield Path(name)


def deliver(source: Path, target: Location) -> None:
    """Move or copy a finished local file to its target."""
    if target.is_local:
        sync(source)
        try:
            source.replace(target.local)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    target.upload(source)


# Step one.


def partition(task: Task[tuple[Piece, ...]]) -> Marker:
    """Read, check and cut some pieces. The marker says what was read of each, and what of it was dropped.

    Batches are cut one after the other into one file, each as a run; several are merged in the end.
    """
    counts: list[dict[str, Any]] = []
    starts: list[int] = []
    names: dict[str, str] = {}
    known = {name: node.address for name, node in task.settings.nodes.items() if node.address is not None}
    strict, piece_rows = task.settings.strict, task.settings.sizes.piece_rows
    batch_rows = int(np.clip(task.memory_bytes // BYTES_PER_ROW_IN_FLIGHT, 65_536, piece_rows))
    with task.temporary_folder() as folder:
        run, batches = folder / f"run-{task.number:05d}.run", folder / "batches"
        with batches.open("w+b") as file:
            for piece in task.input:
                read, dropped, examples = 0, Counter[str](), dict[str, str]()
                for raw in files.read(piece, batch_rows, strict=strict):
                    valid = validate(raw.batch, piece.spelling)
                    if valid.first_dropped or raw.examples:
                        if strict and valid.first_dropped:
                            raise _first_bad_row(piece, raw, valid.first_dropped)
                        examples = {**files.examples_of(piece, raw, valid.first_dropped), **examples}
                    valid = valid.with_addresses(known)
                    names.update(valid.stand_ins)
                    dropped += raw.dropped + valid.dropped
                    read += raw.batch.num_rows + raw.dropped.total()
                    if len(valid):
                        starts.append(file.tell())
                        write_run(file, valid)
                counts.append({"read": read, "dropped": dropped, "examples": examples})
            if len(starts) > 1:
                merge_runs(file, starts, run)
        if len(starts) == 1:
            batches.rename(run)
        size = run.stat().st_size if starts else 0
        bytes_in = sum(piece.bytes for piece in task.input)
        made = [run] if starts else []
        return task.finish(made, pieces=counts, names=names, bytes_in=bytes_in, bytes_out=size)


def _first_bad_row(piece: Piece, raw: RawBatch, first_dropped: Mapping[str, int]) -> MeasurementError:
    reason, position = min(first_dropped.items(), key=lambda found: found[1])
    where, _, values = files.row_in_words(piece, raw, position).partition(": ")
    return MeasurementError(f"{piece.path}, {where}: {reason} ({DROP_REASONS[reason]}): {values}")


def write_run(file: BinaryIO, measurements: ValidMeasurements) -> None:
    """Write a batch as one run (see the top of this file)."""
    hashes = source_hash(measurements.src.families, measurements.src.packed)
    bucket = (hashes >> np.uint64(64 - 12)).astype(np.uint16)[measurements.src.codes]
    bucket[measurements.family == 6] += BUCKETS
    counts = np.bincount(bucket, minlength=len(FAMILIES) * BUCKETS).reshape(len(FAMILIES), BUCKETS)
    offsets = np.zeros((len(FAMILIES), BUCKETS + 1), dtype="<i8")
    np.cumsum(counts, axis=1, out=offsets[:, 1:])
    file.write(offsets.data)
    in_order = np.argsort(bucket, kind="stable")
    for family, order in zip(FAMILIES, np.split(in_order, [offsets[0, -1]]), strict=True):
        columns = [
            *_address_numbers(measurements.src, order, family),
            measurements.time_us[order],
            *_address_numbers(measurements.dst, order, family),
            measurements.rtt_ms[order],
        ]
        records = np.empty(len(order), dtype=RECORDS[family])
        for name, column in zip(records.dtype.names or (), columns, strict=True):
            records[name] = column
        file.write(records.data)


def _address_numbers(column: AddressColumn, order: Ints, family: int) -> list[npt.NDArray[Any]]:
    codes = column.codes[order]
    if family == 4:
        return [np.ascontiguousarray(column.packed[:, :4]).view(">u4")[:, 0].astype("<u4")[codes]]
    halves = np.ascontiguousarray(column.packed).view(">u8").astype("<u8")
    return [halves[:, 0][codes], halves[:, 1][codes]]


def merge_runs(file: BinaryIO, starts: Sequence[int], path: Path) -> None:
    """Merge the runs of successive batches, which begin at `starts` of a file, as if they had been one batch."""
    file.flush()
    descriptor = file.fileno()
    offsets = [read_offsets(os.pread(descriptor, HEADER_BYTES, start)) for start in starts]
    bounds = np.stack([start + bucket_bounds(one) for start, one in zip(starts, offsets, strict=True)], axis=-1)
    with path.open("wb", buffering=1 << 20) as merged:
        merged.write(np.sum(offsets, axis=0, dtype="<i8").data)
        for number in range(len(FAMILIES)):
            for begins, ends in pairwise(bounds[number].tolist()):
                for begin, end in zip(begins, ends, strict=True):
                    if end > begin:
                        merged.write(os.pread(descriptor, end - begin, begin))


def read_offsets(header: bytes) -> Ints:
    """Where each bucket begins, counted in measurements: shape (families, buckets + 1)."""
    return np.frombuffer(header, dtype="<i8").reshape(len(FAMILIES), BUCKETS + 1)


def bucket_bounds(offsets: Ints) -> Ints:
    """The same in bytes of the run file. Column b is where bucket b begins, and where bucket b - 1 ends."""
    bounds = np.empty_like(offsets)
    base = HEADER_BYTES
    for number, family in enumerate(FAMILIES):
        bounds[number] = base + offsets[number] * RECORDS[family].itemsize
        base = int(bounds[number, -1])
    return bounds


class Span(NamedTuple):
    """A range of bytes of a run."""

    file: str
    start: int
    end: int


Spans = dict[int, tuple[Span, ...]]  # by family


def bucket_spans(folder: Location, runs: Sequence[str]) -> Callable[[int, int], Spans]:
    """A function of a range of buckets: the spans where their measurements lie, one in every run that has any."""
    headers = span_reader(folder)(Span(run, 0, HEADER_BYTES) for run in runs)
    bounds = {run: bucket_bounds(read_offsets(header)) for run, header in zip(runs, headers, strict=True)}

    def spans(first: int, last: int) -> Spans:
        ends = [(run, begins[:, [first, last]].tolist()) for run, begins in bounds.items()]
        return {
            family: tuple(Span(run, *both[number]) for run, both in ends if both[number][0] < both[number][1])
            for number, family in enumerate(FAMILIES)
        }

    return spans


def span_reader(folder: Location) -> Callable[[Iterable[Span]], Iterator[bytes]]:
    """A function that yields the bytes of spans of the runs in a folder, in order. It reads a store in parallel."""
    opened = cache(lambda file: (folder / file).open_random())

    def read(span: Span) -> bytes:
        size = span.end - span.start
        # Local files are not kept open: there may be more of them than a process may have open.
        file = (folder / span.file).open_random() if folder.is_local else opened(span.file)
        data: bytes = file.read_at(size, span.start)
        if len(data) != size:
            raise PingLlmError(f"{folder / span.file} is shorter than when it was written; run the same command again")
        return data

    return partial(map, read) if folder.is_local else partial(side_by_side, read)


def record_batches(stored: Iterable[bytes], family: int) -> Iterator[pa.RecordBatch]:
    """Bytes of one family's measurements, from any number of runs, as Arrow batches of a good size."""
    waiting: list[bytes] = []
    for data in chain(stored, [None]):  # None: the end
        if data is not None:
            waiting.append(data)
        rows = sum(map(len, waiting)) // RECORDS[family].itemsize
        if rows >= _BATCH_ROWS or (rows and data is None):
            records = np.frombuffer(b"".join(waiting), dtype=RECORDS[family])
            columns = {name: np.ascontiguousarray(records[name]) for name in records.dtype.names or ()}
            yield pa.RecordBatch.from_pydict(columns)
            waiting.clear()
