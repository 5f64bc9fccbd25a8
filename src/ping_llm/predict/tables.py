"""Data frames in and out: questions, known measurements and answers as tables of pandas, Polars or Arrow."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ping_llm.core.addresses import UNPARSABLE, format_address, parse_column
from ping_llm.core.distribution import RttDistribution
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import time_microseconds
from ping_llm.core.observations import Ints, Questions
from ping_llm.rows.measurement_set import MeasurementSet, read_observations, table_observations
from ping_llm.sources.files import find_columns

History = Any
"""A path or glob, several of them, or a data frame."""


def measured_of(history: History | None) -> MeasurementSet:
    """Known measurements. Without any, a model falls back on what it learnt in training."""
    if history is None:
        return table_observations(None)
    if isinstance(history, MeasurementSet):
        return history
    if isinstance(history, str | Path):
        return read_observations([history])
    if isinstance(history, Sequence):
        return read_observations(history)
    return table_observations(_named(table_of(history), "the history", optional={"event_time", "ip_version"}))


def asked_of(table: pa.Table, nodes: Sequence[str]) -> tuple[Questions, tuple[str, ...]]:
    """Questions from the columns of a table, and all nodes: the known ones first, as they were."""
    asked = _named(table, "the questions", optional={"event_time", "ip_version", "rtt"})
    number = {node: place for place, node in enumerate(nodes)}
    ends = [_numbers(asked[column].combine_chunks(), column, number) for column in ("src_addr", "dst_addr")]
    time_s = np.full(table.num_rows, np.nan)
    if "event_time" in asked.column_names:
        time_us, missing, bad = time_microseconds(asked["event_time"].combine_chunks())
        if bad.any():
            first = int(np.argmax(bad))
            raise PingLlmError(f"question {first + 1}: {asked['event_time'][first]} is not a time")
        time_s = np.where(missing, np.nan, time_us / 1e6)
    return Questions(source=ends[0], destination=ends[1], time_s=time_s), tuple(number)


def _numbers(column: Any, name: str, number: dict[str, int]) -> Any:
    """The node of each address; an address that was never measured becomes a new one."""
    parsed = parse_column(column)
    wrong = np.flatnonzero(parsed.family_of_each == UNPARSABLE)
    if len(wrong):
        raise PingLlmError(f"question {wrong[0] + 1}: {name} {column[int(wrong[0])].as_py()!r} is not an address")
    texts = [
        format_address(int(family), packed.tobytes()) if family != UNPARSABLE else ""
        for family, packed in zip(parsed.families, parsed.packed, strict=True)
    ]
    of_text = np.array([number.setdefault(text, len(number)) if text else -1 for text in texts], dtype=np.int64)
    return of_text[parsed.codes]


def answers_table(
    table: pa.Table, answers: Iterable[tuple[Ints, RttDistribution]], levels: Sequence[float]
) -> pa.Table:
    """The table with the columns `p_failed`, `predictions` and one for each level. Answers are those of some rows."""
    names = ["p_failed", "predictions", *(f"{level:g}" for level in levels)]
    values = np.full((len(names), table.num_rows), np.nan)
    for rows, of_rows in answers:
        values[:, rows] = np.stack([of_rows.p_failed, of_rows.median, *of_rows.quantile(list(levels)).T])
    for name, column in zip(names, values, strict=True):
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(column))
    return table


def table_of(frame: Any) -> pa.Table:
    """A data frame of any of the three kinds as an Arrow table."""
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "to_arrow"):  # Polars
        return frame.to_arrow()
    if hasattr(frame, "iloc"):  # pandas
        return pa.Table.from_pandas(frame, preserve_index=False)
    raise PingLlmError(f"expected a data frame of pandas, Polars or Arrow, not {type(frame).__name__}")


def like(frame: Any, table: pa.Table) -> Any:
    """The table as a data frame of the kind that was given; a pandas index is kept."""
    if isinstance(frame, pa.Table):
        return table
    if hasattr(frame, "to_arrow"):
        return type(frame)(table)
    answer = table.to_pandas()
    answer.index = frame.index
    return answer


def _named(table: pa.Table, what: str, optional: set[str]) -> pa.Table:
    """The columns that are needed, under the names of the schema; whatever types they have."""
    found = find_columns(table.column_names, {}, what, optional=frozenset(optional))
    return table.select(list(found.values())).rename_columns(list(found))
