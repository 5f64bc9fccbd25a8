"""Signals end a program once, also when Python is finalising an object."""

import signal
import subprocess
import sys

import pytest

_PROGRAM = """
import time
from ping_llm.core.signals import stop_on_signals

class Finalised:
    def __del__(self):
        print("finalising", flush=True)
        time.sleep(0.5)  # the signal comes now

stop_on_signals()
Finalised()
time.sleep(20)
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_that_falls_into_a_finaliser_still_ends_the_program(sent: signal.Signals, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "finalising\n"
        process.send_signal(sent)
        assert process.wait(timeout=10) == code


def test_other_errors_in_finalisers_are_reported_as_ever() -> None:
    program = "from ping_llm.core.signals import stop_on_signals\nstop_on_signals()\n" + (
        "class Broken:\n    def __del__(self):\n        raise ValueError('told')\nBroken()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "ValueError: told" in done.stderr
