"""Which engine runs the tasks: what the options `--engine`, `--address`, `--workers` and `--memory-limit-gb` say."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from ping_llm.engines.local import local_engine
from ping_llm.engines.tasks import Engine
from ping_llm.errors import PingLlmError

ENGINES: Final = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    name: str = "local"
    address: str | None = None
    """Of a Ray cluster."""
    workers: int | None = None
    """Tasks at a time; by default as many as there are cores."""
    memory_limit_bytes: int | None = None
    """For all workers of this machine together; with Ray, for each task."""

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise PingLlmError(f"--engine {self.name}: there is {' and '.join(ENGINES)}")
        if self.address is not None and self.name != "ray":
            raise PingLlmError("--address is the address of a Ray cluster: add --engine ray")
        if self.workers is not None and self.workers < 1:
            raise PingLlmError("at least one worker is needed")

    def open(self) -> AbstractContextManager[Engine]:
        if self.name == "ray":
            from ping_llm.engines.ray import ray_engine

            return ray_engine(self.address, self.workers, self.memory_limit_bytes)
        return local_engine(self.workers, self.memory_limit_bytes)
