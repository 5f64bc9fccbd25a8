"""The compiled reader agrees with the plain one, and never reads outside a shard, whatever the index says."""

from typing import Any

import numpy as np
import pytest

from conftest import random_measurements
from ping_llm.batches.source import BatchBuilder
from ping_llm.core.errors import PingLlmError
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.reader import CHECKED_BYTES, CorruptRowError, MappedRows, RowReader
from pipeline_fixtures import Dataset, histories, prepare_table

ROW = 1


def with_index(monkeypatch: pytest.MonkeyPatch, dataset: Dataset, name: str, value: int) -> RowSet:
    """The rows with another number in the index for one row."""
    original = RowSet.column

    def column(self: RowSet, asked: str) -> Any:
        found = original(self, asked)
        if asked == name:
            found = found.copy()
            found[ROW] = value
            found.flags.writeable = False
        return found

    monkeypatch.setattr(RowSet, "column", column)
    return dataset.rows


class TestDamagedIndex:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("offset", 0),
            ("offset", 10**6),
            ("offset", 2**63),
            ("offset", 2**64 - 1),
            ("size", 0),
            ("size", 47),
            ("size", 60),
            ("size", 2**32 - 1),
            ("count", 0),
            ("count", 41),
            ("count", 2**32 - 1),
            ("family", 6),
            ("family", 0),
            ("time_unit_us", 0),
            ("time_unit_us", 7),
            ("time_unit_us", 2**32 - 1),
            ("first_time_us", -(2**63)),
            ("last_time_us", 2**63 - 1),
        ],
    )
    def test_is_an_error_that_names_the_row(self, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
        rows = with_index(monkeypatch, prepare_table(histories([30, 40, 50])), name, value)
        with pytest.raises(CorruptRowError) as caught:
            RowReader(rows).check(np.arange(3))
        assert caught.value.row == ROW
        assert f"row {ROW}:" in str(caught.value)

    def test_of_a_shard_that_there_is_not_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = with_index(monkeypatch, prepare_table(histories([30, 40, 50])), "shard", 5)
        with pytest.raises(PingLlmError, match="shards that there are not"):
            RowReader(rows)


class TestSoundRows:
    def test_of_any_size_and_family_pass_as_with_the_plain_reader(self) -> None:
        dataset = prepare_table(random_measurements(20_000, sources=300))
        with dataset.rows as rows:
            RowReader(rows).check(np.arange(len(rows)))
            MappedRows(rows).check(np.arange(len(rows)))

    def test_are_checked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with prepare_table(histories([30, 40, 50])).rows as rows:
            reader = RowReader(rows)
            reader.check(np.arange(3))
            reader._bytes[:] = 0  # every row would now be outside
            reader.check(np.arange(3))


class TestRowsThatAreTooLongToCheckWhole:
    """Only their header is checked; a number in them may be anything."""

    def damaged(self) -> Dataset:
        dataset = prepare_table(histories([90_000, 40, 30], gap_us=1_000_000_000))
        with dataset.rows as rows:
            row = int(rows.column("count").argmax())
            assert rows.column("size")[row] > CHECKED_BYTES
            begin, size = int(rows.column("offset")[row]), int(rows.column("size")[row])
            path = dataset.folder / rows.info.shards[0].file
        content = bytearray(path.read_bytes())
        infinite = np.float32(np.inf).tobytes()
        for at in range(begin + size - 200_000, begin + size - 8, 4):  # within the RTTs, the last column
            place = layout.physical(at + (-at) % 4)
            content[place : place + 4] = infinite
        path.write_bytes(content)
        return dataset

    def test_and_say_what_cannot_be_are_an_error(self) -> None:
        builder = self.damaged().builder()
        with pytest.raises(CorruptRowError, match="not as the index says"):
            builder.build(range(2 * builder.plan.sequences_per_epoch))

    def test_and_say_what_cannot_be_can_be_left_out(self) -> None:
        dataset = self.damaged()
        builder = BatchBuilder(dataset.rows, dataset.plan(), skip_corrupt_rows=True)
        builder.build(range(2 * builder.plan.sequences_per_epoch))
        assert len(builder.corrupt_rows) == 1
