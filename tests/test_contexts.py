"""Contexts: how many, which window, which times, in which order, and how large they can get."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.contexts.plan import Flags, Mode, RowFacts, Samples
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.randomness import Ints, key
from ping_llm.tokens import FIELD_ORDERS, TimeKind
from ping_llm.tokens.encode import encode
from pipeline_fixtures import START_S, facts_of, looks_like, looks_uniform
from reference_contexts import (
    Arrangement,
    arrange,
    candidate_limit,
    count_tokens,
    draw_positions,
    draw_samples,
    first_measurement,
    keeps_time,
    largest_increase,
    late_absolute_time,
    measurement_words,
)

MODES = pytest.mark.parametrize("mode", list(Mode))


def samples_of_row(
    facts: RowFacts, count: int, *, seed: int = 1, length: int = 1024, mode: Mode | None = None, window: int = 0
) -> Samples:
    """`count` contexts of the first row; of one mode and with a given window (from the beginning) if that is said."""
    row = np.zeros(count, dtype=np.int64)
    samples = draw_samples(key(seed), row, np.arange(count), facts, ContextSettings(length=length))
    if mode is not None:
        samples = samples._replace(mode=np.full(count, mode, dtype=np.uint8))
    if window:
        samples = samples._replace(start=row, size=np.full(count, window))
    return samples


def draw(samples: Samples, counts: Any) -> tuple[Ints, Ints, Ints]:
    """Sample, position and rank of so many measurements of each sample's window."""
    return draw_positions(
        samples, np.broadcast_to(counts, len(samples.row)).astype(np.int64), np.ones(len(samples.row), dtype=bool)
    )


def timed_in(samples: Samples, sample: Ints, position: Ints) -> Flags:
    return keeps_time(samples, sample, measurement_words(samples, sample, position))


@dataclass(frozen=True, kw_only=True)
class Written:
    """Contexts of one row as they are written, measurement by measurement."""

    samples: Samples
    sample: Ints
    position: Ints
    time_s: Ints
    timed: Flags
    arrangement: Arrangement

    def of_each_sample(self, values: Any) -> list[Any]:
        return np.split(values, np.cumsum(np.bincount(self.sample, minlength=len(self.samples.row)))[:-1])


def write(samples: Samples, counts: Any, time_s: Any) -> Written:
    """Contexts of `counts` measurements, where measurement i of the row was at `time_s[i]`."""
    sample, position, _ = draw(samples, counts)
    words = measurement_words(samples, sample, position)
    times, timed = np.asarray(time_s)[position], keeps_time(samples, sample, words)
    arrangement = arrange(sample, words, times, timed)
    order = arrangement.order
    return Written(
        samples=samples,
        sample=sample[order],
        position=position[order],
        time_s=times[order],
        timed=timed[order],
        arrangement=arrangement,
    )


def times_with(gaps: list[int]) -> Ints:
    return START_S + np.cumsum([0, *gaps])


GAPS = [0, 1, 254, 255, 256, 257, 0, 65_535, 65_536, 10_000_000, 3, 255, 256] * 8
TIMES = times_with(GAPS)


class TestNumberOfContexts:
    @pytest.mark.parametrize(
        ("measurements", "contexts"),
        [(1, 1), (29, 1), (30, 1), (31, 2), (60, 2), (61, 3), (450, 15), (451, 16), (480, 16), (481, 16), (10**6, 16)],
    )
    def test_is_one_per_thirty_measurements_at_most_sixteen(self, measurements: int, contexts: int) -> None:
        assert ContextSettings().per_row(measurements) == contexts

    def test_follows_the_settings(self) -> None:
        settings_ = ContextSettings(measurements_per_context=100, max_contexts=3)
        assert settings_.per_row([1, 100, 101, 300, 301, 10**6]).tolist() == [1, 1, 2, 3, 3, 3]


class TestWindow:
    def test_size_is_log_uniform_up_to_the_whole_row(self) -> None:
        count = 1000
        size = samples_of_row(facts_of([count]), 50_000).size
        assert size.min() == 1
        assert size.max() == count
        edges = np.array([0, 1, 2, 3, 5, 9, 20, 50, 120, 300, 600, 900, 1000])
        found = np.histogram(size, bins=edges + 0.5)[0]
        assert looks_like(found, np.diff(np.log(edges + 1)))

    @pytest.mark.parametrize("count", [2, 3, 8])
    def test_size_is_log_uniform_for_short_rows_too(self, count: int) -> None:
        size = samples_of_row(facts_of([count], family=6), 20_000, length=50).size
        assert looks_like(np.bincount(size, minlength=count + 1)[1:], np.diff(np.log(np.arange(1, count + 2))))

    def test_begins_anywhere_equally_often(self) -> None:
        count = 12
        samples = samples_of_row(facts_of([count]), 100_000, length=100)
        for size in range(1, count):
            start = samples.start[samples.size == size]
            assert looks_uniform(np.bincount(start, minlength=count - size + 1)), size

    def test_begins_and_ends_within_its_row(self) -> None:
        samples = samples_of_row(facts_of([77]), 20_000, length=200)
        assert samples.start.min() == 0
        assert (samples.start + samples.size).max() == 77

    def test_of_a_very_long_row_can_be_anywhere(self) -> None:
        count = 700_000
        samples = samples_of_row(facts_of([count]), 50_000)
        assert samples.size.min() == 1
        assert looks_uniform(np.histogram(samples.start / (count - samples.size + 1), bins=50, range=(0, 1))[0])

    def test_does_not_depend_on_the_mode(self) -> None:
        samples = samples_of_row(facts_of([1000]), 50_000)
        assert looks_like(
            np.histogram2d(samples.mode, np.log(samples.size + 0.5), bins=(3, [-1, 1, 2, 3, 4, 5, 6, 8]))[0],
            np.outer([0.4, 0.3, 0.3], np.histogram(np.log(samples.size + 0.5), bins=[-1, 1, 2, 3, 4, 5, 6, 8])[0]),
        )


class TestModes:
    def test_have_their_shares(self) -> None:
        counts = np.bincount(samples_of_row(facts_of([1000]), 100_000).mode)
        assert looks_like(counts, [0.4, 0.3, 0.3])

    def test_differ_between_contexts_rows_epochs_and_seeds(self) -> None:
        modes = [samples_of_row(facts_of([1000]), 100, seed=seed).mode.tolist() for seed in range(5)]
        assert len({tuple(m) for m in modes}) == 5
        assert all(len(set(m)) == 3 for m in modes)


class TestWholeRows:
    # Tokens of n IPv4 measurements: 14n without times; 16n + 7 with all, when no gap is long; 19n + 4 when all are.
    @pytest.mark.parametrize(
        ("mode", "long_gaps", "failed", "largest"),
        [
            (Mode.NONE, 0, 0, 73),
            (Mode.NONE, 0, 10, 74),
            (Mode.FULL, 0, 0, 63),
            (Mode.FULL, 3, 0, 63),
            (Mode.FULL, 4, 0, 62),
            (Mode.FULL, 4, 20, 65),
            (Mode.PARTIAL, 0, 0, 53),
        ],
    )
    def test_a_row_is_used_whole_exactly_when_it_is_sure_to_fit(
        self, mode: Mode, long_gaps: int, failed: int, largest: int
    ) -> None:
        for count in range(largest - 15, largest + 15):
            samples = samples_of_row(facts_of([count], long_gaps=long_gaps, failed=failed), 300)
            samples = samples.take(samples.mode == mode)
            assert (samples.whole == (count <= largest)).all()
            if count <= largest:
                assert (samples.start == 0).all()
                assert (samples.size == count).all()
                assert (samples.max_tokens <= 1024).all()
            else:
                assert len(np.unique(samples.size)) > 5

    def test_every_measurement_of_a_whole_row_is_a_candidate(self) -> None:
        for count in range(1, 90):
            samples = samples_of_row(facts_of([count], failed=count), 50)
            assert (candidate_limit(samples, 1024)[samples.whole] == count).all()


class TestFull:
    def written(self) -> Written:
        return write(samples_of_row(facts_of([len(TIMES)]), 400, mode=Mode.FULL, window=len(TIMES)), 40, TIMES)

    def test_everything_is_in_time_order(self) -> None:
        written = self.written()
        for position in written.of_each_sample(written.position):
            assert len(position) == 40
            assert (np.diff(position) > 0).all()

    def test_the_first_time_is_absolute_and_all_others_are_the_true_gaps(self) -> None:
        written = self.written()
        kinds, values = written.arrangement.time_kind, written.arrangement.time_value
        parts = (written.of_each_sample(column) for column in (kinds, values, written.time_s))
        seen = set()
        for kind, value, time_s in zip(*parts, strict=True):
            assert kind[0] == TimeKind.ABSOLUTE
            assert value[0] == time_s[0]
            gaps = np.diff(time_s)
            assert np.array_equal(value[1:], gaps)
            assert np.array_equal(kind[1:], np.where(gaps <= 255, TimeKind.DELTA1, TimeKind.DELTA4))
            seen |= set(gaps.tolist())
        assert {0, 1, 254, 255, 256, 257} <= seen

    def test_a_context_of_one_measurement_has_an_absolute_time(self) -> None:
        written = write(samples_of_row(facts_of([len(TIMES)]), 50, mode=Mode.FULL, window=len(TIMES)), 1, TIMES)
        assert (written.arrangement.time_kind == TimeKind.ABSOLUTE).all()
        assert np.array_equal(written.arrangement.time_value, written.time_s)


class TestNone:
    def test_nothing_has_a_time(self) -> None:
        written = write(samples_of_row(facts_of([100]), 200, mode=Mode.NONE, window=100), 30, TIMES)
        assert (written.arrangement.time_kind == TimeKind.NONE).all()

    def test_every_order_is_equally_likely(self) -> None:
        written = write(samples_of_row(facts_of([4]), 24_000, mode=Mode.NONE, window=4), 4, TIMES)
        orders = {order: number for number, order in enumerate(permutations(range(4)))}
        found = [orders[tuple(position)] for position in written.position.reshape(-1, 4).tolist()]
        assert looks_uniform(np.bincount(found, minlength=24))

    def test_long_contexts_are_shuffled_too(self) -> None:
        written = write(samples_of_row(facts_of([60]), 5_000, mode=Mode.NONE, window=60), 60, TIMES)
        index_of_earliest = np.flatnonzero(written.position == 0) % 60
        assert looks_uniform(np.bincount(index_of_earliest, minlength=60))


class TestPartial:
    def test_between_a_tenth_and_nine_tenths_lose_their_time_spread_evenly(self) -> None:
        size = 2_000
        samples = samples_of_row(facts_of([size]), 1_000, mode=Mode.PARTIAL, window=size)
        sample = np.repeat(np.arange(1_000), size)
        timed = timed_in(samples, sample, np.tile(np.arange(size), 1_000))
        untimed = 1 - timed.reshape(1_000, size).mean(axis=1)
        assert 0.07 < untimed.min() < 0.12
        assert 0.88 < untimed.max() < 0.93
        assert looks_like(np.histogram(untimed, bins=[0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1])[0], np.ones(8))

    def test_which_ones_lose_their_time_does_not_depend_on_their_position(self) -> None:
        samples = samples_of_row(facts_of([20]), 20_000, mode=Mode.PARTIAL, window=20)
        timed = timed_in(samples, np.repeat(np.arange(20_000), 20), np.tile(np.arange(20), 20_000)).reshape(-1, 20)
        assert np.abs(timed.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(20_000)

    def test_timed_ones_stay_in_time_order_with_deltas_that_skip_the_others(self) -> None:
        written = write(samples_of_row(facts_of([len(TIMES)]), 500, mode=Mode.PARTIAL, window=len(TIMES)), 40, TIMES)
        kinds, values = written.arrangement.time_kind, written.arrangement.time_value
        columns = (written.timed, kinds, values, written.time_s, written.position)
        long_deltas = 0
        for timed, kind, value, time_s, position in zip(*map(written.of_each_sample, columns), strict=True):
            assert (kind[~timed] == TimeKind.NONE).all()
            if timed.any():
                assert (np.diff(position[timed]) > 0).all()
                assert kind[timed][0] == TimeKind.ABSOLUTE
                gaps = np.diff(time_s[timed])
                assert np.array_equal(kind[timed][1:], np.where(gaps <= 255, TimeKind.DELTA1, TimeKind.DELTA4))
                assert np.array_equal(np.cumsum(value[timed]), time_s[timed])
                long_deltas += int((gaps > 255).sum())
        assert long_deltas > 1000

    def test_untimed_ones_are_at_uniformly_random_positions(self) -> None:
        written = write(samples_of_row(facts_of([5]), 60_000, mode=Mode.PARTIAL, window=5), 5, TIMES)
        timed, position = written.timed.reshape(-1, 5), written.position.reshape(-1, 5)
        chosen = timed.sum(axis=1) == 3
        index = np.nonzero(~timed[chosen])[1].reshape(-1, 2)
        swapped = np.diff(np.take_along_axis(position[chosen], index, axis=1), axis=1)[:, 0] < 0
        outcome = np.where(swapped, index[:, 1] * 5 + index[:, 0], index[:, 0] * 5 + index[:, 1])
        counts = np.bincount(outcome, minlength=25).reshape(5, 5)
        assert looks_uniform(counts[~np.eye(5, dtype=bool)])


class TestSampling:
    @MODES
    def test_no_measurement_is_twice_in_a_context(self, mode: Mode) -> None:
        written = write(samples_of_row(facts_of([90]), 500, mode=mode, window=90), 60, TIMES)
        for position in written.of_each_sample(written.position):
            assert len(np.unique(position)) == 60

    def test_measurements_are_of_the_window(self) -> None:
        samples = samples_of_row(facts_of([5_000]), 2_000)
        counts = np.minimum(samples.size, 50)
        sample, position, _ = draw(samples, counts)
        assert np.array_equal(np.bincount(sample), counts)
        assert (position >= samples.start[sample]).all()
        assert (position < (samples.start + samples.size)[sample]).all()

    @pytest.mark.parametrize("in_part", [True, False])
    def test_the_whole_window_can_be_taken(self, in_part: bool) -> None:
        samples = samples_of_row(facts_of([5_000]), 300)
        samples = samples.take(samples.size <= 100)
        sample, position, rank = draw_positions(samples, samples.size, np.full(len(samples.row), in_part))
        for number, (start, size) in enumerate(zip(samples.start, samples.size, strict=True)):
            assert np.array_equal(position[sample == number], np.arange(start, start + size))
            assert np.array_equal(np.sort(rank[sample == number]), np.arange(size) if in_part else np.zeros(size))

    @pytest.mark.parametrize(("size", "taken"), [(3, 2), (5, 2), (6, 5), (7, 3), (12, 5), (61, 60), (70, 40)])
    def test_each_measurement_of_a_window_is_equally_likely(self, size: int, taken: int) -> None:
        samples = samples_of_row(facts_of([size]), 20_000, window=size)
        _, position, _ = draw(samples, taken)
        # Those left out vary less than independent draws would, so this is on the safe side.
        left_out = 20_000 - np.bincount(position, minlength=size)
        assert looks_uniform(left_out)

    @pytest.mark.parametrize(("size", "taken"), [(5, 2), (7, 4), (16, 2), (31, 3)])
    def test_each_pair_of_a_window_is_equally_likely(self, size: int, taken: int) -> None:
        samples = samples_of_row(facts_of([size]), 20_000, window=size)
        _, position, rank = draw(samples, taken)
        first, second = np.sort(position[rank < 2].reshape(-1, 2), axis=1).T
        counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
        assert looks_uniform(counts[np.triu_indices(size, 1)])

    def test_a_smaller_sample_is_part_of_a_larger_one(self) -> None:
        samples = samples_of_row(facts_of([500]), 100, window=500)
        sample, position, rank = draw(samples, 60)
        small_sample, small_position, small_rank = draw(samples, 20)
        kept = rank < 20
        assert np.array_equal(sample[kept], small_sample)
        assert np.array_equal(position[kept], small_position)
        assert np.array_equal(rank[kept], small_rank)

    def test_measurements_come_by_context_and_in_time_order(self) -> None:
        samples = samples_of_row(facts_of([500]), 100)
        sample, position, _ = draw(samples, np.minimum(samples.size, 30))
        assert np.array_equal(np.lexsort((position, sample)), np.arange(len(sample)))

    def test_field_orders_are_all_equally_likely(self) -> None:
        written = write(samples_of_row(facts_of([500]), 1_000, window=500), 50, np.arange(500))
        assert looks_uniform(np.bincount(written.arrangement.field_order, minlength=len(FIELD_ORDERS)))

    def test_field_orders_differ_between_measurements_of_a_context_and_between_contexts(self) -> None:
        written = write(samples_of_row(facts_of([50]), 2_000, mode=Mode.FULL, window=50), 50, np.arange(50))
        orders = written.arrangement.field_order.reshape(-1, 50).astype(np.int64)
        assert looks_uniform(np.bincount((orders[:-1, 7] - orders[1:, 7]) % 24, minlength=24))
        assert looks_uniform(np.bincount((orders[:, 0] - orders[:, 1]) % 24, minlength=24))

    def test_field_orders_do_not_depend_on_index_or_time(self) -> None:
        written = write(samples_of_row(facts_of([6]), 20_000, mode=Mode.PARTIAL, window=6), 6, TIMES)
        orders = written.arrangement.field_order.astype(np.int64)
        index = np.arange(len(orders)) % 6
        assert looks_uniform(np.bincount(orders * 6 + index, minlength=24 * 6))
        assert looks_uniform(np.bincount(orders * 6 + written.position, minlength=24 * 6))
        shares = np.outer(np.ones(24), np.bincount(written.timed, minlength=2))
        assert looks_like(np.bincount(orders * 2 + written.timed, minlength=48).reshape(24, 2), shares)

    def test_a_context_does_not_depend_on_those_drawn_with_it(self) -> None:
        samples = samples_of_row(facts_of([100]), 50)
        counts = np.minimum(samples.size, 30)
        together = write(samples, counts, TIMES)
        for number in (0, 17, 49):
            alone = write(samples.take([number]), counts[number], TIMES)
            of_it = together.sample == number
            assert np.array_equal(alone.position, together.position[of_it])
            for name in ("time_kind", "time_value", "field_order"):
                assert np.array_equal(getattr(alone.arrangement, name), getattr(together.arrangement, name)[of_it])


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row with all that sizes depend on."""

    family: int
    time_s: Ints
    failed: Flags

    @property
    def facts(self) -> RowFacts:
        long_gaps = int((np.diff(self.time_s) > 255).sum())
        return facts_of([len(self.time_s)], family=self.family, failed=int(self.failed.sum()), long_gaps=long_gaps)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    count = draw(st.integers(1, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = draw(st.sampled_from([1, 60, 200, 255, 300, 600, 100_000]))
    failed_share = draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    return Row(
        family=draw(st.sampled_from([4, 6])),
        time_s=START_S + np.cumsum(rng.integers(0, longest + 1, count)),
        failed=rng.random(count) < failed_share,
    )


def tokens_of(samples: Samples, row: Row, counts: npt.ArrayLike) -> Ints:
    """What `encode` makes of contexts of so many measurements, context by context."""
    written = write(samples, counts, row.time_s)
    zeros = np.zeros((len(written.sample), 16), dtype=np.uint8)
    _, lengths = encode(
        family=samples.family[written.sample],
        source=zeros,
        destination=zeros,
        rtt_ms=np.where(row.failed[written.position], np.nan, 1.0).astype(np.float32),
        time_kind=written.arrangement.time_kind,
        time_value=written.arrangement.time_value,
        order=written.arrangement.field_order,
    )
    return np.bincount(written.sample, lengths, len(samples.row)).astype(np.int64)


class TestSizes:
    @settings(max_examples=60, deadline=None)
    @given(row=rows(), seed=st.integers(0, 1000), share=st.floats(0, 1))
    def test_count_tokens_says_what_encoding_gives(self, row: Row, seed: int, share: float) -> None:
        samples = samples_of_row(row.facts, 30, seed=seed, length=500)
        counts = np.maximum(1, (samples.size * share).astype(np.int64))
        sample, position, _ = draw(samples, counts)
        timed = timed_in(samples, sample, position)
        counted = count_tokens(samples, sample, row.time_s[position], timed, row.failed[position])
        assert np.array_equal(counted, tokens_of(samples, row, counts))

    @settings(max_examples=60, deadline=None)
    @given(row=rows(), seed=st.integers(0, 1000), length=st.sampled_from([100, 1024, 4096]))
    def test_no_part_of_a_window_takes_more_than_max_tokens(self, row: Row, seed: int, length: int) -> None:
        samples = samples_of_row(row.facts, 30, seed=seed, length=length)
        for share in (0.0, 0.3, 0.8, 0.95, 1.0):
            counts = np.maximum(1, (samples.size * share).astype(np.int64))
            assert (tokens_of(samples, row, counts) <= samples.max_tokens).all()

    @pytest.mark.parametrize("family", [4, 6])
    @pytest.mark.parametrize("mode", [Mode.FULL, Mode.NONE])
    def test_max_tokens_is_exact_for_a_whole_row_unless_times_are_lost(self, family: int, mode: Mode) -> None:
        row = Row(family=family, time_s=TIMES[:20], failed=np.arange(20) % 4 == 0)
        samples = samples_of_row(row.facts, 100)
        samples = samples.take(samples.mode == mode)
        assert samples.whole.all()
        assert np.array_equal(tokens_of(samples, row, 20), samples.max_tokens)
        assert np.array_equal(samples.max_tokens, samples.target_tokens)

    def test_target_tokens_is_near_the_average_of_whole_rows(self) -> None:
        rng = np.random.default_rng(0)
        for longest in (200, 600):
            row = Row(family=4, time_s=START_S + np.cumsum(rng.integers(0, longest, 50)), failed=rng.random(50) < 0.05)
            samples = samples_of_row(row.facts, 3_000)
            assert samples.whole.all()
            assert tokens_of(samples, row, 50).mean() == pytest.approx(samples.target_tokens.mean(), rel=0.03)

    @settings(max_examples=60, deadline=None)
    @given(row=rows(), seed=st.integers(0, 1000))
    def test_one_more_measurement_adds_at_most_the_largest_increase(self, row: Row, seed: int) -> None:
        samples = samples_of_row(row.facts, 20, seed=seed, length=64)
        before = tokens_of(samples, row, 1)
        assert (before <= first_measurement(samples.family, samples.mode)).all()
        for count in range(2, len(row.time_s) + 1):
            after = tokens_of(samples, row, np.minimum(samples.size, count))
            assert (after - before <= largest_increase(samples) + late_absolute_time(samples)).all()
            before = after

    @settings(max_examples=60, deadline=None)
    @given(row=rows(), seed=st.integers(0, 1000))
    def test_a_sample_takes_at_most_its_first_measurement_and_the_increases(self, row: Row, seed: int) -> None:
        samples = samples_of_row(row.facts, 20, seed=seed, length=64)
        for count in range(1, len(row.time_s) + 1):
            counts = np.minimum(samples.size, count)
            assert (
                tokens_of(samples, row, counts)
                <= first_measurement(samples.family, samples.mode) + (counts - 1) * largest_increase(samples)
            ).all()

    @settings(max_examples=60, deadline=None)
    @given(row=rows(), seed=st.integers(0, 1000), length=st.integers(47, 1500))
    def test_no_context_that_fits_has_more_measurements_than_the_candidate_limit(
        self, row: Row, seed: int, length: int
    ) -> None:
        samples = samples_of_row(row.facts, 20, seed=seed, length=length)
        limit = candidate_limit(samples, length)
        one_more = np.minimum(samples.size, limit + 1)
        assert (tokens_of(samples, row, one_more)[one_more > limit] > length).all()
