"""RIPE Atlas ping results become Parquet files. The bytes depend on the input and the options, not on the workers.

`import_atlas` makes one sequence of files from all input; they appear together at the end.

`import_by_file` makes a Parquet file for each input, on several machines. A ledger says what is done: a small JSON file
for each input, written after the Parquet file that it vouches for. An input without an entry, with another size or time
than its entry has, or whose Parquet file is not there as it was, is imported again. A damaged file is reported at the
end without holding up the rest.
"""

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import STAGING, file_sha256, sole_writer, staged_files
from ping_llm.sources.atlas_results import ATLAS_SCHEMA, Counts, parse_file
from ping_llm.sources.files import distinct
from ping_llm.sources.objects import DEFAULT_SIZES, ReadSizes
from ping_llm.storage import Location, locate
from ping_llm.tasks.engines import EngineChoice, OnTiming
from ping_llm.tasks.pool import available_cores, map_in_order, side_by_side, worker_pool

PARSER_VERSION: Final = 2
"""Raised when the same input gives other measurements than before; older entries are then imported again."""

PATTERN: Final = "measurements-*.parquet"
LEDGER: Final = "ledger"  # the folder that tells an import file by file

ROWS_PER_FILE: Final = 10_000_000  # 50 to 70 MB of Parquet
ROWS_PER_GROUP: Final = 1 << 17
"""Readers take a row group as one task; this is about what DuckDB writes itself. 1 MB on disk."""


@dataclass(kw_only=True)
class LedgerEntry(Counts):
    """An input file as it was found, and what became of it: an entry of the ledger."""

    file: str
    modified_ns: int
    packets: str
    parser: int = PARSER_VERSION
    output: str | None = None  # its own Parquet file; there is none if the input held no ping, or could not be read
    output_bytes: int = 0
    sha256: str | None = None
    seconds: float = 0.0
    error: str | None = None  # why the input could not be read. It is tried again by the next import.

    @property
    def name(self) -> str:
        return locate(self.file).name


@dataclass(kw_only=True)
class ImportReport(Counts):
    """What an import did, and by file: what earlier ones did of the files that were named."""

    seconds: float
    inputs: Sequence[LedgerEntry]
    files: tuple[str, ...]  # the Parquet files
    skipped: int = 0  # inputs that were done before and have not changed
    failures: dict[str, str] = field(default_factory=dict)  # inputs that could not be read, and why
    copies: dict[str, str] = field(default_factory=dict)  # inputs that were left out, and what they are copies of

    def __post_init__(self) -> None:
        for one in self.inputs:
            self.add(one)
        self.dropped = dict(Counter(self.dropped).most_common())
        self.examples = {reason: self.examples[reason] for reason in self.dropped}

    def to_json(self) -> dict[str, Any]:
        shown = ("file", "bytes", "results", "measurements", "failed", "dropped")
        return asdict(self) | {"inputs": [{name: getattr(one, name) for name in shown} for one in self.inputs]}


def _inputs(files: Sequence[Location], packets: str) -> list[LedgerEntry]:
    """The input files as they are now, with nothing imported yet. All must be there before any work starts."""
    if packets not in ("min", "each"):
        raise PingLlmError(f"packets must be 'min' or 'each', not {packets!r}")
    if not files:
        raise PingLlmError("no input file given")
    found = []
    for file, stat in zip(files, side_by_side(Location.stat, files), strict=True):
        if not stat.is_file:
            raise PingLlmError(f"{file}: is not a file but a folder; name the files")
        found.append(LedgerEntry(file=str(file), bytes=stat.size, modified_ns=stat.mtime_ns, packets=packets))
    return found


# All files to one sequence of Parquet files.


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
    started, folder = time.perf_counter(), Path(output)
    if rows_per_file < 1 or (workers is not None and workers < 1):
        raise PingLlmError("rows_per_file and workers must be at least 1")
    inputs = _inputs([locate(Path(file)) for file in files], packets)
    if len({Path(one.file).resolve() for one in inputs}) < len(inputs):
        raise PingLlmError("an input file is given twice; its measurements would count double")
    _, copies = distinct([locate(one.file) for one in inputs])
    inputs = [one for one in inputs if one.file not in copies]
    if (folder / LEDGER).is_dir():
        raise PingLlmError(f"{folder}: holds files imported one by one; add --per-file, or choose another folder")
    total = sum(one.bytes for one in inputs)
    if workers is None:  # starting a process takes longer than parsing a chunk
        workers = max(1, min(available_cores(), total // sizes.chunk))
    on_progress(0, total=total)
    parse = partial(parse_file, each_packet=packets == "each", strict=strict, sizes=sizes)
    with (
        explained(f"{folder}: cannot be written", OSError),
        staged_files(folder, PATTERN, overwrite=overwrite) as staging,
    ):
        with closing(_batches(inputs, parse, workers, on_progress, staging)) as batches:  # ends the workers, too
            files_written = write_measurements(batches, staging, rows_per_file=rows_per_file)
        names = tuple(path.name for path in files_written)
        seconds = time.perf_counter() - started
        report = ImportReport(seconds=seconds, files=names, inputs=inputs, copies=copies)
        if not report.measurements:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped.items())
            raise PingLlmError(f"no ping measurement in {report.results:,} results" + (reasons and f" ({reasons})"))
    return report


def _batches(
    inputs: list[LedgerEntry], parse: Callable[..., Any], workers: int, advance: Advance, scratch: Path
) -> Generator[pa.RecordBatch, None, None]:
    """The batches of all files, in order; each entry then has the counts of its file.

    Of several files each is read by one worker: decompression, the slow part, then runs on every core. A file may be
    larger than memory, so a worker leaves its batches on disk. A single file is read here, its chunks parsed by all.
    """
    with worker_pool(workers) as pool:
        if workers == 1 or len(inputs) == 1:
            for one in inputs:
                position = 0
                for parsed in parse(one.file, one, pool=pool, window=2 * workers):
                    yield parsed.batch
                    advance(parsed.position - position)
                    position = parsed.position
                advance(one.bytes - position)
            return
        tasks = [(one, scratch / f"input-{number:05d}.arrow") for number, one in enumerate(inputs)]
        for number, done in enumerate(map_in_order(pool, partial(_parse_to_disk, parse), tasks, window=2 * workers)):
            inputs[number], path = done
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
                yield from batches
            path.unlink()
            advance(inputs[number].bytes)


def _parse_to_disk(parse: Callable[..., Any], task: tuple[LedgerEntry, Path]) -> tuple[LedgerEntry, Path]:
    """A worker's task: one input file becomes one file of batches."""
    one, path = task
    writer: Any
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, ATLAS_SCHEMA) as writer:
        for parsed in parse(one.file, one):
            writer.write_batch(parsed.batch)
    return one, path


def write_measurements(
    batches: Iterable[pa.RecordBatch], folder: Path, *, rows_per_file: int = sys.maxsize
) -> list[Path]:
    """Writes Parquet files of `rows_per_file` rows, whose bytes do not depend on how the batches are cut."""
    # Arrow's default gives up on dictionaries above 1 MiB.
    options: dict[str, Any] = {"use_dictionary": ["src_addr", "dst_addr"], "dictionary_pagesize_limit": 16 << 20}
    written: list[Path] = []
    upcoming, waiting = iter(batches), ATLAS_SCHEMA.empty_table()

    def take(rows: int) -> pa.Table:
        """The next rows, fewer only at the end, in one chunk: page boundaries could otherwise follow the batches'."""
        nonlocal waiting
        while len(waiting) < rows and (batch := next(upcoming, None)) is not None:
            waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch], schema=ATLAS_SCHEMA)])
        taken, waiting = waiting.slice(0, rows).combine_chunks(), waiting.slice(rows)
        return taken

    while len(group := take(min(ROWS_PER_GROUP, rows_per_file))):
        written.append(folder / f"measurements-{len(written):05d}.parquet")
        with pq.ParquetWriter(written[-1], ATLAS_SCHEMA, compression="zstd", **options) as writer:
            room = rows_per_file
            while len(group):
                writer.write_table(group, row_group_size=len(group))
                room -= len(group)
                group = take(min(ROWS_PER_GROUP, room))
    return written


# Each file to a Parquet file of its own.


def import_by_file(
    files: Sequence[Path | str],
    output: Path | str,
    *,
    packets: str = "min",
    strict: bool = False,
    overwrite: bool = False,
    engine: EngineChoice | None = None,
    on_progress: Advance = no_progress,
    on_timing: OnTiming | None = None,
) -> ImportReport:
    """Import those files that are new, changed or could not be read before. With `overwrite`, all of them.

    `strict` stops at the first file that cannot be read and at the first result that cannot be used.
    """
    started, folder = time.perf_counter(), locate(output).absolute()
    found = _inputs([locate(file).absolute() for file in files], packets)
    for name, count in Counter(one.name for one in found).items():
        if count > 1:
            raise PingLlmError(
                f"{count} input files are called {name}, and so would be what they become; import them to two folders"
            )
    if folder.is_file():
        raise PingLlmError(f"{folder}: is a file; the output must be a folder")
    if folder.glob(PATTERN):
        raise PingLlmError(f"{folder}: holds measurements that were not imported file by file; choose another folder")
    entries = {} if overwrite else _done(found, folder, packets)
    todo = [one for one in found if one.name not in entries]
    skipped, total = len(entries), sum(one.bytes for one in found)
    on_progress(total - sum(one.bytes for one in todo), total=total)
    with explained(f"{folder}: cannot be written", OSError), ExitStack() as running:
        if todo and folder.is_local:  # in a store nothing can be locked; there, two imports of a file write the same
            running.enter_context(sole_writer(folder.local))
            staging = folder.local / STAGING
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            running.callback(shutil.rmtree, staging, ignore_errors=True)
        tasks = running.enter_context((engine or EngineChoice()).open()) if todo else None
        for one, timing in tasks.map(partial(import_file, folder=folder, strict=strict), todo) if tasks else ():
            entries[one.name] = one
            on_progress(one.bytes)
            if on_timing is not None:
                bytes_in, bytes_out = one.bytes, one.output_bytes
                on_timing(replace(timing, stage="import", task=one.name, bytes_in=bytes_in, bytes_out=bytes_out))
    imported = tuple(entries[one.name] for one in found)
    return ImportReport(
        seconds=time.perf_counter() - started,
        files=tuple(one.output for one in imported if one.output),
        inputs=imported,
        skipped=skipped,
        failures={one.file: one.error for one in imported if one.error is not None},
    )


def import_file(found: LedgerEntry, *, folder: Location, strict: bool) -> LedgerEntry:
    """A worker's task: one input file becomes one Parquet file and one entry of the ledger."""
    started = time.perf_counter()
    target, entry = folder / f"{found.name}.parquet", replace(found, dropped={}, examples={})
    # Beside the output, where there is room for it; in the system's folder if that is in a store.
    scratch = None if folder.is_remote else str(folder.local / STAGING)
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=scratch) as unfinished:
        try:
            parsed = parse_file(entry.file, entry, each_packet=entry.packets == "each", strict=strict)
            for path in write_measurements((chunk.batch for chunk in parsed), Path(unfinished)):  # 1 or none
                entry.output, entry.output_bytes, entry.sha256 = target.name, path.stat().st_size, file_sha256(path)
                target.upload(path)
        except PingLlmError as problem:
            if strict:
                raise
            entry = replace(found, error=str(problem))
    if entry.output is None:
        target.delete()  # of an input that has changed
    entry.seconds = round(time.perf_counter() - started, 3)
    (folder / LEDGER / f"{entry.name}.json").write_text(json.dumps(asdict(entry), indent=1, sort_keys=True) + "\n")
    return entry


def _done(found: Sequence[LedgerEntry], folder: Location, packets: str) -> dict[str, LedgerEntry]:
    """The ledger's entries of inputs that are as they were and whose Parquet file is what was written, by name."""
    sizes = {file.name: file.size() for file in folder.list()}
    ledger = {file.name.removesuffix(".json"): file for file in (folder / LEDGER).list()}
    for file in list(ledger.values())[:1]:
        if (before := _entry(file)) and before.packets != packets:
            raise PingLlmError(
                f"{folder}: was imported with --packets {before.packets}; choose another folder, or overwrite"
            )
    named = [one for one in found if one.name in ledger]
    return {
        one.name: entry
        for one, entry in zip(named, side_by_side(_entry, [ledger[one.name] for one in named]), strict=True)
        if entry is not None and entry.error is None
        if all(vars(entry)[name] == vars(one)[name] for name in ("bytes", "modified_ns", "packets", "parser"))
        if entry.output is None or entry.output_bytes == sizes.get(entry.output)
    }


def _entry(file: Location) -> LedgerEntry | None:
    """None if it is not one that this version wrote: the input is then imported again."""
    try:
        return LedgerEntry(**json.loads(file.read_text()))
    except (PingLlmError, ValueError, TypeError):
        return None
