"""Tasks on a Ray cluster as `concurrent.futures`: `--engine ray [--address HOST:PORT]`.

Every task asks Ray for one CPU and for the memory it may use, so that no node is given more than it holds. A task whose
worker or node dies is run again, elsewhere if need be. All nodes need this version of ping-llm, and must reach input,
work folder and output by the same names.
"""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError, need, one_line

PROGRAM_BYTES: Final = 256 << 20
"""What a worker process takes before it has any data (measured: 190 MB)."""

MAX_RETRIES: Final = 8
"""How often a task may lose its worker or its node. A task that kills every worker it gets must end some time."""

_CONNECT_TIMEOUT_S: Final = 10.0


@contextmanager
def ray_executor(address: str | None, memory_bytes: int) -> Iterator["RayExecutor"]:
    """An executor on the cluster at `address`; without one, where `RAY_ADDRESS` says, or a Ray of our own."""
    ray = need("ray", "ray", "--engine ray")
    connected, memory = ray.is_initialized(), memory_bytes + PROGRAM_BYTES
    if not connected:
        _connect(ray, address)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            err.print("The Ray cluster has no node with a CPU yet; waiting for one.")
        elif memory > (largest := max(node.get("memory", 0) for node in nodes)):  # it would wait for ever
            raise PingLlmError(
                f"no node of the Ray cluster has {memory / 2**30:.1f} GB for a task (the largest has "
                f"{largest / 2**30:.1f}); lower --memory-limit-gb, which with Ray is for each task"
            )
        executor = RayExecutor(ray, memory)
        try:
            yield executor
        except Exception as error:
            raise _plain(ray, error) from None
        finally:
            executor.shutdown()
    finally:
        if not connected:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    target = address or os.environ.get("RAY_ADDRESS") or ""
    try:
        host, separator, port = target.removeprefix("ray://").rpartition(":")
        if separator:  # find out in seconds that nobody is there: Ray itself would try for minutes
            if not port.isdecimal():
                raise ValueError("an address is HOST:PORT, as 10.0.0.5:6379")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise PingLlmError(f"no Ray cluster answers at {target or 'this machine'}: {one_line(error)}") from error


class RayExecutor(Executor):
    def __init__(self, ray: Any, memory: int) -> None:
        self._ray = ray
        options = {"num_cpus": 1, "memory": memory, "max_retries": MAX_RETRIES, "scheduling_strategy": "SPREAD"}
        self._remote = ray.remote(**options)(_run_on_node)
        self._references: dict[Future[Any], Any] = {}

    @property
    def cpus(self) -> int:
        """Of all nodes together, now."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        reference = self._remote.remote(__version__, fn, args)
        future: Future[Any] = reference.future()
        self._references[future] = reference
        future.add_done_callback(lambda done: self._references.pop(done, None))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Give up what is under way."""
        for reference in list(self._references.values()):
            self._ray.cancel(reference, force=True)


def _run_on_node(version: str, timed: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a timed task returns, with this node in its timing."""
    import ray

    node = f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"
    if version != __version__:
        raise PingLlmError(f"the Ray node {node} has ping-llm {__version__}, and here is {version}: install the same")
    value, timing = timed(*arguments)
    return value, replace(timing, node=node)


def _plain(ray: Any, error: Exception) -> Exception:
    """The error that the task raised, as it would have come from a local one; Ray's own in one line."""
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
