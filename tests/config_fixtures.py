"""Helpers of the configuration's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ping_llm.config import load_config
from ping_llm.core.errors import PingLlmError

ROOT = Path(__file__).resolve().parents[1]
IN_TMP_PATH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

WriteYaml = Callable[..., Path]


def refusal(path: Path | str | None, *overrides: str) -> str:
    """The message of the error that loading ends in. It must be one line."""
    with pytest.raises(PingLlmError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
