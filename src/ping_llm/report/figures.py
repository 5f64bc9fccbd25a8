"""The key figures of a run, how it stands, and what somebody who looks at it should know."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ping_llm.core.rtt import Floats
from ping_llm.report.formatting import number, percent
from ping_llm.report.run import Run
from ping_llm.runs.task import size_of

Tone = Literal["good", "warn", "bad", "plain"]

_SILENCE: Final = timedelta(minutes=10)
"""A run that wrote nothing for so long is not running any more."""
_LONG_WAIT: Final = 0.05
_MUCH_PADDING: Final = 0.02


def figures_of(run: Run) -> dict[str, Any]:
    """None where it is unknown. `loss` is the mean of the last steps, `time` that of sessions whose end is known."""
    curves, summary, eval_loss = run.curves, run.summary, run.curves["eval_loss"]
    last_losses, padding = _finite(curves["loss"][-run.window :]), _finite(run.padding)
    evaluated = np.flatnonzero(np.isfinite(eval_loss))
    best = evaluated[np.argmin(eval_loss[evaluated])] if len(evaluated) else None
    parameters, flops_per_token = run.summary.get("parameters"), None
    with suppress(Exception):  # the tokenizer that says how large the vocabulary is may be gone
        parameters, flops_per_token = size_of(run.config) if run.config else (parameters, None)
    tokens = float(np.nansum(curves["real_tokens"]))
    known = [session.ended - session.begun for session in run.sessions if session.begun and session.ended]
    return {
        "loss": float(last_losses.mean()) if len(last_losses) else None,
        "eval_loss": float(eval_loss[evaluated[-1]]) if len(evaluated) else None,
        "best_eval_loss": None if best is None else float(eval_loss[best]),
        "best_eval_step": None if best is None else int(curves["evaluated_at"][best]),
        "tokens": tokens,
        "tokens_per_s": _either(summary.get("real_tokens_per_s"), curves["real_tokens_per_s"]),
        "mfu": _either(summary.get("mfu"), curves["mfu"]),
        "data_wait": _either(summary.get("data_wait_fraction"), curves["data_wait_fraction"]),
        "padding": float(padding.mean()) if len(padding) else (run.pipeline or {}).get("padding_fraction"),
        "parameters": parameters,
        "flops_per_token": flops_per_token,
        "flops": flops_per_token * tokens if flops_per_token and tokens else None,
        "time": sum(known, timedelta()) if known else None,
    }


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _either(said: object, seen: Floats) -> float | None:
    """What the summary says, or the median of what was seen so far."""
    if isinstance(said, int | float):
        return float(said)
    return float(np.median(_finite(seen))) if len(_finite(seen)) else None


class Note(NamedTuple):
    """Something to know about a run. That of its status has a word for it."""

    tone: Tone
    text: str
    word: str = ""


def status_of(run: Run) -> Note:
    last = run.sessions[-1] if run.sessions else None
    if last and last.error and "KeyboardInterrupt" not in last.error:
        return Note("bad", last.error, "failed")
    if not last or last.ended:
        if run.summary.get("complete"):
            return Note("good", "", "complete")
        if last or run.summary:
            by = "by a signal" if run.summary.get("stopped_by_signal") else "before its end"
            return Note("warn", f"It was stopped {by}; the same command resumes it.", "stopped")
    written = run.last_written
    if written and datetime.now(UTC) - written < _SILENCE:
        return Note("plain", f"Its last numbers came at {written:%H:%M:%S} UTC.", "running")
    since = f" since {written:%Y-%m-%d %H:%M} UTC" if written else ""
    text = f"It has written nothing{since} and did not say why: killed, or its machine is gone."
    return Note("bad", text, "interrupted")


def notes_of(run: Run, found: Mapping[str, Any]) -> list[Note]:
    """Faults, then what gives cause for concern."""
    faults, concerns = list(run.problems), []
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        broken = run.curves["step"][~np.isfinite(run.curves[name])]
        if len(broken):
            more = f", and of {len(broken) - 1:,} more" if len(broken) > 1 else ""
            faults.append(f"The {word} of step {int(broken[0]):,}{more} is not a number.")
    if (run.folder / "damaged-checkpoints").is_dir():
        faults.append("A checkpoint was damaged and set aside; the run resumed from the one before.")
    if run.pipeline and run.pipeline.get("corrupt_rows"):
        faults.append(f"{run.pipeline['corrupt_rows']:,} rows could not be read and were left out.")
    if not len(run.curves["step"]):
        concerns.append("No step has been finished yet.")
    if (waited := found["data_wait"] or 0) > _LONG_WAIT:
        advice = f": {run.pipeline['advice']}" if run.pipeline and run.pipeline["bottleneck"] != "consumer" else ""
        concerns.append(f"Training waited for data {percent(waited)} of the time{advice}.")
    if (found["padding"] or 0) > _MUCH_PADDING:
        concerns.append(f"{percent(found['padding'])} of all positions were padding; the pipeline aims at 2 %.")
    now, best = found["eval_loss"], found["best_eval_loss"]
    if now is not None and best and now > 1.01 * best:
        at = f"{found['best_eval_step']:,} ({number(best)})"
        concerns.append(f"The evaluation loss was lowest at step {at} and has risen to {number(now)} since.")
    if run.settings.get("allow_data_change"):
        concerns.append("allow_data_change was set: the data may have changed during the run.")
    return [*(Note("bad", text) for text in faults), *(Note("warn", text) for text in concerns)]
