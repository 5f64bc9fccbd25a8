"""`ping-llm simulate`, `import` and `prepare`: from measurements to probe rows."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ping_llm.commands.options import Columns, Json, Overwrite, Workers, print_json, renamed
from ping_llm.console import err, out, progress
from ping_llm.errors import PingLlmError


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
    import dataclasses

    from ping_llm.sources.simulator import SimulatorSettings
    from ping_llm.sources.simulator import simulate as run

    values = dataclasses.asdict(SimulatorSettings(measurements=measurements, seed=seed))
    given = SimulatorSettings.from_json(values | _parsed_settings(settings or []))
    with progress("simulating", total=given.measurements) as advance:
        summary = run(given, output, overwrite=overwrite, on_progress=advance)
    if json_output:
        print_json(summary.to_json())
        return
    out.print(
        f"{summary.measurements:,} measurements ({summary.failed:,} failed) of {summary.sources:,} sources and "
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
    files: Annotated[list[Path], typer.Argument(help="Result files: JSON array or lines, plain, .gz or .bz2.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the measurement files to.")],
    packets: Annotated[
        str, typer.Option(help="`min`: one measurement per result, its minimum RTT; `each`: one per packet.")
    ] = "min",
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first unusable result.")] = False,
    workers: Workers = None,
    overwrite: Overwrite = False,
    json_output: Json = False,
) -> None:
    """Turn RIPE Atlas ping results, of any firmware, into measurement files (Parquet).

    Takes what the API gives (one JSON array) and the daily dumps (one object per line). Every result is in the output
    or is counted under the reason why it is not.

    Examples:

      ping-llm import atlas ping-2024-05-01T*.bz2 --output data/raw

      ping-llm import atlas results.json --packets each --output data/raw --json
    """
    from ping_llm.sources.atlas import import_atlas as run

    with progress("importing (bytes)") as advance:
        report = run(
            files,
            output,
            packets=packets,  # type: ignore[arg-type]  # checked there
            strict=strict,
            workers=workers,
            overwrite=overwrite,
            on_progress=advance,
        )
    if json_output:
        print_json(report.to_json())
        return
    out.print(
        f"{report.results:,} results gave {report.measurements:,} measurements ({report.failed:,} failed) "
        f"in {report.seconds:.1f} s: {len(report.files)} file(s) in {output}"
    )
    for reason, count in report.dropped.items():
        out.print(f"dropped {count:,} {reason}, the first at {report.examples[reason]}", markup=False)


def prepare(
    input: Annotated[list[str], typer.Option("--input", "-i", help="File, folder or quoted glob; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the rows to.")],
    max_row_size_mb: Annotated[float, typer.Option(help="Cut a longer history into several rows.")] = 8,
    train_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the sources in the train split.")] = 0.9,
    workers: Workers = None,
    memory_limit_gb: Annotated[
        float | None, typer.Option(help="For all workers together.", show_default="half of the free memory")
    ] = None,
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
    """
    from ping_llm.rows.prepare import MIB, PrepareSettings
    from ping_llm.rows.prepare import prepare as run
    from ping_llm.rows.summary import render, summarise

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
    )
    _, worked = run(settings)
    summary = summarise(output)
    if json_output:
        print_json(summary)
        return
    if not worked:
        err.print(f"{output} is already prepared from this input with these options; nothing to do.")
    out.print(render(summary))


def _bytes(option: str, value: float, unit: int) -> int:
    if not math.isfinite(value):
        raise PingLlmError(f"{option} {value}: write a number, such as 4")
    return int(value * unit)
