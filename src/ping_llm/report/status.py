"""How a run stands, and what somebody should know who looks at it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import numpy as np

from ping_llm.report.figures import Figures
from ping_llm.report.reading import Run
from ping_llm.report.scales import shown

Tone = Literal["good", "warn", "bad", "plain"]

_SILENCE: Final = timedelta(minutes=10)
"""A run that wrote nothing for so long is not going on."""
_LONG_WAIT: Final = 0.05
_MUCH_PADDING: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Status:
    word: str
    tone: Tone
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    tone: Tone
    text: str


def status_of(run: Run, now: datetime | None = None) -> Status:
    last = run.sessions[-1] if run.sessions else None
    if last and last.error and "KeyboardInterrupt" not in last.error:
        return Status(word="failed", tone="bad", sentence=last.error)
    if last and not last.ended:
        return _silent(run, now or datetime.now(UTC))
    if run.summary.get("complete"):
        return Status(word="complete", tone="good")
    if last or run.summary:
        by = "by a signal" if run.summary.get("stopped_by_signal") else "before its end"
        return Status(word="stopped", tone="warn", sentence=f"It was stopped {by}; the same command goes on with it.")
    return _silent(run, now or datetime.now(UTC))


def _silent(run: Run, now: datetime) -> Status:
    sign = run.last_sign
    if sign and now - sign < _SILENCE:
        return Status(word="running", tone="plain", sentence=f"Its last numbers came at {sign:%H:%M:%S} UTC.")
    since = f" since {sign:%Y-%m-%d %H:%M} UTC" if sign else ""
    return Status(
        word="interrupted",
        tone="bad",
        sentence=f"It has written nothing{since} and did not say why: killed, or its machine is gone.",
    )


def notes_of(run: Run, found: Figures) -> list[Note]:
    return [Note(tone="bad", text=text) for text in _faults(run)] + [
        Note(tone="warn", text=text) for text in _concerns(run, found)
    ]


def _faults(run: Run) -> Iterator[str]:
    yield from run.problems
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        broken = run.curves.step[~np.isfinite(run.curves[name])]
        if len(broken):
            more = f", and of {len(broken) - 1:,} more" if len(broken) > 1 else ""
            yield f"The {word} of step {int(broken[0]):,}{more} is not a number."
    if (run.folder / "damaged-checkpoints").is_dir():
        yield "A checkpoint was damaged and set aside; the run went on from the one before."
    if run.pipeline and run.pipeline.get("corrupt_rows"):
        yield f"{run.pipeline['corrupt_rows']:,} rows could not be read and were left out."


def _concerns(run: Run, found: Figures) -> Iterator[str]:
    if not len(run.curves.step):
        yield "No step has been finished yet."
    if found.data_wait is not None and found.data_wait > _LONG_WAIT:
        advice = f": {run.pipeline['advice']}" if run.pipeline and run.pipeline["bottleneck"] != "consumer" else ""
        yield f"Training waited for data {shown(found.data_wait, 'percent')} of the time{advice}."
    if found.padding is not None and found.padding > _MUCH_PADDING:
        yield f"{shown(found.padding, 'percent')} of all places were padding; the pipeline aims at 2 %."
    if found.eval_loss is not None and found.best_eval_loss and found.eval_loss > 1.01 * found.best_eval_loss:
        yield (
            f"The evaluation loss was lowest at step {found.best_eval_step:,} ({shown(found.best_eval_loss)}) and has "
            f"risen to {shown(found.eval_loss)} since."
        )
    if run.settings.get("allow_data_change"):
        yield "allow_data_change was set: the data may have changed on the way."
