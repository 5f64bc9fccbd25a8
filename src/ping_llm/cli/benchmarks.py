"""How fast this machine makes batches (`ping-llm bench pipeline`) and rows (`ping-llm plan --measure`).

`bench/` has what to compare with: a plain encoder, a plain converter, a bare sort, other projects' loaders.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.batches.loader import Loader
from ping_llm.batches.spec import DataSpec, LoaderSettings
from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec
from ping_llm.core.console import progress
from ping_llm.rows.estimate import MEASURED, Rates
from ping_llm.rows.manifest import INDEX_TYPES
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.shards import index_table, join_indexes
from ping_llm.sources.simulator import SimulatorSettings, simulate
from ping_llm.sources.simulator.world import SimulationSummary
from ping_llm.tasks.engines import Timing

SIMULATED: Final[dict[str, SimulatorSettings]] = {
    "typical": SimulatorSettings(measurements=4_000_000),
    # A few probes with hundreds of thousands of measurements each: every row is at the 8 MB cap or near it.
    "big": SimulatorSettings(measurements=12_000_000, measurements_per_source=600_000, days=365),
}
_INDEX_ROWS: Final = 2_000_000


@contextmanager
def simulated_input(given: SimulatorSettings, inside: Path | None = None) -> Iterator[tuple[Path, SimulationSummary]]:
    """A temporary folder (inside another one, if given) with simulated measurements in `raw`."""
    with tempfile.TemporaryDirectory(prefix="ping-llm-bench-", dir=inside, ignore_cleanup_errors=True) as name:
        with progress("simulating the input", total=given.measurements) as advance:
            summary = simulate(given, Path(name) / "raw", on_progress=advance)
        yield Path(name), summary


@contextmanager
def benchmark_rows(rows: str) -> Iterator[Path]:
    """A folder of prepared rows: the one with this path, or simulated ones by their name in `SIMULATED`."""
    if rows not in SIMULATED:
        yield Path(rows)
        return
    with simulated_input(SIMULATED[rows]) as (scratch, _):
        prepare(PrepareSettings(inputs=(str(scratch / "raw"),), output=scratch / "rows"))
        yield scratch / "rows"


def measure_pipeline(rows: Path, *, workers: int, batch_size: int, length: int, seconds: float) -> dict[str, Any]:
    """Speed of making batches (read, sample, encode, pack, assemble) in one process, and of what workers deliver."""
    found = RowsSpec.find(str(rows), "train", contexts=ContextSettings(length=length))
    spec = data_spec([found], global_batch_size=batch_size)
    with progress("measuring", total=1 + bool(workers)) as advance:
        alone = _loader_report(spec, 0, seconds)
        advance()
        names = "real_tokens_per_s", "padding_fraction", "first_batch_s", "stages", "bottleneck", "advice"
        result = {"batch": [batch_size, length], **{name: alone[name] for name in names}}
        if workers:
            delivered = _loader_report(spec, workers, seconds)
            result |= {
                "workers": workers,
                "delivered_tokens_per_s": delivered["real_tokens_per_s"],
                "delivered_relative_to_one": round(delivered["real_tokens_per_s"] / alone["real_tokens_per_s"], 2),
                "delivered_first_batch_s": delivered["first_batch_s"],
            }
            advance()
    return result


def _loader_report(spec: DataSpec, workers: int, seconds: float) -> dict[str, Any]:
    """Take batches as fast as they come, after a warm-up that brings the rows into memory."""
    started = time.perf_counter()
    with Loader(spec, LoaderSettings(worker_count=workers)) as loader:
        next(loader)
        first_batch_s = time.perf_counter() - started
        for period in (seconds / 4, seconds):
            loader.report.reset()
            until = time.perf_counter() + period
            while time.perf_counter() < until:
                next(loader)
        return loader.report.to_json() | {"first_batch_s": round(first_batch_s, 3)}


def measure_rates(measurements: int = 8_000_000) -> tuple[Rates, float]:
    """Rates of one worker on this machine, and the size of a simulated measurement as Parquet, in bytes.

    The rate of the Atlas import is not measured, because that needs real dumps.
    """
    with simulated_input(SimulatorSettings(measurements=measurements)) as (folder, raw):
        timings: list[Timing] = []
        # So little memory that tasks of the first step merge several runs, as with billions of measurements.
        inputs, output, memory = (str(folder / "raw"),), folder / "rows", 512 << 20
        prepare(PrepareSettings(inputs=inputs, output=output, workers=1, memory_limit_bytes=memory), timings.append)
        seconds = {s: sum(t.seconds for t in timings if t.stage == s) for s in ("partition", "shard")}
        part = index_table([np.zeros(_INDEX_ROWS // 4, kind) for kind in INDEX_TYPES.values()])
        started = time.perf_counter()
        join_indexes([part] * 4, _INDEX_ROWS, folder / "joined.index")
        rates = Rates(
            partition=measurements / seconds["partition"],
            shard=measurements / seconds["shard"],
            index=_INDEX_ROWS / (time.perf_counter() - started),
            atlas=MEASURED.atlas,
            where=f"measured on this machine with {measurements:,} measurements and one worker",
        )
        return rates, raw.size_bytes / measurements
