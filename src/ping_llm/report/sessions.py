"""When a run began, stopped and went on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ping_llm.train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Session:
    """From one start of the program to its end, which a killed one does not tell."""

    begun: datetime | None
    ended: datetime | None
    first_step: int
    error: str | None
    machine: Mapping[str, Any]


def read_sessions(file: Path) -> list[Session]:
    found: list[Session] = []
    for event in read_metrics(file):
        if not isinstance(event, dict):
            continue
        if event.get("event") == "begin":
            machine = {key: value for key, value in event.items() if key not in ("event", "time", "first_step")}
            first = event.get("first_step")
            found.append(
                Session(
                    begun=_time(event),
                    ended=None,
                    first_step=first if isinstance(first, int) else 0,
                    error=None,
                    machine=machine,
                )
            )
        elif event.get("event") == "end" and found:
            error = event.get("error")
            found[-1] = replace(found[-1], ended=_time(event), error=None if error is None else str(error))
    return found


def _time(event: Mapping[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
