"""`ping-llm inspect`: rows and batches, decoded and checked; `ping-llm bench`: how fast this machine makes batches."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ping_llm.cli.options import BatchSize, Json, Length, show
from ping_llm.core.console import out, progress
from ping_llm.core.errors import PingLlmError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ping_llm.batches.spec import Batch, DataSpec

PreparedRows = Annotated[str, Argument(help="Folder that `ping-llm prepare` wrote.")]
Split = Annotated[str, Option(help="train or eval.")]


def batches_spec(
    rows: PreparedRows = "",
    config: Annotated[
        Path | None, Option("--config", help="Rows, seed and shape from a configuration instead.")
    ] = None,
    changes: Annotated[
        list[str] | None, Option("--set", help="A configuration key; repeatable.", metavar="KEY=VALUE")
    ] = None,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seed: Annotated[int, Option(min=0, help="Seed of the order and of all sampling.")] = 0,
    split: Split = "train",
) -> "DataSpec":
    """What determines the batches: a configuration if there is one, else the other options."""
    from ping_llm.config import load_config
    from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec
    from ping_llm.data.registry import spec_from_config

    if not (config or changes):
        if not rows:
            raise PingLlmError("name a folder that `ping-llm prepare` wrote, or a --config")
        found = RowsSpec.find(rows, split, contexts=ContextSettings(length=length))
        return data_spec([found], seed=seed, global_batch_size=batch_size)
    if rows:
        raise PingLlmError(f"give either the folder {rows} or a configuration (--config, --set), not both")
    if split not in {"train", "eval"}:
        raise PingLlmError(f"--split {split!r}: write train or eval")
    return spec_from_config(load_config(config, changes or []), split)


def inspect_rows(
    path: PreparedRows,
    split: Split = "train",
    row: Annotated[int, Option(help="Row to decode.")] = 0,
    limit: Annotated[int, Option(min=0, help="Number of its measurements to show.")] = 8,
    quick: Annotated[bool, Option("--quick", help="Skip the check of the shards.")] = False,
    json_output: Json = False,
) -> None:
    """Show counts, row sizes, time span, families and timeouts of prepared rows, and one decoded row.

    Reads every shard and checks it against the manifest and the index; a fault is named and the command fails.

    Examples:

        ping-llm inspect rows data/probe_rows
        ping-llm inspect rows data/probe_rows --split eval --row 7 --limit 20 --json
    """
    from ping_llm.rows.dataset import RowSet
    from ping_llm.rows.summary import render, row_as_json, summarise

    summary = summarise(path)
    faults: list[str] = []
    shown = None
    with RowSet(path, split) as rows:
        if len(rows) and not -len(rows) <= row < len(rows):
            raise PingLlmError(f"{path} has {len(rows):,} rows in {split}; there is no row {row}")
        if not quick:
            total = sum(part["bytes"] for part in summary["splits"].values())
            with progress("checking shards (bytes)", total=total) as advance:
                for name in summary["splits"]:
                    with RowSet(path, name) as checked:
                        faults += checked.verify(advance)
        if len(rows) and not faults:
            shown = row_as_json(rows, row % len(rows), limit)
    summary |= {"verified": not quick and not faults, "faults": faults}
    verdict = ["\nAll shards match the index and the manifest."] if summary["verified"] else []
    show(summary | {"row": shown}, json_output, render(summary, row=shown, histograms=True), *verdict)
    if faults:
        raise PingLlmError(faults[0] + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))


def inspect_batches(
    spec: Any,
    steps: Annotated[str, Option(help="Steps to show, as first:end.")] = "0:10",
    hosts: Annotated[int, Option(min=1, help="Assemble each batch from the parts of this many hosts.")] = 1,
    workers: Annotated[int, Option(min=0, help="Worker processes for each host.")] = 0,
    digest: Annotated[bool, Option("--digest", help="Print a digest of each global batch.")] = False,
    backward: Annotated[bool, Option("--backward", help="Make the last batch first, each independently.")] = False,
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
    from ping_llm.batches import batch as arrays
    from ping_llm.batches.source import BatchSource
    from ping_llm.contexts.source import global_batches

    first, separator, last = steps.partition(":")
    if not (separator and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise PingLlmError(f"--steps {steps!r}: write first:end, such as 0:20")
    numbers = range(int(first), int(last))
    batches: Iterator[Batch] = global_batches(spec, numbers.start, numbers.stop, hosts=hosts, workers=workers)
    if backward:
        numbers = numbers[::-1]
        batches = map(BatchSource(spec).__getitem__, numbers)
    for step, batch in zip(numbers, batches, strict=True):
        segmentation = batch["inputs_segmentation"]
        shown: dict[str, Any] = {
            "step": step,
            "tokens": int((segmentation > 0).sum()),
            "padding": round(float((segmentation == 0).mean()), 5),
            "segments": int(segmentation.max(axis=1).sum()),
        }
        text = (
            f"step {step:6}  {shown['tokens']:,} tokens  {shown['segments']:,} segments  {shown['padding']:.2%} padding"
        )
        if digest:
            shown["digest"] = arrays.digest(batch)
            text = f"{step:6}  {shown['digest']}"
        show(shown, json_output, text)


def inspect_batch(
    spec: Any,
    step: Annotated[int, Option(min=0, help="Step of the batch.")] = 0,
    sequence: Annotated[int, Option(min=0, help="Sequence of the batch.")] = 0,
    json_output: Json = False,
) -> None:
    """Explain a sequence of a batch down to the last token: its rows, windows and modes, and its decoded measurements.

    Any batch of any past run can be made again from its rows, seed and shape, or from the run's config.yml.

    Examples:

        ping-llm inspect batch data/probe_rows --step 1200 --sequence 3
        ping-llm inspect batch --config runs/my-project/my-run/config.yml --step 1200
    """
    from ping_llm.batches.source import BatchSource
    from ping_llm.contexts.source import render

    if sequence >= (count := spec.global_batch_size):
        raise PingLlmError(f"a batch of {count} has sequences 0 to {count - 1}; there is no {sequence}")
    explained = BatchSource(spec).explain(step, sequence)
    if json_output:
        show(explained, json_output)
    else:
        out.print(render(explained), soft_wrap=True)  # token lines are not cut


def bench_pipeline(
    rows: Annotated[str, Option(help="`typical` or `big` simulated rows, or a prepared folder.")] = "typical",
    workers: Annotated[int, Option(min=0, help="Also measure what this many worker processes deliver.")] = 0,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seconds: Annotated[float, Option(min=0.5, help="How long to measure.")] = 10.0,
    json_output: Json = False,
) -> None:
    """Measure how fast batches of your rows are made in one process, stage by stage, and by worker processes.

    Examples:

        ping-llm bench pipeline --workers 2 --json
        ping-llm bench pipeline --rows big
    """
    from ping_llm.cli.benchmarks import benchmark_rows, measure_pipeline

    shape: dict[str, Any] = {"batch_size": batch_size, "length": length}
    with benchmark_rows(rows) as folder:
        found = measure_pipeline(folder, workers=workers, seconds=seconds, **shape)
    texts = {name: f"{value:,}" if type(value) in {int, float} else str(value) for name, value in found.items()}
    show(found, json_output, *(f"{name:28} {text}" for name, text in texts.items()))
