"""Files of RIPE Atlas ping results become one sequence of Parquet files, which appear together at the end.

`by_file.py` is the other way to import. Of both, the bytes written depend on the input and the options, never on the
number of workers.
"""

import fcntl
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas.chunks import DEFAULT_SIZES, Counts, InputCounts, ReadSizes, parse_file
from ping_llm.storage import Location, locate
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool

PATTERN: Final = "measurements-*.parquet"
STAGING: Final = ".importing"
LEDGER: Final = "ledger"
"""The folder that tells an import file by file."""

ROWS_PER_FILE: Final = 10_000_000
"""50 to 70 MB of Parquet."""
ROWS_PER_GROUP: Final = 1 << 17
"""Readers take a row group as one task; this is about what DuckDB writes itself. 1 MB on disk."""
REQUESTS_AT_ONCE: Final = 16


@dataclass(kw_only=True)
class ImportReport(Counts):
    """What an import did."""

    seconds: float
    files: tuple[str, ...]
    """Parquet files written."""
    inputs: tuple[InputCounts, ...]

    def __post_init__(self) -> None:
        for one in self.inputs:
            self.add(one)
        self.dropped = dict(Counter(self.dropped).most_common())
        self.examples = {reason: self.examples[reason] for reason in self.dropped}

    def to_json(self) -> dict[str, Any]:
        shown = ("file", "bytes", "results", "measurements", "failed", "dropped")
        return asdict(self) | {"inputs": [{name: getattr(one, name) for name in shown} for one in self.inputs]}


def check_packets(packets: str) -> None:
    if packets not in ("min", "each"):
        raise PingLlmError(f"packets must be 'min' or 'each', not {packets!r}")


def check_inputs(files: Sequence[Location]) -> list[tuple[int, int]]:
    """Size and time of the input files, which must all be there before any work starts."""
    if not files:
        raise PingLlmError("no input file given")
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        entries = list(threads.map(Location.stat, files))
    for file, entry in zip(files, entries, strict=True):
        if not entry.is_file:
            raise PingLlmError(f"{file}: is not a file but a folder; name the files")
    return [(entry.size, entry.mtime_ns) for entry in entries]


def import_atlas(
    files: Sequence[Path | str],
    output: Path | str,
    *,
    packets: str = "min",
    strict: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    rows_per_file: int = ROWS_PER_FILE,
    sizes: ReadSizes = DEFAULT_SIZES,
    on_progress: Advance = no_progress,
) -> ImportReport:
    """Import ping results, in the order of the files, into the folder `output`.

    `packets` is "min" (one measurement per result, its minimum RTT) or "each" (one per packet). `strict` stops at the
    first result that cannot be used. `on_progress` gets bytes of input, as stored.
    """
    started = time.perf_counter()
    check_packets(packets)
    if rows_per_file < 1 or (workers is not None and workers < 1):
        raise PingLlmError("rows_per_file and workers must be at least 1")
    paths = [Path(file) for file in files]
    stats = check_inputs([locate(path) for path in paths])
    if len({path.resolve() for path in paths}) < len(paths):
        raise PingLlmError("an input file is given twice; its measurements would count double")
    if (Path(output) / LEDGER).is_dir():
        raise PingLlmError(f"{output}: holds files imported one by one; add --per-file, or choose another folder")
    inputs = [InputCounts(file=str(path), bytes=size) for path, (size, _) in zip(paths, stats, strict=True)]
    total = sum(one.bytes for one in inputs)
    if workers is None:  # starting a process takes longer than parsing a chunk
        workers = max(1, min(available_cores(), total // sizes.chunk))
    on_progress(0, total=total)
    parsing = {"each_packet": packets == "each", "strict": strict, "sizes": sizes}
    with staged_output(Path(output), overwrite=overwrite) as staging:
        with worker_pool(workers) as pool:
            if workers > 1 and len(paths) > 1:
                batches = _files_by_workers(inputs, parsing, pool, 2 * workers, on_progress, staging)
            else:
                batches = _chunks_by_workers(inputs, parsing, pool, 2 * workers, on_progress)
            names = write_measurements(batches, staging, rows_per_file=rows_per_file)
        report = ImportReport(seconds=time.perf_counter() - started, files=tuple(names), inputs=tuple(inputs))
        if not report.measurements:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items())
            raise PingLlmError(f"no ping measurement in {report.results:,} results" + (reasons and f" ({reasons})"))
    return report


# Two ways to keep the cores busy. Both give the same batches, in the order of the input.


def _chunks_by_workers(
    inputs: list[InputCounts], parsing: dict[str, Any], pool: Executor, window: int, advance: Advance
) -> Iterator[pa.RecordBatch]:
    """One file after the other, however large: it is read here, and its chunks are parsed by all workers."""
    for counts in inputs:
        position = 0
        for parsed in parse_file(counts, **parsing, pool=pool, window=window):
            yield parsed.batch
            advance(parsed.position - position)
            position = parsed.position
        advance(counts.bytes - position)


def _files_by_workers(
    inputs: list[InputCounts], parsing: dict[str, Any], pool: Executor, window: int, advance: Advance, staging: Path
) -> Iterator[pa.RecordBatch]:
    """Each file read by one worker: decompression, the slow part, then runs on every core.

    A file may be larger than memory, so a worker leaves its batches on disk; they are removed as they are written.
    """
    tasks = [(counts, staging / f"input-{number:05d}.arrow", parsing) for number, counts in enumerate(inputs)]
    for number, counts in enumerate(map_in_order(pool, _parse_to_disk, tasks, window=window)):
        inputs[number], path = counts, tasks[number][1]
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        path.unlink()
        advance(counts.bytes)


def _parse_to_disk(task: tuple[InputCounts, Path, dict[str, Any]]) -> InputCounts:
    """A worker's task: one input file becomes one file of batches."""
    counts, path, parsing = task
    writer: Any
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for parsed in parse_file(counts, **parsing):
            writer.write_batch(parsed.batch)
    return counts


# What is left on disk: Parquet files, which appear whole or not at all.


@contextmanager
def staged_output(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden folder inside `output`; the Parquet files left in it are moved to `output` when all went well.

    A staging folder left by an import that was killed is cleared by the next one.
    """
    if output.exists() and not output.is_dir():
        raise PingLlmError(f"{output}: is a file; the output must be a folder")
    if not overwrite and next(output.glob(PATTERN), None):
        raise PingLlmError(f"{output}: already holds measurements; choose another folder or overwrite them")
    existed = output.exists()
    staging = output / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:  # it ends with this process, however that ends
            descriptor = os.open(staging, os.O_RDONLY)
            lock.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PingLlmError(f"{output}: another import is writing to this folder") from None
            lock.callback(shutil.rmtree, staging, ignore_errors=True)
            for leftover in staging.iterdir():
                leftover.unlink()
            yield staging
            for old in sorted(output.glob(PATTERN)):
                old.unlink()
            # The first one arrives last and leaves first, so that a set that has it is complete.
            for staged in sorted(staging.glob(f"{PATTERN}.tmp"), reverse=True):
                staged.replace(output / staged.stem)
    except OSError as error:
        raise PingLlmError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, as it should be after an import
                output.rmdir()


def write_measurements(
    batches: Iterable[pa.RecordBatch], folder: Path, *, rows_per_file: int = sys.maxsize
) -> list[str]:
    """Writes Parquet files of `rows_per_file` rows, whose bytes do not depend on how the batches are cut.

    Returns their names; until they are published, the files have the suffix .tmp.
    """
    names: list[str] = []
    waiting = SCHEMA.empty_table()
    room = 0  # rows that the open file still takes
    with ExitStack() as open_file:
        for batch in chain(batches, [None]):  # None: the end
            if batch is not None:
                waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], schema=SCHEMA)])
            while len(waiting):
                rows = min(ROWS_PER_GROUP, room or rows_per_file)
                if len(waiting) < rows and batch is not None:
                    break
                if not room:
                    open_file.close()
                    names.append(f"measurements-{len(names):05d}.parquet")
                    writer = open_file.enter_context(_parquet_writer(folder / f"{names[-1]}.tmp"))
                    room = rows_per_file
                # One contiguous chunk: page boundaries could otherwise follow those of the batches.
                writer.write_table(waiting.slice(0, rows).combine_chunks(), row_group_size=rows)
                waiting = waiting.slice(rows)
                room -= rows
    return names


def _parquet_writer(path: Path) -> Any:
    # The default gives up on dictionaries above 1 MiB.
    dictionaries: dict[str, Any] = {"use_dictionary": ["src_addr", "dst_addr"], "dictionary_pagesize_limit": 16 << 20}
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", **dictionaries)
