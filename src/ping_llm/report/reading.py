"""What the folder of a run holds, read as far as it can be: most of it may be missing, cut off or damaged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from ping_llm.config import Config, load_config
from ping_llm.config.text import SECRETS
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.spec import DataState
from ping_llm.report.curves import Curves
from ping_llm.report.sessions import Session, read_sessions
from ping_llm.train.folder import RunFolder
from ping_llm.train.metrics import SESSIONS

PIPELINE: Final = "pipeline.json"
DATA: Final = "data.json"
EVALUATION: Final = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    name: str
    config: Config | None
    """None if this version of the program cannot read it: then `settings` is all there is."""
    settings: Mapping[str, Any]
    curves: Curves
    summary: Mapping[str, Any]
    sessions: Sequence[Session]
    pipeline: Mapping[str, Any] | None
    """As `PipelineReport.to_json` gives it."""
    data: DataState | None
    evaluation: Mapping[str, Any] | None
    problems: Sequence[str] = field(default=())
    """Of reading, one line each."""

    @property
    def dataset_type(self) -> str:
        return str(self.settings.get("dataset_type", "network"))

    @property
    def steps_wanted(self) -> int | None:
        return self.settings.get("steps")

    @property
    def steps_done(self) -> int:
        return int(self.curves.step[-1]) if len(self.curves.step) else 0

    @property
    def last_sign(self) -> datetime | None:
        """When its numbers were last written."""
        file = RunFolder(self.folder).metrics
        return datetime.fromtimestamp(file.stat().st_mtime, UTC) if file.exists() else None


def read_run(folder: Path, evaluation: Path | None = None) -> Run:
    """`evaluation` is a file of `ping-llm evaluate --json`, instead of the one in the folder."""
    where = RunFolder(folder)
    if not where.config.is_file():
        raise PingLlmError(f"{folder} is not the folder of a run: there is no {where.config.name} in it")
    if (folder / "model.safetensors.index.json").exists():
        raise PingLlmError(f"{folder} is an exported model; a report is made of the folder of a run")
    problems: list[str] = []
    config, settings = _configuration(where.config, problems)
    summary = _json(where.summary, problems) or {}
    pipeline = _json(folder / PIPELINE, problems) or _visualized(settings, problems)
    return Run(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        settings=settings,
        curves=Curves.read(where.metrics),
        summary=summary,
        sessions=read_sessions(folder / SESSIONS),
        pipeline=pipeline if pipeline and _is_pipeline(pipeline) else None,
        data=_data_state(where, problems),
        evaluation=_evaluation(evaluation) if evaluation else _json(folder / EVALUATION, problems),
        problems=problems,
    )


def _json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{file.name} cannot be read: {error}")
        return None
    if isinstance(value, dict):
        return value
    problems.append(f"{file.name} holds something else than it should")
    return None


def _configuration(file: Path, problems: list[str]) -> tuple[Config | None, dict[str, Any]]:
    try:
        config = load_config(file)
    except PingLlmError as error:
        problems.append(f"the configuration is not one of this version: {error}")
    else:
        return config, config.to_store()
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        return None, {}
    return None, {str(key): "" if key in SECRETS else value for key, value in values.items()}


def _visualized(settings: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """Of a run that is still going, if it draws its pipeline."""
    folder = settings.get("grain_visualization_dir")
    return _json(Path(folder) / PIPELINE, problems) if isinstance(folder, str) and folder else None


def _is_pipeline(value: Mapping[str, Any]) -> bool:
    stages = value.get("stages")
    numbers = ("workers", "wait_share", "real_tokens_per_s", "padding_fraction", "batches")
    return (
        isinstance(stages, dict)
        and _has_numbers(value, numbers)
        and all(isinstance(s, dict) and _has_numbers(s, ("ms_per_batch", "share")) for s in stages.values())
        and all(isinstance(value.get(name), str) for name in ("bottleneck", "advice"))
    )


def _has_numbers(value: Mapping[str, Any], names: Sequence[str]) -> bool:
    return all(isinstance(value.get(name), int | float) for name in names)


def _data_state(run: RunFolder, problems: list[str]) -> DataState | None:
    """As the run left it, or as its newest checkpoint has it."""
    try:
        if (run.path / DATA).is_file():
            return DataState.from_json((run.path / DATA).read_text())
        steps = sorted(int(path.name) for path in run.checkpoints.glob("*") if path.name.isdigit())
        if steps:
            stored = json.loads((run.checkpoints / str(steps[-1]) / "run" / "metadata").read_text())
            return DataState.from_json(stored["data"])
    except (OSError, ValueError, KeyError, TypeError, PingLlmError) as error:
        problems.append(f"what the data was cannot be read: {error}")
    return None


def _evaluation(file: Path) -> dict[str, Any]:
    """A file that was asked for must be there."""
    try:
        lines = file.read_text(encoding="utf-8").strip()
        value = (
            json.loads(lines) if lines.startswith("{") and "\n{" not in lines else json.loads(lines.splitlines()[-1])
        )
    except (OSError, ValueError, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not JSON"
        raise PingLlmError(f"cannot read the evaluation {file}: {reason}") from error
    if not isinstance(value, dict) or not isinstance(value.get("protocols"), dict):
        raise PingLlmError(f"{file} is not what `ping-llm evaluate --json` prints: it has no protocols")
    return value
