"""A run's folder: what is where."""

import contextlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ping_llm.config import Config
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import work_folder
from ping_llm.storage.mirror import Mirror


@dataclass(frozen=True)
class RunFolder:
    path: Path
    remote: Location | None = None
    """Where it is kept, if that is not on this machine: `path` is then a copy to work with."""

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        place = locate(config.base_output_directory) / config.project / config.run_name
        return cls(work_folder(place), place) if place.is_remote else cls(place.local)

    def __str__(self) -> str:
        return str(self.remote or self.path)

    @cached_property
    def mirror(self) -> Mirror | None:
        return Mirror(self.path, self.remote) if self.remote else None

    @property
    def config(self) -> Path:
        return self.path / "config.yml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_checkpoints(self) -> bool:
        """A run that never got so far may be begun again with any settings."""
        return any(self.checkpoints.glob("[0-9]*"))

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    def forget_if_empty(self) -> None:
        """A run that could not begin leaves no trace."""
        with contextlib.suppress(OSError):  # they hold something, or were never made
            for folder in (self.checkpoints, self.path, *self.path.parents[:2]):
                folder.rmdir()

    def write(self, file: Path, text: str) -> None:
        """Whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(file)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write(self.summary, json.dumps(summary, indent=1) + "\n")
