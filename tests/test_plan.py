"""The plan: every context once an epoch, the same whoever asks, and no sequence that could overflow."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.contexts.plan import BLOCK_SAMPLES, Block, RowFacts, SequencePlan
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints
from pipeline_fixtures import Dataset, arrays_of, facts_of, histories, in_batches, prepare_table, simulated


def plan_of(facts: RowFacts, seed: int = 1, **options: int) -> SequencePlan:
    return SequencePlan(facts, seed, ContextSettings(**options))


def simulated_facts() -> RowFacts:
    with simulated(1_000_000).rows as rows:
        return RowFacts.of(rows)


SHAPES: dict[str, Callable[[], RowFacts]] = {
    "heavy-tailed": simulated_facts,
    "one measurement": lambda: facts_of([1]),
    "one row": lambda: facts_of([5_000]),
    "only small": lambda: facts_of([2, 3, 4, 5, 30] * 4_000, failed=1),
    "only single measurements": lambda: facts_of([1] * 20_000),
    "only huge": lambda: facts_of([100_000] * 1_500, long_gaps=3_000),
    "only IPv6": lambda: facts_of(np.arange(1, 1_000), family=6, long_gaps=0),
    "all failed": lambda: facts_of(np.arange(1, 300), failed=np.arange(1, 300)),
}
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES)


def blocks_of(plan: SequencePlan, epoch: int) -> list[Block]:
    return [plan.block(epoch, number) for number in range(plan.blocks)]


def samples_of(plan: SequencePlan, epoch: int) -> tuple[Ints, Ints]:
    """Number and row of the samples of an epoch, in the order of its sequences."""
    blocks = blocks_of(plan, epoch)
    return np.concatenate([b.samples.number for b in blocks]), np.concatenate([b.samples.row for b in blocks])


def least_tokens(block: Block) -> Ints:
    """What the sequences of a block take when every shrinkable sample gives way to a single measurement."""
    samples = block.samples
    least = np.where(samples.shrinkable, samples.min_tokens, samples.max_tokens)
    return np.add.reduceat(least, block.first[:-1])


class TestEpoch:
    @ALL_SHAPES
    def test_has_every_sample_in_exactly_one_sequence(self, shape: str) -> None:
        facts = SHAPES[shape]()
        plan = plan_of(facts)
        per_row = ContextSettings().per_row(facts.count)
        assert plan.samples_per_epoch == per_row.sum()
        for epoch in (0, 1, 7):
            number, row = samples_of(plan, epoch)
            assert np.array_equal(np.sort(number), np.arange(plan.samples_per_epoch))
            assert np.array_equal(np.bincount(row, minlength=len(per_row)), per_row)
            for block in blocks_of(plan, epoch):
                assert block.first[0] == 0
                assert block.first[-1] == len(block.samples.row)
                assert len(block.first) == plan.sequences_per_block + 1
                assert (np.diff(block.first) >= 1).all(), "no sequence is empty"

    @ALL_SHAPES
    def test_every_sequence_number_stands_for_one_position(self, shape: str) -> None:
        plan = plan_of(SHAPES[shape]())
        positions = [plan.locate(sequence) for sequence in range(2 * plan.sequences_per_epoch)]
        assert len(set(positions)) == len(positions)
        assert positions == sorted(positions)
        assert {epoch for epoch, _, _ in positions} == {0, 1}
        assert {block for _, block, _ in positions} == set(range(plan.blocks))
        assert {index for _, _, index in positions} == set(range(plan.sequences_per_block))

    def test_spreads_samples_over_several_blocks_of_nearly_equal_size(self) -> None:
        plan = plan_of(facts_of([5] * (3 * BLOCK_SAMPLES + 7)))
        assert plan.blocks == 4
        sizes = [len(block.samples.row) for block in blocks_of(plan, 0)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == plan.samples_per_epoch

    def test_has_another_order_each_time(self) -> None:
        plan = plan_of(facts_of([100] * 10_000))
        orders = [samples_of(plan, epoch)[0] for epoch in range(3)]
        blocks = [set(block.samples.number.tolist()) for block in (plan.block(epoch, 0) for epoch in range(3))]
        assert not np.array_equal(orders[0], orders[1])
        assert not np.array_equal(orders[1], orders[2])
        assert 0.2 < len(blocks[0] & blocks[1]) / len(blocks[0]) < 0.7, "samples change their block"

    def test_draws_other_windows_and_modes_each_time(self) -> None:
        plan = plan_of(facts_of([5_000] * 500))
        windows = []
        for epoch in (0, 1):
            samples = plan.block(epoch, 0).samples
            by_number = samples.take(np.argsort(samples.number))
            windows.append((by_number.start, by_number.size, by_number.mode))
        for one, other in zip(*windows, strict=True):
            assert (one != other).mean() > 0.5

    def test_is_another_one_for_another_seed(self) -> None:
        facts = facts_of([100] * 500)
        orders = [samples_of(plan_of(facts, seed), 0)[0].tolist() for seed in range(4)]
        assert len({tuple(order) for order in orders}) == 4

    def test_mixes_the_contexts_of_a_row_over_sequences(self) -> None:
        plan = plan_of(facts_of([20_000] * 1_000))
        block = plan.block(0, 0)
        sequence = np.repeat(np.arange(plan.sequences_per_block), np.diff(block.first))
        together = len(np.unique(sequence * 1_000 + block.samples.row)) / len(block.samples.row)
        assert together > 0.99, "hardly ever are two contexts of a row in one sequence"

    def test_has_as_many_sequences_as_its_tokens_fill_less_one_per_cent(self) -> None:
        plan = plan_of(facts_of([10] * 5_000, family=6))
        likely = float(plan.block(0, 0).samples.target_tokens.sum())
        assert abs(plan.sequences_per_epoch * 1.01 * 1024 / likely - 1) < 0.005


class TestLocate:
    def test_is_plain_arithmetic(self) -> None:
        plan = plan_of(facts_of([5] * 40_000))
        per_block, per_epoch = plan.sequences_per_block, plan.sequences_per_epoch
        assert per_epoch == plan.blocks * per_block
        assert plan.locate(0) == (0, 0, 0)
        assert plan.locate(per_block - 1) == (0, 0, per_block - 1)
        assert plan.locate(per_block) == (0, 1, 0)
        assert plan.locate(per_epoch) == (1, 0, 0)
        assert plan.locate(1_000_000 * per_epoch + 2 * per_block + 3) == (1_000_000, 2, 3)

    def test_does_not_depend_on_what_was_asked_for_before(self) -> None:
        facts = facts_of([3] * (6 * BLOCK_SAMPLES))
        plan = plan_of(facts)
        asked = [(0, 0), (5, 3), (0, 1), (2, 2), (1, 0), (0, 5), (3, 3), (0, 0), (5, 3), (0, 1), (0, 1)]
        for epoch, number in asked:  # more than are kept
            fresh, found = plan_of(facts).block(epoch, number), plan.block(epoch, number)
            for name in ("row", "number", "key", "mode", "start", "size", "max_tokens", "shrinkable"):
                assert np.array_equal(getattr(found.samples, name), getattr(fresh.samples, name))
            assert np.array_equal(found.first, fresh.first)

    def test_follows_the_settings(self) -> None:
        plan = plan_of(facts_of([1_000] * 10), measurements_per_context=100, max_contexts=7)
        assert plan.samples_per_epoch == 70


class TestOverflow:
    @ALL_SHAPES
    @pytest.mark.parametrize("length", [1024, 256, 4096])
    def test_is_impossible_whatever_the_data_are(self, shape: str, length: int) -> None:
        plan = plan_of(SHAPES[shape](), length=length)
        for epoch in range(3):
            assert max(least_tokens(block).max() for block in blocks_of(plan, epoch)) <= length

    def test_is_impossible_when_sequences_hold_one_sample_each_and_blocks_differ_in_size(self) -> None:
        plan = plan_of(facts_of([1] * (BLOCK_SAMPLES + 1), family=6), length=64)
        for block in blocks_of(plan, 0):
            assert least_tokens(block).max() <= 64

    @settings(max_examples=100, deadline=None)
    @given(
        sizes=st.lists(st.sampled_from([1, 1, 1, 2, 3, 10, 29, 60, 500]), min_size=1, max_size=150),
        family=st.sampled_from([4, 6]),
        length=st.sampled_from([47, 64, 100, 256, 1024]),
    )
    def test_is_impossible_for_any_few_rows(self, sizes: list[int], family: int, length: int) -> None:
        plan = plan_of(facts_of(sizes, family=family), length=length)
        for epoch in range(3):
            assert least_tokens(plan.block(epoch, 0)).max() <= length

    @pytest.mark.parametrize(
        "dataset",
        [
            lambda: simulated(300_000),
            lambda: prepare_table(histories([1])),
            lambda: prepare_table(histories([1] * 60)),
            lambda: prepare_table(histories([1] * 2_000, family=6)),
            lambda: prepare_table(histories([1] * 2_000, failed=1.0)),
            lambda: prepare_table(histories([2, 3, 4, 5, 30] * 300)),
            lambda: prepare_table(histories([30_000, 20_000])),
            lambda: prepare_table(histories(list(range(1, 200)), family=6)),
        ],
        ids=["heavy-tailed", "one measurement", "60 singles", "IPv6 singles", "failed", "small", "huge", "IPv6"],
    )
    def test_never_happens_and_no_sample_is_crowded_out(self, dataset: Callable[[], Dataset]) -> None:
        builder = dataset().builder()
        sequences = builder.plan.sequences_per_epoch
        samples = 0
        for batch in in_batches(sequences):
            segments = builder.segments(batch)
            assert (np.bincount(segments.sample, minlength=len(segments.samples.row)) >= 1).all()
            assert arrays_of(builder, batch)["inputs"].shape == (len(batch), 1024)
            samples += len(segments.samples.row)
        assert samples == builder.plan.samples_per_epoch


class TestLimits:
    def test_without_rows_there_is_no_plan(self) -> None:
        with pytest.raises(PingLlmError, match="no row"):
            plan_of(facts_of([]))

    def test_a_sequence_must_hold_the_longest_measurement(self) -> None:
        assert plan_of(facts_of([1], family=6), length=47).sequences_per_epoch == 1
        with pytest.raises(PingLlmError, match="at least 47 tokens, not 46"):
            plan_of(facts_of([1]), length=46)

    def test_ten_million_rows_are_planned_in_little_memory(self) -> None:
        rows = np.arange(10_000_000)
        count = np.minimum(30 / (1 - rows / 10_000_001) ** (2 / 3), 500_000).astype(np.uint32)  # a Pareto tail
        failed, long_gaps, family = count // 30, count // 3, np.where(rows % 2, 4, 6)
        facts = facts_of(count, failed=failed, long_gaps=long_gaps, family=family)
        tracemalloc.start()
        try:
            plan = plan_of(facts)
            plan.block(0, 0)
            plan.block(3, plan.blocks - 1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert plan.samples_per_epoch > 20_000_000
        assert peak < 1 << 30


def test_long_and_short_contexts_are_mixed_over_a_block() -> None:
    """Batches are consecutive sequences: each must be like any other, not first the long contexts, then the short."""
    block = simulated(300_000).plan().block(0, 0)
    samples_in = np.diff(block.first)
    tenths = [part.mean() for part in np.array_split(samples_in, 10)]
    assert max(tenths) < 1.3 * min(tenths)
    assert abs(np.corrcoef(np.arange(len(samples_in)), samples_in)[0, 1]) < 0.1
