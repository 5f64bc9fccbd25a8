"""Files of RIPE Atlas ping results become Parquet files of measurements."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from ping_llm.errors import PingLlmError
from ping_llm.measurements import SCHEMA
from ping_llm.sources.atlas import ledger
from ping_llm.sources.atlas.chunk import parse_chunk
from ping_llm.sources.atlas.output import MeasurementWriter, staged_output
from ping_llm.sources.atlas.report import ImportReport, Tally, total
from ping_llm.sources.atlas.stream import CHUNK_BYTES, read_ahead, read_chunks
from ping_llm.workers import available_cores, map_in_order, worker_pool

if TYPE_CHECKING:
    from ping_llm.console import Advance

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
