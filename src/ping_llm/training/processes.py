"""A run of several processes: how they join, how all of them end when one fails, and how they stop together.

They find each other by three variables (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), or by those of a
launcher that JAX knows: SLURM's srun, Open MPI's mpirun, Cloud TPU, Kubernetes. A process that fails would leave the
others waiting for it in the middle of a step. So it writes the reason to the key-value store that JAX's processes
share; the others look there every second, and all end at once.

JAX ends a process that has lost the others from inside its C++ library, by `abort()` and with a stack trace, where no
Python code can explain it. So each process forks before it joins the others: the child trains; the parent forwards its
output and signals, waits, and explains in one line how the child ended. It also ends the worker processes that an
aborted child leaves behind, and ends together with the child.
"""

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import FrameType
from typing import Any, Final, NoReturn, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from ping_llm import __version__
from ping_llm.config import Config
from ping_llm.core.console import err, print_error
from ping_llm.core.errors import PingLlmError, one_line

_VARIABLES: Final = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LAUNCHERS: Final = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "KUBERNETES_SERVICE_HOST")
_SLURM_TASK: Final = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables that JAX needs from SLURM: srun sets all of them, a batch script has only some."""

_FAILURE: Final = "ping_llm/failure"
"""Key of the store under which the first process that fails writes the reason."""
_exchanges = count()
_POLL_S: Final = 1.0
_VERDICT_S: Final = 20.0
"""Time beyond the heartbeat that JAX may take to report which process was lost."""
_SIGNS_OF_LOSS: Final = ("gloo", "nccl", "coordination", "connection reset", "connection closed", "barrier", "socket")

_NO_TRITON_GEMM: Final = "--xla_gpu_enable_triton_gemm=false"
"""XLA picks matmul kernels by timing each alone; in a whole step the library's are 12 % faster (docs/benchmarks.md)."""


# -- joining


def start_processes(config: Config) -> None:
    """Set up the compiler and join the other processes of the run, before any other use of JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _NO_TRITON_GEMM.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_NO_TRITON_GEMM}".strip()
    if config.distributed and not jax.distributed.is_initialized():
        join(config)


def join(config: Config) -> None:
    """Join the other processes. Returns in a child process, which its parent watches over."""
    if not config.run_name:
        raise PingLlmError("the processes of a run must know its name: add --name, the same for all")
    coordinates = find_coordinates(os.environ)
    wait_s, heartbeat_s = _seconds("PING_LLM_JOIN_S", 300), _seconds("PING_LLM_HEARTBEAT_S", 60)
    tell_guard = fork_guarded()
    try:
        jax.distributed.initialize(**coordinates, initialization_timeout=wait_s, heartbeat_timeout_seconds=heartbeat_s)
    except (RuntimeError, ValueError, OSError) as error:
        text = one_line(error, 1000)
        reason = f"the processes could not be joined: {text}"
        if "should be defined" in text or "must be defined" in text:
            reason = (
                "nothing says where the other processes are: start with srun or mpirun, or set "
                "JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID (docs/multihost.md)"
            )
        raise PingLlmError(f"distributed=true, but {reason}") from error
    if threading.current_thread() is threading.main_thread():
        # JAX puts a handler of its own on SIGTERM when processes join; ours is what saves and ends.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    tell_guard(_introduce(config))


def find_coordinates(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for `jax.distributed.initialize`; none where JAX finds the processes by itself.

    >>> find_coordinates({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"})
    {'coordinator_address': '10.0.0.1:1234', 'num_processes': 4, 'process_id': 3, ...}
    """
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    has_launcher = any(name in environment for name in _LAUNCHERS)
    if not given or ([*given] == ["JAX_COORDINATOR_ADDRESS"] and has_launcher):
        if "SLURM_JOB_ID" in environment and not all(name in environment for name in _SLURM_TASK):
            raise PingLlmError(
                "distributed=true in a SLURM job, but not started by srun: write srun before the command "
                "(deploy/slurm.sbatch does)"
            )
        return {}
    if missing := [name for name in _VARIABLES if name not in given]:
        raise PingLlmError(f"{' and '.join(given)} is set, so {' and '.join(missing)} must be, too")
    address, *numbers = given.values()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise PingLlmError(f"JAX_COORDINATOR_ADDRESS={address}: write the host and a free port of process 0, host:port")
    for name, text in zip(_VARIABLES[1:], numbers, strict=True):
        if not text.removeprefix("-").isdecimal():
            raise PingLlmError(f"{name}={text}: write a whole number")
    processes, number = map(int, numbers)
    if not 0 <= number < processes:
        raise PingLlmError(
            f"JAX_PROCESS_ID={number}, but with JAX_NUM_PROCESSES={processes} they are numbered 0 to {processes - 1}"
        )
    identity = {"coordinator_address": address, "num_processes": processes, "process_id": number}
    return {**identity, "cluster_detection_method": "deactivate"}


def _seconds(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise PingLlmError(f"{variable}={text}: write whole seconds")
    return int(text)


def _joined() -> Any:
    """JAX's distributed state, which has no public name. Its `client` is the key-value store, which Orbax uses in the
    same way; its `process_id` is available before the devices are, which `jax.process_index` would start."""
    from jax._src import distributed

    return distributed.global_state


def _introduce(config: Config) -> list[str]:
    """Check that all processes have the same configuration and version. Returns the host of each."""
    digest = hashlib.sha256(config.to_yaml().encode()).hexdigest()
    mine = {"host": socket.gethostname(), "version of ping-llm": __version__, "configuration": digest}
    first, *others = [json.loads(text) for text in of_all_processes(json.dumps(mine))]
    for number, other in enumerate(others, 1):
        if different := [what for what in mine if what != "host" and other[what] != first[what]]:
            raise PingLlmError(
                f"process {number} on {other['host']} has another {different[0]} than process 0 on {first['host']}: "
                "start all with the same"
            )
    return [process["host"] for process in (first, *others)]


def of_all_processes(mine: str) -> list[str]:
    """The texts of all processes, in order. All processes must call this, equally often."""
    if (store := _joined().client) is None:
        return [mine]
    name = f"ping_llm/exchange/{next(_exchanges)}"
    store.key_value_set(f"{name}/{_joined().process_id:09}", mine)
    store.wait_at_barrier(name, 300_000)
    return [text for _, text in sorted(store.key_value_dir_get(f"{name}/"))]


# -- failing


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """When the block fails in one process of the run, end all of them, each with an error of one line."""
    if jax.process_count() == 1:
        yield
        return
    done = threading.Event()
    threading.Thread(target=_watch_others, args=(done,), daemon=True).start()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, PingLlmError) and tells_of_a_lost_process(error):
            error = _verdict(error)
        done.set()
        _end_with(error)
    finally:
        done.set()


def tells_of_a_lost_process(error: BaseException) -> bool:
    return any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)


def _watch_others(done: threading.Event) -> None:
    store = _joined().client
    while not done.wait(_POLL_S):
        try:
            message = store.key_value_try_get(_FAILURE)
        except Exception:  # nobody has failed; or process 0 is gone, and JAX will say so
            continue
        _let_others_see()
        if not done.is_set():
            print_error(f"{message}; so this process stops, too")
            os._exit(1)


def _verdict(error: BaseException) -> PingLlmError:
    """Wait, after a connection broke, for the reason: JAX ends this process when it knows which process was lost, and a
    process that failed reports it in the store. The error returned is for the case that neither happens."""
    wait_s = _seconds("PING_LLM_HEARTBEAT_S", 60) + _VERDICT_S
    err.print("the connection to another process broke; finding out which")
    time.sleep(wait_s)
    return PingLlmError(
        f"the connection to another process broke, and after {wait_s:.0f} s it is not known which: "
        f"{one_line(error, 300)}"
    )


def _end_with(error: BaseException) -> NoReturn:
    """End this process at once, with the reason. At a normal exit, JAX and Orbax would wait minutes for the others."""
    kind = "" if isinstance(error, PingLlmError) else f"{type(error).__name__}: "
    failure = f"process {jax.process_index()} on {socket.gethostname()} failed: {kind}{one_line(error, 500)}"
    with contextlib.suppress(Exception):  # another was first, or process 0 is gone
        _joined().client.key_value_set(_FAILURE, failure)
    if isinstance(error, PingLlmError):
        print_error(error)
    elif not isinstance(error, KeyboardInterrupt | SystemExit):
        traceback.print_exception(error)
    _let_others_see()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _let_others_see() -> None:
    """Give the other processes time to read the failure if this is process 0, which holds the store."""
    if _joined().process_id == 0:
        time.sleep(2 * _POLL_S)


# -- the parent

LOST: Final = 75
"""Exit code of a process that ended because another was lost (`EX_TEMPFAIL`): start all again, and the run resumes."""

_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_WORDS: Final = b"Terminating process because the JAX distributed service"
_PR_SET_PDEATHSIG: Final = 1
_NOT_JOINED: Final = {
    "ALREADY_EXISTS": "another process has the same number (JAX_PROCESS_ID)",
    "Unexpected task": "process 0 was told of fewer processes (JAX_NUM_PROCESSES)",
    "DEADLINE_EXCEEDED": "not all came in time: see that every process was started, reaches the host and port of "
    "process 0, and has the same number of processes; PING_LLM_JOIN_S is how many seconds they wait",
}


def fork_guarded() -> Callable[[list[str]], object]:
    """Fork. Returns in the child, with a function to give the parent the hosts of all processes."""
    errors, errors_write = os.pipe()
    shared = mmap.mmap(-1, 1 << 20)  # memory of both
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if child := os.fork():
        os.close(errors_write)
        _guard(child, errors, shared)
    os.close(errors)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    os.dup2(errors_write, 2)
    os.close(errors_write)
    return lambda hosts: shared.write(json.dumps(hosts).encode())


def _guard(child: int, errors: int, shared: mmap.mmap) -> NoReturn:
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    last_words = bytearray()
    listener = threading.Thread(target=_listen, args=(errors, last_words), daemon=True)
    listener.start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped yet, so that its number stays its own
    listener.join(timeout=0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    listener.join(timeout=5)
    hosts = json.loads(shared[:].rstrip(b"\0") or "[]")  # nothing, if the child never got so far
    if explanation := explain(code, last_words.decode(errors="replace"), hosts):
        print_error(explanation)
    else:
        _pass_on(bytes(last_words))
    os._exit(LOST if code == -signal.SIGABRT and explanation else code if code >= 0 else 128 - code)


def _listen(source: int, last_words: bytearray) -> None:
    """Forward what the child writes, except JAX's final message, which `explain` turns into one line."""
    while data := os.read(source, 1 << 16):
        found = data.find(_LAST_WORDS)
        start = 0 if last_words else len(data) if found < 0 else data.rfind(b"\n", 0, found) + 1
        _pass_on(data[:start])
        last_words += data[start:]


def _pass_on(data: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(data)
        sys.stderr.flush()


def explain(code: int, last_words: str, hosts: Sequence[str]) -> str | None:
    """Why a process ended with this exit code (negative: a signal); None if it has reported that itself."""
    if code >= 0 or (code == -signal.SIGABRT and not last_words):
        return None
    if code != -signal.SIGABRT:
        memory = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
        return f"this process was ended by {signal.Signals(-code).name}{memory}"
    reason = " ".join(last_words.partition("absl::Status:")[2].partition("*** Check")[0].split())
    if "RegisterTask" in reason:
        why = next((text for sign, text in _NOT_JOINED.items() if sign in reason), reason[:300])
        return f"the processes could not be joined: {why}"
    return (
        f"{_who(reason, hosts)}, so this process stops. Start all processes again with the same command, in the same "
        "or another number: the run resumes from its last checkpoint, with the batches that would have come next"
    )


def _who(reason: str, hosts: Sequence[str]) -> str:
    silent = re.search(r"stopped sending heartbeats\):(.*?)The tasks have crashed", reason)
    if silent and (lost := [int(number) for number in re.findall(r"(?:^|\s|task:)(\d+)(?=\s|$)", silent[1])]):
        return f"lost {', '.join(_named(number, hosts) for number in lost)} of {len(hosts) or 'all'}: no sign of life"
    if "Failed to send RPC" in reason or "Socket closed" in reason:
        return f"lost {_named(0, hosts)}, which holds the processes together, or the network to it"
    return f"lost another process ({reason[:300]})"


def _named(number: int, hosts: Sequence[str]) -> str:
    return f"process {number}" + (f" on {hosts[number]}" if number < len(hosts) else "")


# -- stopping

_AGREE_EVERY_S: Final = 2.0
"""Time between two checks of whether any process was asked to stop: each check makes the devices wait."""
_AGREE_MAX_STEPS: Final = 64
"""Steps between two such checks, at most."""


class StopRequest:
    """On SIGTERM or Ctrl-C, the run finishes its step, saves and ends. A second Ctrl-C ends it at once.

    Use it in a `with` around the training loop.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._agreed_at: tuple[int, float] | None = None
        self._agree_next = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            self._before[number](number, frame)
        self.signal = number

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step. All processes of a run get the same answer."""
        if jax.process_count() == 1:
            return self.signal is not None
        if step < self._agree_next:
            return False
        now = time.monotonic()
        since, then = self._agreed_at or (step, now)
        mine = np.array([self.signal or 0, (now - then) / max(1, step - since)])
        signals, step_s = np.asarray(multihost_utils.process_allgather(mine)).max(axis=0)
        self._agreed_at = step, time.monotonic()
        # Check at every step until the duration of a step is known.
        self._agree_next = step + (int(np.clip(_AGREE_EVERY_S / step_s, 1, _AGREE_MAX_STEPS)) if step_s > 0 else 1)
        self.signal = int(signals) or None
        return self.signal is not None
