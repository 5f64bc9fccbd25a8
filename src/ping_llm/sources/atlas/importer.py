"""Files of RIPE Atlas ping results become Parquet files of measurements."""

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas import output as ledger
from ping_llm.sources.atlas.output import PATTERN, LedgerEntry, MeasurementWriter, output_name, staged_output
from ping_llm.sources.atlas.report import ImportReport, InputReport, Tally, total
from ping_llm.sources.atlas.stream import CHUNK_BYTES, parse_chunk, read_ahead, read_chunks
from ping_llm.storage import Location, locate
from ping_llm.tasks.engines import EngineChoice, OnTiming, Timing
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool

if TYPE_CHECKING:
    from ping_llm.core.console import Advance

Packets = Literal["min", "each"]

ROWS_PER_FILE: Final = 10_000_000
"""50 to 70 MB of Parquet."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    each_packet: bool
    strict: bool
    chunk_bytes: int


def import_atlas(
    files: Sequence[Path | str],
    output: Path | str,
    *,
    packets: Packets = "min",
    strict: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    rows_per_file: int = ROWS_PER_FILE,
    chunk_bytes: int = CHUNK_BYTES,
    on_progress: "Advance | None" = None,
) -> ImportReport:
    """Import ping results, in the order of the files, into the folder `output`.

    The bytes written depend on the input and on `packets` and `rows_per_file`, not on the number of workers.
    `on_progress` is told bytes of input, as stored.
    """
    started = time.perf_counter()
    if packets not in ("min", "each"):
        raise PingLlmError(f"packets must be 'min' or 'each', not {packets!r}")
    if rows_per_file < 1 or (workers is not None and workers < 1):
        raise PingLlmError("rows_per_file and workers must be at least 1")
    paths = [Path(file) for file in files]
    sizes = _sizes(paths)
    if workers is None:  # starting a process takes longer than parsing a chunk
        workers = max(1, min(available_cores(), sum(sizes) // chunk_bytes))
    if on_progress is not None:
        on_progress(0, total=sum(sizes))

    if (Path(output) / ledger.FOLDER).is_dir():
        raise PingLlmError(
            f"{output}: holds files imported one by one; go on with --per-file, or choose another folder"
        )
    settings = _Settings(each_packet=packets == "each", strict=strict, chunk_bytes=chunk_bytes)
    with staged_output(Path(output), overwrite=overwrite) as staging:
        with worker_pool(workers) as pool, MeasurementWriter(staging, rows_per_file=rows_per_file) as writer:
            job = _Import(
                settings=settings,
                pool=pool,
                window=2 * workers,
                writer=writer,
                advance=on_progress or _say_nothing,
            )
            if workers > 1 and len(paths) > 1:
                tallies = list(job.files(paths, sizes, staging))
            else:
                tallies = [job.file(path, size) for path, size in zip(paths, sizes, strict=True)]
        report = total(tallies, sizes, files=tuple(writer.names), seconds=time.perf_counter() - started)
        if not report.measurements:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items())
            raise PingLlmError(f"no ping measurement in {report.results:,} results" + (reasons and f" ({reasons})"))
    return report


def _sizes(paths: list[Path]) -> list[int]:
    """Sizes of the input files, which must all be there before any work starts."""
    if not paths:
        raise PingLlmError("no input file given")
    for path in paths:
        if not path.exists():
            raise PingLlmError(f"{path}: no such file")
        if not path.is_file():
            raise PingLlmError(f"{path}: is not a file" + (" but a folder; name the files" if path.is_dir() else ""))
    if len({path.resolve() for path in paths}) < len(paths):
        raise PingLlmError("an input file is given twice; its measurements would count double")
    return [path.stat().st_size for path in paths]


def _say_nothing(amount: float) -> None:
    """Progress that nobody asked for."""


@dataclass(frozen=True, kw_only=True)
class _Import:
    """The two ways to keep the cores busy. Both hand the same batches to the writer, in the order of the input."""

    settings: _Settings
    pool: Executor
    window: int
    """Tasks under way at a time."""
    writer: MeasurementWriter
    advance: Callable[[float], None]

    def file(self, path: Path, size: int) -> Tally:
        """One file, however large: it is read here, and its chunks are parsed by all workers."""
        tally = Tally(file=str(path), strict=self.settings.strict)
        parse = partial(parse_chunk, each_packet=self.settings.each_packet)
        chunks = read_ahead(read_chunks(path, chunk_bytes=self.settings.chunk_bytes))
        position = 0
        for parsed in map_in_order(self.pool, parse, chunks, window=self.window):
            tally.add(parsed)
            self.writer.write(parsed.batch)
            self.advance(parsed.position - position)
            position = parsed.position
        tally.finish()
        self.advance(size - position)
        return tally

    def files(self, paths: list[Path], sizes: list[int], staging: Path) -> Iterator[Tally]:
        """Many files, each read by one worker: decompression, the slow part, then runs on every core.

        A file may be larger than memory, so a worker leaves its batches on disk; they are removed as they are written.
        """
        tasks = [(path, staging / f"input-{number:05d}.arrow", self.settings) for number, path in enumerate(paths)]
        tallies = map_in_order(self.pool, _parse_file, tasks, window=self.window)
        for (_, batches, _), size, tally in zip(tasks, sizes, tallies, strict=True):
            with pa.OSFile(str(batches)) as file, pa.ipc.open_file(file) as reader:
                for index in range(reader.num_record_batches):
                    self.writer.write(reader.get_batch(index))
            batches.unlink()
            self.advance(size)
            yield tally


def _parse_file(task: tuple[Path, Path, _Settings]) -> Tally:
    """A worker's task: one input file becomes one file of batches."""
    path, batches, settings = task
    tally = Tally(file=str(path), strict=settings.strict)
    writer: Any
    with pa.OSFile(str(batches), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for chunk in read_ahead(read_chunks(path, chunk_bytes=settings.chunk_bytes)):
            parsed = parse_chunk(chunk, each_packet=settings.each_packet)
            tally.add(parsed)
            writer.write_batch(parsed.batch)
    tally.finish()
    return tally


# Import of many files, each on its own: one task and one Parquet file for each, and a ledger of what is done.
#
# This is for the daily dumps of weeks and years. An import that was stopped goes on where it was, one with more files
# does only those, and a file that is damaged is reported at the end without holding up the rest. The bytes of a Parquet
# file depend on its input file and on `packets` alone.

_ALL_ROWS: Final = 1 << 62


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


@dataclass(frozen=True, kw_only=True)
class ByFileReport:
    """The files that were named, those that an earlier import did included."""

    total: ImportReport
    skipped: int
    """Files that were done before and have not changed."""
    failures: dict[str, str]
    """Files that could not be read, and why."""

    def to_json(self) -> dict[str, Any]:
        return {**self.total.to_json(), "skipped": self.skipped, "failures": self.failures}


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
    if packets not in ("min", "each"):
        raise PingLlmError(f"packets must be 'min' or 'each', not {packets!r}")
    folder = _absolute(locate(output))
    _check_folder(folder, packets, overwrite)
    tasks = _tasks(files, folder, packets, strict)
    entries = {} if overwrite else _done(tasks, folder)
    todo = [task for task in tasks if task.name not in entries]
    skipped = len(entries)
    if on_progress is not None:
        on_progress(sum(t.bytes for t in tasks) - sum(t.bytes for t in todo), total=sum(t.bytes for t in tasks))
    if todo:
        try:
            if folder.is_local:
                (folder.local / ledger.FOLDER).mkdir(parents=True, exist_ok=True)
            with (engine or EngineChoice()).open() as running:
                for task, done in zip(todo, running.map(import_file, todo), strict=True):
                    entry = done.value
                    entries[task.name] = entry
                    if on_progress is not None:
                        on_progress(task.bytes)
                    if on_timing is not None:
                        on_timing(_timing(task, entry, done.node, done.started, done.seconds))
        except OSError as error:
            raise PingLlmError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return _report([entries[task.name] for task in tasks], skipped, time.perf_counter() - started)


def import_file(task: FileTask) -> LedgerEntry:
    """A worker's task: one input file becomes one Parquet file and one entry of the ledger."""
    started = time.perf_counter()
    tally = Tally(file=str(task.source), strict=task.strict)
    error, size, digest = None, 0, None
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=_scratch(task.output)) as name:
        try:
            _parse(task, tally, Path(name))
        except PingLlmError as problem:
            if task.strict:
                raise
            error = str(problem)
        written = [] if error else list(Path(name).glob(f"{PATTERN}.tmp"))
        for path in written:
            size, digest = path.stat().st_size, _sha256(path)
            (task.output / output_name(task.name)).upload(path)
    entry = LedgerEntry(
        input=str(task.source),
        bytes=task.bytes,
        modified_ns=task.modified_ns,
        packets=task.packets,
        parser=ledger.PARSER,
        output=output_name(task.name) if written else None,
        output_bytes=size,
        sha256=digest,
        results=0 if error else tally.results,
        measurements=0 if error else tally.measurements,
        failed=0 if error else tally.failed,
        dropped={} if error else dict(sorted(tally.dropped.items())),
        examples={} if error else dict(sorted(tally.examples.items())),
        seconds=round(time.perf_counter() - started, 3),
        error=error,
    )
    if not written:
        (task.output / output_name(task.name)).delete()  # of an input that has changed
    ledger.write_entry(task.output, task.name, entry)
    return entry


def _parse(task: FileTask, tally: Tally, folder: Path) -> None:
    with MeasurementWriter(folder, rows_per_file=_ALL_ROWS) as writer:
        for chunk in read_ahead(read_chunks(task.source)):
            parsed = parse_chunk(chunk, each_packet=task.packets == "each")
            tally.add(parsed)
            writer.write(parsed.batch)
    tally.finish()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scratch(output: Location) -> str | None:
    """Beside the output, where there is room for it; the system's folder if that is in a store."""
    return None if output.is_remote else str(output.local / ledger.FOLDER)


def _absolute(location: Location) -> Location:
    return locate(location.local.absolute()) if location.is_local else location


def _check_folder(folder: Location, packets: str, overwrite: bool) -> None:
    if folder.is_file():
        raise PingLlmError(f"{folder}: is a file; the output must be a folder")
    if folder.glob(PATTERN):
        raise PingLlmError(f"{folder}: holds measurements that were not imported file by file; choose another folder")
    before = ledger.packets_of(folder)
    if before not in (None, packets) and not overwrite:
        raise PingLlmError(f"{folder}: was imported with --packets {before}; choose another folder, or overwrite")


def _tasks(files: Sequence[Path | str], folder: Location, packets: str, strict: bool) -> list[FileTask]:
    if not files:
        raise PingLlmError("no input file given")
    sources = [_absolute(locate(file)) for file in files]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise PingLlmError(
                f"{count} input files are called {name}, and so would be what they become; import them to two folders"
            )

    def task(source: Location) -> FileTask:
        entry = source.stat()
        if not entry.is_file:
            raise PingLlmError(f"{source}: is not a file")
        return FileTask(
            source=source,
            output=folder,
            bytes=entry.size,
            modified_ns=entry.mtime_ns,
            packets=packets,
            strict=strict,
        )

    with ThreadPoolExecutor(ledger.REQUESTS_AT_ONCE) as threads:
        return list(threads.map(task, sources))


def _done(tasks: Sequence[FileTask], folder: Location) -> dict[str, LedgerEntry]:
    """The entries of files that need not be imported again."""
    sizes = {file.name: file.size() for file in folder.list()}
    entries = ledger.read_entries(folder, [task.name for task in tasks])
    return {task.name: entry for task in tasks if (entry := entries.get(task.name)) and _holds(entry, task, sizes)}


def _holds(entry: LedgerEntry, task: FileTask, sizes: dict[str, int]) -> bool:
    return (
        entry.error is None
        and entry.parser == ledger.PARSER
        and (entry.bytes, entry.modified_ns, entry.packets) == (task.bytes, task.modified_ns, task.packets)
        and (entry.output is None or sizes.get(entry.output) == entry.output_bytes)
    )


def _timing(task: FileTask, entry: LedgerEntry, node: str, started: float, seconds: float) -> Timing:
    return Timing(
        stage="import",
        task=task.name,
        node=node,
        started=started,
        seconds=seconds,
        bytes_in=task.bytes,
        bytes_out=entry.output_bytes,
    )


def _report(entries: list[LedgerEntry], skipped: int, seconds: float) -> ByFileReport:
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for entry in entries:
        dropped.update(entry.dropped)
        examples = entry.examples | examples
    total = ImportReport(
        results=sum(entry.results for entry in entries),
        measurements=sum(entry.measurements for entry in entries),
        failed=sum(entry.failed for entry in entries),
        dropped=dict(dropped.most_common()),
        examples={reason: examples[reason] for reason, _ in dropped.most_common()},
        bytes=sum(entry.bytes for entry in entries),
        seconds=seconds,
        files=tuple(entry.output for entry in entries if entry.output is not None),
        inputs=tuple(
            InputReport(
                file=entry.input,
                bytes=entry.bytes,
                results=entry.results,
                measurements=entry.measurements,
                failed=entry.failed,
                dropped=entry.dropped,
            )
            for entry in entries
        ),
    )
    failures = {entry.input: entry.error for entry in entries if entry.error is not None}
    return ByFileReport(total=total, skipped=skipped, failures=failures)
