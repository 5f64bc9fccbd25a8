"""How fast preparation is, beside two yardsticks measured in the same run on the same simulated input.

The *naive* way is how such converters are usually written: one dict per measurement, grouped in Python, one Arrow IPC
record per probe. The *sort* is the least that any preparation must do: DuckDB ordering the input by source and time
into an Arrow stream, with as many threads as preparation has workers.
"""

import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.benchmarks.memory import run_measured
from ping_llm.console import progress
from ping_llm.sources.simulator import SimulatorSettings, simulate
from ping_llm.workers import available_cores

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
