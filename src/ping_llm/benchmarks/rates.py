"""The rates of this machine that `ping-llm plan --measure` reckons with."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import pyarrow as pa

from ping_llm.engines.tasks import Timing
from ping_llm.rows.estimate import MEASURED, Rates
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.rows.publish import join_indexes
from ping_llm.rows.shard import INDEX_SCHEMA
from ping_llm.sources.simulator import SimulatorSettings, simulate

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
