"""How work that is cut into tasks is run: on this machine (`local.py`) or on a Ray cluster (`ray.py`).

A task is an importable function and a picklable argument, and returns something small. It may run anywhere and be run
again: what it makes it leaves in a place that all machines reach. An engine gives back what the tasks returned, in
their order, with the time that each took and where.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Done(Generic[Value]):
    """What a task returned, and what it took."""

    value: Value
    node: str
    started: float
    """Seconds since 1970, by the clock of that machine."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of a timings file."""

    stage: str
    task: int | str
    node: str
    started: float
    seconds: float
    bytes_in: int
    bytes_out: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


OnTiming = Callable[[Timing], None]


class Engine:
    """Runs tasks with an executor."""

    def __init__(
        self, executor: Executor, *, window: Callable[[], int], memory_bytes: int, is_this_machine: bool = True
    ) -> None:
        self._executor = executor
        self._window = window
        self.memory_bytes = memory_bytes
        """What one task may use."""
        self.is_this_machine = is_this_machine

    def map(self, function: Callable[[Task], Value], tasks: Iterable[Task]) -> Iterator[Done[Value]]:
        """Results in the order of the tasks, of which no more than a window are under way or made at a time.

        A slow task does not hold up those behind it. The error that is raised is the first in the order of the tasks,
        however they ran; once there is one, no further task is begun.
        """
        numbered = enumerate(tasks)
        under_way: dict[Future[Done[Value]], int] = {}
        finished: dict[int, Future[Done[Value]]] = {}
        failed = False
        position = 0
        while True:
            room = 0 if failed else max(1, self._window()) - len(under_way)
            for number, task in islice(numbered, max(0, room)):
                under_way[self._executor.submit(run_timed, function, task)] = number
            while position in finished:
                yield finished.pop(position).result()
                position += 1
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                finished[under_way.pop(future)] = future
                failed = failed or future.exception() is not None


def run_timed(function: Callable[[Task], Value], task: Task) -> Done[Value]:
    started, clock = time.time(), time.perf_counter()
    value = function(task)
    return Done(value=value, node=socket.gethostname(), started=started, seconds=time.perf_counter() - clock)


def summarise(timings: list[Timing]) -> list[dict[str, Any]]:
    """A line for each stage, in the order in which they began."""
    stages: dict[str, list[Timing]] = {}
    for timing in timings:
        stages.setdefault(timing.stage, []).append(timing)
    return [_summary(stage, members) for stage, members in stages.items()]


def _summary(stage: str, timings: list[Timing]) -> dict[str, Any]:
    slowest = max(timings, key=lambda timing: timing.seconds)
    wall = max(t.started + t.seconds for t in timings) - min(t.started for t in timings)
    return {
        "stage": stage,
        "tasks": len(timings),
        "nodes": len({timing.node for timing in timings}),
        "wall_s": round(wall, 2),
        "task_s": round(sum(timing.seconds for timing in timings), 2),
        "slowest": {"task": slowest.task, "node": slowest.node, "seconds": round(slowest.seconds, 2)},
        "bytes_in": sum(timing.bytes_in for timing in timings),
        "bytes_out": sum(timing.bytes_out for timing in timings),
    }
