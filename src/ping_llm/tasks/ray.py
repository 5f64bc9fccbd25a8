"""Tasks on a Ray cluster: `--engine ray [--address HOST:PORT]`.

Every task asks Ray for one CPU and for the memory it may use, so that no node is given more than it holds. A task whose
worker or node dies is run again, elsewhere if need be. Only some tasks per CPU are handed over at a time. All nodes
need this version of ping-llm, and must reach input, work folder and output by the same names.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.core.extras import need
from ping_llm.tasks.engines import Done, Engine

MEMORY_BYTES: Final = 2 << 30
"""For each task, unless told otherwise."""

PROGRAM_BYTES: Final = 256 << 20
"""What a worker process takes before it has any data (measured: 190 MB)."""

MAX_RETRIES: Final = 8
"""How often a task may lose its worker or its node. A task that kills every worker it gets must end some time."""

TASKS_PER_CPU: Final = 4
"""Handed to Ray at a time: enough that no CPU waits for the next."""

_KNOCK_S: Final = 10.0


@contextmanager
def ray_engine(
    address: str | None = None, workers: int | None = None, memory_limit_bytes: int | None = None
) -> Iterator[Engine]:
    """An engine on the cluster at `address`; without one, where `RAY_ADDRESS` says, or a Ray of our own.

    `memory_limit_bytes` is for each task, and `workers` the most tasks that run at a time.
    """
    ray = need("ray", "ray", "--engine ray")
    memory = memory_limit_bytes or MEMORY_BYTES
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, address)
    try:
        _see_that_it_fits(ray, memory + PROGRAM_BYTES)
        executor = _RayExecutor(ray, memory + PROGRAM_BYTES)

        def window() -> int:
            return workers or max(8, TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 0)))

        try:
            yield Engine(executor, window=window, memory_bytes=memory, is_this_machine=False)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    finally:
        if not connected:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    where = address or os.environ.get("RAY_ADDRESS")
    try:
        if where:
            _knock(where)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PingLlmError(f"no Ray cluster answers at {where or 'this machine'}: {reason}") from error


def _knock(address: str) -> None:
    """Find out in seconds that there is nobody: Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator:
        if not port.isdecimal():
            raise ValueError("an address is HOST:PORT, as 10.0.0.5:6379")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _see_that_it_fits(ray: Any, memory: int) -> None:
    """A task that fits on no node would wait for ever without a word."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        err.print("The Ray cluster has no node with a CPU yet; waiting for one.")
    elif memory > (most := max(node.get("memory", 0) for node in nodes)):
        raise PingLlmError(
            f"no node of the Ray cluster has {memory / 2**30:.1f} GB for a task (the largest has {most / 2**30:.1f}); "
            f"lower --memory-limit-gb, which with Ray is for each task"
        )


class _RayExecutor(Executor):
    """Ray tasks as `concurrent.futures`."""

    def __init__(self, ray: Any, memory: int) -> None:
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, memory=memory, max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")(
            _run_on_node
        )
        self._references: dict[Future[Any], Any] = {}
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        reference = self._remote.remote(__version__, fn, args)
        with self._lock:
            self._references[future] = reference
        reference.future().add_done_callback(lambda answer: self._settle(future, answer))
        return future

    def _settle(self, future: Future[Any], answer: Future[Any]) -> None:
        with self._lock:
            self._references.pop(future, None)
        error = answer.exception()
        if error is None:
            future.set_result(answer.result())
        else:
            future.set_exception(_plain(self._ray, error))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            references = list(self._references.values())
        for reference in references:
            self._ray.cancel(reference, force=True)


def _run_on_node(version: str, timed: Callable[..., Done[Any]], arguments: tuple[Any, ...]) -> Done[Any]:
    import ray

    context = ray.get_runtime_context()
    done_by = f"{ray.util.get_node_ip_address()}/{context.get_node_id()[:8]}"
    if version != __version__:
        raise PingLlmError(
            f"the Ray node {done_by} has ping-llm {__version__}, and here is {version}: install the same"
        )
    return replace(timed(*arguments), node=done_by)


def _plain(ray: Any, error: BaseException) -> BaseException:
    """The error that the task raised, as it would have come from a local one; Ray's own in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, PingLlmError | OSError):
            return cause
        text = str(error)
        if "No module named 'ping_llm" in text:
            return PingLlmError('a node of the Ray cluster has no ping-llm: pip install "ping-llm[ray]" on every node')
        return error
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return PingLlmError(
            "a task needed more memory than its Ray node has left; raise --memory-limit-gb, so that fewer run on a node"
        )
    if isinstance(error, ray.exceptions.RayError):
        reason = " ".join(str(error).split())[:200]
        return PingLlmError(f"a task was lost {MAX_RETRIES + 1} times with its worker or node ({reason})")
    return error
