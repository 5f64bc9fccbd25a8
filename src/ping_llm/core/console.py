"""What a person sees while a command works: progress on a terminal, nothing in a pipe or a log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console(highlight=False)
"""Results. Programs read this stream, so nothing else is ever printed to it."""

err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress, notes and errors."""


def print_error(error: object) -> None:
    """One line on standard error, as all that goes wrong ends."""
    message = " ".join(str(error).split()).replace("[", r"\[")
    err.print(f"[bold red]error:[/] {message}")


class _ToConsole(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(self.format(record), markup=False)


def log_to_console() -> None:
    """What our modules log appears on standard error, above a progress bar; by itself Python shows warnings only."""
    logging.basicConfig(handlers=[_ToConsole()], format="%(message)s")
    logging.getLogger("ping_llm").setLevel(logging.INFO)


class Advance(Protocol):
    """Reports work done. `total` may be given late, when it becomes known."""

    def __call__(self, amount: float = 1, *, total: float | None = None) -> None: ...


def no_progress(amount: float = 1, *, total: float | None = None) -> None:
    """For work that nobody watches."""


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Advance]:
    """A progress bar on standard error that is only drawn on a terminal.

    >>> with progress("reading", total=3) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    columns = SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float = 1, *, total: float | None = None) -> None:
            if total is not None:
                bar.update(task, total=total)
            bar.advance(task, amount)

        yield advance
