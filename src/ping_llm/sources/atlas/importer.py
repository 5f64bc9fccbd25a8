"""Files of RIPE Atlas ping results become Parquet files of measurements, in one of two ways.

`import_atlas`    all files into one sequence of Parquet files, which appear together at the end
`import_by_file`  each file into a Parquet file of its own, with a ledger of what is done: for the daily dumps of weeks
                  and years. An import that was stopped continues where it was, one with more files does only those,
                  and a damaged file is reported at the end without holding up the rest.

The bytes written depend on the input and the options, never on the number of workers.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas.chunks import DEFAULT_SIZES, InputCounts, ReadSizes, parse_file
from ping_llm.sources.atlas.output import (
    LEDGER,
    PARSER_VERSION,
    PATTERN,
    REQUESTS_AT_ONCE,
    LedgerEntry,
    read_entries,
    staged_output,
    write_measurements,
)
from ping_llm.storage import Location, locate
from ping_llm.tasks.engines import EngineChoice, OnTiming
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool

if TYPE_CHECKING:
    from ping_llm.core.console import Advance

ROWS_PER_FILE: Final = 10_000_000
"""50 to 70 MB of Parquet."""


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import did. Every result that was read is accounted for: `dropped`, or in one measurement or several."""

    results: int
    measurements: int
    """Measurements written: one per result kept, or one per packet of it."""
    failed: int
    """Measurements without an answer, which are among the measurements."""
    dropped: dict[str, int]
    """Results that gave no measurement, by reason."""
    examples: dict[str, str]
    """Where the first result dropped for each reason is, and what is wrong with it."""
    bytes: int
    seconds: float
    files: tuple[str, ...]
    """Parquet files written."""
    inputs: tuple[InputCounts, ...]

    def to_json(self) -> dict[str, Any]:
        report = asdict(self)
        for one in report["inputs"]:
            del one["examples"]
        return report


@dataclass(frozen=True, kw_only=True)
class ByFileReport(ImportReport):
    """Counts all files that were named, those that an earlier import did included."""

    skipped: int
    """Files that were done before and have not changed."""
    failures: dict[str, str]
    """Files that could not be read, and why."""


def _total(inputs: Sequence[InputCounts], files: Sequence[str], started: float) -> dict[str, Any]:
    """The fields of a report."""
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for one in inputs:
        dropped.update(one.dropped)
        examples = one.examples | examples
    sums = {name: sum(getattr(one, name) for one in inputs) for name in ("results", "measurements", "failed", "bytes")}
    return sums | {
        "dropped": dict(dropped.most_common()),
        "examples": {reason: examples[reason] for reason, _ in dropped.most_common()},
        "seconds": time.perf_counter() - started,
        "files": tuple(files),
        "inputs": tuple(inputs),
    }


def _check_packets(packets: str) -> None:
    if packets not in ("min", "each"):
        raise PingLlmError(f"packets must be 'min' or 'each', not {packets!r}")


def _check_inputs(files: Sequence[Location]) -> list[tuple[int, int]]:
    """Size and time of the input files, which must all be there before any work starts."""
    if not files:
        raise PingLlmError("no input file given")
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        entries = list(threads.map(Location.stat, files))
    for file, entry in zip(files, entries, strict=True):
        if not entry.is_file:
            raise PingLlmError(f"{file}: is not a file but a folder; name the files")
    return [(entry.size, entry.mtime_ns) for entry in entries]


# All files into one sequence of Parquet files.


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
    on_progress: "Advance | None" = None,
) -> ImportReport:
    """Import ping results, in the order of the files, into the folder `output`.

    `packets` is "min" (one measurement per result, its minimum RTT) or "each" (one per packet). `strict` stops at the
    first result that cannot be used. `on_progress` gets bytes of input, as stored.
    """
    started = time.perf_counter()
    _check_packets(packets)
    if rows_per_file < 1 or (workers is not None and workers < 1):
        raise PingLlmError("rows_per_file and workers must be at least 1")
    paths = [Path(file) for file in files]
    stats = _check_inputs([locate(path) for path in paths])
    if len({path.resolve() for path in paths}) < len(paths):
        raise PingLlmError("an input file is given twice; its measurements would count double")
    if (Path(output) / LEDGER).is_dir():
        raise PingLlmError(f"{output}: holds files imported one by one; add --per-file, or choose another folder")
    inputs = [InputCounts(file=str(path), bytes=size) for path, (size, _) in zip(paths, stats, strict=True)]
    total = sum(one.bytes for one in inputs)
    if workers is None:  # starting a process takes longer than parsing a chunk
        workers = max(1, min(available_cores(), total // sizes.chunk))
    advance = on_progress or _no_progress
    advance(0, total=total)
    parsing = {"each_packet": packets == "each", "strict": strict, "sizes": sizes}
    with staged_output(Path(output), overwrite=overwrite) as staging:
        with worker_pool(workers) as pool:
            if workers > 1 and len(paths) > 1:
                batches = _files_by_workers(inputs, parsing, pool, 2 * workers, advance, staging)
            else:
                batches = _chunks_by_workers(inputs, parsing, pool, 2 * workers, advance)
            names = write_measurements(batches, staging, rows_per_file=rows_per_file)
        report = ImportReport(**_total(inputs, names, started))
        if not report.measurements:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items())
            raise PingLlmError(f"no ping measurement in {report.results:,} results" + (reasons and f" ({reasons})"))
    return report


def _no_progress(amount: float = 1, *, total: float | None = None) -> None:
    """Progress that nobody watches."""


# Two ways to keep the cores busy. Both give the same batches, in the order of the input.


def _chunks_by_workers(
    inputs: list[InputCounts], parsing: dict[str, Any], pool: Executor, window: int, advance: "Advance"
) -> Iterator[Any]:
    """One file after the other, however large: it is read here, and its chunks are parsed by all workers."""
    for counts in inputs:
        position = 0
        for parsed in parse_file(counts, **parsing, pool=pool, window=window):
            yield parsed.batch
            advance(parsed.position - position)
            position = parsed.position
        advance(counts.bytes - position)


def _files_by_workers(
    inputs: list[InputCounts], parsing: dict[str, Any], pool: Executor, window: int, advance: "Advance", staging: Path
) -> Iterator[Any]:
    """Each file read by one worker: decompression, the slow part, then runs on every core.

    A file may be larger than memory, so a worker leaves its batches on disk; they are removed as they are written.
    """
    tasks = [(counts, staging / f"input-{number:05d}.arrow", parsing) for number, counts in enumerate(inputs)]
    for number, counts in enumerate(map_in_order(pool, _parse_to_disk, tasks, window=window)):
        inputs[number], path = counts, tasks[number][1]
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
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


# Each file into a Parquet file of its own.


@dataclass(frozen=True, kw_only=True)
class FileTask:
    source: Location
    output: Location
    bytes: int
    modified_ns: int
    packets: str
    strict: bool

    @property
    def name(self) -> str:
        return self.source.name


def import_by_file(
    files: Sequence[Path | str],
    output: Path | str,
    *,
    packets: str = "min",
    strict: bool = False,
    overwrite: bool = False,
    engine: EngineChoice | None = None,
    on_progress: "Advance | None" = None,
    on_timing: OnTiming | None = None,
) -> ByFileReport:
    """Import those files that are new, changed or could not be read before. With `overwrite`, all of them.

    `strict` stops at the first file that cannot be read and at the first result that cannot be used.
    """
    started = time.perf_counter()
    _check_packets(packets)
    folder = _absolute(locate(output))
    _check_folder(folder, packets, overwrite)
    tasks = _tasks(files, folder, packets, strict)
    entries = {} if overwrite else _done(tasks, folder)
    todo = [task for task in tasks if task.name not in entries]
    skipped, total = len(entries), sum(task.bytes for task in tasks)
    advance = on_progress or _no_progress
    advance(total - sum(task.bytes for task in todo), total=total)
    try:
        if todo and folder.is_local:
            (folder.local / LEDGER).mkdir(parents=True, exist_ok=True)
        if todo:
            with (engine or EngineChoice()).open() as running:
                for task, done in zip(todo, running.map(import_file, todo), strict=True):
                    entries[task.name] = done.value
                    advance(task.bytes)
                    if on_timing is not None:
                        sizes = {"bytes_in": task.bytes, "bytes_out": done.value.output_bytes}
                        on_timing(done.timing("import", task.name, **sizes))
    except OSError as error:
        raise PingLlmError(f"{folder}: cannot be written: {error.strerror or error}") from error
    found = [entries[task.name] for task in tasks]
    return ByFileReport(
        **_total([entry.counts for entry in found], [entry.output for entry in found if entry.output], started),
        skipped=skipped,
        failures={entry.input: entry.error for entry in found if entry.error is not None},
    )


def import_file(task: FileTask) -> LedgerEntry:
    """A worker's task: one input file becomes one Parquet file and one entry of the ledger."""
    started = time.perf_counter()
    target = task.output / f"{task.name}.parquet"
    counts = InputCounts(file=str(task.source), bytes=task.bytes)
    output: dict[str, Any] = {}
    # Beside the output, where there is room for it; in the system's folder if that is in a store.
    scratch = None if task.output.is_remote else str(task.output.local / LEDGER)
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=scratch) as folder:
        try:
            parsed = parse_file(counts, each_packet=task.packets == "each", strict=task.strict)
            for name in write_measurements((chunk.batch for chunk in parsed), Path(folder)):  # one, or none
                path = Path(folder) / f"{name}.tmp"
                output = {"output": target.name, "output_bytes": path.stat().st_size, "sha256": file_sha256(path)}
                target.upload(path)
        except PingLlmError as problem:
            if task.strict:
                raise
            counts, output = InputCounts(file=str(task.source), bytes=task.bytes), {"error": str(problem)}
    if "output" not in output:
        target.delete()  # of an input that has changed
    entry = LedgerEntry.of(
        counts,
        modified_ns=task.modified_ns,
        packets=task.packets,
        seconds=round(time.perf_counter() - started, 3),
        **output,
    )
    entry.write(task.output, task.name)
    return entry


def _absolute(location: Location) -> Location:
    return locate(location.local.absolute()) if location.is_local else location


def _check_folder(folder: Location, packets: str, overwrite: bool) -> None:
    if folder.is_file():
        raise PingLlmError(f"{folder}: is a file; the output must be a folder")
    if folder.glob(PATTERN):
        raise PingLlmError(f"{folder}: holds measurements that were not imported file by file; choose another folder")
    for file in (folder / LEDGER).list()[:1]:
        before = LedgerEntry.read(file).packets
        if before != packets and not overwrite:
            raise PingLlmError(f"{folder}: was imported with --packets {before}; choose another folder, or overwrite")


def _tasks(files: Sequence[Path | str], folder: Location, packets: str, strict: bool) -> list[FileTask]:
    sources = [_absolute(locate(file)) for file in files]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise PingLlmError(
                f"{count} input files are called {name}, and so would be what they become; import them to two folders"
            )
    return [
        FileTask(source=source, output=folder, bytes=size, modified_ns=modified_ns, packets=packets, strict=strict)
        for source, (size, modified_ns) in zip(sources, _check_inputs(sources), strict=True)
    ]


def _done(tasks: Sequence[FileTask], folder: Location) -> dict[str, LedgerEntry]:
    """The entries of files that need not be imported again."""
    sizes = {file.name: file.size() for file in folder.list()}
    entries = read_entries(folder, [task.name for task in tasks])

    def holds(task: FileTask, entry: LedgerEntry) -> bool:
        return (
            entry.error is None
            and entry.parser == PARSER_VERSION
            and (entry.bytes, entry.modified_ns, entry.packets) == (task.bytes, task.modified_ns, task.packets)
            and (entry.output is None or sizes.get(entry.output) == entry.output_bytes)
        )

    return {task.name: entries[task.name] for task in tasks if task.name in entries and holds(task, entries[task.name])}
