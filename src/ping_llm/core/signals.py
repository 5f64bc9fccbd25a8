"""Ctrl-C and SIGTERM end a program once, wherever it is: each is an exception in the main thread.

Python discards an exception that is raised while an object is being finalised, and a loader finalises an array with
every batch: one signal in twenty would be lost, and the program would simply go on. So a signal that was discarded is
sent again, a moment later.
"""

import signal
import sys
import threading
from types import FrameType
from typing import Final

_AGAIN_AFTER_S: Final = 0.02


def stop_on_signals() -> None:
    """From now on SIGTERM exits as Ctrl-C does, cleaning up on the way, and neither is ever lost."""
    signal.signal(signal.SIGTERM, _terminate)
    report = sys.unraisablehook

    def unraisable(discarded: "sys.UnraisableHookArgs") -> None:
        if isinstance(discarded.exc_value, KeyboardInterrupt):
            _send_again(signal.SIGINT)
        elif isinstance(discarded.exc_value, SystemExit):
            _send_again(signal.SIGTERM)
        else:
            report(discarded)

    sys.unraisablehook = unraisable


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _send_again(number: signal.Signals) -> None:
    main = threading.main_thread().ident
    if main is None:
        return
    timer = threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, (main, number))
    timer.daemon = True
    timer.start()
