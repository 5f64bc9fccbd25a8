"""Keyed random numbers: functions of their key alone, and as good as random."""

from itertools import combinations, permutations
from math import factorial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.core.randomness import Purpose, extend, key, permute, uniform
from pipeline_fixtures import looks_uniform
from reference_randomness import below, bits

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 1000, 4096, 4097)
WORD = st.integers(0, 2**64 - 1)


def words(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return key(seed, np.arange(count))


class TestKey:
    def test_depends_on_every_part_on_their_order_and_on_their_number(self) -> None:
        changed = [(9, 2, 3), (1, 9, 3), (1, 2, 9)]
        keys = [*permutations((1, 2, 3)), *changed, *([0] * parts for parts in range(1, 9))]
        assert len({int(key(*parts)) for parts in keys}) == len(keys)

    def test_of_an_array_is_that_of_each_element(self) -> None:
        rows, columns = np.arange(5)[:, None], np.arange(7)
        grid = key(3, rows, columns, Purpose.SAMPLE)
        assert grid.shape == (5, 7)
        assert grid.dtype == np.uint64
        assert grid[4, 6] == key(3, 4, 6, Purpose.SAMPLE)

    def test_takes_any_64_bit_seed(self) -> None:
        seeds = (0, 1, -1, 2**63 - 1, 2**63, 2**64 - 2, -(2**63) + 1)
        assert len({int(key(seed)) for seed in seeds}) == len(seeds)

    def test_can_be_extended_part_by_part(self) -> None:
        assert extend(extend(key(5), 6), np.arange(9)).tolist() == key(5, 6, np.arange(9)).tolist()

    def test_does_not_repeat_over_a_grid_of_parts(self) -> None:
        grid = key(np.arange(20)[:, None, None], np.arange(500)[:, None], np.arange(1, 10))
        assert len(np.unique(grid)) == grid.size

    @pytest.mark.parametrize("bit", [0, 1, 31, 32, 63])
    def test_every_bit_is_a_fair_coin_for_neighbouring_keys(self, bit: int) -> None:
        ones = int((words(40_000) >> np.uint64(bit) & np.uint64(1)).sum())
        assert looks_uniform([ones, 40_000 - ones])

    def test_words_are_the_pinned_ones(self) -> None:
        assert [hex(int(key(*parts))) for parts in [(0,), (1,), (-1,), (1, 2, 3), (2**64 - 1, 0)]] == GOLDEN_KEYS


class TestNumbers:
    def test_bits_are_a_part_of_the_word(self) -> None:
        word = np.array([0xFEDCBA9876543210], dtype=np.uint64)
        parts = [(0, 16), (16, 32), (48, 16), (60, 4), (0, 4)]
        assert [int(bits(word, *part)[0]) for part in parts] == [0x3210, 0xBA987654, 0xFEDC, 0xF, 0x0]

    def test_different_bits_of_a_word_are_independent(self) -> None:
        low, high = (bits(words(100_000), first, 4).astype(np.int64) for first in (12, 48))
        assert looks_uniform(np.bincount(low * 16 + high, minlength=256))

    def test_uniform_is_in_the_unit_interval_even_for_extreme_words(self) -> None:
        found = uniform(np.array([0, 2**11 - 1, 2**11, 2**64 - 1], dtype=np.uint64))
        assert found.tolist() == [0.0, 0.0, 2.0**-53, 1 - 2.0**-53]

    def test_uniform_is_evenly_distributed(self) -> None:
        assert looks_uniform(np.histogram(uniform(words(100_000)), bins=100, range=(0, 1))[0])

    @pytest.mark.parametrize("bound", [1, 2, 3, 24, 1000])
    def test_below_gives_each_number_below_the_bound_equally_often(self, bound: int) -> None:
        counts = np.bincount(below(words(200_000), bound), minlength=bound)
        assert len(counts) == bound
        assert bound == 1 or looks_uniform(counts)

    def test_below_reaches_both_ends(self) -> None:
        ends = np.array([0, 2**64 - 1], dtype=np.uint64)
        assert below(ends, 10**12).tolist() == [0, 10**12 - 1]

    def test_values_are_the_pinned_ones(self) -> None:
        assert uniform(words(3, seed=7)).tolist() == GOLDEN_UNIFORM
        assert below(words(8, seed=7), 1000).tolist() == GOLDEN_BELOW


class TestPermute:
    @pytest.mark.parametrize("size", SIZES)
    def test_is_a_permutation(self, size: int) -> None:
        for word in words(20):
            assert sorted(permute(word, size, np.arange(size)).tolist()) == list(range(size))

    @settings(max_examples=50)
    @given(word=WORD, size=st.integers(1, 3000))
    def test_is_a_permutation_for_any_size_and_key(self, word: int, size: int) -> None:
        values = permute(np.array(word, dtype=np.uint64), size, np.arange(size))
        assert np.array_equal(np.sort(values), np.arange(size))

    @given(word=WORD, data=st.data(), size=st.integers(1, 2**40))
    def test_stays_in_its_range(self, word: int, size: int, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, size - 1))
        value = permute(np.array([word], dtype=np.uint64), size, position)
        assert 0 <= value[0] < size

    def test_takes_a_key_and_a_size_for_each_position(self) -> None:
        sizes = np.arange(1, 500)
        together = permute(words(499), sizes, sizes - 1)
        for word, size, found in zip(words(499), sizes, together, strict=True):
            assert permute(word, size, [size - 1]) == found

    def test_takes_single_numbers_and_grids(self) -> None:
        grid = permute(words(200)[:, None], 5, np.arange(5))
        assert (np.sort(grid, axis=1) == np.arange(5)).all()
        assert [int(permute(words(1)[0], 5, position)) for position in range(5)] == grid[0].tolist()

    def test_other_keys_give_other_permutations(self) -> None:
        found = {permute(word, 1000, np.arange(1000)).tobytes() for word in words(200)}
        assert len(found) == 200

    def test_two_keys_agree_in_no_more_positions_than_chance_would(self) -> None:
        one, *others = (permute(word, 4097, np.arange(4097)) for word in words(50))
        agreeing = [int((one == other).sum()) for other in others]
        assert np.mean(agreeing) < 2, "one position in all is expected"
        assert max(agreeing) < 10

    def test_reaches_every_permutation_of_few(self) -> None:
        for size in (2, 3, 4, 5):
            found = np.stack([permute(words(5_000), size, position) for position in range(size)])
            assert len(np.unique(found, axis=1).T) == factorial(size)

    @pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 100])
    def test_each_position_goes_anywhere_equally_often(self, size: int) -> None:
        for position in range(size):
            assert looks_uniform(np.bincount(permute(words(40_000), size, position), minlength=size)), position

    @pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64])
    def test_two_positions_go_to_any_two_others_equally_often(self, size: int) -> None:
        found = [permute(words(40_000), size, position) for position in range(min(size, 5))]
        different = ~np.eye(size, dtype=bool)
        for one, other in combinations(found, 2):
            counts = np.bincount(one * size + other, minlength=size * size).reshape(size, size)
            assert looks_uniform(counts[different])

    def test_of_a_large_range_spreads_neighbours_evenly(self) -> None:
        size = 1_000_003
        first, second = (permute(words(40_000), size, position) for position in (0, 1))
        assert looks_uniform(np.bincount(first * 100 // size, minlength=100))
        assert looks_uniform(np.bincount((second - first) % size * 100 // size, minlength=100))

    def test_the_first_few_positions_are_a_sample_without_replacement(self) -> None:
        size, taken = 50, 20
        drawn = np.stack([permute(words(5_000), size, rank) for rank in range(taken)])
        assert all(len(set(sample)) == taken for sample in drawn.T.tolist())
        included = np.bincount(drawn.ravel(), minlength=size) / 5_000
        assert np.abs(included - taken / size).max() < 5 * np.sqrt(0.4 * 0.6 / 5_000)

    def test_values_are_the_pinned_ones(self) -> None:
        word = key(2024, 7)
        assert permute(word, 10, np.arange(10)).tolist() == GOLDEN_PERMUTATION
        assert permute(word, 10**9, np.arange(3)).tolist() == GOLDEN_LARGE_PERMUTATION


def test_purposes_are_distinct_and_keep_their_numbers() -> None:
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "EPOCH_ORDER": 1,
        "MODE": 2,
        "WINDOW_SIZE": 3,
        "WINDOW_OFFSET": 4,
        "UNTIMED_SHARE": 5,
        "SAMPLE": 6,
        "MEASUREMENT": 7,
        "SEQUENCE_ORDER": 8,
        "FIELD_ORDER": 9,
    }


# What the streams gave when they were fixed. A change here changes every batch of every run.
GOLDEN_KEYS = [
    "0xe220a8397b1dcdaf",
    "0x910a2dec89025cc1",
    "0xe4d971771b652c20",
    "0xd0734750fde362b3",
    "0x5dc20aa7b2a27137",
]
GOLDEN_UNIFORM = [0.7215081806049702, 0.23928447285727472, 0.27598243332716743]
GOLDEN_BELOW = [721, 239, 275, 420, 556, 534, 971, 227]
GOLDEN_PERMUTATION = [0, 1, 7, 2, 5, 9, 6, 8, 4, 3]
GOLDEN_LARGE_PERMUTATION = [638399553, 531839366, 720753777]
