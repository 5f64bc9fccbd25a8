"""The one exception a user is meant to see: the command line prints its message as a single line and exits non-zero."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final


class PingLlmError(Exception):
    """Something is wrong with what the user gave us (a file, an option, a folder), and the message says what to do."""


class DroppedRowsWarning(UserWarning):
    """Rows of a history that a Python program gave cannot be used, and the answers do without them."""


class MeasurementError(PingLlmError):
    """Input that cannot be used: one measurement, met under `--strict` (the message names the file and row), or all."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an exception of another package says, as it may stand in a message of ours."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    said = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(said.split())[:limit] or type(error).__name__


def shown(value: object, limit: int = 120) -> str:
    """A value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


@contextmanager
def explained(what: str, *kinds: type[Exception], limit: int = 200) -> Iterator[None]:
    """An exception of another package, of any kind or of these, becomes an error of ours: `what`, and what it says."""
    expected = kinds or (Exception,)
    try:
        yield
    except expected as error:
        if isinstance(error, PingLlmError) and not kinds:
            raise
        raise PingLlmError(f"{what}: {one_line(error, limit)}") from None


@contextmanager
def options_as_arguments() -> Iterator[None]:
    """Errors name the options of commands as those who call from Python write them: `--rtt-unit` is rtt_unit."""
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
"""Packages that only some installations have, imported by many modules. The others are asked for by `need`."""


def missing_extra(error: ModuleNotFoundError, what: str, extra: str = "") -> PingLlmError | None:
    """How to install what was not there, if it belongs to an extra."""
    package = (error.name or "").partition(".")[0]
    extra = extra or next((name for name, packages in _EXTRAS.items() if package in packages), "")
    if not extra:
        return None  # something that is installed is broken
    return PingLlmError(f'{what} needs the package {package}: pip install "ping-llm[{extra}]"')


@contextmanager
def extras_needed(what: str) -> Iterator[None]:
    """Imports that only work where one of these extras is installed, or an error that says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if explanation := missing_extra(error, what):
            raise explanation from None
        raise


def need(module: str, extra: str, what: str) -> Any:
    """A module that only some installations have; an error that says how to install it, if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is installed, and broken
        raise missing_extra(error, what, extra) or error from None
