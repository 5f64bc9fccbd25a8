"""How the processes of a run find each other, whatever started them.

Either three variables say it all (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), or the launcher has said
it in variables of its own, which JAX knows to read: SLURM's srun, Open MPI's mpirun, Cloud TPU, Kubernetes.
"""

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, Final

import jax

from ping_llm.config import Config
from ping_llm.errors import PingLlmError
from ping_llm.train import guard, peers

_VARIABLES: Final = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM_TASK: Final = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""What JAX needs from SLURM: srun sets all of them, a batch script alone has not all."""

_JOIN: Final = "PING_LLM_JOIN_S"


def join(config: Config) -> None:
    """Join the other processes. Returns in a process that `guard` watches over; before any other use of JAX."""
    if not config.run_name:
        raise PingLlmError("the processes of a run must know its name: add --name, the same for all")
    place = find_place(os.environ)
    limits: dict[str, Any] = {
        "initialization_timeout": peers.seconds(_JOIN, 300),
        "heartbeat_timeout_seconds": peers.heartbeat_s(),
    }
    tell = guard.watched()
    try:
        jax.distributed.initialize(**place, **limits)
    except (RuntimeError, ValueError, OSError) as error:
        raise PingLlmError(f"distributed=true, but {_reason(error)}") from error
    _take_back_signals()
    tell(peers.introduce(config))


def find_place(environment: Mapping[str, str]) -> dict[str, Any]:
    """What to tell JAX; nothing, where it finds out by itself.

    >>> find_place({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"})
    {'coordinator_address': '10.0.0.1:1234', 'num_processes': 4, 'process_id': 3, ...}
    """
    given = [name for name in _VARIABLES if environment.get(name)]
    if not given or (given == ["JAX_COORDINATOR_ADDRESS"] and _has_launcher(environment)):
        if "SLURM_JOB_ID" in environment and not all(name in environment for name in _SLURM_TASK):
            raise PingLlmError(
                "distributed=true in a SLURM job, but not started by srun: write srun before the command "
                "(deploy/slurm.sbatch does)"
            )
        return {}
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise PingLlmError(f"{' and '.join(given)} is set, so {' and '.join(missing)} must be, too")
    address = environment["JAX_COORDINATOR_ADDRESS"]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise PingLlmError(f"JAX_COORDINATOR_ADDRESS={address}: write the host and a free port of process 0, host:port")
    processes, number = (_whole(environment, name) for name in _VARIABLES[1:])
    if not 0 <= number < processes:
        raise PingLlmError(
            f"JAX_PROCESS_ID={number}, but with JAX_NUM_PROCESSES={processes} they are numbered 0 to {processes - 1}"
        )
    return {
        "coordinator_address": address,
        "num_processes": processes,
        "process_id": number,
        "cluster_detection_method": "deactivate",
    }


def _has_launcher(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "KUBERNETES_SERVICE_HOST"))


def _whole(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise PingLlmError(f"{name}={environment[name]}: write a whole number") from None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "should be defined" in text or "must be defined" in text:
        return (
            "nothing says where the other processes are: start with srun or mpirun, or set "
            "JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID (docs/multihost.md)"
        )
    return f"the processes could not be joined: {text}"


def _take_back_signals() -> None:
    """JAX puts a handler of its own on SIGTERM when processes join; ours is what saves and ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
