"""The units in which measurement files are read, and the names their columns may have."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA

ALIASES: Final = {
    "event_time": ("event_time", "timestamp", "time"),
    "src_addr": ("src_addr", "source", "src"),
    "dst_addr": ("dst_addr", "destination", "dst"),
    "ip_version": ("ip_version", "af"),
    "rtt": ("rtt", "rtt_avg", "rtt_ms"),
}
"""Column names that are understood without being told, best first."""

OPTIONAL_COLUMNS: Final = frozenset({"ip_version"})
OPTIONAL_WITHOUT_TIME: Final = OPTIONAL_COLUMNS | {"event_time"}
"""For readers to whom a table of RTTs is enough."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file as it was when the work was planned; size and time tell whether it is still the same."""

    path: str
    format: str
    bytes: int
    mtime_ns: int
    measurements: int | None
    """Known without reading for Parquet only."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one file that is read by one task."""

    path: str
    format: str
    columns: dict[str, str]
    """The file's name of each schema column."""
    bytes: int
    row_groups: tuple[int, int] | None = None
    first_row: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        groups = value["row_groups"]
        return cls(**{**value, "row_groups": tuple(groups) if groups else None})


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Rows as they stand in the file, under the schema's names."""

    batch: pa.RecordBatch
    first_row: int
    """Number of the batch's first row in the file, counted from 0."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that the reader itself could not make sense of, and that are not in the batch."""


def find_columns(
    names: list[str], renamed: Mapping[str, str], path: str, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> dict[str, str]:
    """The file's name of each schema column: what the user said, else the first alias that is there."""
    chosen = {}
    for column in SCHEMA.names:
        candidates = (renamed[column],) if column in renamed else ALIASES[column]
        match = next((name for name in candidates if name in names), None)
        if match is None:
            if column in optional and column not in renamed:
                continue
            raise PingLlmError(
                f"{path}: no column {' or '.join(repr(c) for c in candidates)} (the file has: {', '.join(names)}); "
                f"name yours with --columns {column}=NAME"
            )
        chosen[column] = match
    return chosen
