"""How the cost of preparing and of loading grows with the data: `python bench/scale.py --output docs/images/scale.png`.

Preparation is `ping-llm prepare` on simulated measurements, from the start of the program to its end. Loading is a
fresh process that opens prepared rows, takes the first batch of 64 × 1024 and then batches for some seconds. Every
point is a process of its own. A straight line through the logarithms gives the exponent: 1 is a cost that grows as the
data does, 0 one that does not grow.

The default sizes take some ten minutes on two cores and 6 GB of disk: choose others with --measurements and --rows.
Results go to standard output as tables and, with --json, to a file, from which --draw makes the figure again.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prepare_speed import run_measured

PROGRAM: Final = [sys.executable, "-m", "ping_llm"]
MEASUREMENTS_PER_ROW: Final = 4
"""Short histories: what costs in loading is the number of rows."""
LOADING_SECONDS: Final = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", nargs="*", type=float, default=[1e6, 10e6, 50e6], help="sizes to prepare")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="*", type=float, default=[1e4, 1e6, 1e7], help="sizes to load")
    parser.add_argument("--memory-limit-gb", type=float, default=4.0, help="limit given to prepare")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--output", type=Path, help="the figure")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--draw", type=Path, help="results of an earlier run, to draw instead of measuring")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the process that loads
    options = parser.parse_args()
    if options.load:
        sys.stdout.write(json.dumps(load(options.load)) + "\n")
        return
    if options.draw:
        results = json.loads(options.draw.read_text())
    else:
        scratch = Path(tempfile.mkdtemp(prefix="ping-llm-scale-", dir=options.scratch))
        try:
            results = measure(options, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(tables(results))
    if options.output:
        draw(results, options.output)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {"prepare": [], "load": []}
    for size in sorted(map(int, options.measurements)):
        simulate(scratch / "raw", size)
        for workers in options.workers:
            results["prepare"].append(prepare(scratch, size, workers, options.memory_limit_gb))
            say(results["prepare"][-1])
        shutil.rmtree(scratch / "raw")
    for size in sorted(map(int, options.rows)):
        simulate(scratch / "raw", MEASUREMENTS_PER_ROW * size, f"measurements_per_source={MEASUREMENTS_PER_ROW}")
        run_measured(
            [*PROGRAM, "prepare", "-i", str(scratch / "raw"), "-o", str(scratch / "rows"), "--train-ratio", "1"]
        )
        shutil.rmtree(scratch / "raw")
        measured = run_measured([sys.executable, __file__, "--load", str(scratch / "rows")])
        results["load"].append({**json.loads(measured.output), "peak_rss_mb": round(measured.peak_rss_mb)})
        say(results["load"][-1])
        shutil.rmtree(scratch / "rows")
    return results


def simulate(folder: Path, measurements: int, *settings: str) -> None:
    extra = [word for setting in settings for word in ("--set", setting)]
    run_measured([*PROGRAM, "simulate", "-n", str(measurements), "-o", str(folder), *extra])


def prepare(scratch: Path, measurements: int, workers: int, memory_limit_gb: float) -> dict[str, Any]:
    command = [*PROGRAM, "prepare", "--input", str(scratch / "raw"), "--output", str(scratch / "rows"), "--json"]
    command += ["--workers", str(workers), "--memory-limit-gb", str(memory_limit_gb)]
    measured = run_measured(command)
    stages = {stage["stage"]: stage["task_s"] for stage in json.loads(measured.output)["stages"]}
    rows_bytes = sum(path.stat().st_size for path in (scratch / "rows").iterdir())
    shutil.rmtree(scratch / "rows")
    return {
        "measurements": measurements,
        "workers": workers,
        "seconds": round(measured.seconds, 2),
        "partition_s": stages["partition"],
        "shard_s": stages["shard"],
        "peak_rss_mb": round(measured.peak_rss_mb),
        "output_mb": round(rows_bytes / 1e6),
    }


def load(folder: Path) -> dict[str, Any]:
    """Runs in its own process. What was allocated is told apart from what is only mapped, which the system may drop."""
    from ping_llm.batches.loader import Loader
    from ping_llm.batches.spec import LoaderSettings
    from ping_llm.contexts.spec import RowsSpec, data_spec

    before = private_mb()
    started = time.perf_counter()
    spec = data_spec([RowsSpec.find(str(folder), "train")])
    with Loader(spec, LoaderSettings(worker_count=0)) as loader:
        next(loader)
        first_batch_s = time.perf_counter() - started
        plan_mb = private_mb() - before
        for seconds in (1.0, LOADING_SECONDS):
            loader.report.reset()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                next(loader)
        report = loader.report.to_json()
    from ping_llm.rows.dataset import RowSet

    with RowSet(folder) as opened:
        count = len(opened)
    return {
        "rows": count,
        "first_batch_s": round(first_batch_s, 3),
        "plan_mb": round(plan_mb, 1),
        "tokens_per_s": round(report["real_tokens_per_s"]),
    }


def private_mb() -> float:
    """Memory of this process that is its own: neither files that are mapped nor libraries that are shared."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e6


def exponent(sizes: list[float], costs: list[float]) -> float:
    """The slope of the straight line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


PREPARE: Final = {
    "seconds": "time, s",
    "partition_s": "step one, core-s",
    "shard_s": "step two, core-s",
    "peak_rss_mb": "peak memory, MB",
}
LOAD: Final = {
    "first_batch_s": "first batch, s",
    "plan_mb": "memory of the plan, MB",
    "peak_rss_mb": "peak memory, mapped files included, MB",
    "tokens_per_s": "tokens/s, one process",
}


def tables(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for workers in sorted({point["workers"] for point in results["prepare"]}):
        points = [point for point in results["prepare"] if point["workers"] == workers]
        lines += table(f"measurements, {workers} worker(s)", "measurements", points, PREPARE)
    if results["load"]:
        lines += table("rows", "rows", results["load"], LOAD)
    return "\n".join(lines) + "\n"


def table(title: str, size: str, points: list[dict[str, Any]], columns: dict[str, str]) -> list[str]:
    lines = [f"| {title} | " + " | ".join(columns.values()) + " |", "|" + "---:|" * (1 + len(columns))]
    for point in points:
        lines.append(f"| {point[size]:,} | " + " | ".join(f"{point[name]:,}" for name in columns) + " |")
    if len(points) > 1:
        slopes = [exponent([p[size] for p in points], [p[name] for p in points]) for name in columns]
        lines.append("| *exponent* | " + " | ".join(f"*{slope:.2f}*" for slope in slopes) + " |")
    return [*lines, ""]


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for workers in sorted({point["workers"] for point in results["prepare"]}):
        points = [point for point in results["prepare"] if point["workers"] == workers]
        sizes = [point["measurements"] for point in points]
        label = f"{workers} worker" + "s" * (workers > 1)
        curve(left, sizes, [point["seconds"] for point in points], label)
        middle.plot(sizes, [point["peak_rss_mb"] for point in points], "o-", label=label)
    left.set(title="prepare: seconds", xlabel="measurements", xscale="log", yscale="log")
    middle.set(title="prepare: peak memory, MB", xlabel="measurements", xscale="log", ylim=(0, None))
    if results["load"]:
        sizes = [point["rows"] for point in results["load"]]
        curve(right, sizes, [point["first_batch_s"] for point in results["load"]], "first batch, s")
        curve(right, sizes, [point["plan_mb"] / 1000 for point in results["load"]], "memory of the plan, GB")
    right.set(title="load", xlabel="rows", xscale="log", yscale="log")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def curve(axes: Any, sizes: list[float], costs: list[float], label: str) -> None:
    slope = f" (exponent {exponent(sizes, costs):.2f})" if len(sizes) > 1 else ""
    axes.plot(sizes, costs, "o-", label=label + slope)


def say(point: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps(point) + "\n")


if __name__ == "__main__":
    main()
