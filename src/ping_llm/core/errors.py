"""Errors for users: the command line prints the message of a `PingLlmError` as a single line and exits non-zero."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text that may quote a stranger's file, without the control characters that a terminal would obey."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PingLlmError(Exception):
    """Something is wrong with what the user gave (a file, an option, a folder). The message says what to do."""

    def __str__(self) -> str:
        return printable(super().__str__())


class DroppedRowsWarning(UserWarning):
    """Some rows of the history given from Python cannot be used, and are left out."""


class MeasurementError(PingLlmError):
    """Measurements that cannot be used: all of an input, or one under `--strict` (the message names file and row)."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of another package's exception, shortened to become part of one of ours."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    said = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(said.split())[:limit] or type(error).__name__


def shown(value: object, limit: int = 120) -> str:
    """A value, shortened for a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


@contextmanager
def explained(what: str, *kinds: type[Exception], limit: int = 200) -> Iterator[None]:
    """Turn another package's exceptions (of these kinds or any) into a `PingLlmError`: `what`, then their message."""
    expected = kinds or (Exception,)
    try:
        yield
    except expected as error:
        if isinstance(error, PingLlmError) and not kinds:
            raise
        raise PingLlmError(f"{what}: {one_line(error, limit)}") from None


@contextmanager
def options_as_arguments() -> Iterator[None]:
    """Rewrite options in error messages as arguments, for callers from Python: `--rtt-unit` becomes rtt_unit."""
    try:
        yield
    except PingLlmError as error:
        said = re.sub(r"--columns (\w+)=(\w+)", r'columns={"\1": "\2"}', str(error))
        said = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda option: option[1].replace("-", "_"), said)
        raise type(error)(said) from None


_EXTRAS: Final = {
    "data": ("array_record", "duckdb", "google", "numba"),
    "train": ("flax", "grain", "jax", "optax", "orbax"),
    "remote": ("fsspec", "tenacity"),
}
"""Top-level packages of the extras that many modules import. Other optional packages are imported by `need`."""


def missing_extra(error: ModuleNotFoundError, what: str, extra: str = "") -> PingLlmError | None:
    """An error that says how to install the missing package, if it belongs to an extra."""
    package = (error.name or "").partition(".")[0]
    extra = extra or next((name for name, packages in _EXTRAS.items() if package in packages), "")
    if not extra:
        return None  # something that is installed is broken
    return PingLlmError(f'{what} needs the package {package}: pip install "ping-llm[{extra}]"')


@contextmanager
def extras_needed(what: str) -> Iterator[None]:
    """For a block of imports that need one of these extras: if it is not installed, raise an error that says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if explanation := missing_extra(error, what):
            raise explanation from None
        raise


def need(module: str, extra: str, what: str) -> Any:
    """Import a module that is optional; if it is missing, raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is installed, and broken
        raise missing_extra(error, what, extra) or error from None
