"""Cutting a sorted stream of measurements into rows: where rows end must not depend on how the stream is batched."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.rows.format import RowBatch, encode_rows
from ping_llm.rows.shards import cut_into_rows

MAX_ROW_BYTES = 4096


def sorted_batch(counts: list[int], step_us: int, family: int) -> pa.RecordBatch:
    source = np.repeat(np.arange(len(counts)), counts)
    time = np.concatenate([np.arange(n) * step_us for n in counts]) + 1_700_000_000_000_000
    rtt = np.arange(len(time), dtype=np.float32)
    if family == 4:
        columns = [source.astype("u4"), time, source.astype("u4"), rtt]
        return pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=["src", "time", "dst", "rtt"])
    high, low = (source // 2).astype("u8"), (source % 2).astype("u8")
    columns = [high, low, time, high, low, rtt]
    names = ["src", "src_low", "time", "dst", "dst_low", "rtt"]
    return pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=names)


def in_batches(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(batch), size):
        yield batch.slice(start, size)


def rows_of(batches: Iterator[RowBatch]) -> list[tuple[bytes, list[int], list[float]]]:
    return [
        (part.sources[row].tobytes(), part.time_us[end - n : end].tolist(), part.rtt_ms[end - n : end].tolist())
        for part in batches
        for row, (end, n) in enumerate(zip(np.cumsum(part.counts).tolist(), part.counts.tolist(), strict=True))
    ]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 1200), min_size=1, max_size=6),
    size=st.integers(1, 900),
    step_us=st.sampled_from([1, 1_000_000, 30_000_001]),
    family=st.sampled_from([4, 6]),
)
def test_rows_do_not_depend_on_batching_and_nothing_is_lost(
    counts: list[int], size: int, step_us: int, family: int
) -> None:
    batch = sorted_batch(counts, step_us, family)
    whole = rows_of(cut_into_rows(iter([batch]), family, MAX_ROW_BYTES))
    assert rows_of(cut_into_rows(in_batches(batch, size), family, MAX_ROW_BYTES)) == whole
    assert [rtt for _, _, rtts in whole for rtt in rtts] == batch.column("rtt").to_pylist()
    assert len({source for source, _, _ in whole}) == len(counts), "no row mixes sources"


@pytest.mark.parametrize(("family", "step_us"), [(4, 1_000_000), (6, 1_000_000), (4, 60_000_001), (6, 60_000_001)])
def test_no_record_exceeds_the_largest_row_size_and_full_rows_come_close(family: int, step_us: int) -> None:
    batch = sorted_batch([3000], step_us, family)
    sizes = np.concatenate([encode_rows(r)[1]["size"] for r in cut_into_rows(iter([batch]), family, MAX_ROW_BYTES)])
    assert sizes.max() <= MAX_ROW_BYTES
    assert (sizes[:-1] > MAX_ROW_BYTES * 0.95).all()


def test_a_source_that_fits_is_one_row() -> None:
    assert len(rows_of(cut_into_rows(iter([sorted_batch([1, 300, 2], 1_000_000, 4)]), 4, MAX_ROW_BYTES))) == 3


def test_an_empty_stream_gives_no_row() -> None:
    assert rows_of(cut_into_rows(iter([]), 4, MAX_ROW_BYTES)) == []
