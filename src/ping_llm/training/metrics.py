"""The metrics of a run: its speed, and the files that record it.

`metrics.jsonl` has every step, TensorBoard and W&B one in `log_period`. `sessions.jsonl` has a line when the run begins
or resumes, which describes the machine, and one when it ends, with the error if there was one. A run that is killed
writes no line at its end.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from ping_llm import __version__
from ping_llm.config import Config
from ping_llm.core.errors import need
from ping_llm.runs import RunFolder, read_metrics

Record = dict[str, Any]

_PEAK_TFLOPS: Final = {
    "H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121,
    "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197, "TPU v5p": 459, "TPU v6 lite": 918,
}  # fmt: skip
"""Dense bfloat16 matmuls, by the makers' data sheets. The first name contained in the device's kind is the one."""

_WINDOW: Final = 20
"""Steps over which the speed in a record is averaged."""


def peak_flops(config: Config) -> float | None:
    """Peak FLOPs per second of one device; None if unknown."""
    if config.peak_tflops:
        return config.peak_tflops * 1e12
    kind = jax.devices()[0].device_kind
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS.items() if name in kind), None)


class Pace:
    """Real tokens per second, MFU, and the fraction of time spent waiting for data.

    Counts steps as their results come in. Compiling, evaluating and saving are not training time.
    """

    def __init__(self, flops_per_token: int, peak_flops: float | None) -> None:
        self._flops_per_token, self._peak = flops_per_token, peak_flops
        self._recent: deque[npt.NDArray[np.float64]] = deque(maxlen=_WINDOW)
        """Of each step: seconds, seconds waited for data, tokens."""
        self._total = np.zeros(3)
        self._last: float | None = None
        self._waited = 0.0

    def wait(self, seconds: float) -> None:
        self._waited += seconds

    def step(self, tokens: int) -> None:
        """To be called when a step's results arrive. The first step after a pause only starts the clock."""
        now = time.perf_counter()
        if self._last is not None:
            self._recent.append(np.array([now - self._last, self._waited, tokens]))
            self._total += self._recent[-1]
        self._last, self._waited = now, 0.0

    def pause(self) -> None:
        """The time until the next step's results is not training."""
        self._last = None

    def recent(self) -> dict[str, float | None]:
        return self._rates(sum(self._recent, start=np.zeros(3)))

    def overall(self) -> dict[str, float | None]:
        return self._rates(self._total)

    def _rates(self, numbers: npt.NDArray[np.float64]) -> dict[str, float | None]:
        seconds, waited, tokens = numbers.tolist()
        if seconds <= 0:
            return {"real_tokens_per_s": None, "mfu": None, "data_wait_fraction": None}
        rate = tokens / seconds
        return {
            "real_tokens_per_s": round(rate),
            "mfu": round(rate * self._flops_per_token / self._peak, 4) if self._peak else None,
            "data_wait_fraction": round(waited / seconds, 4),
        }


class Metrics:
    """Writes the records of a run, each step once: those after the checkpoint that a run resumes from are dropped."""

    def __init__(
        self, config: Config, folder: RunFolder, first_step: int, arithmetic: str, peak_flops: float | None
    ) -> None:
        # The step of an evaluation is the number of steps before it; that of a training record is the step itself.
        kept = [r for r in read_metrics(folder.metrics) if r["step"] < first_step + ("eval_loss" in r)]
        folder.write(folder.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = folder.metrics.open("a", buffering=1)
        self._folder = folder
        machine = {
            "devices": jax.device_count(),
            "device": jax.devices()[0].device_kind,
            "processes": jax.process_count(),
            "peak_flops": peak_flops,
            "ping_llm": __version__,
            "jax": jax.__version__,
            "python": sys.version.split()[0],
        }
        self._log_session({"event": "begin", "first_step": first_step, "arithmetic": arithmetic, **machine})
        self._writers: list[Callable[[Record], None]] = []
        self._closing = ExitStack()
        if config.enable_tensorboard:
            self._start_tensorboard()
        if config.wandb_mode != "off":
            self._start_wandb(config)

    def write(self, record: Record, *, everywhere: bool) -> None:
        self._file.write(json.dumps(record) + "\n")
        if everywhere:
            for write in self._writers:
                write(record)

    def close(self) -> None:
        self._file.close()
        error = sys.exception()  # the one that ends the run, if any
        self._log_session({"event": "end", "error": f"{type(error).__name__}: {error}"[:1000] if error else None})
        self._closing.close()

    def _log_session(self, event: Record) -> None:
        with self._folder.sessions.open("a") as file:
            file.write(json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}) + "\n")

    def _start_tensorboard(self) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:  # an extra: everything is in metrics.jsonl as well
            return
        writer = SummaryWriter(str(self._folder.tensorboard))

        def write(record: Record) -> None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name, value, record["step"])

        self._writers.append(write)
        self._closing.callback(writer.close)

    def _start_wandb(self, config: Config) -> None:
        wandb = need("wandb", "wandb", "wandb_mode")
        run = wandb.init(
            project=config.project,
            name=config.run_name,
            id=config.run_name,
            dir=str(self._folder.path),
            mode="online" if config.wandb_mode == "online" else "offline",
            resume="allow",
            config=config.to_store(),
        )

        def write(record: Record) -> None:
            run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

        self._writers.append(write)
        self._closing.callback(run.finish)


def draw_losses(folder: RunFolder) -> None:
    """`loss.png`: training loss (smoothed over a fiftieth of the run) and evaluation loss. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    records = read_metrics(folder.metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="cross entropy per token (nats)")
    axes.grid(alpha=0.3)
    if trained := [(r["step"] + 1, r["loss"]) for r in records if r.get("loss") is not None]:
        steps, losses = np.array(trained).T
        width = max(1, len(losses) // 50)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid"), label="training")
    if evaluated := [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]:
        axes.plot(*zip(*evaluated, strict=True), "o-", markersize=4, label="evaluation")
    if trained or evaluated:
        axes.legend()
    figure.savefig(folder.picture, dpi=150)
