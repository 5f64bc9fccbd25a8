"""A parent for each process of a run, which says in one line why it ended.

JAX ends a process that has lost the others from inside its C++ library, by `abort()` and with a stack trace: nothing
written in Python gets a chance to explain. So the process forks before it joins the others. The child trains; the
parent passes on what the child writes and the signals that come, waits, and explains. It also ends the worker processes
that an aborted child leaves behind, and goes down together with the child.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final, NoReturn

from ping_llm.console import err

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
