"""What a training run leaves behind: its folder, its metrics, and the model in it (`runs/trained.py`)."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from ping_llm.config import Config
from ping_llm.core.files import write_atomically
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import Mirror


class RunFolder:
    """The files in a run's folder. If the run is kept in an object store (`remote`), `path` is its local copy."""

    def __init__(self, path: Path, remote: Location | None = None) -> None:
        self.path, self.remote = path, remote
        self.mirror = Mirror(path, remote) if remote else None
        self.config = path / "config.yml"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.sessions = path / "sessions.jsonl"
        self.summary = path / "summary.json"
        self.picture = path / "loss.png"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.lock = path.absolute().parent / f".{path.absolute().name}.lock"
        """Beside the folder, since a copy from the store replaces the folder as a whole."""

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        folder = locate(config.base_output_directory) / config.project / config.run_name
        return cls(work_folder(folder), folder) if folder.is_remote else cls(folder.local)

    def __str__(self) -> str:
        return str(self.remote or self.path)

    @property
    def has_checkpoints(self) -> bool:
        """A run without checkpoints may begin again with any settings."""
        return any(self.checkpoints.glob("[0-9]*"))

    def forget_if_empty(self) -> None:
        """Remove what a run that could not begin has made."""
        with contextlib.suppress(OSError):  # a folder holds something else, or was never made
            if not self.path.exists() or (
                {*self.path.iterdir()} <= {self.checkpoints} and not any(self.checkpoints.glob("*"))
            ):
                shutil.rmtree(self.path, ignore_errors=True)
                self.lock.unlink(missing_ok=True)
                for folder in self.path.parents[:2]:
                    folder.rmdir()

    def write(self, file: Path, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)


def parse_json(text: str) -> Any:
    """JSON that may be hostile: integers beyond 64 bits become floats, and too deep nesting is a `ValueError`."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The records in a file of JSON lines, and the number of broken lines. A last line cut short is not one."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
    found: list[dict[str, Any]] = []
    broken = 0
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError:
            broken += bool(line) and number < len(lines)
            continue
        found.append(record) if isinstance(record, dict) else (broken := broken + 1)
    return found, broken


def read_metrics(file: Path) -> list[dict[str, Any]]:
    return read_lines(file)[0]
