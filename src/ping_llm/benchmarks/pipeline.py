"""How fast batches are made: the whole path (read, sample, encode, pack, assemble) beside a plain encoder alone.

The plain encoder is how such code is usually written: one measurement at a time, from the record as it is stored, to a
list of tokens. It parses the addresses, computes the delta, spells the RTT and shuffles the fields of each measurement.
It does no sampling, reading or packing.
"""

import ipaddress
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.batches.loader import Loader
from ping_llm.batches.spec import ContextSettings, DataSpec, LoaderSettings, RowsSpec
from ping_llm.benchmarks.plain_encoder import encode_one
from ping_llm.benchmarks.prepare_speed import simulated_input
from ping_llm.core.console import progress
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.summary import measurement_as_json
from ping_llm.sources.simulator import SimulatorSettings

SIMULATED: Final[dict[str, SimulatorSettings]] = {
    "typical": SimulatorSettings(measurements=4_000_000),
    # A few probes with hundreds of thousands of measurements each: every row is at the 8 MB cap or near it.
    "big": SimulatorSettings(measurements=12_000_000, measurements_per_source=600_000, days=365),
}


def measure_pipeline(
    rows: str = "typical", *, workers: int = 0, batch_size: int = 64, length: int = 1024, seconds: float = 10.0
) -> dict[str, Any]:
    """`rows` is the name of `SIMULATED` ones, or a folder of prepared ones."""
    if rows not in SIMULATED:
        return {"rows": str(Path(rows))} | _measure(Path(rows), workers, batch_size, length, seconds)
    with simulated_input(SIMULATED[rows]) as (scratch, _):
        prepare(PrepareSettings(inputs=(str(scratch / "raw"),), output=scratch / "rows"))
        return {"rows": rows} | _measure(scratch / "rows", workers, batch_size, length, seconds)


def _measure(rows: Path, workers: int, batch_size: int, length: int, seconds: float) -> dict[str, Any]:
    contexts, found = ContextSettings(length=length), RowsSpec.find(str(rows), "train")
    spec = DataSpec(rows=(found,), global_batch_size=batch_size, contexts=contexts)
    with progress("measuring", total=2 + bool(workers)) as advance:
        reference = _reference_rate(rows)
        advance()
        alone = _loader_report(spec, 0, seconds)
        advance()
        rate = alone["real_tokens_per_s"]
        result = {
            "batch": [batch_size, length],
            "real_tokens_per_s": rate,
            "reference_tokens_per_s": round(reference),
            "speedup": round(rate / reference, 1),
            **{name: alone[name] for name in ("padding_fraction", "first_batch_s", "stages", "bottleneck")},
        }
        if workers:
            delivered = _loader_report(spec, workers, seconds)
            result |= {
                "workers": workers,
                "delivered_tokens_per_s": delivered["real_tokens_per_s"],
                "delivered_relative_to_one": round(delivered["real_tokens_per_s"] / rate, 2),
                "delivered_first_batch_s": delivered["first_batch_s"],
            }
            advance()
    return result


def _loader_report(spec: DataSpec, workers: int, seconds: float) -> dict[str, Any]:
    """Take batches as fast as they come, after a warm-up in which the rows get into memory."""
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


def _reference_rate(rows: Path) -> float:
    """Tokens per second of the plain encoder, on measurements of these rows as records."""
    histories: list[list[dict[str, Any]]] = []
    with RowSet(rows) as row_set:
        for number in np.unique(np.linspace(0, len(row_set) - 1, 400).astype(int)).tolist():
            row = row_set[number]
            source, measured = {"src_addr": row.source_address}, range(min(len(row), 200))
            histories.append(
                [measurement_as_json(row, i) | source | {"t": int(row.time_us[i]) // 10**6} for i in measured]
            )
    rng = np.random.default_rng(0)
    tokens, started = 0, time.perf_counter()
    for history in histories:
        previous_s = None
        for record in history:
            tokens += len(_encoded(record, previous_s, rng))
            previous_s = record["t"]
    return tokens / (time.perf_counter() - started)


def _encoded(record: dict[str, Any], previous_s: int | None, rng: np.random.Generator) -> list[int]:
    source, destination = ipaddress.ip_address(record["src_addr"]), ipaddress.ip_address(record["dst_addr"])
    kind, value = "absolute", record["t"]
    if previous_s is not None:
        value -= previous_s
        kind = "delta1" if value <= 255 else "delta4"
    order = [("source", "destination", "result", "time")[field] for field in rng.permutation(4)]
    return encode_one(source.version, source.packed, destination.packed, record["rtt"], kind, value, order)
