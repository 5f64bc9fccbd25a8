"""`ping-llm simulate`, `tokenize`, `import`, `prepare` and `plan`: making training data, and what that will take."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from ping_llm.cli import options
from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.report.formatting import SI, duration, short

if TYPE_CHECKING:
    from ping_llm.rows.estimate import Estimate
    from ping_llm.sources.files import Reading
    from ping_llm.tasks.engines import OnTiming, Timing

EngineName = Annotated[str, Option("--engine", help="Where tasks run: `local` or `ray`.")]
Address = Annotated[str | None, Option(help="Ray cluster: HOST:6379.", show_default="RAY_ADDRESS, or a new one")]
Timings = Annotated[Path | None, Option(help="Write the time of each task to this file, as JSON lines.")]


def simulate(
    output: options.OutputFolder,
    measurements: Annotated[int, Option("--measurements", "-n", min=1, help="Number of measurements.")] = 1_000_000,
    seed: Annotated[int, Option(help="Each seed gives another Internet.")] = 0,
    settings: Annotated[list[str] | None, Option("--set", help="A setting; repeatable.", metavar="NAME=VALUE")] = None,
    overwrite: options.Overwrite = False,
    json_output: options.Json = False,
) -> None:
    """Simulate measurements of a synthetic Internet whose true latencies are known.

    The defaults resemble a real RIPE Atlas extract. The same options always give the same bytes. The folder also gets
    world.json, from which Python callers rebuild the Internet to get the true distribution of any measurement.

    Examples:

        ping-llm simulate --output data/raw
        ping-llm simulate -n 20000000 --seed 7 --set ipv6_share=0 --set days=30 -o data/raw-ipv4
    """
    from ping_llm.sources import simulator

    chosen: dict[str, Any] = {"measurements": measurements, "seed": seed}
    for pair in settings or []:
        name, separator, text = pair.partition("=")
        if not separator:
            raise PingLlmError(f"--set {pair!r}: write NAME=VALUE")
        try:
            chosen[name] = json.loads(text)
        except ValueError:
            chosen[name] = text
    given = simulator.SimulatorSettings(**chosen)
    with progress("simulating", total=given.measurements) as advance:
        summary = simulator.simulate(given, output, overwrite=overwrite, on_progress=advance)
    text = (
        f"{summary.measurements:,} measurements ({summary.failed:,} unanswered) of {summary.sources:,} sources and "
        f"{summary.targets:,} targets in {len(summary.files)} file(s), {summary.size_bytes / 1e6:,.1f} MB, in {output}"
    )
    options.show(summary.to_json(), json_output, text)


def tokenize(
    output: options.OutputFolder,
    changes: Annotated[list[str] | None, Argument(help="Keys of the configuration.", metavar="KEY=VALUE…")] = None,
    config: Annotated[Path | None, Option(help="Configuration file with grain_train_files and a tokenizer.")] = None,
    copies: Annotated[bool, Option("--copy", help="The column contains tokens already: copy them.")] = False,
    workers: options.Workers = None,
    json_output: options.Json = False,
) -> None:
    """Tokenize documents once, into token files that training reads at random (`grain_file_type=tokens`).

    Every input file becomes FILE.bin and FILE.idx in the layout of Megatron-LM. The same command continues where it was
    interrupted. From tokens, an epoch holds every token exactly once, and hardly any padding.

    Examples:

        ping-llm tokenize --config configs/text_arrayrecord.yml --output data/tokens
        ping-llm tokenize --copy -o data/tokens grain_file_type=parquet grain_train_files='docs/*.parquet' \\
            train_data_columns=input_ids vocab_size=128256
        ping-llm train --config my.yml grain_file_type=tokens grain_train_files='data/tokens/*.bin'
    """
    from ping_llm.config import load_config
    from ping_llm.data import tokenize as text

    settings = load_config(config, [*(changes or []), "dataset_type=grain", "eval_interval=-1"])
    options.check_folder(output, f"--output {output}")
    with progress("tokenizing") as advance:
        made = text.tokenize(settings, output, copies=copies, workers=workers, on_progress=advance)
    found = f"{made['tokens']:,} tokens of {made['documents']:,} documents in {made['files']} token files, in {output}"
    options.show(made, json_output, found)


def import_atlas(
    files: Annotated[
        list[str], Argument(help="Result files (JSON array or lines, plain, .gz or .bz2), or atlas:NUMBER.")
    ],
    output: options.OutputLocation,
    packets: Annotated[str, Option(help="`min`: the least RTT of each result; `each`: that of each packet.")] = "min",
    per_file: Annotated[bool, Option("--per-file", help="A file per input: a rerun does what is missing.")] = False,
    strict: options.Strict = False,
    workers: options.Workers = None,
    engine: EngineName = "local",
    address: Address = None,
    timings: Timings = None,
    overwrite: options.Overwrite = False,
    json_output: options.Json = False,
) -> None:
    """Convert RIPE Atlas ping results, of any firmware, into measurement files (Parquet).

    Takes results of the API (one JSON array) and the daily dumps (one object per line). Every result is in the output
    or is counted under the reason why it is not.

    With --per-file (which --engine ray implies) each input is a task of its own. Files that were imported before and
    have not changed are left alone; a damaged one is reported at the end, and the exit code says so.

    Examples:

        ping-llm import atlas ping-2024-05-01T*.bz2 --output data/raw
        ping-llm import atlas results.json --packets each --output data/raw --json
        ping-llm import atlas 'atlas:1001?start=2024-05-01&stop=2024-05-02' --output data/raw
        ping-llm import atlas dumps/*.bz2 --per-file --engine ray --address head:6379 --output s3://bucket/raw
    """
    from ping_llm.sources import atlas, remote
    from ping_llm.storage import locate
    from ping_llm.tasks.engines import EngineChoice

    pages = {file: remote.download(file) for file in files if file.lower().startswith("atlas:")}
    files = [str(one) for file in files for one in pages.get(file, (file,))]

    by_file = per_file or engine != "local"
    if not by_file and (address is not None or timings is not None):
        raise PingLlmError("--address and --timings belong to --per-file")
    with _timings_to(timings, measured=[]) as on_timing, progress("importing (bytes)") as advance:
        given: dict[str, Any] = {"packets": packets, "strict": strict, "overwrite": overwrite, "on_progress": advance}
        if by_file:
            choice = EngineChoice(engine=engine, address=address, workers=workers)
            report = atlas.import_by_file(files, output, **given, engine=choice, on_timing=on_timing)
            done = len(files) - report.skipped - len(report.failures)
            where = f"{done} file(s) imported to {output}, {report.skipped} done before"
        else:
            local = [locate(file).local for file in files]
            report = atlas.import_atlas(local, locate(output).local, **given, workers=workers)
            where = f"{len(report.files)} file(s) in {output}"
    text = (
        f"{report.results:,} results gave {report.measurements:,} measurements ({report.failed:,} unanswered) "
        f"in {report.seconds:.1f} s: {where}"
    )
    dropped = (f"dropped {n:,} {why}, the first at {report.examples[why]}" for why, n in report.dropped.items())
    options.show(report.to_json(), json_output, text, *dropped)
    for copy, original in report.copies.items():
        err.print(f"{copy} is a copy of {original} and was imported once", markup=False)
    for file, reason in report.failures.items():
        err.print(f"not imported: {reason}" if file in reason else f"not imported: {file}: {reason}", markup=False)
    if failed := len(report.failures):
        raise PingLlmError(f"{failed} of {len(files)} files could not be imported; fix them and run this again")


def prepare(
    input: Annotated[list[str], Option("--input", "-i", help="File, folder or quoted glob; may be repeated.")],
    output: options.OutputLocation,
    max_row_size_mb: Annotated[float, Option(help="A longer history is cut into several rows.")] = 8,
    train_ratio: Annotated[float, Option(min=0, max=1, help="Share of the sources in the train split.")] = 0.9,
    workers: options.Workers = None,
    memory_limit_gb: Annotated[
        float | None, Option(help="Memory of all workers.", show_default="half of what is free; Ray: 2 per task")
    ] = None,
    engine: EngineName = "local",
    address: Address = None,
    work: Annotated[
        str | None, Option(help="Folder for unfinished work, shared by all machines.", show_default="in the output")
    ] = None,
    timings: Timings = None,
    how: options.HowToRead = None,
    strict: options.Strict = False,
    overwrite: options.Overwrite = False,
    json_output: options.Json = False,
) -> None:
    """Convert measurement files (Parquet, CSV, RIPE Atlas JSON, output of ping tools) into probe rows, for training.

    A probe row is one source's history in time order. Every usable measurement is in the rows; the others are dropped,
    counted by reason and reported. If the command is interrupted, run it again: it resumes.

    Examples:

        ping-llm prepare --input "data/raw/*.parquet" --output data/probe_rows
        ping-llm prepare -i pings.csv -o rows --columns event_time=when --columns rtt=latency_ms --strict
        ping-llm prepare -i s3://bucket/raw -o s3://bucket/rows --engine ray --address head:6379
    """
    from ping_llm.rows.prepare import MIB, PrepareSettings
    from ping_llm.rows.prepare import prepare as run
    from ping_llm.rows.summary import render, summarise
    from ping_llm.storage import locate
    from ping_llm.tasks.engines import summarise as stages_of

    for option, value in (("--max-row-size-mb", max_row_size_mb), ("--memory-limit-gb", memory_limit_gb or 0)):
        if not math.isfinite(value):
            raise PingLlmError(f"{option} {value}: write a number, such as 4")
    settings = PrepareSettings(
        inputs=tuple(input),
        output=output,
        max_row_bytes=int(max_row_size_mb * MIB),
        train_ratio=train_ratio,
        input_options=how,
        strict=strict,
        overwrite=overwrite,
        workers=workers,
        memory_limit_bytes=None if memory_limit_gb is None else int(memory_limit_gb * 1024 * MIB),
        engine=engine,
        address=address,
        work=work,
    )
    measured: list[Timing] = []
    readings: list[Reading] = []

    def on_reading(reading: "Reading") -> None:
        options.tell(reading)
        readings.append(reading)

    with _timings_to(timings, measured) as on_timing:
        _, worked = run(settings, on_timing, on_reading)
    summary, stages = summarise(locate(output)), stages_of(measured)
    for stage in stages if engine != "local" and not json_output else ():
        slowest = stage["slowest"]
        err.print(
            f"{stage['stage']}: {stage['tasks']:,} tasks on {stage['nodes']} node(s) in {stage['wall_s']:,.1f} s, "
            f"{stage['task_s'] / stage['tasks']:.1f} s per task; the slowest, {slowest['task']} on {slowest['node']}, "
            f"{slowest['seconds']:.1f} s; {stage['bytes_in'] / 1e6:,.0f} MB in, {stage['bytes_out'] / 1e6:,.0f} MB out",
        )
    if not worked and not json_output:
        err.print(f"{output} is already prepared from this input with these options; nothing to do.")
    read = {"reading": readings[0].to_json()} if readings else {}
    options.show({**summary, "stages": stages, **read}, json_output, render(summary))


@contextmanager
def _timings_to(path: Path | None, measured: "list[Timing]") -> "Iterator[OnTiming]":
    """A function that appends a timing to the list and, if there is a file, writes it there as a line of JSON."""
    with explained(f"--timings {path}", OSError):
        file = path.open("wb", buffering=0) if path else None

    def on_timing(timing: "Timing") -> None:
        measured.append(timing)
        if file:
            with explained(f"--timings {path}", OSError):
                file.write(json.dumps(asdict(timing)).encode() + b"\n")

    with file or nullcontext():
        yield on_timing


def plan(
    measurements: Annotated[float | None, Option("--measurements", "-n", help="How many, such as 35e9.")] = None,
    input: Annotated[list[str] | None, Option("--input", "-i", help="Or the files to count; repeatable.")] = None,
    workers: Annotated[int, Option(min=1, help="Tasks that run at the same time: the cores of the cluster.")] = 16,
    memory_gb_per_worker: Annotated[float, Option(min=0.25, help="Memory of each worker.")] = 4.0,
    bandwidth: Annotated[float, Option(min=0.1, help="MB per second between each worker and the store.")] = 100.0,
    input_bytes_per_measurement: Annotated[float | None, Option(min=0.1, show_default="8, as Parquet has")] = None,
    ipv6_share: Annotated[float, Option(min=0, max=1, help="They take twice the bytes.")] = 0.423,
    measurements_per_source: Annotated[float, Option(min=1, help="Determines the number of rows.")] = 118.0,
    atlas: Annotated[bool, Option("--atlas", help="Include the import of bzip2 dumps.")] = False,
    shared_disk: Annotated[bool, Option("--shared-disk", help="Not an object store: no request latency.")] = False,
    measure: Annotated[bool, Option("--measure", help="Measure this machine's rates first (half a minute).")] = False,
    how: options.HowToRead = None,
    json_output: options.Json = False,
) -> None:
    """Estimate what `prepare` will take: tasks, bytes, memory, disk, requests and time.

    Times are based on measured rates: of another machine, unless --measure is given. The other assumptions are printed
    too.

    Examples:

        ping-llm plan --measurements 35e9 --workers 64
        ping-llm plan --input "data/raw/*.parquet" --workers 2 --shared-disk --measure
    """
    from ping_llm.cli.benchmarks import measure_rates
    from ping_llm.rows.estimate import GIB, MEASURED, Workload, estimate
    from ping_llm.rows.prepare import PrepareSettings, make_plan

    if (measurements is None) == (not input):
        raise PingLlmError("give --measurements NUMBER, or --input FILES to count them in")
    tasks = None
    if input:
        found = make_plan(PrepareSettings(inputs=tuple(input), output="", input_options=how))
        each = input_bytes_per_measurement or 39.0
        measurements = sum(f.measurements if f.measurements is not None else f.bytes / each for f in found.files)
        input_bytes_per_measurement = sum(file.bytes for file in found.files) / max(1, measurements)
        tasks = len(found.settings.sizes.piece_groups(found.pieces))
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
    options.show(result.to_json(), json_output, *_in_words(result))
    for warning in result.warnings if not json_output else ():
        err.print(f"note: {warning}")


def _in_words(found: "Estimate") -> Iterator[str | Table]:
    load, rates = found.scale, found.rates
    yield (
        f"{load.measurements:,} measurements with {load.workers} workers of {_bytes(load.memory_bytes)}: "
        f"{duration(found.seconds)}, {found.seconds * load.workers / 3600:,.0f} worker-hours"
    )
    rows = []
    for stage in found.stages:
        moved = _bytes(stage.bytes_in), _bytes(stage.bytes_out), f"{stage.requests:,}"
        spent = _bytes(stage.memory_bytes), f"{stage.cpu_s / 3600:,.1f}", duration(stage.seconds)
        rows.append([stage.name, f"{stage.tasks:,}", *moved, *spent])
    yield options.as_table(["stage"], ["tasks", "read", "written", "requests", "memory", "core-hours", "time"], rows)
    yield (
        f"shuffle {_bytes(found.shuffle_bytes)}; dataset {_bytes(found.dataset_bytes)} in {found.shards:,} shards per "
        f"split, {found.rows:,} rows, index {_bytes(found.index_bytes)}; work folder and output together up to "
        f"{_bytes(found.peak_store_bytes)}; scratch on each worker {_bytes(found.scratch_bytes)}; this program "
        f"{_bytes(found.driver_memory_bytes)} of memory"
    )
    yield (
        f"Assumed: {load.input_bytes_per_measurement:.1f} bytes of input per measurement, {load.ipv6_share:.0%} IPv6, "
        f"{load.measurements_per_source:,.0f} measurements per source, {load.bandwidth / 1e6:,.0f} MB/s per worker, "
        f"{rates.partition / 1e6:.1f} M measurements partitioned and {rates.shard / 1e6:.1f} M sorted per core and "
        f"second ({rates.where})"
    )


def _bytes(value: float) -> str:
    return f"{short(value, SI, ' ')}B" if value >= 999.5 else f"{value:.0f} B"
