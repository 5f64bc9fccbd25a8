"""A Ray cluster of several nodes on this machine."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil

NODE: Final = {"object_store_memory": 100 << 20, "include_dashboard": False}


@contextmanager
def running_cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one each. All its processes are gone afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    utilities: Any = importlib.import_module("ray.cluster_utils")
    before = _ray_processes()
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
    try:
        for _ in range(2):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()
        left = [process for process in psutil.process_iter() if process.pid in _ray_processes() - before]
        _, alive = psutil.wait_procs(left, timeout=20)
        assert not alive, "Ray leaves nothing behind"


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, memory=1 << 30, **NODE)


def busy_workers() -> set[int]:
    """Processes that run a task of ours."""
    return {pid for pid, (_, title) in _titles().items() if title.startswith("ray::_run_on_node")}


def _ray_processes() -> set[int]:
    servers = ("raylet", "gcs_server")
    return {pid for pid, (name, title) in _titles().items() if name in servers or title.startswith("ray::")}


def _titles() -> dict[int, tuple[str, str]]:
    found = psutil.process_iter(["name", "cmdline"])
    return {process.pid: (process.info["name"], (process.info["cmdline"] or [""])[0]) for process in found}
