"""What a preparation will take, before anything is rented: tasks, bytes, memory, requests and time.

Counts follow from how the work is cut (`prepare.py`). Times are tasks × what a task took where it was measured, plus
what the network needs for the bytes, plus the waiting for an object store's answers. They are as good as the rates; a
cluster has other cores than the machine the rates came from, which is why `--measure` takes them anew.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from ping_llm.rows import partition as spill
from ping_llm.rows import prepare
from ping_llm.rows.manifest import INDEX_SCHEMA
from ping_llm.rows.work import REQUESTS_AT_ONCE

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_PART_BYTES: Final = 8 * MIB
"""Of an upload in several parts, each of which is a request."""
_READ_BYTES: Final = MIB
"""Of an input file, in one request."""
_PROGRAM_BYTES: Final = 0.2 * GIB
_SORT_FACTOR: Final = 3.0
"""Memory that DuckDB takes to sort, over the bytes that it sorts. Measured: 160 MB are sorted in memory with a limit of
512 MB, on disk (in 1.7 times the time) with one of 256 MB."""
_SORT_SHARE: Final = 0.5
_INDEX_BYTES: Final = sum(field.type.bit_width for field in INDEX_SCHEMA) // 8


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one core does in a second, and what an object store takes to answer."""

    partition: float
    """Measurements read, checked and cut."""
    shard: float
    """Measurements sorted and written as rows."""
    index: float
    """Rows whose index entries are joined."""
    atlas: float
    """Results imported from bzip2."""
    request_s: float = 0.03
    where: str
    """How they were found."""


MEASURED: Final = Rates(
    partition=3.5e6,
    shard=2.0e6,
    index=2e6,
    atlas=82e3,
    where="one core of an AMD EPYC, tasks of 36 and 8.5 M measurements; 30 ms for an answer of a store are assumed",
)
"""Tasks of the size that they have at 35 billion measurements: docs/scale.md."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What there is to prepare, and with what."""

    measurements: int
    workers: int
    input_bytes_per_measurement: float = 8.0
    """Of zstd Parquet, simulated measurements take 7.6."""
    memory_bytes: int = 4 * GIB
    """For each worker."""
    bandwidth: float = 100e6
    """Bytes a second for each worker, from and to where the data lies."""
    ipv6_share: float = 0.423
    measurements_per_source: float = 118.0
    max_row_bytes: int = 8 * MIB
    atlas: bool = False
    """The input is bzip2 dumps that must be imported first."""
    object_store: bool = True
    partition_tasks: int | None = None
    """If the files were looked at."""

    @property
    def run_bytes(self) -> float:
        """Of a measurement on its way from step one to step two."""
        return self._mean(spill.RECORDS[4].itemsize, spill.RECORDS[6].itemsize)

    @property
    def row_bytes(self) -> float:
        """Of a measurement in a row, with times in whole seconds."""
        return self._mean(12, 24)

    @property
    def largest_family(self) -> float:
        """Share of the bytes that are sorted at once: the families come one after the other."""
        ipv6 = self.ipv6_share * spill.RECORDS[6].itemsize / self.run_bytes
        return max(ipv6, 1 - ipv6)

    def _mean(self, ipv4: float, ipv6: float) -> float:
        return ipv4 + self.ipv6_share * (ipv6 - ipv4)


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    tasks: int
    bytes_in: float
    bytes_out: float
    requests: int
    cpu_s: float
    """Of all tasks together."""
    seconds: float
    """Until the last one is done."""
    memory_bytes: float
    """The most that one worker uses."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    scale: Scale
    rates: Rates
    stages: tuple[Stage, ...]
    rows: int
    shards: int
    shuffle_bytes: float
    dataset_bytes: float
    index_bytes: float
    peak_store_bytes: float
    """In the work folder and the output at once, the input not counted."""
    scratch_bytes: float
    """On the disk of each worker."""
    driver_memory_bytes: float
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "core_hours": self.seconds * self.scale.workers / 3600}


def estimate(scale: Scale, rates: Rates = MEASURED) -> Estimate:
    n = scale.measurements
    pieces = math.ceil(n / prepare.PIECE_ROWS)
    runs = scale.partition_tasks or min(pieces, prepare.MAX_RUNS)
    shards = len(prepare.bucket_ranges(n))
    shuffle, dataset = n * scale.run_bytes, n * scale.row_bytes
    sources = n / scale.measurements_per_source
    rows = int(max(sources, 1) + dataset / scale.max_row_bytes)
    index = rows * _INDEX_BYTES
    requests = n * scale.input_bytes_per_measurement / _READ_BYTES
    batch = min(scale.memory_bytes, prepare.PIECE_ROWS * prepare.BYTES_PER_ROW_IN_FLIGHT, n * 480)
    sort_bytes = _SORT_FACTOR * scale.largest_family * shuffle / shards
    stages = [
        _stage(
            scale,
            rates,
            name="partition",
            tasks=runs,
            bytes_in=n * scale.input_bytes_per_measurement,
            bytes_out=shuffle,
            requests=int(requests + shuffle / _PART_BYTES + 2 * runs),
            cpu_s=n / rates.partition,
            memory_bytes=_PROGRAM_BYTES + batch,
        ),
        _stage(
            scale,
            rates,
            name="shard",
            tasks=shards,
            bytes_in=shuffle,
            bytes_out=dataset + index,
            requests=int(3 * runs * shards + dataset / _PART_BYTES + 7 * shards),
            cpu_s=n / rates.shard,
            memory_bytes=_PROGRAM_BYTES + min(sort_bytes, scale.memory_bytes * _SORT_SHARE) + 500_000 * 200,
        ),
        _stage(
            scale,
            rates,
            name="publish",
            tasks=1,
            bytes_in=index,
            bytes_out=index,
            requests=6 * shards,
            cpu_s=rows / rates.index,
            memory_bytes=_PROGRAM_BYTES,
        ),
    ]
    if scale.atlas:
        stages.insert(0, _import_stage(scale, rates))
    return Estimate(
        scale=scale,
        rates=rates,
        stages=tuple(stages),
        rows=rows,
        shards=shards,
        shuffle_bytes=shuffle,
        dataset_bytes=dataset,
        index_bytes=index,
        peak_store_bytes=shuffle + dataset * (2 if scale.object_store else 1) + 2 * index,
        scratch_bytes=max(2 * shuffle / runs, 2 * dataset / shards + max(0.0, sort_bytes - scale.memory_bytes)),
        driver_memory_bytes=_PROGRAM_BYTES + runs * spill.HEADER_BYTES + 1500.0 * pieces,
        warnings=tuple(_warnings(scale, sort_bytes, runs, shards)),
    )


def _import_stage(scale: Scale, rates: Rates) -> Stage:
    n = scale.measurements
    dump_bytes = 39.0 * n
    hours = max(1, math.ceil(dump_bytes / GIB))
    return _stage(
        scale,
        rates,
        name="import",
        tasks=hours,
        bytes_in=dump_bytes,
        bytes_out=n * scale.input_bytes_per_measurement,
        requests=int(dump_bytes / _READ_BYTES + 4 * hours),
        cpu_s=n / rates.atlas,
        memory_bytes=_PROGRAM_BYTES,
    )


def _stage(
    scale: Scale,
    rates: Rates,
    *,
    name: str,
    tasks: int,
    bytes_in: float,
    bytes_out: float,
    requests: int,
    cpu_s: float,
    memory_bytes: float,
) -> Stage:
    """Workers take tasks in rounds, so a last round that is not full costs as much as a full one."""
    transfer = (bytes_in + bytes_out) / scale.bandwidth
    waiting = requests * rates.request_s / REQUESTS_AT_ONCE if scale.object_store else 0.0
    rounds = math.ceil(tasks / scale.workers)
    return Stage(
        name=name,
        tasks=tasks,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        requests=requests if scale.object_store else 0,
        cpu_s=cpu_s,
        seconds=rounds * (cpu_s + transfer + waiting) / tasks,
        memory_bytes=memory_bytes,
    )


def _warnings(scale: Scale, sort_bytes: float, runs: int, shards: int) -> list[str]:
    found = []
    if sort_bytes > scale.memory_bytes * _SORT_SHARE:
        found.append(
            f"a shard needs {sort_bytes / GIB:.1f} GB to be sorted in memory, and half of a worker's is "
            f"{scale.memory_bytes * _SORT_SHARE / GIB:.1f} GB: it will be sorted on disk, in about 1.7 times the time"
        )
    if scale.workers > min(runs, shards):
        found.append(f"step one has {runs} tasks and step two {shards}: more workers than that have nothing to do")
    if scale.row_bytes * scale.measurements / shards > 2 * GIB:
        found.append("shards will be larger than 2 GB: readers map them whole, so have the address space for it")
    return found
