"""How work that is cut into tasks is run: on this machine (`pool.py`) or on a Ray cluster (`ray.py`).

A task is an importable function and a picklable argument, and returns something small. It may run anywhere and be run
again: what it makes it leaves where all machines can reach it. An engine gives back what the tasks returned, in their
order, with the time that each took and where.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import psutil

from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool
from ping_llm.tasks.ray import ray_executor

Task = TypeVar("Task")
Value = TypeVar("Value")

ENGINES: Final = ("local", "ray")

TASKS_PER_CPU: Final = 4
"""Handed over at a time: enough that no CPU waits for the next."""

RAY_TASK_BYTES: Final = 2 << 30
"""Memory of a task on a Ray cluster, unless set otherwise."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine runs the tasks: what `--engine`, `--address`, `--workers` and `--memory-limit-gb` say."""

    engine: str = "local"
    address: str | None = None
    """Of a Ray cluster."""
    workers: int | None = None
    """Tasks at a time; by default as many as there are cores."""
    memory_limit_bytes: int | None = None
    """For all workers of this machine together, by default half of the free memory; with Ray, for each task."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PingLlmError(f"--engine {self.engine}: there is {' and '.join(ENGINES)}")
        if self.address is not None and self.engine != "ray":
            raise PingLlmError("--address is the address of a Ray cluster: add --engine ray")
        if self.workers is not None and self.workers < 1:
            raise PingLlmError("at least one worker is needed")

    @contextmanager
    def open(self) -> Iterator["Engine"]:
        if self.engine == "ray":
            memory = self.memory_limit_bytes or RAY_TASK_BYTES
            with ray_executor(self.address, memory) as cluster:
                yield Engine(
                    executor=cluster,
                    window=lambda: self.workers or max(8, TASKS_PER_CPU * cluster.cpus),  # nodes may join and leave
                    memory_bytes=memory,
                    is_this_machine=False,
                )
            return
        workers = self.workers or available_cores()
        limit = self.memory_limit_bytes or psutil.virtual_memory().available // 2
        window = 1 if workers == 1 else TASKS_PER_CPU * workers
        with worker_pool(workers) as pool:
            yield Engine(executor=pool, window=lambda: window, memory_bytes=limit // workers)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a task took, and where: one line of a timings file."""

    stage: str = ""
    task: int | str = ""
    node: str
    started: float
    """Seconds since 1970, by the clock of that machine."""
    seconds: float
    bytes_in: int = 0
    bytes_out: int = 0


OnTiming = Callable[[Timing], None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs tasks with an executor."""

    executor: Executor
    window: Callable[[], int]
    """How many tasks to have under way now."""
    memory_bytes: int
    """What one task may use."""
    is_this_machine: bool = True

    def map(self, function: Callable[[Task], Value], tasks: Iterable[Task]) -> Iterator[tuple[Value, Timing]]:
        """Results in the order of the tasks (`map_in_order`), of which a window is under way at a time."""
        timed = partial(_run_timed, function)
        return map_in_order(self.executor, timed, tasks, window=lambda: max(1, self.window()), run_ahead=True)


def _run_timed(function: Callable[[Task], Value], task: Task) -> tuple[Value, Timing]:
    started, clock = time.time(), time.perf_counter()
    value = function(task)
    return value, Timing(node=socket.gethostname(), started=started, seconds=time.perf_counter() - clock)


def summarise(timings: list[Timing]) -> list[dict[str, Any]]:
    """A line for each stage, in the order in which they began."""
    lines = []
    for stage in dict.fromkeys(timing.stage for timing in timings):
        tasks = [timing for timing in timings if timing.stage == stage]
        slowest = max(tasks, key=lambda task: task.seconds)
        line = {
            "stage": stage,
            "tasks": len(tasks),
            "nodes": len({task.node for task in tasks}),
            "wall_s": round(max(t.started + t.seconds for t in tasks) - min(t.started for t in tasks), 2),
            "task_s": round(sum(task.seconds for task in tasks), 2),
            "slowest": {"task": slowest.task, "node": slowest.node, "seconds": round(slowest.seconds, 2)},
            "bytes_in": sum(task.bytes_in for task in tasks),
            "bytes_out": sum(task.bytes_out for task in tasks),
        }
        lines.append(line)
    return lines
