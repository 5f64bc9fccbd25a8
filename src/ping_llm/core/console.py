"""Output for people: results, errors, and progress, which is a bar on a terminal and a line now and then in a log."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

_NO_LIMIT: Final = 100_000


def _width() -> int | None:
    """None, for the width of the terminal or of COLUMNS; otherwise so wide that lines in a pipe or file do not wrap."""
    has_width = (sys.stdout is not None and sys.stdout.isatty()) or "COLUMNS" in os.environ
    return None if has_width else _NO_LIMIT


out = Console(highlight=False, emoji=False, width=_width())
"""Results. Programs read this stream, so nothing else is ever printed to it."""

err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
"""Progress, notes and errors."""


def print_error(error: object) -> None:
    """Print an error as one line on standard error."""
    message = " ".join(str(error).split()).replace("[", r"\[")
    err.print(f"[bold red]error:[/] {message}")


class _ToConsole(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), markup=False)


def log_to_console() -> None:
    """Show what our modules log on standard error, above a progress bar. Without this, Python shows only warnings."""
    logging.basicConfig(handlers=[_ToConsole()], format="%(message)s")
    logging.getLogger("ping_llm").setLevel(logging.INFO)


class Advance(Protocol):
    """Reports work done. `total` may be given late, when it becomes known."""

    def __call__(self, amount: float = 1, *, total: float | None = None) -> None: ...


def no_progress(amount: float = 1, *, total: float | None = None) -> None:
    """Ignores progress."""


@contextmanager
def progress(description: str, total: float | None = None, *, every_s: float = 30.0) -> Iterator[Advance]:
    """A progress bar on standard error; if that is not a terminal, a line every `every_s` seconds.

    >>> with progress("reading", total=3) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    if not err.is_terminal:
        yield _lines(description, total, every_s)
        return
    columns = SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=err, transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float = 1, *, total: float | None = None) -> None:
            if total is not None:
                bar.update(task, total=total)
            bar.advance(task, amount)

        yield advance


def _lines(description: str, whole: float | None, every_s: float) -> Advance:
    began = said = time.monotonic()
    done = 0.0

    def advance(amount: float = 1, *, total: float | None = None) -> None:
        nonlocal said, done, whole
        now, done, whole = time.monotonic(), done + amount, whole if total is None else total
        if now - said >= every_s:
            said = now
            share = f" of {whole:,.0f} ({done / whole:.0%})" if whole else ""
            err.print(f"{description}: {done:,.0f}{share} after {now - began:.0f} s", markup=False)

    return advance
