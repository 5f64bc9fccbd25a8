"""`ping-llm bench`: the speed of the parts on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ping_llm.cli.options import BatchSize, Json, Length, Workers, print_json
from ping_llm.core.console import out
from ping_llm.core.errors import PingLlmError


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
    from ping_llm.benchmarks.prepare_speed import PrepareBenchmark

    if scratch is not None and not scratch.is_dir():
        raise PingLlmError(f"--scratch {scratch}: no such folder")
    benchmark = PrepareBenchmark(
        measurements=measurements, workers=workers, memory_limit_gb=memory_limit_gb, scratch=scratch
    )
    _show(benchmark.run(), json_output)


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


def bench_backends(
    data: Annotated[Path, typer.Option(help="A small sample of C4, laid out as docs/backends.md says.")] = Path(
        "../shared/data/c4-minimal"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Measure this one only; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes, of those that use any.")] = 0,
    batch_size: BatchSize = 64,
    length: Length = 1024,
    seconds: Annotated[float, typer.Option(min=0.2, help="How long to measure each.")] = 5.0,
    json_output: Json = False,
) -> None:
    """Speed of all input backends on the same documents, beside a tokenizer that takes one document at a time.

    Backends whose packages are not installed are left out, and named.

    Example:

      ping-llm bench backends --json
    """
    from ping_llm.benchmarks.backends import BackendsBenchmark

    benchmark = BackendsBenchmark(
        data=data, workers=workers, batch_size=batch_size, length=length, seconds=seconds, only=tuple(only or ())
    )
    result = benchmark.run()
    measured = {} if json_output else result.pop("backends")
    _show(result, json_output)
    for name, numbers in measured.items():
        rate = numbers.get("tokens_per_core_s", numbers.get("real_tokens_per_s"))
        _show({name: numbers.get("skipped", rate)}, json_output)


def _show(result: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(result)
        return
    for name, value in result.items():
        shown = f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        out.print(f"{name:28} {shown}")
