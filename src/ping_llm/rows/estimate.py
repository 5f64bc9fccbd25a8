"""Estimates what a preparation will take, before machines are rented: tasks, bytes, memory, requests and time.

Counts follow from how the work is cut into tasks (`prepare.TaskSizes`). Times are the measured times of tasks, plus the
transfer of their bytes, plus the latency of an object store's requests.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from ping_llm.rows.manifest import INDEX_SCHEMA
from ping_llm.rows.partition import BYTES_PER_ROW_IN_FLIGHT, HEADER_BYTES, RECORDS
from ping_llm.rows.prepare import DEFAULT_SIZES, MIB, TaskSizes
from ping_llm.rows.shards import SORT_MEMORY_SHARE, SORTED_BATCH_ROWS
from ping_llm.tasks.pool import REQUESTS_AT_ONCE

GIB: Final = 1 << 30

_PART_BYTES: Final = 8 * MIB  # of an upload in several parts, each of which is a request
_READ_BYTES: Final = MIB  # of an input file, in one request
_PROGRAM_BYTES: Final = 0.2 * GIB
_SORT_FACTOR: Final = 3.0
"""Memory that DuckDB takes to sort, over the bytes that it sorts. Measured: 160 MB are sorted in memory with a limit of
512 MB, on disk (in 1.7 times the time) with one of 256 MB."""
_DUMP_BYTES: Final = 39.0  # of a measurement in a bzip2 dump of RIPE Atlas


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one core does per second, and the latency of an object store."""

    partition: float  # measurements read, checked and cut
    shard: float  # measurements sorted and written as rows
    index: float  # rows whose index entries are joined
    atlas: float  # results imported from bzip2
    request_s: float = 0.03
    where: str  # how they were found


MEASURED: Final = Rates(  # with tasks of the size that they have at 35 billion measurements: docs/scale.md
    partition=3.5e6,
    shard=2.0e6,
    index=2e6,
    atlas=82e3,
    where="one core of an AMD EPYC, tasks of 36 and 8.5 M measurements; 30 ms for an answer of a store are assumed",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be prepared, and the machines for it."""

    measurements: int
    workers: int
    input_bytes_per_measurement: float = 8.0  # of zstd Parquet, simulated measurements take 7.6
    memory_bytes: int = 4 * GIB  # for each worker
    bandwidth: float = 100e6  # bytes per second for each worker, from and to where the data lies
    ipv6_share: float = 0.423
    measurements_per_source: float = 118.0
    max_row_bytes: int = 8 * MIB
    atlas: bool = False  # the input is bzip2 dumps that must be imported first
    object_store: bool = True
    partition_tasks: int | None = None  # if the files were looked at


@dataclass(frozen=True)
class Stage:
    name: str
    tasks: int
    bytes_in: float
    bytes_out: float
    requests: int
    cpu_s: float  # of all tasks together
    seconds: float  # until the last one is done
    memory_bytes: float  # the most that one worker uses


@dataclass(frozen=True, kw_only=True)
class Estimate:
    scale: Workload
    rates: Rates
    stages: tuple[Stage, ...]
    rows: int
    shards: int
    shuffle_bytes: float
    dataset_bytes: float
    index_bytes: float
    peak_store_bytes: float  # in the work folder and the output at once, the input not counted
    scratch_bytes: float  # on the disk of each worker
    driver_memory_bytes: float
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "core_hours": self.seconds * self.scale.workers / 3600}


def estimate(load: Workload, rates: Rates = MEASURED, sizes: TaskSizes = DEFAULT_SIZES) -> Estimate:
    n, ipv6 = load.measurements, load.measurements * load.ipv6_share
    shuffle_of = {4: (n - ipv6) * RECORDS[4].itemsize, 6: ipv6 * RECORDS[6].itemsize}
    input_bytes, shuffle = n * load.input_bytes_per_measurement, sum(shuffle_of.values())
    dataset = 12 * n + 12 * ipv6  # with times in whole seconds
    pieces = math.ceil(n / sizes.piece_rows)
    runs, shards = load.partition_tasks or min(pieces, sizes.max_runs), len(sizes.bucket_ranges(n))
    rows = int(max(n / load.measurements_per_source, 1) + dataset / load.max_row_bytes)
    index = rows * (sum(field.type.bit_width for field in INDEX_SCHEMA) // 8)
    sort_bytes = _SORT_FACTOR * max(shuffle_of.values()) / shards  # families are sorted one after the other

    program, batch = _PROGRAM_BYTES, min(load.memory_bytes, min(sizes.piece_rows, n) * BYTES_PER_ROW_IN_FLIGHT)
    sort_memory = load.memory_bytes * SORT_MEMORY_SHARE
    sorting = min(sort_bytes, sort_memory) + SORTED_BATCH_ROWS * 200
    dump, dumps = _DUMP_BYTES * n, max(1, math.ceil(_DUMP_BYTES * n / GIB))
    partition_requests = input_bytes / _READ_BYTES + shuffle / _PART_BYTES + 2 * runs
    shard_requests = 3 * runs * shards + dataset / _PART_BYTES + 7 * shards
    figures = [  # name, tasks, bytes in, bytes out, requests, seconds of CPU, memory of a worker
        ("import", dumps, dump, input_bytes, dump / _READ_BYTES + 4 * dumps, n / rates.atlas, program),
        ("partition", runs, input_bytes, shuffle, partition_requests, n / rates.partition, program + batch),
        ("shard", shards, shuffle, dataset + index, shard_requests, n / rates.shard, program + sorting),
        ("publish", 1, index, index, 6 * shards, rows / rates.index, program),
    ]
    stages = []
    for name, tasks, read, written, requests, cpu_s, memory in figures[0 if load.atlas else 1 :]:
        sent = int(requests) if load.object_store else 0
        work_s = cpu_s + (read + written) / load.bandwidth + sent * rates.request_s / REQUESTS_AT_ONCE
        seconds = math.ceil(tasks / load.workers) * work_s / tasks  # a last round that is not full takes as long
        stages.append(Stage(name, tasks, read, written, sent, cpu_s, seconds, memory))

    warnings = []
    if sort_bytes > sort_memory:
        warnings.append(
            f"a shard needs {sort_bytes / GIB:.1f} GB to be sorted in memory, and half of a worker's is "
            f"{sort_memory / GIB:.1f} GB: it will be sorted on disk, in about 1.7 times the time"
        )
    if load.workers > min(runs, shards):
        warnings.append(f"step one has {runs} tasks and step two {shards}: more workers than that have nothing to do")
    if dataset / shards > 2 * GIB:
        warnings.append("shards will be larger than 2 GB: readers map them whole, so have the address space for it")
    return Estimate(
        scale=load,
        rates=rates,
        stages=tuple(stages),
        rows=rows,
        shards=shards,
        shuffle_bytes=shuffle,
        dataset_bytes=dataset,
        index_bytes=index,
        peak_store_bytes=shuffle + dataset * (2 if load.object_store else 1) + 2 * index,
        scratch_bytes=max(2 * shuffle / runs, 2 * dataset / shards + max(0.0, sort_bytes - load.memory_bytes)),
        driver_memory_bytes=_PROGRAM_BYTES + runs * HEADER_BYTES + 1500.0 * pieces,
        warnings=tuple(warnings),
    )
