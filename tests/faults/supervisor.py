"""A process whose system calls are decided one by one: let through, failed with an error number, or its end.

Linux tells a supervisor of the calls that a filter names and waits for its answer (seccomp user notifications, no
privileges needed). The filter holds for all threads and children of the process, so native libraries are met as well as
Python. What is written through a mapping is not a call, and not seen.
"""

import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Of each call, where its path or descriptor stands: numbers for x86-64 and ARM, then the arguments.
_CALLS: Final = {
    "write": (1, 64, "fd", 0), "pwrite64": (18, 68, "fd", 0), "writev": (20, 66, "fd", 0),
    "pwritev": (296, 70, "fd", 0), "pwritev2": (328, 287, "fd", 0),
    "sendfile": (40, 71, "fd", 0), "copy_file_range": (326, 285, "fd", 2),
    "truncate": (76, 45, "path", 0), "ftruncate": (77, 46, "fd", 0), "fallocate": (285, 47, "fd", 0),
    "fsync": (74, 82, "fd", 0), "fdatasync": (75, 83, "fd", 0),
    "rename": (82, None, "path", 0), "renameat": (264, 38, "at", 0), "renameat2": (316, 276, "at", 0),
    "link": (86, None, "path", 0), "linkat": (265, 37, "at", 0),
    "unlink": (87, None, "path", 0), "unlinkat": (263, 35, "at", 0),
    "mkdir": (83, None, "path", 0), "mkdirat": (258, 34, "at", 0), "rmdir": (84, None, "path", 0),
    "symlink": (88, None, "path", 1), "symlinkat": (266, 36, "at", 1),
    "sendto": (44, 206, "fd", 0),
    "io_uring_setup": (425, 425, "", 0),
}  # fmt: skip
WRITES: Final = frozenset(
    {"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "truncate", "ftruncate",
     "fallocate", "mkdir", "mkdirat", "symlink", "symlinkat"}
)  # fmt: skip
SENDS: Final = frozenset({"sendto"})
SYNCS: Final = frozenset({"fsync", "fdatasync"})
NAMES: Final = frozenset({"rename", "renameat", "renameat2", "link", "linkat"})

_ON_ARM: Final = platform.machine() == "aarch64"
_NUMBERS: Final = {call[_ON_ARM]: name for name, call in _CALLS.items() if call[_ON_ARM] is not None}
_SECCOMP: Final = 277 if _ON_ARM else 317
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_HERE: Final = (1 << 32) - 100  # AT_FDCWD as an unsigned argument
KILL: Final = -1
"""The answer that ends the process instead of a call."""


@dataclass(frozen=True)
class Call:
    name: str
    path: str
    """Of the file, before a rename its old name; `socket:[…]` and the like for what is no file."""


Decide = Callable[[Call], int]
"""0: go on; an error number; or `KILL`."""


@dataclass(frozen=True)
class Ended:
    code: int
    """As the shell has it; negative for a signal."""
    stdout: str
    stderr: str

    @property
    def is_one_line(self) -> bool:
        """Whether it ended as a fault of the user's making does: its last line, and no other, says what is wrong."""
        lines = self.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error:")]
        return self.code == 1 and "Traceback" not in self.stderr and len(errors) == 1 and lines[-1] == errors[0]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("true", ctypes.c_ubyte), ("false", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def _listen() -> int:
    """From here on this process's calls are reported to who reads the descriptor."""
    numbers = list(_NUMBERS)
    code = [_Instruction(0x20, 0, 0, 0)]  # the number of the call
    code += [_Instruction(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    code += [_Instruction(0x06, 0, 0, 0x7FFF0000), _Instruction(0x06, 0, 0, 0x7FC00000)]  # allow; ask
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code), (_Instruction * len(code))(*code))
    if libc.prctl(38, 1, 0, 0, 0) == 0 and (listener := libc.syscall(_SECCOMP, 1, 8, ctypes.byref(program))) >= 0:
        return int(listener)
    raise OSError(ctypes.get_errno(), "this system has no seccomp notifications")


def supervise(action: Callable[[], Any], folder: Path, decide: Decide | None = None) -> Ended:
    """Run an action in a fork of this process, within `folder`. Its output goes to files beside that."""
    outputs = [folder.with_name(f"{folder.name}.{name}") for name in ("out", "err")]
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(action, folder, outputs, theirs if decide else None)
    theirs.close()
    if decide is not None:
        message, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not message:
            os.waitpid(child, 0)
            raise OSError(outputs[1].read_text())
        try:
            _answer(descriptors[0], child, decide)
        finally:
            os.close(descriptors[0])
    ours.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # workers that it left behind
    return Ended(code, *(path.read_text(errors="replace") for path in outputs))


def _become(action: Callable[[], Any], folder: Path, outputs: list[Path], parent: socket.socket | None) -> None:
    code = 70
    try:
        os.setsid()
        for number, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        if parent is not None:
            listener = _listen()
            socket.send_fds(parent, [b"x"], [listener])
            os.close(listener)
        action()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _answer(listener: int, child: int, decide: Decide) -> None:
    """Decide about all calls, until no process is left that makes any."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not any(event & select.POLLHUP for _, event in poll.poll()):
        message = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, message, True)
        except FileNotFoundError:  # its process was killed meanwhile
            continue
        number, process, _, call, *_, first, second, third = struct.unpack_from("<QIIiIQQQQ", message)
        name = _NUMBERS[call]
        answer = 38 if name == "io_uring_setup" else decide(Call(name, _path(process, name, (first, second, third))))
        if answer == KILL:
            os.killpg(child, signal.SIGKILL)
        with suppress(FileNotFoundError):
            reply = struct.pack("<QqiI", number, 0, -answer, int(answer == 0))
            fcntl.ioctl(listener, _SEND, bytearray(reply), True)


def _path(process: int, name: str, arguments: tuple[int, ...]) -> str:
    *_, kind, at = _CALLS[name]
    try:
        if kind == "fd":
            return str(Path(f"/proc/{process}/fd/{arguments[at]}").readlink())
        folder = Path(f"/proc/{process}/cwd")
        if kind == "at":
            if arguments[at] & 0xFFFFFFFF != _HERE:
                folder = Path(f"/proc/{process}/fd/{arguments[at] & 0xFFFFFFFF}")
            at += 1
        with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
            memory.seek(arguments[at])
            text = memory.read(4096).partition(b"\0")[0].decode(errors="replace")
        return os.path.normpath(folder.readlink() / text)
    except OSError:  # it ended meanwhile
        return ""
