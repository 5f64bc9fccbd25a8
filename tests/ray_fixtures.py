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
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
    try:
        for _ in range(2):
            add_node(cluster)
        yield cluster
    finally:
        started = _ray_processes()
        cluster.shutdown()
        _, alive = psutil.wait_procs(started, timeout=20)
        assert not alive, "Ray leaves nothing behind"


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, memory=1 << 30, **NODE)


def busy_workers() -> list[psutil.Process]:
    """Processes of the cluster that run a task of ours."""
    return [process for process in _ray_processes() if _title(process).startswith("ray::_run_on_node")]


def _ray_processes() -> list[psutil.Process]:
    """Those that this process has started: others on this machine may have a Ray of their own."""
    servers = ("raylet", "gcs_server", "ray::")
    children = psutil.Process().children(recursive=True)
    return [process for process in children if any(name in _title(process) for name in servers)]


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.NoSuchProcess:
        return ""
