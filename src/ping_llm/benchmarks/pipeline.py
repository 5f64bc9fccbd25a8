"""The yardstick for tokenising: one measurement at a time, from the record as it is stored, in plain Python.

This is how such an encoder is usually written: it parses the addresses, computes the delta, spells the RTT and shuffles
the fields of each measurement, and gives back a list of tokens. It does no sampling, reading or packing.
"""

import ipaddress
import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ping_llm.batches.loader import Loader
from ping_llm.batches.spec import ContextSettings, DataSpec, LoaderSettings, RowsSpec
from ping_llm.core.console import progress
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.summary import measurement_as_json
from ping_llm.sources.simulator import SimulatorSettings, simulate
from ping_llm.tokens import FIRST_BYTE, Role


def encode_measurement(measurement: dict[str, Any], previous_s: int | None, rng: np.random.Generator) -> list[int]:
    """Tokens of a measurement dict (`event_time` in seconds, `src_addr`, `dst_addr`, `rtt` or None)."""
    source = ipaddress.ip_address(measurement["src_addr"])
    destination = ipaddress.ip_address(measurement["dst_addr"])
    fields = [
        [Role.SRC_IPV4 if source.version == 4 else Role.SRC_IPV6, *_spell(source.packed)],
        [Role.DST_IPV4 if destination.version == 4 else Role.DST_IPV6, *_spell(destination.packed)],
        _result(measurement["rtt"]),
        _time(measurement["event_time"], previous_s),
    ]
    tokens: list[int] = [Role.MEASUREMENT_START]
    for field in rng.permutation(4):
        tokens += fields[field]
    return tokens


def _result(rtt_ms: float | None) -> list[int]:
    if rtt_ms is None:
        return [Role.FAILED]
    micros = max(1.0, rtt_ms * 1000.0)
    exponent = max(0, math.frexp(micros)[1] - 11)
    mantissa = round(micros / 2**exponent)
    if mantissa == 2048:
        exponent, mantissa = exponent + 1, 1024
    return [Role.RTT_START, *_spell((exponent << 11 | mantissa).to_bytes(2, "big"))]


def _time(time_s: int, previous_s: int | None) -> list[int]:
    if previous_s is None:
        return [Role.TIMESTAMP_ABS, *_spell(time_s.to_bytes(8, "big"))]
    delta = time_s - previous_s
    if delta <= 255:
        return [Role.TIMESTAMP_DELTA1, *_spell(delta.to_bytes(1, "big"))]
    return [Role.TIMESTAMP_DELTA4, *_spell(delta.to_bytes(4, "big"))]


def _spell(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


# How fast batches are made: the whole path (read, sample, encode, pack, assemble) beside a plain encoder alone.

RowKind = Literal["typical", "big"]

_SIMULATED: Final[dict[str, SimulatorSettings]] = {
    "typical": SimulatorSettings(measurements=4_000_000),
    # A few probes with hundreds of thousands of measurements each: every row is at the 8 MB cap or near it.
    "big": SimulatorSettings(measurements=12_000_000, measurements_per_source=600_000, days=365),
}


@dataclass(frozen=True, kw_only=True)
class PipelineBenchmark:
    rows: RowKind = "typical"
    path: Path | None = None
    """Prepared rows to use instead of simulated ones."""
    workers: int = 0
    batch_size: int = 64
    length: int = 1024
    seconds: float = 10.0

    def run(self) -> dict[str, Any]:
        if self.path is not None:
            return self._run(self.path)
        scratch = Path(tempfile.mkdtemp(prefix="ping-llm-bench-"))
        try:
            settings = _SIMULATED[self.rows]
            with progress("simulating the input", total=settings.measurements) as advance:
                simulate(settings, scratch / "raw", on_progress=advance)
            prepare(PrepareSettings(inputs=(str(scratch / "raw"),), output=scratch / "rows"))
            return self._run(scratch / "rows")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _run(self, rows: Path) -> dict[str, Any]:
        with progress("measuring", total=2 + bool(self.workers)) as advance:
            reference = _reference_rate(rows)
            advance()
            alone = self._measure(rows, 0)
            advance()
            result = {
                "rows": self.rows if self.path is None else str(self.path),
                "batch": [self.batch_size, self.length],
                "real_tokens_per_s": alone["real_tokens_per_s"],
                "reference_tokens_per_s": round(reference),
                "speedup": round(alone["real_tokens_per_s"] / reference, 1),
                **{name: alone[name] for name in ("padding_fraction", "first_batch_s", "stages", "bottleneck")},
            }
            if self.workers:
                delivered = self._measure(rows, self.workers)
                result["workers"] = self.workers
                result["delivered_tokens_per_s"] = delivered["real_tokens_per_s"]
                result["delivered_relative_to_one"] = round(
                    delivered["real_tokens_per_s"] / alone["real_tokens_per_s"], 2
                )
                result["delivered_first_batch_s"] = delivered["first_batch_s"]
                advance()
        return result

    def _measure(self, rows: Path, workers: int) -> dict[str, Any]:
        """Take batches as fast as they come, after a warm-up in which the rows get into memory."""
        spec = DataSpec(
            rows=(RowsSpec.find(str(rows), "train"),),
            global_batch_size=self.batch_size,
            contexts=ContextSettings(length=self.length),
        )
        started = time.perf_counter()
        with Loader(spec, LoaderSettings(worker_count=workers)) as loader:
            next(loader)
            first_batch_s = time.perf_counter() - started
            for seconds in (self.seconds / 4, self.seconds):
                loader.report.reset()
                until = time.perf_counter() + seconds
                while time.perf_counter() < until:
                    next(loader)
            return loader.report.to_json() | {"first_batch_s": round(first_batch_s, 3)}


def _reference_rate(rows: Path) -> float:
    """Tokens per second of the plain encoder, on measurements of these rows as records."""
    histories: list[list[dict[str, Any]]] = []
    with RowSet(rows) as row_set:
        for number in np.unique(np.linspace(0, len(row_set) - 1, 400).astype(int)).tolist():
            row = row_set[number]
            source = {"src_addr": row.source_address}
            histories.append(
                [
                    measurement_as_json(row, i) | source | {"event_time": int(row.time_us[i]) // 10**6}
                    for i in range(min(len(row), 200))
                ]
            )
    rng = np.random.default_rng(0)
    tokens, started = 0, time.perf_counter()
    for history in histories:
        previous_s = None
        for measurement in history:
            tokens += len(encode_measurement(measurement, previous_s, rng))
            previous_s = measurement["event_time"]
    return tokens / (time.perf_counter() - started)
