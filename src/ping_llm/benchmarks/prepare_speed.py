"""How fast preparation is on this machine: beside two yardsticks, and as rates for `ping-llm plan --measure`.

The *naive* way is how such converters are usually written: one dict per measurement, grouped in Python, one Arrow IPC
record per probe. The *sort* is the least that any preparation must do: DuckDB ordering the input by source and time
into an Arrow stream, with as many threads as preparation has workers. All are measured in one run on the same simulated
input.
"""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.estimate import MEASURED, Rates
from ping_llm.rows.manifest import INDEX_TYPES
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.shards import index_table, join_indexes
from ping_llm.sources.simulator import SimulatorSettings, simulate
from ping_llm.sources.simulator.world import SimulationSummary
from ping_llm.tasks.engines import Timing
from ping_llm.tasks.pool import available_cores

_NAIVE_SAMPLE: Final = 300_000
"""The naive way takes minutes for what the others do in seconds; its rate shows on a sample."""
_INDEX_ROWS: Final = 2_000_000


@contextmanager
def simulated_input(
    settings: SimulatorSettings, inside: Path | None = None
) -> Iterator[tuple[Path, SimulationSummary]]:
    """A temporary folder (`inside` this one) with simulated measurements in `raw`."""
    with tempfile.TemporaryDirectory(prefix="ping-llm-bench-", dir=inside, ignore_cleanup_errors=True) as name:
        with progress("simulating the input", total=settings.measurements) as advance:
            summary = simulate(settings, Path(name) / "raw", on_progress=advance)
        yield Path(name), summary


def measure_prepare(
    measurements: int = 5_000_000,
    *,
    workers: int | None = None,
    memory_limit_gb: float = 4.0,
    inside: Path | None = None,
) -> dict[str, Any]:
    """`inside` is a folder for input and output; they need about 100 bytes per measurement."""
    workers = workers or available_cores()
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


def measure_rates(measurements: int = 8_000_000) -> tuple[Rates, float]:
    """Rates of one worker on this machine, and the bytes that a simulated measurement takes as Parquet.

    The rate of the Atlas import is not measured: it needs real dumps.
    """
    with simulated_input(SimulatorSettings(measurements=measurements)) as (folder, raw):
        timings: list[Timing] = []
        # So little memory that tasks of step one merge several runs, as they do when there are billions.
        inputs, output, memory = (str(folder / "raw"),), folder / "rows", 512 << 20
        prepare(PrepareSettings(inputs=inputs, output=output, workers=1, memory_limit_bytes=memory), timings.append)
        seconds = {s: sum(t.seconds for t in timings if t.stage == s) for s in ("partition", "shard")}
        rates = Rates(
            partition=measurements / seconds["partition"],
            shard=measurements / seconds["shard"],
            index=_index_rate(folder),
            atlas=MEASURED.atlas,
            where=f"measured on this machine with {measurements:,} measurements and one worker",
        )
        return rates, raw.size_bytes / measurements


def _index_rate(folder: Path) -> float:
    part = index_table([np.zeros(_INDEX_ROWS // 4, kind) for kind in INDEX_TYPES.values()])
    started = time.perf_counter()
    join_indexes([part] * 4, _INDEX_ROWS, folder / "joined.index")
    return _INDEX_ROWS / (time.perf_counter() - started)
