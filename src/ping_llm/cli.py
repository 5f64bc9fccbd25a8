"""The command line: one thin verb per task. Each reads its options, calls one function and shows what came back.

Results go to standard output (with `--json`, one JSON document as the last line), everything else to standard error.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ping_llm import __version__
from ping_llm.console import err, out, progress
from ping_llm.errors import PingLlmError
from ping_llm.stopping import stop_on_signals

app = typer.Typer(
    help="ping-llm: a language model of the Internet, learnt from latency measurements.",
    epilog="Start with:  ping-llm simulate --output data/raw   then   ping-llm prepare --help",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
import_app = typer.Typer(help="Turn other people's measurement formats into measurement files.", no_args_is_help=True)
inspect_app = typer.Typer(help="Look at what the other commands made.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure the speed of the parts on this machine.", no_args_is_help=True)
app.add_typer(import_app, name="import")
app.add_typer(inspect_app, name="inspect")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default="all cores")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder already holds.")]


def _print_json(value: Any) -> None:
    out.print(json.dumps(value), soft_wrap=True, markup=False)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(f"ping-llm {__version__}")
        raise typer.Exit


@app.command()
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
        _print_json(summary.to_json())
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


@import_app.command("atlas")
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
        _print_json(report.to_json())
        return
    out.print(
        f"{report.results:,} results gave {report.measurements:,} measurements ({report.failed:,} failed) "
        f"in {report.seconds:.1f} s: {len(report.files)} file(s) in {output}"
    )
    for reason, count in report.dropped.items():
        out.print(f"dropped {count:,} {reason}, the first at {report.examples[reason]}", markup=False)


@app.command()
def prepare(
    input: Annotated[list[str], typer.Option("--input", "-i", help="File, folder or quoted glob; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the rows to.")],
    max_row_size_mb: Annotated[float, typer.Option(help="Cut a longer history into several rows.")] = 8,
    train_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the sources in the train split.")] = 0.9,
    workers: Workers = None,
    memory_limit_gb: Annotated[
        float | None, typer.Option(help="For all workers together.", show_default="half of the free memory")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(help="Your name of a column, as rtt=latency_ms; may be repeated.", metavar="COLUMN=NAME"),
    ] = None,
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
        max_row_bytes=int(max_row_size_mb * MIB),
        train_ratio=train_ratio,
        columns=_renamed(columns or []),
        strict=strict,
        overwrite=overwrite,
        workers=workers,
        memory_limit_bytes=None if memory_limit_gb is None else int(memory_limit_gb * 1024 * MIB),
    )
    _, worked = run(settings)
    summary = summarise(output)
    if json_output:
        _print_json(summary)
        return
    if not worked:
        err.print(f"{output} is already prepared from this input with these options; nothing to do.")
    out.print(render(summary))


def _renamed(pairs: list[str]) -> dict[str, str]:
    from ping_llm.measurements import SCHEMA

    renamed = {}
    for pair in pairs:
        column, separator, name = pair.partition("=")
        if not separator or column not in SCHEMA.names or not name:
            raise PingLlmError(f"--columns {pair!r}: write COLUMN=NAME with a column of {', '.join(SCHEMA.names)}")
        renamed[column] = name
    return renamed


@inspect_app.command("rows")
def inspect_rows(
    path: Annotated[Path, typer.Argument(help="Folder that `ping-llm prepare` wrote.")],
    split: Annotated[str, typer.Option(help="Split to take the decoded row from: train or eval.")] = "train",
    row: Annotated[int, typer.Option(help="Row to decode.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Measurements of it to show.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the shards to check them.")] = False,
    json_output: Json = False,
) -> None:
    """Counts, row sizes, time span, families and failures of prepared rows, and one row decoded.

    Reads every shard and checks it against the manifest and the index; a fault is named and the command fails.

    Examples:

      ping-llm inspect rows data/probe_rows

      ping-llm inspect rows data/probe_rows --split eval --row 7 --limit 20 --json
    """
    from ping_llm.rows.dataset import RowSet
    from ping_llm.rows.summary import render, row_as_json, summarise

    summary = summarise(path)
    with RowSet(path, split) as rows:
        if len(rows) and not -len(rows) <= row < len(rows):
            raise PingLlmError(f"{path} has {len(rows):,} rows in {split}; there is no row {row}")
    faults: list[str] = []
    if not quick:
        faults = _verify(path, summary)
    summary["verified"] = not quick and not faults
    summary["faults"] = faults
    shown = None
    if not faults:
        with RowSet(path, split) as rows:
            shown = row_as_json(rows, row % len(rows), limit) if len(rows) else None
    if json_output:
        _print_json(summary | {"row": shown})
    else:
        out.print(render(summary, row=shown, histograms=True))
        if not quick and not faults:
            out.print("\nAll shards match the index and the manifest.")
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise PingLlmError(faults[0] + more)


def _verify(path: Path, summary: dict[str, Any]) -> list[str]:
    from ping_llm.rows.dataset import RowSet

    total = sum(split["bytes"] for split in summary["splits"].values())
    faults: list[str] = []
    with progress("checking shards (bytes)", total=total) as advance:
        for split in summary["splits"]:
            with RowSet(path, split) as rows:
                faults += list(rows.verify(advance))
    return faults


Seed = Annotated[int, typer.Option(min=0, help="Seed of the order and of all sampling.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences in a global batch.")]
Length = Annotated[int, typer.Option(min=64, help="Tokens in a sequence.")]
Split = Annotated[str, typer.Option(help="train or eval.")]


@inspect_app.command("batches")
def inspect_batches(
    rows: Annotated[str, typer.Argument(help="Folder that `ping-llm prepare` wrote.")] = "",
    config: Annotated[Path | None, typer.Option(help="Take rows, seed and shape from a configuration instead.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A key of the configuration; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    steps: Annotated[str, typer.Option(help="Steps to show, as first:end.")] = "0:10",
    hosts: Annotated[int, typer.Option(min=1, help="Put each batch together from so many hosts' parts.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes for each host.")] = 0,
    digest: Annotated[bool, typer.Option("--digest", help="Print a digest of each global batch.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Make the last batch first, each by itself.")] = False,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seed: Seed = 0,
    split: Split = "train",
    json_output: Json = False,
) -> None:
    """Make global batches and show their size, padding and digest.

    A batch depends on rows, seed, step, batch size and length alone: digests are equal for every number of hosts and
    workers, forward and backward.

    Examples:

      ping-llm inspect batches data/probe_rows --steps 0:20 --digest

      ping-llm inspect batches data/probe_rows --steps 0:20 --digest --hosts 2 --workers 2

      ping-llm inspect batches --config configs/latency_network.yml
    """
    from ping_llm.pipeline import explain

    first, last = _step_range(steps)
    spec = (
        _configured_spec(config, changes or [], split)
        if config or changes
        else _data_spec(rows, split, batch_size, length, seed)
    )
    batches: Any
    if backward:
        order = list(reversed(range(first, last)))
        batches = (explain.one_batch(spec, step) for step in order)
    else:
        order = list(range(first, last))
        batches = explain.global_batches(spec, first, last, hosts=hosts, workers=workers)
    for step, batch in zip(order, batches, strict=True):
        segmentation = batch["inputs_segmentation"]
        shown = {
            "step": step,
            "tokens": int((segmentation > 0).sum()),
            "padding": round(float((segmentation == 0).mean()), 5),
            "segments": int(segmentation.max(axis=1).sum()),
        } | ({"digest": explain.digest(batch)} if digest else {})
        if json_output:
            _print_json(shown)
        elif digest:
            out.print(f"{step:6}  {shown['digest']}", soft_wrap=True)
        else:
            sizes = f"{shown['tokens']:,} tokens  {shown['segments']:,} segments  {shown['padding']:.2%} padding"
            out.print(f"step {step:6}  {sizes}")


@inspect_app.command("batch")
def inspect_batch(
    rows: Annotated[str, typer.Argument(help="Folder that `ping-llm prepare` wrote.")] = "",
    config: Annotated[Path | None, typer.Option(help="Take rows, seed and shape from a configuration instead.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A key of the configuration; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Step of the batch.")] = 0,
    sequence: Annotated[int, typer.Option(min=0, help="Sequence of the batch.")] = 0,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seed: Seed = 0,
    split: Split = "train",
    json_output: Json = False,
) -> None:
    """Explain a sequence of a batch to the last token: its rows, windows and modes, and its measurements decoded.

    Any batch of any past run can be made again from its rows, seed and shape, or from the run's config.yml.

    Examples:

      ping-llm inspect batch data/probe_rows --step 1200 --sequence 3

      ping-llm inspect batch --config runs/my-project/my-run/config.yml --step 1200
    """
    from ping_llm.pipeline import explain
    from ping_llm.pipeline.source import BatchSource

    spec = (
        _configured_spec(config, changes or [], split)
        if config or changes
        else _data_spec(rows, split, batch_size, length, seed)
    )
    if sequence >= spec.global_batch_size:
        raise PingLlmError(
            f"a batch of {spec.global_batch_size} has sequences 0 to {spec.global_batch_size - 1}; "
            f"there is no {sequence}"
        )
    explained = explain.explain_sequence(BatchSource(spec), step, sequence)
    if json_output:
        _print_json(explained)
    else:
        out.print(explain.render(explained), soft_wrap=True)


def _step_range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition(":")
    if not (separator and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise PingLlmError(f"--steps {text!r}: write first:end, such as 0:20")
    return int(first), int(last)


def _configured_spec(path: Path | None, changes: list[str], split: str) -> Any:
    from ping_llm.config import load_config
    from ping_llm.pipeline.factory import spec_from_config

    return spec_from_config(load_config(path, changes), split)


def _data_spec(rows: str, split: str, batch_size: int, length: int, seed: int) -> Any:
    from ping_llm.pipeline.contexts import ContextSettings
    from ping_llm.pipeline.spec import DataSpec, RowsSpec

    if not rows:
        raise PingLlmError("name a folder that `ping-llm prepare` wrote, or a --config")
    return DataSpec(
        rows=(RowsSpec.find(rows, split),),
        seed=seed,
        global_batch_size=batch_size,
        contexts=ContextSettings(length=length),
    )


@app.command()
def train(
    changes: Annotated[
        list[str] | None, typer.Argument(help="Keys of the configuration, as key=value.", metavar="KEY=VALUE…")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; see configs/ and docs/configuration.md.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Folder for runs that belong together; W&B's project.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. The same name goes on where it stopped.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences a step, of all devices together.")] = None,
    json_output: Json = False,
) -> None:
    """Train a model, or go on with a run that was interrupted: the same command does both.

    The run's folder (runs/PROJECT/NAME) gets the configuration, checkpoints, metrics.jsonl, TensorBoard files, the loss
    curve as a picture and summary.json. SIGTERM and Ctrl-C save and end the run; after any interruption, `kill -9`
    included, the same command continues on exactly the batches that would have come next.

    Examples:

      ping-llm train --config configs/latency_network.yml --project my-project --name my-run --steps 5000

      ping-llm train --config configs/demo.yml --name try learning_rate=1e-3 opt_type=muon

      ping-llm train dataset_type=synthetic enable_checkpointing=false --steps 50     # how fast is this machine?
    """
    from ping_llm.config import load_config
    from ping_llm.train.hardware import start_processes

    given = {"project": project, "run_name": name, "steps": steps}
    overrides = [*(changes or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    settings = load_config(config, overrides)
    start_processes(settings)
    if batch_size is not None:
        import jax

        settings = settings.replace(per_device_batch_size=batch_size / jax.device_count())
    from ping_llm.train import train as run

    summary = run(settings)
    if json_output:
        _print_json(summary)
    else:
        _show_summary(summary)
    if summary["stopped_by_signal"] == 2:
        raise typer.Exit(130)


def _rows_of_run(config: Any) -> Path:
    from ping_llm.config import parse_blend
    from ping_llm.pipeline.spec import RowsSpec

    files = config.network_eval_files or config.network_train_files
    if not files:
        raise PingLlmError("the run names no probe rows: give them by --rows")
    return Path(RowsSpec.find(parse_blend(files)[0][0], "eval").folder)


def _show_summary(summary: dict[str, Any]) -> None:
    if summary["complete"]:
        out.print(f"done: {summary['steps']:,} steps, in {summary['run']}")
    else:
        out.print(f"stopped and saved after {summary['steps']:,} steps; the same command goes on from there")
    for key, label in (("final_loss", "loss"), ("eval_loss", "evaluation loss")):
        if summary[key] is not None:
            out.print(f"  {label} {summary[key]:.4f}")
    if summary["real_tokens_per_s"]:
        mfu = "" if summary["mfu"] is None else f", MFU {summary['mfu']:.1%}"
        wait = summary["data_wait_fraction"]
        out.print(f"  {summary['real_tokens_per_s']:,} tokens/s{mfu}, {wait:.1%} of the time waiting for data")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    rows: Annotated[
        Path | None, typer.Option(help="Folder of probe rows; else those the run was evaluated on.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions to ask, at most.")] = 400,
    seed: Annotated[int, typer.Option(help="Another seed asks other questions.")] = 0,
    world: Annotated[Path | None, typer.Option(help="Folder of the simulated measurements: adds the truth.")] = None,
    json_output: Json = False,
) -> None:
    """Compare a trained model with the classical predictors on measurements that nobody has seen.

    Unseen probes: of each probe of the evaluation split, the first 80 % of its measurements are known and questions are
    asked about the rest. Errors are those of RTTs that were answered; the surprise (NLL) counts failures, too.

    Example:

      ping-llm evaluate runs/ping-llm/demo --world data/demo/raw-1000000
    """
    from ping_llm.evaluate import evaluate_probes
    from ping_llm.evaluate.table import comparison
    from ping_llm.predict import LanguageModel
    from ping_llm.sources.simulator import World

    model = LanguageModel.from_run(run)
    folder = rows or _rows_of_run(model.config)
    truth = World.load(world) if world else None
    with progress("evaluating", total=4) as advance:
        scores = evaluate_probes(model, folder, questions=questions, seed=seed, world=truth, advance=advance)
    if json_output:
        _print_json({"protocols": {"unseen_probe": scores}, "step": model.step})
    else:
        out.print(comparison("Unseen probes: what they measure next", scores))


@bench_app.command("prepare")
def bench_prepare(
    measurements: Annotated[int, typer.Option(min=1000, help="Simulated measurements to prepare.")] = 5_000_000,
    workers: Workers = None,
    memory_limit_gb: Annotated[float, typer.Option(help="Limit given to `prepare`.")] = 4.0,
    scratch: Annotated[Path | None, typer.Option(help="Folder for temporary files.", show_default="system's")] = None,
    json_output: Json = False,
) -> None:
    """Speed and memory of `prepare`, beside a one-at-a-time converter and a bare DuckDB sort of the same input.

    Example:

      ping-llm bench prepare --measurements 20000000 --json
    """
    from ping_llm.benchmarks.prepare import PrepareBenchmark

    benchmark = PrepareBenchmark(
        measurements=measurements, workers=workers, memory_limit_gb=memory_limit_gb, scratch=scratch
    )
    _show(benchmark.run(), json_output)


@bench_app.command("pipeline")
def bench_pipeline(
    rows: Annotated[str, typer.Option(help="`typical` or `big` simulated rows, or a prepared folder.")] = "typical",
    workers: Annotated[int, typer.Option(min=0, help="Also measure what so many worker processes deliver.")] = 0,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to measure.")] = 10.0,
    json_output: Json = False,
) -> None:
    """Speed of making batches in one process, beside a plain encoder that takes one measurement at a time.

    Examples:

      ping-llm bench pipeline --workers 2 --json

      ping-llm bench pipeline --rows big
    """
    from ping_llm.benchmarks.pipeline import PipelineBenchmark

    kind: Any = rows if rows in ("typical", "big") else "typical"
    path = None if rows in ("typical", "big") else Path(rows)
    benchmark = PipelineBenchmark(
        rows=kind, path=path, workers=workers, batch_size=batch_size, length=length, seconds=seconds
    )
    _show(benchmark.run(), json_output)


def _show(result: dict[str, Any], json_output: bool) -> None:
    if json_output:
        _print_json(result)
        return
    for name, value in result.items():
        shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        out.print(f"{name:28} {shown}")


def main() -> None:
    """Run a command; an error of the user's making is one line on standard error and a non-zero exit."""
    stop_on_signals()
    try:
        app()
    except PingLlmError as error:
        err.print(f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


def _escaped(message: str) -> str:
    return " ".join(message.split()).replace("[", r"\[")
