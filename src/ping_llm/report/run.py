"""The folder of a run, of which most files may be missing, truncated or damaged; and what follows from them: key
figures, the status of the run, and warnings.

A file that does not have the expected form is left out, and named in `Run.problems`.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Required

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from ping_llm.batches.spec import DataState
from ping_llm.config import Config, load_config
from ping_llm.config.keys import COMPLETER_DATA, SECRETS, TEXT_DATASET_TYPES
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats
from ping_llm.evaluate.scores import EVALUATION_FILE, ORACLE
from ping_llm.report.formatting import number, percent
from ping_llm.runs import RunFolder, parse_json, read_lines

PIPELINE_FILE: Final = "pipeline.json"
DATA_FILE: Final = "data.json"
_SILENCE: Final = timedelta(minutes=10)  # a run that wrote nothing for this long is not running any more
_LONG_WAIT: Final = 0.05
_MUCH_PADDING: Final = 0.02
_COLUMNS = "loss", "grad_norm", "learning_rate", "real_tokens", "real_tokens_per_s", "mfu", "data_wait_fraction"

Scores = Mapping[str, float | None]


def median_error(scores: Scores) -> float:
    value = scores.get("median_re")
    return math.inf if value is None else value


@with_config(ConfigDict(extra="allow"))
class _Stage(TypedDict):
    ms_per_batch: FiniteFloat
    share: FiniteFloat


@with_config(ConfigDict(extra="allow"))
class StoredPipeline(TypedDict, total=False):
    """The part of `PipelineReport.to_json` that the page needs."""

    stages: Required[dict[str, _Stage]]
    bottleneck: Required[str]
    advice: Required[str]
    batches: Required[int]
    workers: Required[int]
    wait_share: Required[FiniteFloat]
    real_tokens_per_s: Required[FiniteFloat]
    padding_fraction: Required[FiniteFloat]
    first_batch_s: FiniteFloat
    corrupt_rows: int


class StoredEvaluation(BaseModel):
    """The result of `Evaluation.to_store`, or the scores alone."""

    protocols: dict[str, dict[str, dict[str, FiniteFloat | None]]]
    models: list[str] = []
    names: dict[str, str] = {}
    shares: list[FiniteFloat] = []
    curves: dict[str, dict[str, dict[str, list[FiniteFloat]]]] = {}

    @property
    def model(self) -> str:
        """The predictor that is the run's own model."""
        return (self.models or ["model"])[0]

    def title(self, predictor: str) -> str:
        return "the truth" if predictor == ORACLE else self.names.get(predictor, predictor.replace("_", " "))

    def best_baseline(self, protocol: str) -> str | None:
        """The classical predictor with the lowest median error."""
        scores = self.protocols[protocol]
        others = {self.model, ORACLE, *self.models}
        rivals = [name for name in scores if name not in others and median_error(scores[name]) < math.inf]
        return min(rivals, key=lambda name: median_error(scores[name]), default=None)

    def verdict(self, protocol: str) -> str:
        """The model against the best of the classical predictors, by the median relative error."""
        best, scores = self.best_baseline(protocol), self.protocols[protocol]
        own = median_error(scores.get(self.model, {}))
        if own == math.inf or best is None:
            return ""
        rival = median_error(scores[best])
        order = "as good as" if own == rival else "better than" if own < rival else "worse than"
        return (
            f"{self.title(self.model)}: median error {percent(own)}, {order} the best of the classical predictors "
            f"({self.title(best)}, {percent(rival)})"
        )


def _curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """Columns with a value for each step (NaN: none), and `evaluated_at` and `eval_loss` of each evaluation."""
    evaluated = [record for record in records if "eval_loss" in record]
    trained = [record for record in records if "loss" in record and "eval_loss" not in record]
    curves = {name: np.array([_number(record.get(name)) for record in trained]) for name in ("step", *_COLUMNS)}
    at, loss = (np.array([_number(record[name]) for record in evaluated]) for name in ("step", "eval_loss"))
    return {**curves, "step": curves["step"] + 1, "evaluated_at": at, "eval_loss": loss}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True, kw_only=True)
class Session:
    """One execution of the program. A killed one does not record its end."""

    begun: datetime | None
    ended: datetime | None = None
    first_step: int
    error: str | None = None
    machine: Mapping[str, Any]


def _sessions_of(events: Sequence[Mapping[str, Any]]) -> list[Session]:
    found: list[Session] = []
    for event in events:
        if event.get("event") == "begin":
            machine = {key: value for key, value in event.items() if key not in ("event", "time", "first_step")}
            first = event["first_step"] if isinstance(event.get("first_step"), int) else 0
            found.append(Session(begun=_time(event), first_step=first, machine=machine))
        elif event.get("event") == "end" and found:
            error = event.get("error")
            found[-1] = replace(found[-1], ended=_time(event), error=None if error is None else str(error))
    return found


def _time(event: Mapping[str, Any]) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read_as(form: Any, text: str) -> Any:
    """JSON that must have this form."""
    return TypeAdapter(form).validate_python(parse_json(text), strict=True)


class Words(NamedTuple):
    """The name of a kind of model, what it counts, and what its loss is averaged over."""

    kind: str
    token: str = "token"
    question: str = "token"


class Note(NamedTuple):
    """A remark about a run; its status has a word too."""

    tone: Literal["good", "warn", "bad", "plain"]
    text: str
    word: str = ""


class Run:
    """What is known about a run. `evaluation` is a file of `ping-llm evaluate --json`, to use instead of its own."""

    def __init__(self, folder: Path, evaluation: Path | None = None) -> None:
        where = RunFolder(folder)
        if not where.config.is_file():
            raise PingLlmError(f"{folder} is not the folder of a run: there is no {where.config.name} in it")
        if (folder / "model.safetensors.index.json").exists():
            raise PingLlmError(f"{folder} is an exported model: give the folder of its run")
        self.folder, self.name = folder, folder.resolve().name
        self.label = self.name  # in a comparison of runs, see `distinct_labels` of the page
        self.problems: list[str] = []  # files that cannot be read, one line each
        self.config, self.settings = self._configuration(where.config)
        self.dataset_type = str(self.settings.get("dataset_type", "network"))
        records, broken = read_lines(where.metrics)
        usable = [record for record in records if isinstance(record.get("step"), int)]
        self.curves, self.sessions = _curves_of(usable), _sessions_of(read_lines(where.sessions)[0])
        steps, self.machine = self.curves["step"], self.sessions[-1].machine if self.sessions else {}
        self.steps_done = int(steps[-1]) if len(steps) else 0
        self.window = max(1, len(steps) // 50)  # steps over which curves are smoothed
        if broken := broken + len(records) - len(usable):
            self.problems.append(f"{broken:,} lines of {where.metrics.name} cannot be read and are left out")
        self.summary = self._stored(where.summary) or {}
        self.pipeline: StoredPipeline | None = self._stored(folder / PIPELINE_FILE, StoredPipeline)
        drawn = self.settings.get("grain_visualization_dir")  # where a run in progress may write it every minute
        if self.pipeline is None and isinstance(drawn, str) and drawn:
            self.pipeline = self._stored(Path(drawn) / PIPELINE_FILE, StoredPipeline)
        self.data = self._data_state(where)
        self.curves["padding"] = self._padding()
        self.evaluation: StoredEvaluation | None = (
            _evaluation(evaluation) if evaluation else self._stored(folder / EVALUATION_FILE, StoredEvaluation)
        )
        written = where.metrics.stat().st_mtime if where.metrics.exists() else None
        self.last_written = None if written is None else datetime.fromtimestamp(written, UTC)

    def _stored(self, file: Path, form: Any = dict[str, Any]) -> Any:
        try:
            return _read_as(form, file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValidationError:
            self.problems.append(f"{file.name} does not have the expected content")
        except (OSError, ValueError) as error:
            self.problems.append(f"{file.name} cannot be read: {error}")
        return None

    def _configuration(self, file: Path) -> tuple[Config | None, dict[str, Any]]:
        """The configuration and its settings; of another version's configuration only the settings."""
        try:
            config = load_config(file)
            return config, config.to_store()
        except (PingLlmError, RecursionError) as error:
            self.problems.append(f"the configuration is not one of this version: {error}")
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
        except (yaml.YAMLError, ValueError, RecursionError):
            values = None
        values = values if isinstance(values, dict) else {}
        return None, {str(key): "" if key in SECRETS else value for key, value in values.items()}

    def _data_state(self, where: RunFolder) -> DataState | None:
        """The state of the data at the end of the run, or else in its newest checkpoint."""
        try:
            if (where.path / DATA_FILE).is_file():
                return DataState.from_json((where.path / DATA_FILE).read_text())
            steps = sorted(int(path.name) for path in where.checkpoints.glob("*") if path.name.isdigit())
            if steps:
                stored = parse_json((where.checkpoints / str(steps[-1]) / "run" / "metadata").read_text())
                return DataState.from_json(stored["data"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, PingLlmError) as error:
            self.problems.append(f"the state of the data cannot be read: {error}")
        return None

    @property
    def words(self) -> Words:
        if self.dataset_type in COMPLETER_DATA:
            return Words("completer", token="position", question="question")
        return Words("language model of text" if self.dataset_type in TEXT_DATASET_TYPES else "language model")

    def _padding(self) -> Floats:
        """Share of padding in each batch of a language model (completers vary the size of contexts); NaN: unknown."""
        length = self.settings.get("max_target_length")
        batch = self.data.identity.get("global_batch_size") if self.data else None
        sizes = [size for size in (batch, length) if isinstance(size, int) and 0 < size < 2**31]
        if self.dataset_type in COMPLETER_DATA or len(sizes) < 2:
            return np.full(len(self.curves["step"]), np.nan)
        return 1 - self.curves["real_tokens"] / np.prod(sizes)

    @property
    def hardware(self) -> str:
        known = {"devices", "device"} <= self.machine.keys()
        return f"{self.machine['devices']}\u00a0×\u00a0{self.machine['device']}" if known else ""

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Key figures; None: unknown. `loss` is the mean of the last steps, `time` is of sessions with a known end."""
        curves, eval_loss = self.curves, self.curves["eval_loss"]
        last_losses, padding = _finite(curves["loss"][-self.window :]), _finite(curves["padding"])
        evaluated = np.flatnonzero(np.isfinite(eval_loss))
        best = evaluated[np.argmin(eval_loss[evaluated])] if len(evaluated) else None
        parameters, flops_per_token = self.summary.get("parameters"), None
        with suppress(Exception):  # JAX may not be installed, and the tokenizer that knows the vocabulary may be gone
            from ping_llm.runs.task import size_of

            parameters, flops_per_token = size_of(self.config) if self.config else (parameters, None)
        tokens = float(np.nansum(curves["real_tokens"]))
        known = [session.ended - session.begun for session in self.sessions if session.begun and session.ended]
        return {
            "loss": float(last_losses.mean()) if len(last_losses) else None,
            "eval_loss": float(eval_loss[evaluated[-1]]) if len(evaluated) else None,
            "best_eval_loss": None if best is None else float(eval_loss[best]),
            "best_eval_step": None if best is None else int(curves["evaluated_at"][best]),
            "tokens": tokens,
            "tokens_per_s": self._summary_or_median("real_tokens_per_s"),
            "mfu": self._summary_or_median("mfu"),
            "data_wait": self._summary_or_median("data_wait_fraction"),
            "padding": float(padding.mean()) if len(padding) else self.pipeline and self.pipeline["padding_fraction"],
            "parameters": parameters,
            "flops_per_token": flops_per_token,
            "flops": flops_per_token * tokens if flops_per_token and tokens else None,
            "time": sum(known, timedelta()) if known else None,
        }

    def _summary_or_median(self, name: str) -> float | None:
        """The value of the summary, or the median of the steps so far."""
        value, steps = self.summary.get(name), _finite(self.curves[name])
        if isinstance(value, int | float):
            return float(value)
        return float(np.median(steps)) if len(steps) else None

    @cached_property
    def status(self) -> Note:
        last = self.sessions[-1] if self.sessions else None
        if last and last.error and "KeyboardInterrupt" not in last.error:
            return Note("bad", last.error, "failed")
        if not last or last.ended:
            if self.summary.get("complete"):
                return Note("good", "", "complete")
            if last or self.summary:
                by = "by a signal" if self.summary.get("stopped_by_signal") else "before its end"
                return Note("warn", f"It was stopped {by}; the same command resumes it.", "stopped")
        written = self.last_written
        if written and datetime.now(UTC) - written < _SILENCE:
            return Note("plain", f"Its last numbers came at {written:%H:%M:%S} UTC.", "running")
        since = f" since {written:%Y-%m-%d %H:%M} UTC" if written else ""
        text = f"It has written nothing{since}: it was killed, or its machine is gone."
        return Note("bad", text, "interrupted")

    @cached_property
    def notes(self) -> list[Note]:
        """Faults, then causes for concern."""
        found, pipeline = self.figures, self.pipeline
        faults, concerns = list(self.problems), []
        for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
            broken = self.curves["step"][~np.isfinite(self.curves[name])]
            if len(broken):
                more = f", and of {len(broken) - 1:,} more" if len(broken) > 1 else ""
                faults.append(f"The {word} of step {int(broken[0]):,}{more} is not a number.")
        if (self.folder / "damaged-checkpoints").is_dir():
            faults.append("A checkpoint was damaged and set aside; the run resumed from the one before.")
        if pipeline and pipeline.get("corrupt_rows"):
            faults.append(f"{pipeline['corrupt_rows']:,} rows could not be read and were left out.")
        if not self.steps_done:
            concerns.append("No step has been finished yet.")
        if (waited := found["data_wait"] or 0) > _LONG_WAIT:
            advice = f": {pipeline['advice']}" if pipeline and pipeline["bottleneck"] != "consumer" else ""
            concerns.append(f"Training waited for data {percent(waited)} of the time{advice}.")
        if (found["padding"] or 0) > _MUCH_PADDING:
            concerns.append(f"{percent(found['padding'])} of all positions were padding; the pipeline aims at 2 %.")
        now, best = found["eval_loss"], found["best_eval_loss"]
        if now is not None and best and now > 1.01 * best:
            at = f"{found['best_eval_step']:,} ({number(best)})"
            concerns.append(f"The evaluation loss was lowest at step {at} and has risen to {number(now)} since.")
        if self.settings.get("allow_data_change"):
            concerns.append("allow_data_change was set: the data may have changed during the run.")
        return [*(Note("bad", text) for text in faults), *(Note("warn", text) for text in concerns)]


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _evaluation(file: Path) -> StoredEvaluation:
    """An evaluation, which the user has named, so it must be readable. Of printed output, the last line is the JSON."""
    try:
        text = file.read_text(encoding="utf-8").strip()
        text = text if text.startswith("{") and "\n{" not in text else text.splitlines()[-1]
        found: StoredEvaluation = _read_as(StoredEvaluation, text)
        return found
    except ValidationError:
        raise PingLlmError(f"{file} is no output of `ping-llm evaluate --json`: it has no protocols") from None
    except (OSError, ValueError, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not JSON"
        raise PingLlmError(f"cannot read the evaluation {file}: {reason}") from error
