"""The binary probe row, and where its bytes lie in an ArrayRecord file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.core.measurements import ADDRESS_BYTES
from ping_llm.rows import format as layout
from ping_llm.rows.format import (
    HEADER,
    CorruptRecordError,
    RowBatch,
    decode_row,
    encode_rows,
    record_shape,
)


def make_runs(counts: list[int], *, family: int = 4, step_us: int = 1_000_000, seed: int = 0) -> RowBatch:
    rng = np.random.default_rng(seed)
    total, width = sum(counts), ADDRESS_BYTES[family]
    time = np.concatenate([1_700_000_000_000_000 + np.cumsum(rng.integers(0, 900, n)) * step_us for n in counts])
    rtt = rng.lognormal(3, 1, total).astype(np.float32)
    rtt[rng.random(total) < 0.1] = np.nan
    lengths = np.array(counts, dtype=np.int64)
    return RowBatch(
        family=family,
        sources=rng.integers(0, 256, (len(counts), 16), dtype=np.uint8) * (np.arange(16) < width),
        counts=lengths,
        time_us=time,
        destinations=rng.integers(0, 256, (total, width), dtype=np.uint8),
        rtt_ms=rtt,
    )


def starts_of(rows: RowBatch) -> Any:
    return np.cumsum(rows.counts) - rows.counts


def assert_kept(runs: RowBatch) -> None:
    records, index = encode_rows(runs)
    for row, (start, count) in enumerate(zip(starts_of(runs).tolist(), runs.counts.tolist(), strict=True)):
        decoded = decode_row(records[row])
        part = slice(start, start + count)
        assert decoded.family == runs.family
        assert decoded.source == runs.sources[row].tobytes()[: ADDRESS_BYTES[runs.family]]
        np.testing.assert_array_equal(decoded.time_us, runs.time_us[part])
        np.testing.assert_array_equal(decoded.destinations, runs.destinations[part])
        np.testing.assert_array_equal(decoded.rtt_ms, runs.rtt_ms[part])
        assert index["failed"][row] == np.isnan(runs.rtt_ms[part]).sum()


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    family=st.sampled_from([4, 6]),
    step_us=st.sampled_from([1, 1_000, 1_000_000, 37, 20_000_000_000]),
    seed=st.integers(0, 2**32),
)
def test_rows_decode_to_what_was_encoded(counts: list[int], family: int, step_us: int, seed: int) -> None:
    runs = make_runs(counts, family=family, step_us=step_us, seed=seed)
    assert_kept(runs)


def test_whole_seconds_take_four_bytes_and_long_microsecond_spans_eight() -> None:
    _, seconds = encode_rows(make_runs([1000], step_us=1_000_000))
    _, micros = encode_rows(make_runs([1000], step_us=999_999))
    assert seconds["time_unit_us"].tolist() == [1_000_000]
    assert micros["time_unit_us"].tolist() == [1]
    assert 12_000 < seconds["size"][0] < 12_100
    assert 16_000 < micros["size"][0] < 16_100


def test_rows_of_mixed_time_widths_can_share_a_batch() -> None:
    narrow, wide = make_runs([300, 5]), make_runs([200, 7], step_us=999_999, seed=1)
    runs = RowBatch(
        family=4,
        sources=np.concatenate([narrow.sources, wide.sources]),
        counts=np.concatenate([narrow.counts, wide.counts]),
        time_us=np.concatenate([narrow.time_us, wide.time_us]),
        destinations=np.concatenate([narrow.destinations, wide.destinations]),
        rtt_ms=np.concatenate([narrow.rtt_ms, wide.rtt_ms]),
    )
    assert_kept(runs)


def test_every_record_shape_is_aligned_and_consistent_with_its_own_length() -> None:
    bodies = np.concatenate(
        [np.arange(12, 40_000, 4), np.arange(2_000_000, 2_200_000, 4), 2**28 + np.arange(-400, 400, 4)]
    )
    size, columns_at = record_shape(bodies)
    prefix = layout.record_prefix(size)
    assert ((prefix + size) % 8 == 0).all(), "chunks take a multiple of 8 bytes"
    assert ((prefix + columns_at) % 8 == 0).all(), "columns start on a multiple of 8"
    assert (columns_at >= HEADER.itemsize).all()
    assert (columns_at + bodies <= size).all()
    assert (size - columns_at - bodies < 16).all(), "padding stays small"


@pytest.mark.parametrize("position", [0, 4, 8, 9, 12, 20, 30, 44, 60, 500, -1])
def test_a_flipped_byte_anywhere_is_noticed(position: int) -> None:
    record = bytearray(encode_rows(make_runs([80]))[0][0])
    record[position] ^= 0x40
    with pytest.raises(CorruptRecordError):
        decode_row(bytes(record))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_not_crashed_on(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_row(data)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1_008))
def test_a_truncated_record_is_refused(length: int) -> None:
    record = encode_rows(make_runs([80]))[0][0]
    assert len(record) > 1_008
    with pytest.raises(CorruptRecordError):
        decode_row(record[:length])


def write_file(path: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), layout.WRITER_OPTIONS)
    for record in records:
        writer.write(record)
    writer.close()


def logical_starts(sizes: Any) -> Any:
    ends = layout.FIRST_CHUNK + np.cumsum(layout.record_prefix(sizes) + sizes)
    return ends - sizes


def test_records_lie_in_the_file_where_the_layout_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sizes = np.concatenate(
        [rng.integers(1, 500, 800), rng.integers(1, 200_000, 60), rng.integers(65_400, 65_700, 60), [3_000_000]]
    )
    rng.shuffle(sizes)
    records = [rng.bytes(int(size)) for size in sizes]
    write_file(tmp_path / "a.arrayrecord", records)
    file = np.fromfile(tmp_path / "a.arrayrecord", dtype=np.uint8)
    for start, record in zip(logical_starts(sizes).tolist(), records, strict=True):
        found = file[layout.physical(start + np.arange(len(record)))].tobytes()
        assert found == record


def test_columns_are_aligned_in_the_mapped_file_and_values_never_straddle_a_block(tmp_path: Path) -> None:
    """What a reader that maps the shard relies on: a whole column can be picked from the file as 32-bit words."""
    runs = make_runs([40_000, 3, 900, 17_000, 1, 66], family=6)
    records, index = encode_rows(runs)
    write_file(tmp_path / "a.arrayrecord", records)
    words = np.fromfile(tmp_path / "a.arrayrecord", dtype="<u4")
    for row, count in enumerate(runs.counts.tolist()):
        header = np.frombuffer(records[row], dtype=HEADER, count=1)[0]
        rtt_at = layout.FIRST_CHUNK + index["offset"][row] + int(header["columns_at"]) + count * (4 + 16)
        positions = layout.physical(rtt_at + 4 * np.arange(count))
        assert (positions % 4 == 0).all()
        part = slice(starts_of(runs)[row], starts_of(runs)[row] + count)
        np.testing.assert_array_equal(words[positions // 4].view("<f4"), runs.rtt_ms[part])


def test_shards_are_plain_arrayrecord_files_for_other_tools(tmp_path: Path) -> None:
    write_file(tmp_path / "a.arrayrecord", encode_rows(make_runs([5, 50, 500]))[0])
    reader = ArrayRecordReader(str(tmp_path / "a.arrayrecord"), "")
    assert [len(decode_row(record)) for record in reader.read_all()] == [5, 50, 500]
