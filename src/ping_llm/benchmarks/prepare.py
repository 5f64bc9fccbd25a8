"""Peak memory of a command and all the processes it starts."""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.estimate import MEASURED, Rates
from ping_llm.rows.manifest import INDEX_SCHEMA
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.shards import join_indexes
from ping_llm.sources.simulator import SimulatorSettings, simulate
from ping_llm.tasks.engines import Timing
from ping_llm.tasks.pool import available_cores


@dataclass(frozen=True, kw_only=True)
class Measured:
    seconds: float
    peak_rss_mb: float
    output: str


def run_measured(command: Sequence[str], *, every_s: float = 0.05) -> Measured:
    """Run a command and watch it. Resident sets are added up, so pages that processes share count more than once."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(every_s):
            peak = max(peak, _tree_rss(process.pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
        done.set()
        watcher.join()
    if process.returncode:
        raise PingLlmError(f"{' '.join(command[:4])} … failed: {errors.strip()[-300:]}")
    return Measured(seconds=time.perf_counter() - started, peak_rss_mb=peak / 1e6, output=output)


def _tree_rss(pid: int) -> int:
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:  # ended in between
                continue
    except psutil.Error:
        pass
    return total


# The rates of this machine that `ping-llm plan --measure` reckons with.

MEASUREMENTS: Final = 8_000_000
MEMORY_BYTES: Final = 512 << 20
"""So little that tasks of step one join several runs, as they do when there are billions."""
INDEX_ROWS: Final = 2_000_000


def measure_rates(measurements: int = MEASUREMENTS, scratch: Path | None = None) -> tuple[Rates, float]:
    """Rates of one worker on this machine, and the bytes that a simulated measurement takes as Parquet.

    The rate of the Atlas import is not measured: it needs real dumps.
    """
    folder = Path(tempfile.mkdtemp(prefix="ping-llm-rates-", dir=scratch))
    try:
        raw = simulate(SimulatorSettings(measurements=measurements), folder / "raw")
        timings: list[Timing] = []
        settings = PrepareSettings(
            inputs=(str(folder / "raw"),),
            output=folder / "rows",
            workers=1,
            memory_limit_bytes=MEMORY_BYTES,
        )
        prepare(settings, timings.append)
        rates = Rates(
            partition=measurements / _seconds(timings, "partition"),
            shard=measurements / _seconds(timings, "shard"),
            index=_index_rate(folder),
            atlas=MEASURED.atlas,
            where=f"measured on this machine with {measurements:,} measurements and one worker",
        )
        return rates, raw.size_bytes / measurements
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(timings: list[Timing], stage: str) -> float:
    return sum(timing.seconds for timing in timings if timing.stage == stage)


def _index_rate(folder: Path) -> float:
    rows = INDEX_ROWS // 4
    blank = [pa.py_buffer(bytes(rows * field.type.bit_width // 8)) for field in INDEX_SCHEMA]
    arrays = [
        pa.Array.from_buffers(field.type, rows, [None, data]) for field, data in zip(INDEX_SCHEMA, blank, strict=True)
    ]
    part = pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)
    started = time.perf_counter()
    join_indexes([part] * 4, INDEX_ROWS, folder / "joined.index")
    return INDEX_ROWS / (time.perf_counter() - started)


# How fast preparation is, beside two yardsticks measured in the same run on the same simulated input.
#
# The *naive* way is how such converters are usually written: one dict per measurement, grouped in Python, one Arrow IPC
# record per probe. The *sort* is the least that any preparation must do: DuckDB ordering the input by source and time
# into an Arrow stream, with as many threads as preparation has workers.

NAIVE_SAMPLE: Final = 300_000
"""The naive way takes minutes for what the others do in seconds; its rate shows on a sample."""


@dataclass(frozen=True, kw_only=True)
class PrepareBenchmark:
    measurements: int = 5_000_000
    workers: int | None = None
    memory_limit_gb: float = 4.0
    scratch: Path | None = None
    """Folder for input and output; needs about 100 bytes a measurement."""

    def run(self) -> dict[str, Any]:
        workers = self.workers or available_cores()
        scratch = Path(tempfile.mkdtemp(prefix="ping-llm-bench-", dir=self.scratch))
        try:
            return self._run(workers, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _run(self, workers: int, scratch: Path) -> dict[str, Any]:
        raw = scratch / "raw"
        with progress("simulating the input", total=self.measurements) as advance:
            simulate(SimulatorSettings(measurements=self.measurements), raw, on_progress=advance)
        pattern = str(raw / "*.parquet")
        with progress("measuring", total=3) as advance:
            naive = _naive_rate(sorted(raw.glob("*.parquet")), scratch)
            advance()
            sort_seconds = _sort_seconds(pattern, workers, scratch)
            advance()
            command = [sys.executable, "-m", "ping_llm", "prepare", "--input", pattern]
            command += ["--output", str(scratch / "rows"), "--workers", str(workers)]
            command += ["--memory-limit-gb", str(self.memory_limit_gb), "--json"]
            measured = run_measured(command)
            advance()
        rate = self.measurements / measured.seconds
        return {
            "measurements": self.measurements,
            "workers": workers,
            "memory_limit_gb": self.memory_limit_gb,
            "measurements_per_s": round(rate),
            "naive_measurements_per_s": round(naive),
            "speedup": round(rate / naive, 1),
            "sort_seconds": round(sort_seconds, 2),
            "prepare_seconds": round(measured.seconds, 2),
            "overhead_vs_sort": round(measured.seconds / sort_seconds, 2),
            "peak_rss_mb": round(measured.peak_rss_mb),
        }


def _sort_seconds(pattern: str, threads: int, scratch: Path) -> float:
    started = time.perf_counter()
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": threads,
        "temp_directory": str(scratch / "sort"),
        "preserve_insertion_order": False,
    }
    with duckdb.connect(config=settings) as connection:
        connection.execute("SET enable_progress_bar = false")
        query = f"SELECT * FROM read_parquet('{pattern}') ORDER BY src_addr, event_time"
        for _ in connection.sql(query).to_arrow_reader(500_000):
            pass
    return time.perf_counter() - started


def _naive_rate(paths: list[Path], scratch: Path) -> float:
    """Measurements per second of the one-at-a-time way, from Parquet to ArrayRecord."""
    table = _head(paths, NAIVE_SAMPLE)
    started = time.perf_counter()
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for measurement in table.to_pylist():
        by_source[measurement["src_addr"]].append(measurement)
    writer = ArrayRecordWriter(str(scratch / "naive.arrayrecord"), "group_size:1")
    for source in sorted(by_source):
        history = pa.Table.from_pylist(sorted(by_source[source], key=lambda m: m["event_time"]))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, history.schema) as stream:
            stream.write_table(history)
        writer.write(sink.getvalue().to_pybytes())
    writer.close()
    return len(table) / (time.perf_counter() - started)


def _head(paths: list[Path], count: int) -> pa.Table:
    tables, found = [], 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(count - found):
                tables.append(pa.Table.from_batches([batch]))
                found += batch.num_rows
                if found >= count:
                    return pa.concat_tables(tables)
    return pa.concat_tables(tables)
