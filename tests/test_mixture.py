"""Blending row sets: exact shares, random access, and weights that change without repeating or losing anything."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.batches.mixture import PERIOD, Mixture
from ping_llm.batches.spec import DataState
from ping_llm.core.errors import PingLlmError


def weights(*parts: int) -> list[Fraction]:
    return [Fraction(part, sum(parts)) for part in parts]


some_weights = st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any).map(lambda parts: weights(*parts))


@settings(max_examples=30, deadline=None)
@given(some_weights)
def test_each_source_gives_its_sequences_in_order_without_gaps(parts: list[Fraction]) -> None:
    mixture = Mixture.of(parts)
    places = [mixture.locate(sequence) for sequence in range(2 * PERIOD + 77)]
    for source in range(len(parts)):
        numbers = [number for which, number in places if which == source]
        assert numbers == list(range(len(numbers)))


@settings(max_examples=30, deadline=None)
@given(some_weights, st.integers(1, 3 * PERIOD))
def test_shares_are_kept_at_every_point_not_only_on_average(parts: list[Fraction], length: int) -> None:
    mixture = Mixture.of(parts)
    counts = Counter(mixture.locate(sequence)[0] for sequence in range(length))
    for source, weight in enumerate(parts):
        assert abs(counts[source] - length * weight) <= 2 + length * len(parts) / PERIOD


def test_a_weight_of_zero_gives_nothing_and_a_tiny_one_something() -> None:
    mixture = Mixture.of([Fraction(1, 10**6), Fraction(0), 1 - Fraction(1, 10**6)])
    counts = Counter(mixture.locate(sequence)[0] for sequence in range(PERIOD))
    assert counts == {0: 1, 2: PERIOD - 1}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=2, max_size=4), st.data())
def test_changed_weights_neither_repeat_nor_lose_a_sequence(
    changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    mixture = Mixture.of(weights(*changes[0]))
    at = 0
    for change in changes[1:]:
        at += data.draw(st.integers(0, 700))
        mixture = mixture.changed(weights(*change), at)
    places = [mixture.locate(sequence) for sequence in range(at + 500)]
    for source in range(2):
        numbers = [number for which, number in places if which == source]
        assert all(b == a + 1 for a, b in pairwise(numbers))
        assert numbers[:1] in ([], [0])


def test_the_past_is_not_changed_by_new_weights() -> None:
    before = Mixture.of(weights(1, 1))
    after = before.changed(weights(9, 1), 300)
    assert [after.locate(i) for i in range(300)] == [before.locate(i) for i in range(300)]


def test_equal_weights_begin_no_new_phase_and_json_keeps_everything() -> None:
    mixture = Mixture.of(weights(3, 7))
    assert mixture.changed(weights(30, 70), 40) is mixture
    changed = mixture.changed(weights(1, 1), 123)
    state = DataState(next_step=18, identity={"seed": 1}, mixture=changed)
    assert DataState.from_json(state.to_json()) == state


def test_a_blend_cannot_change_its_number_of_row_sets() -> None:
    with pytest.raises(PingLlmError, match="use weight 0"):
        Mixture.of(weights(1, 1)).changed(weights(1, 1, 1), 10)
