"""What a training run leaves behind: its folder, its metrics, and the model in it (`runs/trained.py`)."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ping_llm.config import Config
from ping_llm.core.files import write_atomically
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import Mirror


class RunFolder:
    """The names in a run's folder. If it is kept in an object store (`remote`), `path` is a copy to work with."""

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
        self.lock = path / ".lock"

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        folder = locate(config.base_output_directory) / config.project / config.run_name
        return cls(work_folder(folder), folder) if folder.is_remote else cls(folder.local)

    def __str__(self) -> str:
        return str(self.remote or self.path)

    @property
    def has_checkpoints(self) -> bool:
        """A run that never got so far may be begun again with any settings."""
        return any(self.checkpoints.glob("[0-9]*"))

    def forget_if_empty(self) -> None:
        """A run that could not begin leaves no trace."""
        with contextlib.suppress(OSError):  # they hold something, or were never made
            if {*self.path.iterdir()} <= {self.lock, self.checkpoints} and not any(self.checkpoints.glob("*")):
                shutil.rmtree(self.path)
                for folder in self.path.parents[:2]:
                    folder.rmdir()

    def write(self, file: Path, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; the last one may be cut off where a run was killed."""
    if file.exists():
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
