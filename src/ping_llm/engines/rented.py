"""A command on a machine that is rented by the hour and may be taken away: what `modal.py` runs there.

Training is a program of its own, so that it can be asked to save (SIGTERM) when the time is over or the machine is
taken away. Whenever it has saved, `commit` makes that safe.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ping_llm.errors import PingLlmError

_LOOK_EVERY_S: Final = 2.0
_SAVING_S: Final = 25.0
"""For the last checkpoint when the machine is taken away; Modal gives 30 s."""

_DONE, _WRONG_INPUT = 0, 1


class NotFinishedError(Exception):
    """The run has been saved, and there is more to do: call again, and it goes on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    config: str
    """The configuration, as YAML."""
    run: Path
    """The run's folder."""
    options: tuple[str, ...] = ()
    """More options of `ping-llm train`."""
    seconds: float
    """How long it may take; it saves and ends, then."""


def train_rented(job: Job, commit: Callable[[], None]) -> dict[str, Any]:
    """Train until it is done, and return the summary.

    What the user must mend is a `PingLlmError`: trying again does not help. Everything else, from the end of the
    allotted time to a crash, is a `NotFinishedError` after which to call again.
    """
    file = job.run.parent / f".{job.run.name}.yml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(job.config)
    command = [sys.executable, "-m", "ping_llm", "train", "--config", str(file), "--json", *job.options]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        _look_after(training, job, commit)
    except BaseException:  # the machine is being taken away
        _stop(training)
        commit()
        raise
    output = training.communicate()[0]
    commit()
    if training.returncode == _WRONG_INPUT:
        raise PingLlmError("the run could not go on; its last lines above say why")
    if training.returncode != _DONE:
        raise NotFinishedError(f"training ended with code {training.returncode}")
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    if not summary["complete"]:
        raise NotFinishedError(f"saved after {summary['steps']:,} steps; there are more to do")
    return summary


def _look_after(training: "subprocess.Popen[str]", job: Job, commit: Callable[[], None]) -> None:
    end = time.monotonic() + job.seconds
    saved = saved_steps(job.run)
    asked = False
    while training.poll() is None:
        time.sleep(_LOOK_EVERY_S if end - time.monotonic() > _LOOK_EVERY_S else 0.1)
        now = saved_steps(job.run)
        if now - saved:
            commit()
        saved = now
        if not asked and time.monotonic() > end:
            training.terminate()
            asked = True


def saved_steps(run: Path) -> set[int]:
    """Checkpoints that are whole: one that is being written has another name."""
    return {int(path.name) for path in (run / "checkpoints").glob("[0-9]*") if path.name.isdecimal()}


def _stop(training: "subprocess.Popen[str]") -> None:
    training.terminate()
    try:
        training.wait(_SAVING_S)
    except subprocess.TimeoutExpired:
        training.kill()
        training.wait()


def sync_wandb(run: Path, tool: Sequence[str] = ("wandb",)) -> bool:
    """Send what a run kept for Weights & Biases; its parts are sent in their order. Whether that worked."""
    parts = sorted(str(path) for path in (run / "wandb").glob("offline-run-*"))
    return not parts or subprocess.run([*tool, "sync", *parts], check=False).returncode == 0
