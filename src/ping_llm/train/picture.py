"""The loss curve of a run as a picture."""

from pathlib import Path

import numpy as np

from ping_llm.train.metrics import read_metrics


def draw_losses(metrics: Path, picture: Path) -> bool:
    """Training loss (smoothed over a fiftieth of the run) and evaluation loss by step. False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = list(read_metrics(metrics))
    trained = [(r["step"] + 1, r["loss"]) for r in records if r.get("loss") is not None]
    evaluated = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if trained:
        steps, losses = np.array(trained).T
        width = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps[width - 1 :], smooth, color="tab:blue", label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="tab:orange", markersize=4, label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy a token (nats)")
    axes.grid(alpha=0.3)
    if trained or evaluated:
        axes.legend()
    figure.savefig(picture, dpi=150)
    return True
