"""What the processes of a run tell each other beside the training: who they are, and when one of them fails.

A process that fails would leave the others waiting for it, each in the middle of a step. So it says why in the store
that JAX's processes share, where the others look every second, and all end at once.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import jax

from ping_llm import __version__
from ping_llm.config import Config
from ping_llm.console import err
from ping_llm.errors import PingLlmError
from ping_llm.train.guard import Hosts

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
