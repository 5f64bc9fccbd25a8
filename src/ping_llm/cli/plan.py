"""`ping-llm plan`: what a preparation will take, before machines are rented for it."""

from typing import TYPE_CHECKING, Annotated

import typer

from ping_llm.cli.options import Json, print_json
from ping_llm.core.console import err, out
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    from ping_llm.rows.estimate import Estimate


def plan(
    measurements: Annotated[float | None, typer.Option("--measurements", "-n", help="How many, as 35e9.")] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", help="Take the counts from these files instead; may be repeated."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Tasks that run at a time: the cores of the cluster.")] = 16,
    memory_gb_per_worker: Annotated[float, typer.Option(min=0.25, help="Memory for each of them.")] = 4.0,
    bandwidth: Annotated[
        float, typer.Option(min=0.1, help="MB per second for each worker, from and to where the data lies.")
    ] = 100.0,
    input_bytes_per_measurement: Annotated[
        float | None, typer.Option(min=0.1, help="Of the input files.", show_default="8, as Parquet has")
    ] = None,
    ipv6_share: Annotated[float, typer.Option(min=0, max=1, help="They take twice the bytes.")] = 0.423,
    measurements_per_source: Annotated[float, typer.Option(min=1, help="Decides the number of rows.")] = 118.0,
    atlas: Annotated[bool, typer.Option("--atlas", help="Begin with the import of bzip2 dumps.")] = False,
    shared_disk: Annotated[
        bool, typer.Option("--shared-disk", help="No object store: nothing waits for answers.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's rates first (half a minute).")
    ] = False,
    json_output: Json = False,
) -> None:
    """Estimate what `prepare` will take: tasks, bytes, memory, disk, requests and time.

    The times come from rates that were measured, on another machine unless --measure is given. What else is assumed is
    printed with them.

    Examples:

      ping-llm plan --measurements 35e9 --workers 64

      ping-llm plan --input "data/raw/*.parquet" --workers 2 --shared-disk --measure
    """
    from ping_llm.benchmarks.prepare_speed import measure_rates
    from ping_llm.rows.estimate import GIB, MEASURED, Workload, estimate
    from ping_llm.rows.prepare import PrepareSettings, make_plan

    if (measurements is None) == (not input):
        raise PingLlmError("say --measurements NUMBER, or --input FILES to take it from")
    tasks = None
    if input:
        found = make_plan(PrepareSettings(inputs=tuple(input), output=""))
        size = sum(file.bytes for file in found.files)
        each = input_bytes_per_measurement or 39.0
        measurements = sum(f.measurements if f.measurements is not None else f.bytes / each for f in found.files)
        input_bytes_per_measurement = size / max(1, measurements)
        tasks = len(found.sizes.piece_groups(found.pieces))
    if not measurements or not 1 <= measurements < 1e15:
        raise PingLlmError("--measurements must be a number from 1 to 1e15")
    rates, measured_bytes = measure_rates() if measure else (MEASURED, None)
    load = Workload(
        measurements=int(measurements),
        workers=workers,
        input_bytes_per_measurement=input_bytes_per_measurement or measured_bytes or 8.0,
        memory_bytes=int(memory_gb_per_worker * GIB),
        bandwidth=bandwidth * 1e6,
        ipv6_share=ipv6_share,
        measurements_per_source=measurements_per_source,
        atlas=atlas,
        object_store=not shared_disk,
        partition_tasks=tasks,
    )
    result = estimate(load, rates)
    if json_output:
        print_json(result.to_json())
    else:
        _show(result)


def _show(found: "Estimate") -> None:
    from rich.table import Table

    load = found.scale
    table = Table("stage", box=None, header_style="bold")
    for title in ("tasks", "read", "written", "requests", "memory", "core-hours", "time"):
        table.add_column(title, justify="right")
    for stage in found.stages:
        table.add_row(
            stage.name,
            f"{stage.tasks:,}",
            size(stage.bytes_in),
            size(stage.bytes_out),
            f"{stage.requests:,}",
            size(stage.memory_bytes),
            f"{stage.cpu_s / 3600:,.1f}",
            duration(stage.seconds),
        )
    out.print(
        f"{load.measurements:,} measurements with {load.workers} workers of {size(load.memory_bytes)}: "
        f"[bold]{duration(found.seconds)}[/], {found.seconds * load.workers / 3600:,.0f} worker-hours"
    )
    out.print(table)
    out.print(
        f"shuffle {size(found.shuffle_bytes)}; dataset {size(found.dataset_bytes)} in {found.shards:,} shards per "
        f"split, {found.rows:,} rows, index {size(found.index_bytes)}; work folder and output together up to "
        f"{size(found.peak_store_bytes)}; scratch on each worker {size(found.scratch_bytes)}; this program "
        f"{size(found.driver_memory_bytes)} of memory",
        soft_wrap=True,
    )
    rates = found.rates
    out.print(
        f"Assumed: {load.input_bytes_per_measurement:.1f} bytes of input per measurement, {load.ipv6_share:.0%} IPv6, "
        f"{load.measurements_per_source:,.0f} measurements per source, {load.bandwidth / 1e6:,.0f} MB/s per worker, "
        f"{rates.partition / 1e6:.1f} M measurements partitioned and {rates.shard / 1e6:.1f} M sorted per core and "
        f"second ({rates.where})",
        soft_wrap=True,
        markup=False,
    )
    for warning in found.warnings:
        err.print(f"note: {warning}", soft_wrap=True)


def size(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
