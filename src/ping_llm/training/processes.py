"""A parent for each process of a run, which says in one line why it ended.

JAX ends a process that has lost the others from inside its C++ library, by `abort()` and with a stack trace: nothing
written in Python gets a chance to explain. So the process forks before it joins the others. The child trains; the
parent passes on what the child writes and the signals that come, waits, and explains. It also ends the worker processes
that an aborted child leaves behind, and goes down together with the child.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import jax

from ping_llm import __version__
from ping_llm.config import Config
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError

LOST: Final = 75
"""Exit code of a process that ended because another was lost (`EX_TEMPFAIL`): start all again, and it goes on."""

Hosts = dict[int, str]
"""The machine of each process."""

_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_WORDS: Final = b"Terminating process because the JAX distributed service"
_PR_SET_PDEATHSIG: Final = 1


def watched() -> Callable[[Hosts], None]:
    """Fork. Returns in the child, which goes on; what it returns tells the parent who takes part."""
    from_child, to_parent = os.pipe()
    hosts_read, hosts_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(to_parent)
        os.close(hosts_write)
        _watch(child, from_child, hosts_read)
    os.close(from_child)
    os.close(hosts_read)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    os.dup2(to_parent, 2)
    os.close(to_parent)
    os.set_blocking(hosts_write, False)  # nobody reads it before the end

    def tell(hosts: Hosts) -> None:
        with contextlib.suppress(OSError), os.fdopen(hosts_write, "w") as file:
            json.dump(hosts, file)

    return tell


def _watch(child: int, from_child: int, hosts_read: int) -> NoReturn:
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: os.kill(child, number))
    listener = _Listener(from_child)
    listener.start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped yet, so that its number stays its own
    listener.join(timeout=0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    listener.join(timeout=5)
    code = os.waitstatus_to_exitcode(status)
    explanation = explain(code, listener.last_words.decode(errors="replace"), _hosts(hosts_read))
    if explanation:
        err.print(f"[bold red]error:[/] {explanation}", soft_wrap=True)
    else:
        listener.say(listener.last_words)
    sys.stderr.flush()
    os._exit(LOST if code == -signal.SIGABRT and explanation else code if code >= 0 else 128 - code)


class _Listener(threading.Thread):
    """Passes on what the child writes, but for JAX's last words, which `explain` puts in a line."""

    def __init__(self, source: int) -> None:
        super().__init__(daemon=True)
        self._source = source
        self.last_words = b""

    def run(self) -> None:
        unfinished = b""
        while data := os.read(self._source, 1 << 16):
            if self.last_words:
                self.last_words += data
                continue
            text = unfinished + data
            found = text.find(_LAST_WORDS)
            if found >= 0:
                start = text.rfind(b"\n", 0, found) + 1
                self.say(text[len(unfinished) : start] if start > len(unfinished) else b"")
                self.last_words = text[start:]
                continue
            self.say(data)
            unfinished = text[text.rfind(b"\n") + 1 :][-4096:]

    def say(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]


def _hosts(source: int) -> Hosts:
    """Nothing, if the child never got so far. It has ended, and so has what it wrote."""
    os.set_blocking(source, False)
    with contextlib.suppress(OSError, ValueError), os.fdopen(source) as file:
        return {int(number): host for number, host in json.load(file).items()}
    return {}


def explain(code: int, last_words: str, hosts: Hosts) -> str | None:
    """Why a process ended with this code; None if it has said so itself."""
    if code >= 0:
        return None
    if code != -signal.SIGABRT or not last_words:
        name = signal.Signals(-code).name
        memory = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
        return None if code == -signal.SIGABRT else f"this process was ended by {name}{memory}"
    reason = " ".join(last_words.partition("absl::Status:")[2].partition("*** Check")[0].split())
    if "RegisterTask" in reason:
        return _not_joined(reason)
    return f"{_who(reason, hosts)}, so this process stops. {_GO_ON}"


_GO_ON: Final = (
    "Start all processes again with the same command, in the same or another number: the run goes on from its last "
    "checkpoint, with the batches that would have come next"
)


def _who(reason: str, hosts: Hosts) -> str:
    silent = re.search(r"stopped sending heartbeats\):(.*?)The tasks have crashed", reason)
    if silent and (lost := [int(number) for number in re.findall(r"(?:^|\s|task:)(\d+)(?=\s|$)", silent[1])]):
        names = ", ".join(_named(number, hosts) for number in lost)
        return f"lost {names} of {len(hosts) or 'all'}: no sign of life"
    if "Failed to send RPC" in reason or "Socket closed" in reason:
        return f"lost {_named(0, hosts)}, which holds the processes together, or the network to it"
    return f"lost another process ({reason[:300]})"


def _named(number: int, hosts: Hosts) -> str:
    return f"process {number}" + (f" on {hosts[number]}" if number in hosts else "")


def _not_joined(reason: str) -> str:
    if "ALREADY_EXISTS" in reason:
        why = "another process has the same number (JAX_PROCESS_ID)"
    elif "Unexpected task" in reason:
        why = "process 0 was told of fewer processes (JAX_NUM_PROCESSES)"
    elif "DEADLINE_EXCEEDED" in reason:
        why = (
            "not all came in time: see that every process was started, reaches the host and port of process 0, and has "
            "the same number of processes; PING_LLM_JOIN_S is how many seconds they wait"
        )
    else:
        why = reason[:300]
    return f"the processes could not be joined: {why}"


# What the processes of a run tell each other beside the training: who they are, and when one of them fails.
#
# A process that fails would leave the others waiting for it, each in the middle of a step. So it says why in the store
# that JAX's processes share, where the others look every second, and all end at once.

_INTRODUCTIONS: Final = "ping_llm/introductions/"
_FAILURE: Final = "ping_llm/failure"
_LOOK_EVERY_S: Final = 1.0
_VERDICT_S: Final = 20.0
"""How much longer than the heartbeat JAX may take to say who was lost."""

_HEARTBEAT: Final = "PING_LLM_HEARTBEAT_S"

_SIGNS_OF_LOSS: Final = ("gloo", "nccl", "coordination", "connection reset", "connection closed", "barrier", "socket")


def _store() -> Any:
    """JAX's key-value store of the run, which Orbax uses in the same way; there is no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def _number() -> int:
    """Of this process. `jax.process_index` would start the devices."""
    from jax._src import distributed

    return distributed.global_state.process_id


def seconds(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return otherwise
    if not text.isdecimal() or int(text) < 1:
        raise PingLlmError(f"{variable}={text}: write whole seconds")
    return int(text)


def heartbeat_s() -> int:
    """A process that gave no sign of life for so long is lost."""
    return seconds(_HEARTBEAT, 60)


def introduce(config: Config) -> Hosts:
    """Meet the others: all must have the same configuration. Returns where each of them is."""
    store = _store()
    mine = {"host": socket.gethostname(), "version": __version__, "config": _digest(config)}
    store.key_value_set(f"{_INTRODUCTIONS}{_number()}", json.dumps(mine))
    store.wait_at_barrier("ping_llm/introduced", 300_000)
    said = store.key_value_dir_get(_INTRODUCTIONS)
    all_said = {int(name.rpartition("/")[2]): json.loads(value) for name, value in said}
    for number, other in sorted(all_said.items()):
        for what in ("version", "config"):
            if other[what] != all_said[0][what]:
                thing = "another version of ping-llm" if what == "version" else "another configuration"
                raise PingLlmError(
                    f"process {number} on {other['host']} has {thing} than process 0 on {all_said[0]['host']}: "
                    "start all with the same"
                )
    return {number: other["host"] for number, other in all_said.items()}


def _digest(config: Config) -> str:
    return hashlib.sha256(config.to_yaml().encode()).hexdigest()


@contextmanager
def failing_together() -> Iterator[None]:
    """What is done in here by all processes ends in all when it fails in one: the processes end, with a line."""
    if jax.process_count() == 1:
        yield
        return
    done = threading.Event()
    threading.Thread(target=_look_out, args=(done,), daemon=True).start()
    try:
        yield
    except BaseException as error:
        if _is_loss(error):
            error = _verdict(error)
        done.set()
        _announce(error)
        _end_with(error)
    finally:
        done.set()


def _look_out(done: threading.Event) -> None:
    store = _store()
    while not done.wait(_LOOK_EVERY_S):
        try:
            message = store.key_value_try_get(_FAILURE)
        except Exception:  # nobody has failed; or process 0 is gone, and JAX will say so
            continue
        _let_others_see()
        if not done.is_set():
            _say(f"{message}; so this process stops, too")
            os._exit(1)


def _announce(error: BaseException) -> None:
    reason = " ".join(str(error).split())[:500]
    if not isinstance(error, PingLlmError):
        reason = f"{type(error).__name__}: {reason}"
    try:
        _store().key_value_set(_FAILURE, f"process {jax.process_index()} on {socket.gethostname()} failed: {reason}")
    except Exception:  # another was first, or process 0 is gone
        return


def _is_loss(error: BaseException) -> bool:
    """Whether it comes from a connection that broke, rather than from this process."""
    text = str(error).lower()
    return not isinstance(error, PingLlmError) and any(sign in text for sign in _SIGNS_OF_LOSS)


def _verdict(error: BaseException) -> PingLlmError:
    """JAX finds out who was lost, and ends this process with the answer; or another process says that it failed."""
    wait_s = heartbeat_s() + _VERDICT_S
    err.print("the connection to another process broke; finding out which")
    time.sleep(wait_s)
    reason = " ".join(str(error).split())[:300]
    return PingLlmError(
        f"the connection to another process broke, and after {wait_s:.0f} s it is not known which: {reason}"
    )


def _end_with(error: BaseException) -> NoReturn:
    """At once. On the usual way out of Python, JAX and Orbax would wait minutes for the others."""
    if isinstance(error, PingLlmError):
        _say(str(error))
    elif not isinstance(error, KeyboardInterrupt | SystemExit):
        traceback.print_exception(error)
    _let_others_see()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _say(message: str) -> None:
    message = " ".join(message.split()).replace("[", r"\[")
    err.print(f"[bold red]error:[/] {message}", soft_wrap=True)


def _let_others_see() -> None:
    """What happened, before the process goes that holds the store."""
    if _number() == 0:
        time.sleep(2 * _LOOK_EVERY_S)


# How the processes of a run find each other, whatever started them.
#
# Either three variables say it all (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), or the launcher has
# said it in variables of its own, which JAX knows to read: SLURM's srun, Open MPI's mpirun, Cloud TPU, Kubernetes.

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
        "initialization_timeout": seconds(_JOIN, 300),
        "heartbeat_timeout_seconds": heartbeat_s(),
    }
    tell = watched()
    try:
        jax.distributed.initialize(**place, **limits)
    except (RuntimeError, ValueError, OSError) as error:
        raise PingLlmError(f"distributed=true, but {_reason(error)}") from error
    _take_back_signals()
    tell(introduce(config))


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


_NO_TRITON_PRODUCTS: Final = "--xla_gpu_enable_triton_gemm=false"
"""XLA picks matrix kernels by timing each alone; in a whole step the library's are 12 % faster (docs/benchmarks.md)."""


def start_processes(config: Config) -> None:
    """Set up the compiler and join the other processes of the run, before any other use of JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _NO_TRITON_PRODUCTS.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_NO_TRITON_PRODUCTS}".strip()
    if config.distributed and not jax.distributed.is_initialized():
        join(config)
