"""Picking measurements out of mapped shards: what decoding the rows gives, never a read outside a shard, and damage
that is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_measurements
from ping_llm.contexts.source import RowSequences
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import CorruptRowError, RowSet
from ping_llm.rows.format import HEADER, decode_row
from ping_llm.rows.manifest import INDEX_TYPES, index_fault
from ping_llm.rows.prepare import TaskSizes
from ping_llm.rows.reader import CHECKED_BYTES, RowReader
from pipeline_fixtures import Dataset, arrays_of, histories, prepare_table
from reference_rows import assert_same, pick, picked_by

ROW = 1


def check_every_measurement(dataset: Dataset, seed: int = 0) -> None:
    """All measurements of all rows, at once and in random order. Rows are those that ArrayRecord itself reads."""
    with dataset.rows as rows:
        stored = [
            decode_row(record)
            for shard in rows.info.shards
            for record in ArrayRecordReader(str(dataset.folder / shard.file), "").read_all()
        ]
        assert len(stored) == len(rows)
        for number, row in enumerate(stored):
            assert rows[number].source == row.source
            assert rows[number].time_us.tobytes() == row.time_us.tobytes()
            assert rows[number].rtt_ms.tobytes() == row.rtt_ms.tobytes()
        counts = [len(row) for row in stored]
        order = np.random.default_rng(seed).permutation(sum(counts))
        numbers = np.repeat(np.arange(len(rows)), counts)[order]
        positions = np.concatenate([np.arange(count) for count in counts])[order]
        reader = RowReader(rows)
        reader.check(np.arange(len(rows)))
        assert_same(picked_by(reader, numbers, positions), pick(rows, numbers, positions))
        sources = b"".join(row.source.ljust(16, b"\0") for row in stored)
        assert rows.column("source").tobytes() == sources


class TestPick:
    def picked(self, rows: RowSet, numbers: Any, positions: Any) -> Any:
        reader = RowReader(rows)
        reader.check(numbers)
        return picked_by(reader, numbers, positions)

    def test_gives_every_measurement_of_both_families(self) -> None:
        dataset = prepare_table(random_measurements(20_000))
        assert set(dataset.rows.column("family").tolist()) == {4, 6}
        check_every_measurement(dataset)

    @pytest.mark.parametrize("family", [4, 6])
    def test_gives_measurements_of_rows_across_many_blocks(self, family: int) -> None:
        dataset = prepare_table(histories([40_000, 1, 9_000], family=family, gap_us=1_000))
        assert dataset.rows.column("size").max() > 7 * layout.BLOCK
        check_every_measurement(dataset)

    def test_gives_measurements_of_rows_too_long_to_be_checked_whole(self) -> None:
        dataset = prepare_table(histories([50_000], family=6))
        assert dataset.rows.column("size")[0] > CHECKED_BYTES
        check_every_measurement(dataset)

    @pytest.mark.parametrize("family", [4, 6])
    def test_gives_times_of_microseconds_over_more_than_an_hour(self, family: int) -> None:
        dataset = prepare_table(histories([500, 3, 20_000], family=family, gap_us=600_000_000))
        with dataset.rows as rows:
            span_us = rows.column("last_time_us") - rows.column("first_time_us")
            assert (rows.column("time_unit_us") == 1).all()
            assert (span_us >= 2**32).any(), "ticks of eight bytes"
        check_every_measurement(dataset)

    def test_gives_narrow_and_wide_times_side_by_side(self) -> None:
        table = pa.concat_tables([histories([30, 200, 31, 300]), random_measurements(3_000)])
        dataset = prepare_table(table)
        with dataset.rows as rows:
            wide = (rows.column("last_time_us") - rows.column("first_time_us")) // rows.column("time_unit_us") >= 2**32
            assert wide.any()
            assert not wide.all()
        check_every_measurement(dataset)

    def test_gives_whole_seconds_of_times_just_before_and_after_them(self) -> None:
        table = histories([6])
        times = [1_699_999_999_999_999, 1_700_000_000_000_000, 1_700_000_000_000_001, 0, 999_999, 1_000_000]
        dataset = prepare_table(table.set_column(0, table.schema.field(0), pa.array(times, table.schema.field(0).type)))
        with dataset.rows as rows:
            picked = self.picked(rows, np.zeros(6, dtype=np.int64), np.arange(6))
        assert picked.time_s.tolist() == [0, 0, 1, 1_699_999_999, 1_700_000_000, 1_700_000_000]

    def test_gives_measurements_of_several_shards(self) -> None:
        table = pa.concat_tables([random_measurements(20_000, sources=200), histories([7_000], family=6)])
        dataset = prepare_table(table, sizes=TaskSizes(shard_measurements=1_500))
        assert len(dataset.rows.info.shards) > 8
        check_every_measurement(dataset)

    def test_gives_nothing_when_nothing_is_requested(self) -> None:
        with prepare_table(histories([5])).rows as rows:
            picked = self.picked(rows, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert len(picked.time_s) == len(picked.rtt_ms) == len(picked.destination) == 0

    def test_gives_a_measurement_as_often_as_it_is_requested(self) -> None:
        with prepare_table(histories([100, 100])).rows as rows:
            picked = self.picked(rows, np.array([1, 0, 1, 1]), np.array([7, 7, 99, 7]))
            expected = [int(rows[row].time_us[position]) // 1_000_000 for row, position in [(1, 7), (0, 7), (1, 99)]]
        assert picked.time_s.tolist() == [*expected, expected[0]]

    @settings(max_examples=20, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 60) | st.integers(5_400, 5_500), min_size=1, max_size=12),
        family=st.sampled_from([4, 6]),
        gap_us=st.sampled_from([1, 1_000_000, 3_600_000_000]),
        seed=st.integers(0, 99),
    )
    def test_gives_every_measurement_whatever_the_row_sizes(
        self, sizes: list[int], family: int, gap_us: int, seed: int
    ) -> None:
        check_every_measurement(prepare_table(histories(sizes, family=family, gap_us=gap_us, seed=seed)), seed)


class TestDamage:
    def damaged(self, at: int, sizes: tuple[int, ...] = (3_000, 20, 40)) -> tuple[RowSet, int, Path]:
        """A dataset in which byte `at` of the record of the largest row is another one."""
        dataset = prepare_table(histories(sizes))
        rows = dataset.rows
        row = int(rows.column("count").argmax())
        path = dataset.folder / rows.info.shards[0].file
        size, offset = int(rows.column("size")[row]), int(rows.column("offset")[row])
        content = bytearray(path.read_bytes())
        content[layout.physical(offset + at % size)] ^= 0x40
        path.write_bytes(content)
        return rows, row, path

    @pytest.mark.parametrize("at", [0, 5, HEADER.itemsize - 1, HEADER.itemsize + 9, 20_000, -1])
    def test_anywhere_in_a_row_is_an_error_that_names_shard_and_row(self, at: int) -> None:
        rows, row, path = self.damaged(at)
        with pytest.raises(CorruptRowError) as caught:
            RowReader(rows).check(np.arange(3))
        assert caught.value.row == row
        assert str(path) in str(caught.value)
        assert f"row {rows.column('position')[row]}:" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_of_one_row_leaves_the_others_readable(self) -> None:
        rows, row, _ = self.damaged(1_000)
        RowReader(rows).check(np.delete(np.arange(3), row))

    def test_is_reported_again_when_the_row_is_used_again(self) -> None:
        rows, row, _ = self.damaged(1_000)
        reader = RowReader(rows)
        for _attempt in range(2):
            with pytest.raises(CorruptRowError):
                reader.check(np.array([row]))

    def test_of_the_header_of_a_very_long_row_is_noticed(self) -> None:
        rows, row, _ = self.damaged(0, sizes=(70_000,))
        assert rows.column("size")[row] > CHECKED_BYTES
        with pytest.raises(CorruptRowError):
            RowReader(rows).check(np.array([row]))

    def test_sound_rows_are_checked_once(self) -> None:
        dataset = prepare_table(histories([30, 40, 50]))
        reader = RowReader(dataset.rows)
        reader.check(np.arange(3))
        path = dataset.folder / dataset.rows.info.shards[0].file
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        reader.check(np.arange(3))
        with pytest.raises(CorruptRowError):
            RowReader(dataset.rows).check(np.arange(3))


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
            ("offset", 1000),
            ("size", 60),
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

    @pytest.mark.parametrize("value", [0, 39, 10**6, 2**32 - 1, 2**63, 2**64 - 1])
    @pytest.mark.parametrize("name", ["offset", "size"])
    def test_that_says_where_a_row_cannot_lie_is_refused_when_it_is_opened(self, name: str, value: int) -> None:
        rows = prepare_table(histories([30, 40, 50])).rows
        columns = {column: rows.column(column) for column in INDEX_TYPES}
        columns[name] = columns[name].astype(np.uint64)
        columns[name][ROW] = value
        assert f"out of range, first in row {ROW}" in str(index_fault(columns, rows.info))


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
            at_byte = layout.physical(at + (-at) % 4)
            content[at_byte : at_byte + 4] = infinite
        path.write_bytes(content)
        return dataset

    def test_and_say_what_cannot_be_are_an_error(self) -> None:
        builder = self.damaged().builder()
        with pytest.raises(CorruptRowError, match="not as the index says"):
            arrays_of(builder, range(2 * builder.plan.sequences_per_epoch))

    def test_and_say_what_cannot_be_can_be_left_out(self) -> None:
        dataset = self.damaged()
        builder = RowSequences(dataset.rows, dataset.plan(), skip_corrupt_rows=True)
        arrays_of(builder, range(2 * builder.plan.sequences_per_epoch))
        assert len(builder.left_out) == 1
