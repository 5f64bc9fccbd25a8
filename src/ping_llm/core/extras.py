"""Packages that only some installations have."""

import importlib
from typing import Any

from ping_llm.core.errors import PingLlmError


def need(module: str, extra: str, what: str) -> Any:
    """The module; an error that says how to install it, if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is installed, and broken
        raise PingLlmError(f'{what} needs the package {package}: pip install "ping-llm[{extra}]"') from None
