"""`ping-llm simulate`, `import` and `prepare`: from measurements to probe rows."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ping_llm.cli.options import Columns, Json, Overwrite, Workers, print_json, renamed
from ping_llm.core.console import err, out, progress
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    from ping_llm.sources.atlas import ImportReport
    from ping_llm.tasks.engines import EngineChoice, Timing

EngineName = Annotated[str, typer.Option("--engine", help="Where tasks run: `local` or `ray`.")]
Address = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster, as HOST:6379.", show_default="RAY_ADDRESS, or a Ray started here"),
]
Timings = Annotated[Path | None, typer.Option(help="Write what each task took to this file, as lines of JSON.")]


def simulate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the measurement files to.")],
    measurements: Annotated[int, typer.Option("--measurements", "-n", min=1, help="How many to make.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Another seed is another Internet.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another simulator setting; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Make measurements of a synthetic Internet whose true answers are known.

    The defaults resemble a real RIPE Atlas extract. The same options always give the same bytes. The folder also gets
    world.json, from which Python callers rebuild the Internet and ask for the true distribution of any measurement.

    Examples:

      ping-llm simulate --output data/raw

      ping-llm simulate -n 20000000 --seed 7 --set ipv6_share=0 --set days=30 -o data/raw-ipv4
    """
    from ping_llm.sources.simulator import SimulatorSettings
    from ping_llm.sources.simulator import simulate as run

    given = SimulatorSettings(**{"measurements": measurements, "seed": seed} | _parsed_settings(settings or []))
    with progress("simulating", total=given.measurements) as advance:
        summary = run(given, output, overwrite=overwrite, on_progress=advance)
    if json_output:
        print_json(summary.to_json())
        return
    out.print(
        f"{summary.measurements:,} measurements ({summary.failed:,} unanswered) of {summary.sources:,} sources and "
        f"{summary.targets:,} targets in {len(summary.files)} file(s), {summary.size_bytes / 1e6:,.1f} MB, in {output}"
    )


def _parsed_settings(pairs: list[str]) -> dict[str, Any]:
    parsed = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise PingLlmError(f"--set {pair!r}: write NAME=VALUE")
        try:
            parsed[name] = json.loads(text)
        except ValueError:
            parsed[name] = text
    return parsed


def import_atlas(
    files: Annotated[list[str], typer.Argument(help="Result files: JSON array or lines, plain, .gz or .bz2.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write the measurement files to.")],
    packets: Annotated[
        str, typer.Option(help="`min`: one measurement per result, its minimum RTT; `each`: one per packet.")
    ] = "min",
    per_file: Annotated[
        bool,
        typer.Option("--per-file", help="A Parquet file for each input, and a ledger: a rerun does what is missing."),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unusable result.")] = False,
    workers: Workers = None,
    engine: EngineName = "local",
    address: Address = None,
    timings: Timings = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Turn RIPE Atlas ping results, of any firmware, into measurement files (Parquet).

    Takes what the API gives (one JSON array) and the daily dumps (one object per line). Every result is in the output
    or is counted under the reason why it is not.

    With --per-file (which --engine ray implies) each input is a task of its own. Files that were imported before and
    have not changed are left alone; a damaged one is reported at the end, and the exit code says so.

    Examples:

      ping-llm import atlas ping-2024-05-01T*.bz2 --output data/raw

      ping-llm import atlas results.json --packets each --output data/raw --json

      ping-llm import atlas dumps/*.bz2 --per-file --engine ray --address head:6379 --output s3://bucket/raw
    """
    from ping_llm.sources.atlas import import_atlas as run
    from ping_llm.storage import locate
    from ping_llm.tasks.engines import EngineChoice

    if per_file or engine != "local":
        choice = EngineChoice(name=engine, address=address, workers=workers)
        _import_by_file(files, output, packets, strict, overwrite, choice, timings, json_output)
        return
    if address is not None or timings is not None:
        raise PingLlmError("--address and --timings belong to --per-file")
    with progress("importing (bytes)") as advance:
        report = run(
            [locate(file).local for file in files],
            locate(output).local,
            packets=packets,
            strict=strict,
            workers=workers,
            overwrite=overwrite,
            on_progress=advance,
        )
    if json_output:
        print_json(report.to_json())
        return
    _show_import(report, f"{len(report.files)} file(s) in {output}")


def _import_by_file(
    files: list[str],
    output: str,
    packets: str,
    strict: bool,
    overwrite: bool,
    engine: "EngineChoice",
    timings: Path | None,
    json_output: bool,
) -> None:
    from ping_llm.sources.atlas import import_by_file

    with progress("importing (bytes)") as advance, _timings_to(timings) as on_timing:
        report = import_by_file(
            files,
            output,
            packets=packets,
            strict=strict,
            overwrite=overwrite,
            engine=engine,
            on_progress=advance,
            on_timing=on_timing,
        )
    if json_output:
        print_json(report.to_json())
    else:
        done = len(files) - report.skipped - len(report.failures)
        _show_import(report, f"{done} file(s) imported to {output}, {report.skipped} done before")
    for file, reason in report.failures.items():
        err.print(f"not imported: {reason}" if file in reason else f"not imported: {file}: {reason}", markup=False)
    if report.failures:
        raise PingLlmError(
            f"{len(report.failures)} of {len(files)} files could not be imported; fix them and run this again"
        )


def _show_import(report: "ImportReport", where: str) -> None:
    out.print(
        f"{report.results:,} results gave {report.measurements:,} measurements ({report.failed:,} unanswered) "
        f"in {report.seconds:.1f} s: {where}"
    )
    for reason, count in report.dropped.items():
        out.print(f"dropped {count:,} {reason}, the first at {report.examples[reason]}", markup=False)


def prepare(
    input: Annotated[list[str], typer.Option("--input", "-i", help="File, folder or quoted glob; may be repeated.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder to write the rows to.")],
    max_row_size_mb: Annotated[float, typer.Option(help="Cut a longer history into several rows.")] = 8,
    train_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the sources in the train split.")] = 0.9,
    workers: Workers = None,
    memory_limit_gb: Annotated[
        float | None,
        typer.Option(
            help="For all workers together; with Ray, for each task.", show_default="half of the free memory; Ray: 2"
        ),
    ] = None,
    engine: EngineName = "local",
    address: Address = None,
    work: Annotated[
        str | None,
        typer.Option(
            help="Folder for unfinished work, seen by all machines; may be s3:// or gs://.",
            show_default="in the output folder",
        ),
    ] = None,
    timings: Timings = None,
    columns: Columns = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unusable measurement.")] = False,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Turn measurement files (Parquet, CSV, RIPE Atlas JSON) into probe rows, the form that training reads.

    A probe row is one source's history in time order. Every measurement that can be used is in the rows; the others are
    dropped, counted by reason and reported. If the command is interrupted, run it again: it continues.

    Examples:

      ping-llm prepare --input "data/raw/*.parquet" --output data/probe_rows

      ping-llm prepare -i pings.csv -o rows --columns event_time=when --columns rtt=latency_ms --strict

      ping-llm prepare -i s3://bucket/raw -o s3://bucket/rows --engine ray --address head:6379
    """
    from ping_llm.rows.prepare import MIB, PrepareSettings
    from ping_llm.rows.prepare import prepare as run
    from ping_llm.rows.summary import render, summarise
    from ping_llm.storage import locate
    from ping_llm.tasks.engines import Timing
    from ping_llm.tasks.engines import summarise as stages

    settings = PrepareSettings(
        inputs=tuple(input),
        output=output,
        max_row_bytes=_bytes("--max-row-size-mb", max_row_size_mb, MIB),
        train_ratio=train_ratio,
        columns=renamed(columns),
        strict=strict,
        overwrite=overwrite,
        workers=workers,
        memory_limit_bytes=None
        if memory_limit_gb is None
        else _bytes("--memory-limit-gb", memory_limit_gb, 1024 * MIB),
        engine=engine,
        address=address,
        work=work,
    )
    measured: list[Timing] = []
    with _timings_to(timings) as write_timing:

        def on_timing(timing: Timing) -> None:
            measured.append(timing)
            write_timing(timing)

        _, worked = run(settings, on_timing)
    summary = summarise(locate(output))
    if json_output:
        print_json({**summary, "stages": stages(measured)})
        return
    if engine != "local":
        for stage in stages(measured):
            err.print(_stage_line(stage), soft_wrap=True)
    if not worked:
        err.print(f"{output} is already prepared from this input with these options; nothing to do.")
    out.print(render(summary))


@contextmanager
def _timings_to(path: Path | None) -> Iterator[Callable[["Timing"], None]]:
    """Something to tell timings to, which writes each as a line of JSON."""
    if path is None:
        yield lambda timing: None
        return
    try:
        file = path.open("w", buffering=1)
    except OSError as error:
        raise PingLlmError(f"--timings {path}: {error.strerror}") from error
    with file:
        yield lambda timing: print(json.dumps(asdict(timing)), file=file)


def _stage_line(stage: dict[str, Any]) -> str:
    slowest = stage["slowest"]
    return (
        f"{stage['stage']}: {stage['tasks']:,} tasks on {stage['nodes']} node(s) in {stage['wall_s']:,.1f} s, "
        f"{stage['task_s'] / stage['tasks']:.1f} s per task; the slowest, {slowest['task']} on {slowest['node']}, "
        f"{slowest['seconds']:.1f} s; {stage['bytes_in'] / 1e6:,.0f} MB in, {stage['bytes_out'] / 1e6:,.0f} MB out"
    )


def _bytes(option: str, value: float, unit: int) -> int:
    if not math.isfinite(value):
        raise PingLlmError(f"{option} {value}: write a number, such as 4")
    return int(value * unit)
