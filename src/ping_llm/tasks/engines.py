"""Engines run tasks: in worker processes of this machine (`pool.py`), or on a Ray cluster.

A task is an importable function with a picklable argument that returns something small. It may run anywhere, and more
than once: it writes its output to a place that all machines can reach. An engine yields what the tasks returned, in
their order, each with how long it took and on which machine.

On Ray, every task requests one CPU and the memory it may use, so that no node is overcommitted. A task whose worker or
node dies is run again, on another node if necessary. All nodes need this version of ping-llm, and must reach input,
work folder and output under the same names.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError, explained, need, one_line
from ping_llm.tasks.pool import available_cores, free_memory_bytes, map_in_order, worker_pool

Task = TypeVar("Task")
Value = TypeVar("Value")

TASKS_PER_CPU: Final = 4  # submitted at a time, so that no CPU waits for the next task
RAY_TASK_BYTES: Final = 2 << 30  # default memory of a task on a Ray cluster
PROGRAM_BYTES: Final = 256 << 20  # memory of a worker process before it has any data (measured: 190 MB)
MAX_RETRIES: Final = 8  # how often a task may lose its worker or node: one that kills every worker must end some time
_CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a task took, and where it ran: one line of a timings file."""

    stage: str = ""
    task: int | str = ""
    node: str
    started: float  # seconds since 1970, by that machine's clock
    seconds: float
    bytes_in: int = 0
    bytes_out: int = 0


OnTiming = Callable[[Timing], None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs tasks with an executor."""

    executor: Executor
    window: Callable[[], int]  # how many tasks to have in progress now: nodes may join and leave
    memory_bytes: int  # that one task may use
    is_this_machine: bool = True

    def map(self, function: Callable[[Task], Value], tasks: Iterable[Task]) -> Iterator[tuple[Value, Timing]]:
        """Results in the order of the tasks (`map_in_order`)."""
        return map_in_order(self.executor, partial(_run_timed, function), tasks, window=self.window, run_ahead=True)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine runs the tasks: `--engine`, `--address`, `--workers` and `--memory-limit-gb`.

    `address` is that of a Ray cluster; by default `RAY_ADDRESS`, or a Ray that is started here. `workers` run at a
    time, by default one per core. The memory limit is for all workers of this machine together, by default half of the
    free memory; with Ray, it is for each task.
    """

    engine: str = "local"
    address: str | None = None
    workers: int | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise PingLlmError(f"--engine {self.engine}: there is local and ray")
        if self.address is not None and self.engine != "ray":
            raise PingLlmError("--address is the address of a Ray cluster: add --engine ray")
        if self.workers is not None and self.workers < 1:
            raise PingLlmError("at least one worker is needed")

    @contextmanager
    def open(self) -> Iterator[Engine]:
        if self.engine == "ray":
            with self._open_ray() as engine:
                yield engine
            return
        workers = self.workers or available_cores()
        limit = self.memory_limit_bytes or free_memory_bytes() // 2
        window = 1 if workers == 1 else TASKS_PER_CPU * workers
        with worker_pool(workers) as pool:
            yield Engine(executor=pool, window=lambda: window, memory_bytes=limit // workers)

    @contextmanager
    def _open_ray(self) -> Iterator[Engine]:
        ray = need("ray", "ray", "--engine ray")
        memory = self.memory_limit_bytes or RAY_TASK_BYTES
        if not (connected := ray.is_initialized()):
            _connect(ray, self.address)
        try:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            memories = [node.get("memory", 0) for node in alive if node.get("CPU", 0) >= 1]
            wanted = memory + PROGRAM_BYTES
            if not memories:
                err.print("The Ray cluster has no node with a CPU yet; waiting for one.")
            elif wanted > max(memories):  # Ray would wait for ever
                raise PingLlmError(
                    f"no node of the Ray cluster has {wanted / 2**30:.1f} GB for a task (the largest has "
                    f"{max(memories) / 2**30:.1f}); lower --memory-limit-gb, which with Ray is for each task"
                )

            def window() -> int:
                return self.workers or max(8, TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))

            with RayExecutor(ray, wanted) as cluster:
                yield Engine(executor=cluster, window=window, memory_bytes=memory, is_this_machine=False)
        except Exception as error:
            raise _plain(ray, error) from None
        finally:
            if not connected:
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    target = address or os.environ.get("RAY_ADDRESS") or ""
    with explained(f"no Ray cluster answers at {target or 'this machine'}", OSError, ValueError, RuntimeError):
        host, separator, port = target.removeprefix("ray://").rpartition(":")
        if separator:  # find out in seconds that nobody is there: Ray itself would try for minutes
            if not port.isdecimal():
                raise ValueError("an address is HOST:PORT, as 10.0.0.5:6379")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)


class RayExecutor(Executor):
    """Runs timed tasks on a cluster. Leaving its `with` block cancels those in progress."""

    def __init__(self, ray: Any, memory: int) -> None:
        self._ray = ray
        options = {"num_cpus": 1, "memory": memory, "max_retries": MAX_RETRIES, "scheduling_strategy": "SPREAD"}
        self._remote = ray.remote(**options)(_run_on_node)
        self._references: dict[Future[Any], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        reference = self._remote.remote(__version__, fn, args)
        future: Future[Any] = reference.future()
        self._references[future] = reference
        future.add_done_callback(lambda done: self._references.pop(done, None))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for reference in list(self._references.values()):
            self._ray.cancel(reference, force=True)


def _run_timed(function: Callable[[Task], Value], task: Task) -> tuple[Value, Timing]:
    started, clock = time.time(), time.perf_counter()
    value = function(task)
    return value, Timing(node=socket.gethostname(), started=started, seconds=time.perf_counter() - clock)


def _run_on_node(version: str, timed: Callable[..., tuple[Any, Timing]], arguments: tuple[Any, ...]) -> Any:
    """The result of a timed task, with this node in its timing."""
    import ray

    node = f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"
    if version != __version__:
        raise PingLlmError(f"the Ray node {node} has ping-llm {__version__}, and here is {version}: install the same")
    value, timing = timed(*arguments)
    return value, replace(timing, node=node)


def _plain(ray: Any, error: Exception) -> Exception:
    """The error that the task itself raised, or one of Ray's in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, PingLlmError | OSError):
            return cause
        if "No module named 'ping_llm" in str(error):
            return PingLlmError('a node of the Ray cluster has no ping-llm: pip install "ping-llm[ray]" on every node')
    elif isinstance(error, ray.exceptions.OutOfMemoryError):
        return PingLlmError(
            "a task needed more memory than its Ray node has left; raise --memory-limit-gb, so that fewer run on a node"
        )
    elif isinstance(error, ray.exceptions.RayError):
        return PingLlmError(f"a task was lost {MAX_RETRIES + 1} times with its worker or node ({one_line(error)})")
    return error


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
