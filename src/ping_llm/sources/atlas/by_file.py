"""Import of many files, each on its own: one task and one Parquet file for each, and a ledger of what is done.

This is for the daily dumps of weeks and years. An import that was stopped goes on where it was, one with more files
does only those, and a file that is damaged is reported at the end without holding up the rest. The bytes of a Parquet
file depend on its input file and on `packets` alone.
"""

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ping_llm.engines.choice import EngineChoice
from ping_llm.engines.tasks import OnTiming, Timing
from ping_llm.errors import PingLlmError
from ping_llm.sources.atlas import ledger
from ping_llm.sources.atlas.chunk import parse_chunk
from ping_llm.sources.atlas.ledger import LedgerEntry, output_name
from ping_llm.sources.atlas.output import PATTERN, MeasurementWriter
from ping_llm.sources.atlas.report import ImportReport, InputReport, Tally
from ping_llm.sources.atlas.stream import read_ahead, read_chunks
from ping_llm.storage import Location, locate

if TYPE_CHECKING:
    from ping_llm.console import Advance

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
        if entry.kind != "file":
            raise PingLlmError(f"{source}: " + ("no such file" if entry.kind == "missing" else "is not a file"))
        return FileTask(
            source=source,
            output=folder,
            bytes=entry.size,
            modified_ns=entry.modified_ns,
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
