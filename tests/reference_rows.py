"""Picking measurements out of rows by decoding the rows whole: what the compiled reader must agree with."""

import numpy as np

from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import Ints
from ping_llm.rows.reader import Picked, RowReader


def pick(rows: RowSet, row: Ints, position: Ints) -> Picked:
    """Measurement `position[i]` of row `row[i]`, for all i."""
    numbers, which = np.unique(row, return_inverse=True)
    decoded = [rows[number] for number in numbers.tolist()]
    at = np.cumsum([0] + [len(d) for d in decoded])[which] + position
    padded = [np.pad(d.destinations, ((0, 0), (0, 16 - d.destinations.shape[1]))) for d in decoded]
    return Picked(
        time_s=np.concatenate([d.time_us for d in decoded])[at] // 1_000_000,
        rtt_ms=np.concatenate([d.rtt_ms for d in decoded])[at],
        destination=np.concatenate(padded)[at],
    )


def picked_by(reader: RowReader, row: Ints, position: Ints) -> Picked:
    """The same, by the compiled reader."""
    return reader.pick(row, np.arange(len(row) + 1), position, np.ones(len(row), dtype=np.bool_))


def assert_same(found: Picked, expected: Picked) -> None:
    assert np.array_equal(found.time_s, expected.time_s)
    assert found.rtt_ms.tobytes() == expected.rtt_ms.tobytes(), "unanswered ones are the same NaN"
    assert np.array_equal(found.destination, expected.destination)
