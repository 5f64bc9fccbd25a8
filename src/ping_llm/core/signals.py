"""Ctrl-C and SIGTERM as exceptions in the main thread, of which none is lost.

Python discards an exception that is raised while an object is being finalised, and a loader finalises an array with
every batch: one signal in twenty would be lost, and the program would continue. So a discarded signal is sent again.
"""

import signal
import sys
import threading
from types import FrameType
from typing import Final

_AGAIN_AFTER_S: Final = 0.02
_SIGNALS: Final = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}


def stop_on_signals() -> None:
    """From now on, SIGTERM ends the program like Ctrl-C, with all cleanup, and neither is ever lost."""
    report = sys.unraisablehook

    def terminate(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def unraisable(discarded: "sys.UnraisableHookArgs") -> None:
        number = next((n for kind, n in _SIGNALS.items() if isinstance(discarded.exc_value, kind)), None)
        main = threading.main_thread().ident
        if number is None or main is None:
            return report(discarded)
        timer = threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, (main, number))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = unraisable
