"""A parent for each process of a distributed run, which says in one line why it ended.

JAX ends a process that has lost the others from inside its C++ library, by `abort()` and with a stack trace: nothing
written in Python gets a chance to explain. So the process forks before it joins the others. The child trains; the
parent passes on what the child writes and the signals that come, waits, and explains. It also ends the worker processes
that an aborted child leaves behind, and goes down together with the child.
"""

import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final, NoReturn

from ping_llm.core.console import print_error

LOST: Final = 75
"""Exit code of a process that ended because another was lost (`EX_TEMPFAIL`): start all again, and the run resumes."""

Hosts = dict[int, str]
"""The machine of each process."""

_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_WORDS: Final = b"Terminating process because the JAX distributed service"
_PR_SET_PDEATHSIG: Final = 1
_NOT_JOINED: Final = {
    "ALREADY_EXISTS": "another process has the same number (JAX_PROCESS_ID)",
    "Unexpected task": "process 0 was told of fewer processes (JAX_NUM_PROCESSES)",
    "DEADLINE_EXCEEDED": "not all came in time: see that every process was started, reaches the host and port of "
    "process 0, and has the same number of processes; PING_LLM_JOIN_S is how many seconds they wait",
}


def fork_guarded() -> Callable[[Hosts], object]:
    """Fork. Returns in the child, which continues; the function it gets tells the parent who takes part."""
    errors, errors_write = os.pipe()
    shared = mmap.mmap(-1, 1 << 20)  # both see it
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
    hosts = json.loads(shared[:].rstrip(b"\0") or "{}")  # nothing, if the child never got so far
    explanation = explain(code, last_words.decode(errors="replace"), {int(n): host for n, host in hosts.items()})
    if explanation:
        print_error(explanation)
    else:
        _pass_on(bytes(last_words))
    os._exit(LOST if code == -signal.SIGABRT and explanation else code if code >= 0 else 128 - code)


def _listen(source: int, last_words: bytearray) -> None:
    """Pass on what the child writes, but for JAX's last words, which `explain` puts in a line."""
    while data := os.read(source, 1 << 16):
        found = data.find(_LAST_WORDS)
        start = 0 if last_words else len(data) if found < 0 else data.rfind(b"\n", 0, found) + 1
        _pass_on(data[:start])
        last_words += data[start:]


def _pass_on(data: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(data)
        sys.stderr.flush()


def explain(code: int, last_words: str, hosts: Hosts) -> str | None:
    """Why a process ended with this exit code (negative: a signal); None if it has said so itself."""
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


def _who(reason: str, hosts: Hosts) -> str:
    silent = re.search(r"stopped sending heartbeats\):(.*?)The tasks have crashed", reason)
    if silent and (lost := [int(number) for number in re.findall(r"(?:^|\s|task:)(\d+)(?=\s|$)", silent[1])]):
        return f"lost {', '.join(_named(number, hosts) for number in lost)} of {len(hosts) or 'all'}: no sign of life"
    if "Failed to send RPC" in reason or "Socket closed" in reason:
        return f"lost {_named(0, hosts)}, which holds the processes together, or the network to it"
    return f"lost another process ({reason[:300]})"


def _named(number: int, hosts: Hosts) -> str:
    return f"process {number}" + (f" on {hosts[number]}" if number in hosts else "")
