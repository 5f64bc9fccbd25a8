"""Where numbers go: `metrics.jsonl` has every step, TensorBoard and W&B one in `log_period`.

`sessions.jsonl` has a line when the run begins or goes on, with its machine, and one when it ends, with the error if it
ended in one. A run that is killed says nothing at its end.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jax

from ping_llm import __version__
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.runs.devices import peak_flops
from ping_llm.runs.folder import RunFolder

Record = dict[str, Any]

SESSIONS: Final = "sessions.jsonl"


def read_metrics(file: Path) -> Iterator[Record]:
    """All whole lines; the last one may be cut off where a run was killed."""
    if not file.exists():
        return
    for line in file.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            yield json.loads(line)


class Metrics:
    """Writes the records of a run, each step once: those after the checkpoint that a run resumes from are dropped."""

    def __init__(self, config: Config, folder: RunFolder, first_step: int, arithmetic: str) -> None:
        kept = [record for record in read_metrics(folder.metrics) if _is_before(record, first_step)]
        folder.write(folder.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = folder.metrics.open("a", buffering=1)
        self._sessions = folder.path / SESSIONS
        self._say({"event": "begin", "first_step": first_step, "arithmetic": arithmetic, **_machine(config)})
        self._others: list[Callable[[Record], None]] = []
        self._closers: list[Callable[[], None]] = []
        if config.enable_tensorboard:
            self._start_tensorboard(folder)
        if config.wandb_mode != "off":
            self._start_wandb(config, folder)

    def write(self, record: Record, *, everywhere: bool) -> None:
        self._file.write(json.dumps(record) + "\n")
        if everywhere:
            for write in self._others:
                write(record)

    def close(self) -> None:
        self._file.close()
        error = sys.exception()  # what the run is ending in
        self._say({"event": "end", "error": f"{type(error).__name__}: {error}"[:1000] if error else None})
        for close in self._closers:
            close()

    def _say(self, event: Record) -> None:
        with self._sessions.open("a") as file:
            file.write(json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}) + "\n")

    def _start_tensorboard(self, folder: RunFolder) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:  # an extra: everything is in metrics.jsonl as well
            return
        writer = SummaryWriter(str(folder.tensorboard))

        def write(record: Record) -> None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name, value, record["step"])

        self._others.append(write)
        self._closers.append(writer.close)

    def _start_wandb(self, config: Config, folder: RunFolder) -> None:
        try:
            import wandb
        except ImportError:
            raise PingLlmError('wandb_mode needs the wandb package: pip install "ping-llm[wandb]"') from None
        run = wandb.init(
            project=config.project,
            name=config.run_name,
            id=config.run_name,
            dir=str(folder.path),
            mode="online" if config.wandb_mode == "online" else "offline",
            resume="allow",
            config=config.to_store(),
        )

        def write(record: Record) -> None:
            run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

        self._others.append(write)
        self._closers.append(run.finish)


def _machine(config: Config) -> Record:
    return {
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "peak_flops": peak_flops(config),
        "ping_llm": __version__,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def _is_before(record: Record, first_step: int) -> bool:
    """A training record's step is the one it belongs to; an evaluation's is the number of steps done before it."""
    return record["step"] < first_step or ("eval_loss" in record and record["step"] == first_step)
