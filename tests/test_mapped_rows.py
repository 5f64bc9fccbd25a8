"""Picking measurements out of mapped shards gives what decoding the rows gives, and damage is an error with a place."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_measurements
from ping_llm.rows import format as layout
from ping_llm.rows import prepare as prepare_module
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import HEADER
from ping_llm.rows.reader import CHECKED_BYTES, CorruptRowError, MappedRows
from pipeline_fixtures import Dataset, histories, prepare_table

Ints = npt.NDArray[np.int64]


def check_every_measurement(dataset: Dataset, seed: int = 0) -> None:
    """All measurements of all rows, asked for at once and in random order."""
    with dataset.rows as rows:
        decoded = [rows[number] for number in range(len(rows))]
        row = np.repeat(np.arange(len(rows)), [len(d) for d in decoded])
        position = np.concatenate([np.arange(len(d)) for d in decoded])
        order = np.random.default_rng(seed).permutation(len(row))
        mapped = MappedRows(rows)
        mapped.check(np.arange(len(rows)))
        picked = mapped.pick(row[order], position[order])

        time_s = np.concatenate([d.time_us // 1_000_000 for d in decoded])
        rtt_ms = np.concatenate([d.rtt_ms for d in decoded])
        destination = np.zeros((len(row), 16), dtype=np.uint8)
        for number, d in enumerate(decoded):
            destination[row == number, : d.destinations.shape[1]] = d.destinations
            assert mapped.sources(np.array([number])).tobytes() == d.source.ljust(16, b"\0")
    assert np.array_equal(picked.time_s, time_s[order])
    assert picked.rtt_ms.tobytes() == rtt_ms[order].tobytes(), "failed ones are the same NaN"
    assert np.array_equal(picked.destination, destination[order])


class TestPick:
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
            picked = MappedRows(rows).pick(np.zeros(6, dtype=np.int64), np.arange(6))
        assert picked.time_s.tolist() == [0, 0, 1, 1_699_999_999, 1_700_000_000, 1_700_000_000]

    def test_gives_measurements_of_several_shards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare_module, "SHARD_MEASUREMENTS", 1_500)
        table = pa.concat_tables([random_measurements(20_000, sources=200), histories([7_000], family=6)])
        dataset = prepare_table(table)
        assert len(dataset.rows.info.shards) > 8
        check_every_measurement(dataset)

    def test_gives_nothing_when_nothing_is_asked_for(self) -> None:
        with prepare_table(histories([5])).rows as rows:
            picked = MappedRows(rows).pick(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert len(picked.time_s) == len(picked.rtt_ms) == len(picked.destination) == 0

    def test_gives_a_measurement_as_often_as_it_is_asked_for(self) -> None:
        with prepare_table(histories([100, 100])).rows as rows:
            picked = MappedRows(rows).pick(np.array([1, 0, 1, 1]), np.array([7, 7, 99, 7]))
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
            MappedRows(rows).check(np.arange(3))
        assert caught.value.row == row
        assert str(path) in str(caught.value)
        assert f"row {rows.column('position')[row]}:" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_of_one_row_leaves_the_others_readable(self) -> None:
        rows, row, _ = self.damaged(1_000)
        MappedRows(rows).check(np.delete(np.arange(3), row))

    def test_is_reported_again_when_the_row_is_used_again(self) -> None:
        rows, row, _ = self.damaged(1_000)
        mapped = MappedRows(rows)
        for _attempt in range(2):
            with pytest.raises(CorruptRowError):
                mapped.check(np.array([row]))

    def test_of_the_header_of_a_very_long_row_is_noticed(self) -> None:
        rows, row, _ = self.damaged(0, sizes=(70_000,))
        assert rows.column("size")[row] > CHECKED_BYTES
        with pytest.raises(CorruptRowError):
            MappedRows(rows).check(np.array([row]))

    def test_a_record_that_is_not_the_one_the_index_names_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = prepare_table(histories([3_000, 20, 40]))
        rows = dataset.rows
        column = RowSet.column
        monkeypatch.setattr(RowSet, "column", lambda s, name: column(s, name) + (name == "count"))
        with pytest.raises(CorruptRowError, match="not the one that the index names"):
            MappedRows(rows).check(np.arange(3))
