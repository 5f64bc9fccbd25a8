"""The compiled pipeline does what its specification in NumPy does, to the last bit."""

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_batches
import reference_randomness
from conftest import random_measurements
from ping_llm.batches.batch import PackedTokens, expand
from ping_llm.contexts.plan import SequencePlan
from ping_llm.contexts.segments import sort_random
from ping_llm.contexts.source import RowSequences
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core import draws
from ping_llm.core.randomness import permute
from ping_llm.core.rtt import encode_rtt
from ping_llm.tokens.encode import rtt_code
from pipeline_fixtures import arrays_of, facts_of, histories, prepare_table, simulated

SIZES = st.integers(1, 5) | st.integers(20, 100) | st.integers(500, 4_000)
LENGTHS = st.sampled_from([47, 64, 100, 257, 1024, 4096])


def check_sequences(builder: RowSequences, sequences: Any) -> None:
    found, expected = builder.segments(sequences), reference_batches.segments(builder, sequences)
    for name in expected.samples._fields:
        assert np.array_equal(getattr(found.samples, name), getattr(expected.samples, name)), name
    assert np.array_equal(found.sample, expected.sample)
    assert np.array_equal(found.position, expected.position)
    assert np.array_equal(found.field_order, expected.arrangement.field_order)
    for name in ("tokens", "sizes", "sequence"):
        column = getattr(found.packed, name)
        assert np.array_equal(column, getattr(expected.packed, name)), name
        assert column.dtype == getattr(expected.packed, name).dtype
    built = arrays_of(builder, sequences)
    for name, array in reference_batches.expand(expected.packed, len(sequences), builder.plan.settings.length).items():
        assert np.array_equal(built[name], array), name


class TestBatches:
    @settings(max_examples=60, deadline=None)
    @given(
        sizes=st.lists(SIZES, min_size=1, max_size=12),
        family=st.sampled_from([4, 6]),
        gap_us=st.sampled_from([1, 1_000_000, 100_000_000, 300_000_000, 3_600_000_000]),
        failed=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
        length=LENGTHS,
        seed=st.integers(0, 2**63 - 1),
        chosen=st.lists(st.integers(0, 10**6), min_size=1, max_size=8),
        result_last=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def test_of_any_rows_are_those_of_the_specification(
        self,
        sizes: list[int],
        family: int,
        gap_us: int,
        failed: float,
        length: int,
        seed: int,
        chosen: list[int],
        result_last: float,
    ) -> None:
        table = histories(sizes, family=family, gap_us=gap_us, failed=failed, seed=seed % 1000)
        builder = prepare_table(table).builder(seed, length=length, result_last=result_last)
        check_sequences(builder, [*chosen, *range(chosen[0], chosen[0] + 5)])

    @pytest.mark.parametrize("length", [64, 1024])
    def test_of_both_families_and_every_kind_of_time_are_those_of_the_specification(self, length: int) -> None:
        parts = [random_measurements(6_000, sources=200), histories([3_000, 200, 1], family=6, seed=4)]
        builder = prepare_table(pa.concat_tables(parts)).builder(length=length)
        check_sequences(builder, range(100))

    def test_of_heavy_tailed_rows_are_those_of_the_specification(self) -> None:
        builder = simulated(300_000).builder()
        per_block = builder.plan.sequences_per_block
        check_sequences(builder, range(per_block - 3, per_block + 3))
        check_sequences(builder, range(7 * builder.plan.sequences_per_epoch, 7 * builder.plan.sequences_per_epoch + 9))


class TestPlan:
    @settings(max_examples=40, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 60) | st.integers(1, 10**6), min_size=1, max_size=200),
        failed=st.floats(0, 1),
        long_gaps=st.floats(0, 1),
        length=LENGTHS,
        seed=st.integers(0, 2**63 - 1),
        epoch=st.integers(0, 10**9),
        crossing=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def test_of_any_row_index_is_that_of_the_specification(
        self, sizes: list[int], failed: float, long_gaps: float, length: int, seed: int, epoch: int, crossing: float
    ) -> None:
        count = np.array(sizes)
        facts = facts_of(
            count,
            family=np.where(count % 3 == 0, 6, 4),
            failed=(count * failed).astype(int),
            long_gaps=((count - 1) * long_gaps).astype(int),
        )
        plan = SequencePlan(facts, seed, ContextSettings(length=length, crossing=crossing))
        found, expected = plan.block(epoch, 0), reference_batches.pack_block(plan, epoch, 0)
        for name in expected.samples._fields:
            assert np.array_equal(getattr(found.samples, name), getattr(expected.samples, name)), name
        assert np.array_equal(found.first, expected.first)


class TestParts:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 2**52 - 1), max_size=300), st.integers(0, 40))
    def test_sorting_sorts_whatever_the_keys(self, keys: list[int], fewer_bits: int) -> None:
        found = np.array([key >> fewer_bits for key in keys], dtype=np.int64)
        expected = np.sort(found)
        spare, ends = np.empty_like(found), np.empty(2 * len(keys) + 17, dtype=np.int64)
        sort_random(found, spare, ends, len(keys), 52 - fewer_bits)
        assert np.array_equal(found, expected)

    @settings(max_examples=200, deadline=None)
    @given(st.floats(0, 2**32, width=32))
    def test_the_code_of_an_rtt_is_that_of_the_encoder(self, rtt_ms: float) -> None:
        assert rtt_code(np.float32(rtt_ms)) == encode_rtt(np.float32(rtt_ms))

    def test_codes_agree_at_every_boundary(self) -> None:
        edges = (np.arange(1, 1 << 22) / 8_000).astype(np.float32)
        assert [rtt_code(e) for e in edges[::97]] == encode_rtt(edges[::97]).tolist()

    @settings(max_examples=200, deadline=None)
    @given(word=st.integers(0, 2**64 - 1), size=st.integers(1, 40) | st.integers(1, 2**40), at=st.floats(0, 0.999))
    def test_permutations_and_log_uniform_numbers_are_those_of_the_specification(
        self, word: int, size: int, at: float
    ) -> None:
        words, position = np.array([word], dtype=np.uint64), int(at * size)
        assert permute(words, size, position) == reference_randomness.permute(words, size, position)
        assert draws.log_uniform(words[0], size) == reference_randomness.log_uniform(words, size)[0]
        assert draws.below(words[0], size) == reference_randomness.below(words, size)[0]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_segments_are_laid_out_as_the_specification_says(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for sequences, length in ((1, 1), (3, 50), (40, 300)):
        sizes = [rng.multinomial(int(rng.integers(1, length + 1)), [0.25] * 4) for _ in range(sequences)]
        sizes[sequences // 2] = np.zeros(4, dtype=np.int64)
        kept = [size[size > 0] for size in sizes]
        packed = PackedTokens(
            tokens=rng.integers(1, 250, int(np.sum(sizes))).astype(dtype),
            sizes=np.concatenate(kept).astype(np.int32),
            sequence=np.repeat(np.arange(sequences), [len(k) for k in kept]).astype(np.int32),
        )
        found, expected = expand(packed, sequences, length), reference_batches.expand(packed, sequences, length)
        for name in expected:
            assert np.array_equal(found[name], expected[name]), name


def test_commands_that_build_no_batches_do_not_load_the_compiler() -> None:
    modules = "ping_llm.data.registry, ping_llm.predict, ping_llm.rows.measurement_set, ping_llm.cli.main"
    script = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
