"""The key figures of a run, how it stands, and what somebody who looks at it should know."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import numpy as np

from ping_llm.config.keys import TEXT_DATASET_TYPES
from ping_llm.data.completer import COMPLETER_DATA
from ping_llm.report.charts import Floats, smoothing_window
from ping_llm.report.formatting import number, percent
from ping_llm.report.run import Run

Tone = Literal["good", "warn", "bad", "plain"]

_SILENCE: Final = timedelta(minutes=10)
"""A run that wrote nothing for so long is not running any more."""
_LONG_WAIT: Final = 0.05
_MUCH_PADDING: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Figures:
    """None where it is unknown."""

    loss: float | None
    """The mean of the last fiftieth of the steps."""
    eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: int | None
    tokens: float
    tokens_per_s: float | None
    mfu: float | None
    data_wait: float | None
    padding: float | None
    batch: int | None
    parameters: int | None
    flops_per_token: int | None
    flops: float | None
    time: timedelta | None
    """Spent in sessions whose end is known."""


def figures_of(run: Run) -> Figures:
    curves, summary = run.curves, run.summary
    last_losses = _finite(curves["loss"][-smoothing_window(len(curves.step)) :])
    evaluated = np.flatnonzero(np.isfinite(curves.eval_loss))
    best = evaluated[np.argmin(curves.eval_loss[evaluated])] if len(evaluated) else None
    parameters, flops_per_token = _size(run)
    batch = run.data.identity.get("global_batch_size") if run.data else None
    batch = batch if isinstance(batch, int) else None
    padding = _finite(padding_by_step(run, batch))
    tokens = float(np.nansum(curves["real_tokens"]))
    known = [session.ended - session.begun for session in run.sessions if session.begun and session.ended]
    return Figures(
        loss=float(last_losses.mean()) if len(last_losses) else None,
        eval_loss=float(curves.eval_loss[evaluated[-1]]) if len(evaluated) else None,
        best_eval_loss=None if best is None else float(curves.eval_loss[best]),
        best_eval_step=None if best is None else int(curves.evaluated_at[best]),
        tokens=tokens,
        tokens_per_s=_either(summary.get("real_tokens_per_s"), curves["real_tokens_per_s"]),
        mfu=_either(summary.get("mfu"), curves["mfu"]),
        data_wait=_either(summary.get("data_wait_fraction"), curves["data_wait_fraction"]),
        padding=float(padding.mean()) if len(padding) else run.pipeline["padding_fraction"] if run.pipeline else None,
        batch=batch,
        parameters=parameters,
        flops_per_token=flops_per_token,
        flops=flops_per_token * tokens if flops_per_token and tokens else None,
        time=sum(known, timedelta()) if known else None,
    )


def token_word(run: Run) -> str:
    """What the run counts: a completer has positions of a context where a language model has tokens."""
    return "position" if run.dataset_type in COMPLETER_DATA else "token"


def loss_unit(run: Run) -> str:
    """What its loss is a mean over."""
    return "question" if run.dataset_type in COMPLETER_DATA else "token"


def kind_of(run: Run) -> str:
    if run.dataset_type in COMPLETER_DATA:
        return "completer"
    return "language model of text" if run.dataset_type in TEXT_DATASET_TYPES else "language model"


def padding_by_step(run: Run, batch: int | None) -> Floats:
    """Of a language model; a completer's contexts differ in size by intent. NaN where it is unknown."""
    length = run.settings.get("max_target_length")
    if run.dataset_type in COMPLETER_DATA or batch is None or not isinstance(length, int):
        return np.full(len(run.curves.step), np.nan)
    return 1 - run.curves["real_tokens"] / (batch * length)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _either(said: object, seen: Floats) -> float | None:
    """What the summary says, or the median of what was seen so far."""
    if isinstance(said, int | float):
        return float(said)
    return float(np.median(_finite(seen))) if len(_finite(seen)) else None


def _size(run: Run) -> tuple[int | None, int | None]:
    """Parameters, and FLOPs per token in training. No device is used: it may be training something else."""
    from ping_llm.data.completer import world_settings
    from ping_llm.runs.trained import completer_settings, model_settings

    stored = run.summary.get("parameters")
    parameters = stored if isinstance(stored, int) else None
    if not run.config:
        return parameters, None
    try:
        if run.dataset_type in COMPLETER_DATA:
            completer, worlds = completer_settings(run.config), world_settings(run.config)
            flops = completer.flops_per_context(worlds.context, worlds.questions)
            return parameters or completer.parameters, flops // (worlds.context + worlds.questions)
        model = model_settings(run.config)
        return parameters or model.parameters, model.flops_per_token(run.config.max_target_length)
    except Exception:  # the tokenizer that says how large the vocabulary is may be gone
        return parameters, None


@dataclass(frozen=True, kw_only=True)
class Status:
    word: str
    tone: Tone
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    tone: Tone
    text: str


def status_of(run: Run) -> Status:
    last = run.sessions[-1] if run.sessions else None
    if last and last.error and "KeyboardInterrupt" not in last.error:
        return Status(word="failed", tone="bad", sentence=last.error)
    if not last or last.ended:
        if run.summary.get("complete"):
            return Status(word="complete", tone="good")
        if last or run.summary:
            by = "by a signal" if run.summary.get("stopped_by_signal") else "before its end"
            return Status(word="stopped", tone="warn", sentence=f"It was stopped {by}; the same command resumes it.")
    written = run.last_written
    if written and datetime.now(UTC) - written < _SILENCE:
        return Status(word="running", tone="plain", sentence=f"Its last numbers came at {written:%H:%M:%S} UTC.")
    since = f" since {written:%Y-%m-%d %H:%M} UTC" if written else ""
    sentence = f"It has written nothing{since} and did not say why: killed, or its machine is gone."
    return Status(word="interrupted", tone="bad", sentence=sentence)


def notes_of(run: Run, found: Figures) -> list[Note]:
    faults = [Note(tone="bad", text=text) for text in _faults(run)]
    return faults + [Note(tone="warn", text=text) for text in _concerns(run, found)]


def _faults(run: Run) -> Iterator[str]:
    yield from run.problems
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        broken = run.curves.step[~np.isfinite(run.curves[name])]
        if len(broken):
            more = f", and of {len(broken) - 1:,} more" if len(broken) > 1 else ""
            yield f"The {word} of step {int(broken[0]):,}{more} is not a number."
    if (run.folder / "damaged-checkpoints").is_dir():
        yield "A checkpoint was damaged and set aside; the run resumed from the one before."
    if run.pipeline and run.pipeline.get("corrupt_rows"):
        yield f"{run.pipeline['corrupt_rows']:,} rows could not be read and were left out."


def _concerns(run: Run, found: Figures) -> Iterator[str]:
    if not len(run.curves.step):
        yield "No step has been finished yet."
    if found.data_wait is not None and found.data_wait > _LONG_WAIT:
        advice = f": {run.pipeline['advice']}" if run.pipeline and run.pipeline["bottleneck"] != "consumer" else ""
        yield f"Training waited for data {percent(found.data_wait)} of the time{advice}."
    if found.padding is not None and found.padding > _MUCH_PADDING:
        yield f"{percent(found.padding)} of all positions were padding; the pipeline aims at 2 %."
    if found.eval_loss is not None and found.best_eval_loss and found.eval_loss > 1.01 * found.best_eval_loss:
        best = f"{found.best_eval_step:,} ({number(found.best_eval_loss)})"
        yield f"The evaluation loss was lowest at step {best} and has risen to {number(found.eval_loss)} since."
    if run.settings.get("allow_data_change"):
        yield "allow_data_change was set: the data may have changed during the run."
