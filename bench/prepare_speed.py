"""Speed and memory of `ping-llm prepare` beside two yardsticks: `python bench/prepare_speed.py`.

The *naive* way is how such converters are usually written: one dict per measurement, grouped in Python, one Arrow IPC
record per probe. The *sort* is the least that any preparation must do: DuckDB ordering the input by source and time
into an Arrow stream, with as many threads as preparation has workers. All are measured in one run on the same simulated
input.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.cli.benchmarks import simulated_input
from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError
from ping_llm.sources.simulator import SimulatorSettings
from ping_llm.tasks.pool import available_cores

_NAIVE_SAMPLE: Final = 300_000
"""The naive way takes minutes for what the others do in seconds; its rate shows on a sample."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=int, default=5_000_000, help="to simulate and prepare")
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--memory-limit-gb", type=float, default=4.0, help="limit given to prepare")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="for temporary files: 100 bytes per measurement")
    sys.stdout.write(json.dumps(measure_prepare(**vars(parser.parse_args())), indent=1) + "\n")


def measure_prepare(
    measurements: int, *, workers: int, memory_limit_gb: float = 4.0, inside: Path | None = None
) -> dict[str, Any]:
    with simulated_input(SimulatorSettings(measurements=measurements), inside) as (scratch, _):
        pattern = str(scratch / "raw" / "*.parquet")
        with progress("measuring", total=3) as advance:
            naive = _naive_rate(scratch)
            advance()
            sort_seconds = _sort_seconds(pattern, workers, scratch)
            advance()
            command = [sys.executable, "-m", "ping_llm", "prepare", "--input", pattern]
            command += ["--output", str(scratch / "rows"), "--workers", str(workers)]
            measured = run_measured([*command, "--memory-limit-gb", str(memory_limit_gb), "--json"])
            advance()
    rate = measurements / measured.seconds
    return {
        "measurements": measurements,
        "workers": workers,
        "memory_limit_gb": memory_limit_gb,
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
    settings: dict[str, Any] = {"threads": threads, "temp_directory": str(scratch / "sort")}
    with duckdb.connect(config=settings | {"preserve_insertion_order": False}) as connection:
        connection.execute("SET enable_progress_bar = false")
        query = f"SELECT * FROM read_parquet('{pattern}') ORDER BY src_addr, event_time"
        for _ in connection.sql(query).to_arrow_reader(500_000):
            pass
    return time.perf_counter() - started


def _naive_rate(scratch: Path) -> float:
    """Measurements per second of the one-at-a-time way, from Parquet to ArrayRecord."""
    table = ds.dataset(sorted((scratch / "raw").glob("*.parquet"))).head(_NAIVE_SAMPLE)
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


class MeasuredRun(NamedTuple):
    seconds: float
    peak_rss_mb: float
    output: str


def run_measured(command: Sequence[str], *, every_s: float = 0.05) -> MeasuredRun:
    """Run a command, and watch the memory of it and of all processes that it starts.

    Resident sets are added up, so pages that processes share count more than once.
    """
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            while process.poll() is None:
                with suppress(psutil.Error):  # ended in between
                    root = psutil.Process(process.pid)
                    peak = max(peak, sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every_s)
        finally:
            process.kill()
        seconds = time.perf_counter() - started
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise PingLlmError(f"{' '.join(command[:4])} … failed: {errors.read().strip()[-300:]}")
        return MeasuredRun(seconds, peak / 1e6, output.read())


if __name__ == "__main__":
    main()
