"""Blending row sets: exact shares, random access, and weights that change without repeating or losing anything."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.batches.batch import Stages
from ping_llm.batches.mixture import PERIOD, Mixture
from ping_llm.batches.spec import DataSpec, DataState, SequenceSource
from ping_llm.config import parse_schedule, parse_steps
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
    with pytest.raises(PingLlmError, match="2 sources has 3 weights"):
        Mixture.of(weights(1, 1)).changed(weights(1, 1, 1), 10)


class Nothing:
    """A source that is only named."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def open(self, spec: DataSpec, stages: Stages) -> SequenceSource:
        raise AssertionError("nothing is read here")


def spec_of(schedule: str = "", skip: str = "", **changes: Any) -> DataSpec:
    chosen: dict[str, Any] = {"sources": tuple(map(Nothing, "abc")), "weights": tuple(weights(7, 3, 0))}
    changes = {"schedule": parse_schedule(schedule), "skipped": parse_steps(skip), **changes}
    return DataSpec(**chosen | changes, global_batch_size=8)


def drawn(spec: DataSpec, mixture: Mixture, steps: range) -> list[list[tuple[str, int]]]:
    """The sources of each step's sequences, and their numbers there."""
    names = [source.fingerprint for source in spec.sources]
    located = [[mixture.locate(spec.planned(step) * 8 + i) for i in range(8)] for step in steps]
    return [[(names[source], number) for source, number in of_step] for of_step in located]


class TestSchedule:
    STAGES = "100: 0.2,0.5,0.3; 300: 0,0,1"

    def test_weights_are_a_function_of_the_step(self) -> None:
        spec = spec_of(self.STAGES)
        found = drawn(spec, spec.mixture(), range(400))
        for begin, end, shares in ((0, 100, (0.7, 0.3, 0)), (100, 300, (0.2, 0.5, 0.3)), (300, 400, (0, 0, 1))):
            counts = Counter(name for step in found[begin:end] for name, _ in step)
            assert [counts[name] / (8 * (end - begin)) for name in "abc"] == pytest.approx(shares, abs=0.01)
        for name in "abc":
            numbers = [number for step in found for which, number in step if which == name]
            assert numbers == list(range(len(numbers))), "none repeated, none lost"

    @pytest.mark.parametrize("at", [0, 40, 100, 101, 250, 300, 350])
    def test_a_resume_changes_nothing(self, at: int) -> None:
        spec = spec_of(self.STAGES)
        stored = DataState.from_json(replace(DataState.start(spec), next_step=at).to_json())
        again, state = stored.resume(spec)
        assert drawn(again, state.mixture, range(at, 400)) == drawn(spec, spec.mixture(), range(at, 400))

    def test_on_resume_it_may_be_another_and_sources_may_be_named_in_another_order(self) -> None:
        stored = replace(DataState.start(spec_of(self.STAGES)), next_step=200)
        other = spec_of("250: 1,0,0", sources=tuple(map(Nothing, "cab")), weights=tuple(weights(1, 1, 2)))
        spec, state = stored.resume(other)
        before = drawn(spec_of(self.STAGES), spec_of(self.STAGES).mixture(), range(200))
        found = before + drawn(spec, state.mixture, range(200, 300))
        for begin, end, shares in ((200, 250, (0.25, 0.5, 0.25)), (250, 300, (0, 0, 1))):
            counts = Counter(name for step in found[begin:end] for name, _ in step)
            assert [counts[name] / (8 * (end - begin)) for name in "abc"] == pytest.approx(shares, abs=0.02)
        for name in "abc":
            numbers = [number for step in found for which, number in step if which == name]
            assert numbers == list(range(len(numbers)))

    @pytest.mark.parametrize(
        ("text", "said"),
        [("5: 1,x", "write STEP: weight"), ("5: 0,0", "all 0"), ("9: 1,1; 5: 1,0", "must rise"), (": 1", "write STEP")],
    )
    def test_a_wrong_one_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(PingLlmError, match=said):
            parse_schedule(text)
        with pytest.raises(PingLlmError, match="3 sources has 2 weights"):
            spec_of("5: 1,1").mixture()


class TestSkippedSteps:
    def test_are_passed_over_and_nothing_else_changes(self) -> None:
        plain, spec = spec_of(), spec_of(skip="10_0:1_20,50:53")
        everything = drawn(plain, plain.mixture(), range(200))
        assert drawn(spec, spec.mixture(), range(177)) == everything[:50] + everything[53:100] + everything[120:]

    def test_may_be_named_at_a_resume_before_them_and_are_remembered(self) -> None:
        plain = spec_of()
        stored = replace(DataState.start(plain), next_step=90)
        spec, state = stored.resume(spec_of(skip="100:120"))
        everything = drawn(plain, plain.mixture(), range(200))
        assert drawn(spec, state.mixture, range(90, 180)) == everything[90:100] + everything[120:]
        later = DataState.from_json(replace(state, next_step=110).to_json())
        for again in (spec_of(), spec_of(skip="100:120")):
            spec, state = later.resume(again)
            assert drawn(spec, state.mixture, range(110, 180)) == everything[130:]

    def test_that_are_still_to_come_may_be_taken_back(self) -> None:
        stored = replace(DataState.start(spec_of(skip="100:120")), next_step=90)
        spec, _ = stored.resume(spec_of())
        assert spec.skipped == ()

    def test_that_were_trained_on_cannot_be(self) -> None:
        stored = replace(DataState.start(spec_of(skip="20:30")), next_step=90)
        with pytest.raises(PingLlmError, match=r"steps 95 to 97 cannot be skipped.*trained on those before 100"):
            stored.resume(spec_of(skip="20:30,95:97"))

    @pytest.mark.parametrize(("text", "said"), [("5", "FIRST:END"), ("7:7", "FIRST:END"), ("1:5,4:6", "overlap")])
    def test_wrong_ones_are_refused(self, text: str, said: str) -> None:
        with pytest.raises(PingLlmError, match=said):
            parse_steps(text)
