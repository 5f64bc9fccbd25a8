"""Evaluation loss against compute: `python bench/scaling.py RUN… --output docs/images/scaling.png`.

Train the runs first, with equal tokens and different sizes; docs/training.md has the commands. Compute is what the
trainer counts: tokens × floating-point operations a token.
"""

import argparse
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ping_llm.config import load_config
from ping_llm.runs import read_metrics
from ping_llm.runs.weights import model_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("scaling.png"))
    options = parser.parse_args()
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in options.runs:
        config = load_config(run / "config.yml")
        settings = model_settings(config)
        flops = settings.flops_per_token(config.max_target_length)
        tokens, points = 0, []
        for record in read_metrics(run / "metrics.jsonl"):
            tokens += record.get("real_tokens", 0)
            if "eval_loss" in record:
                points.append((tokens * flops, record["eval_loss"]))
        label = f"{settings.parameters / 1e6:.1f} M parameters"
        axes.plot(*zip(*points, strict=True), "o-", label=label)
        sys.stdout.write(f"{label}: {tokens / 1e6:.1f} M tokens, {points[-1][0]:.2e} FLOP, loss {points[-1][1]:.4f}\n")
    axes.set_xscale("log")
    axes.set_xlabel("training compute (FLOP)")
    axes.set_ylabel("evaluation loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
