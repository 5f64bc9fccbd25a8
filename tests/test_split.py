"""The split: leak-free, and a function of the measurements alone."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations
from ping_llm.evaluate.split import PROTOCOLS, Split, SplitSettings, sampled, split, trained_on
from ping_llm.rows.measurement_set import MeasurementSet
from reference_split import expected_split, mix, node_hash
from split_fixtures import GENEROUS, NODES, Measurement, equal, leaks, measured, plain, random_world, without_times


@st.composite
def measurement_lists(draw: st.DrawFn, fewest: int = 1) -> list[Measurement]:
    """Enough measurements of few nodes that pairs and times repeat and most sets can be split."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, timeless = draw(st.integers(fewest, 150)), draw(st.booleans())
    nodes = random.permutation(NODES)[: draw(st.integers(2, len(NODES)))].tolist()
    ends = zip(random.choice(nodes, count).tolist(), random.choice(nodes, count).tolist(), strict=True)
    times = random.integers(0, draw(st.integers(1, 100)), count).tolist()
    rtts = random.integers(0, 9, count).tolist()
    return [
        (source, destination, None if timeless else float(at), float(rtt) if rtt else None)
        for (source, destination), at, rtt in zip(ends, times, rtts, strict=True)
    ]


any_settings = st.builds(
    SplitSettings,
    held_out_pairs=st.sampled_from([0.0, 0.1, 0.4]),
    unseen_probes=st.sampled_from([0.0, 0.2, 0.5]),
    later=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.sampled_from([0, 1, 2**64 - 1]),
)


def promises_kept(found: Split) -> None:
    """Every promise, in plain Python, for every question."""
    train, history = plain(found.nodes, found.train), plain(found.nodes, found.history)
    timeless = found.cut_time_s != found.cut_time_s
    assert not Counter(train) - Counter(history)
    for protocol, questions in found.questions.items():
        for source, destination, at, _ in plain(found.nodes, questions):
            context = [(s, d, t) for s, d, t, _ in history if timeless or (t or 0.0) < (at or 0.0)]
            ends = {node for s, d, *_ in train for node in (s, d)}
            assert destination in ends
            if not timeless:
                assert at is not None
                assert all(t is not None and t < found.cut_time_s <= at for _, _, t, _ in train)
            if protocol == "disconnected":
                half = {node: mix(node_hash(node) ^ 0x4A1F5A1700000004) >> 63 for node in found.nodes}
                known = [
                    m
                    for part in (found.train, found.history)
                    for m in plain(found.nodes, found.visible(part, protocol))
                ]
                assert all(half[s] == half[d] for s, d, *_ in known)
            if protocol in ("unseen_pair", "disconnected"):
                assert source in ends
                assert all({s, d} != {source, destination} for s, d, *_ in train + history)
            elif protocol == "seen_pair":
                assert not timeless
                assert (source, destination) in {(s, d) for s, d, *_ in train}
            else:
                assert source not in ends
                assert source in {s for s, _, _ in context}
                if timeless:
                    assert all({s, d} != {source, destination} for s, d, *_ in context)


class TestSplit:
    @given(measurement_lists(), any_settings)
    @hypothesis_settings(max_examples=200, deadline=None)
    def test_puts_every_measurement_where_the_rule_says(
        self, measurements: list[Measurement], settings: SplitSettings
    ) -> None:
        expected = expected_split(measurements, settings)
        if expected is None:
            with pytest.raises(PingLlmError):
                split(measured(measurements), settings)
            return
        found = split(measured(measurements), settings)
        parts = {"train": found.train, "history": found.history} | found.questions
        assert {name: Counter(plain(NODES, part)) for name, part in parts.items()} | {
            "unused": expected["unused"]
        } == expected
        assert found.unused == expected["unused"].total()

    @given(measurement_lists(fewest=40), any_settings)
    @hypothesis_settings(max_examples=200, deadline=None)
    def test_keeps_every_promise(self, measurements: list[Measurement], settings: SplitSettings) -> None:
        assume(expected_split(measurements, settings) is not None)
        found = split(measured(measurements), settings)
        promises_kept(found)
        assert leaks(found) == []

    @given(st.data())
    @hypothesis_settings(max_examples=200, deadline=None)
    def test_does_not_depend_on_the_order_of_measurements(self, data: st.DataObject) -> None:
        measurements = data.draw(measurement_lists(fewest=40))
        assume(expected_split(measurements, GENEROUS) is not None)
        one = split(measured(measurements), GENEROUS)
        other = split(measured(data.draw(st.permutations(measurements))), GENEROUS)
        assert list(one.questions) == list(other.questions)
        assert all(equal(one.questions[name], other.questions[name]) for name in one.questions)
        for part in ("train", "history"):
            assert Counter(plain(NODES, getattr(one, part))) == Counter(plain(NODES, getattr(other, part)))
        assert (one.unused, str(one.cut_time_s)) == (other.unused, str(other.cut_time_s))

    def test_has_questions_of_all_protocols_and_both_families_with_failures(self) -> None:
        world = random_world(20_000)
        found = split(world)
        assert tuple(found.questions) == PROTOCOLS
        assert all(np.isnan(questions.rtt_ms).any() for questions in found.questions.values())
        ipv6 = dataclasses.replace(world, nodes=tuple(f"2001:db8:{i:x}::1" for i in range(len(world.nodes))))
        assert tuple(split(ipv6).questions) == PROTOCOLS
        assert leaks(split(ipv6)) == []

    def test_shares_are_about_what_the_settings_say(self) -> None:
        world = random_world(300_000, sources=2_000, targets=500)
        found = split(world)
        assert (world.observations.time_s < found.cut_time_s).mean() == pytest.approx(0.9, abs=1e-4)
        # neither source (5 %) nor destination (80 % are sources too) is an unseen probe, the pair not held out, earlier
        assert len(found.train) / len(world.observations) == pytest.approx(0.95 * 0.96 * 0.9 * 0.9, rel=0.03)

    def test_all_parts_are_in_time_order(self) -> None:
        world = random_world(5_000)
        order = np.random.default_rng(1).permutation(5_000)
        found = split(dataclasses.replace(world, observations=world.observations.take(order)))
        for part in (found.train, found.history, *found.questions.values()):
            assert (np.diff(part.time_s) >= 0).all()

    def test_a_pair_and_a_probe_fall_the_same_way_in_every_data_set(self) -> None:
        one, other = split(random_world(20_000, seed=1)), split(random_world(20_000, seed=2))

        def pairs(found: Split) -> set[frozenset[str]]:
            return {frozenset(m[:2]) for m in plain(found.nodes, found.questions["unseen_pair"])}

        def probes(found: Split) -> set[str]:
            return {m[0] for m in plain(found.nodes, found.questions["unseen_probe"])}

        assert pairs(one) & pairs(other)
        assert not pairs(one) & {frozenset(m[:2]) for m in plain(other.nodes, other.history)}
        assert probes(one) & probes(other)
        assert not probes(one) & {node for m in plain(other.nodes, other.train) for node in m[:2]}

    def test_another_seed_is_another_split(self) -> None:
        world = random_world(20_000)
        one, other = (split(world, SplitSettings(seed=seed)) for seed in (0, 1))
        assert not np.array_equal(one.train.pair, other.train.pair)

    def test_without_times_there_is_no_later(self) -> None:
        found = split(without_times(random_world(20_000)))
        assert found.timeless
        assert tuple(found.questions) == ("unseen_pair", "unseen_probe", "disconnected")
        assert leaks(found) == []
        probes = found.history.take(~np.isin(found.history.source, found.train.source))
        kept = len(np.unique(probes.pair)) / len(
            np.unique(np.append(probes.pair, found.questions["unseen_probe"].pair))
        )
        assert kept == pytest.approx(0.8, abs=0.05)

    def test_time_that_moves_only_once_is_cut_there(self) -> None:
        early = [(NODES[s], NODES[d], 1.0, 5.0) for s in range(9) for d in range(9)] * 20
        found = split(measured([*early, *((s, d, 2.0, 5.0) for s, d, _, _ in early[:81])]))
        assert found.cut_time_s == 2.0
        assert len(found.questions["seen_pair"])

    @pytest.mark.parametrize(
        ("measurements", "message"),
        [
            ([], "no measurements to split"),
            ([(NODES[0], NODES[1], 1.0, 5.0)], "at the same time"),
            ([(NODES[0], NODES[1], 1.0, 5.0), (NODES[2], NODES[3], 2.0, 5.0)], "too little to split"),
            ([(NODES[0], NODES[1], None, 5.0)], "too little to split"),
            ([(NODES[0], NODES[1], 1.0, 5.0), (NODES[0], NODES[1], None, 5.0)], "1 of 2 measurements have no time"),
        ],
    )
    def test_says_what_is_lacking(self, measurements: list[Measurement], message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            split(measured(measurements))

    @pytest.mark.parametrize(
        ("nodes", "message"),
        [
            (("10.0.0.1", "10.0.0"), "'10.0.0' is neither an address nor a name"),
            (("2001:db8::1", "2001:DB8:0::1"), "two nodes have the same address"),
            (("10.0.0.1",), "between nodes 0 to 1, but 1 nodes have addresses"),
        ],
    )
    def test_refuses_nodes_that_it_cannot_tell_apart(self, nodes: tuple[str, ...], message: str) -> None:
        world = measured([(NODES[0], NODES[1], 1.0, 5.0), (NODES[0], NODES[1], 2.0, 5.0)])
        with pytest.raises(PingLlmError, match=message):
            split(dataclasses.replace(world, nodes=nodes))

    @pytest.mark.parametrize("wrong", [{"later": 0.0}, {"later": 1.0}, {"held_out_pairs": -0.1}, {"seed": -1}])
    def test_refuses_shares_that_make_no_split(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(PingLlmError, match=next(iter(wrong))):
            SplitSettings(**wrong)

    @pytest.mark.slow
    def test_splits_five_million_measurements(self) -> None:
        """In 4 to 6 s on one core."""
        assert leaks(split(random_world(5_000_000, sources=40_000, targets=20_000))) == []


def with_more(found: Split, part: str, more: Observations) -> Split:
    """The split with measurements added to its train or history."""
    known: Observations = getattr(found, part)
    columns = {name: np.concatenate([column, vars(more)[name]]) for name, column in vars(known).items()}
    changes: dict[str, Any] = {part: Observations(**columns)}
    return dataclasses.replace(found, **changes)


class TestLeaks:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("part", ["train", "history"])
    def test_a_question_among_what_is_known_is_found(self, protocol: str, part: str) -> None:
        found = split(random_world(20_000))
        question = found.questions[protocol].take(slice(0, 1))
        broken = leaks(with_more(found, part, question))
        if part == "train":
            assert "1 measurements of train are not before the cut time" in broken
        elif protocol in ("unseen_pair", "disconnected"):
            assert [line for line in broken if "unseen_pair have their pair in the history" in line]
        else:  # their own later measurements belong there
            assert broken == []

    @pytest.mark.parametrize("part", ["train", "history"])
    def test_the_reverse_of_an_unseen_pair_is_found(self, part: str) -> None:
        found = split(random_world(20_000))
        question = found.questions["unseen_pair"].take(slice(0, 1))
        early = found.cut_time_s - 1
        reverse = dataclasses.replace(
            question, source=question.destination, destination=question.source, time_s=np.array([early])
        )
        broken = leaks(with_more(found, part, reverse))
        assert len(broken) == 1
        assert f"questions of unseen_pair have their pair in {'the ' * (part == 'history')}{part}" in broken[0]


class TestTrainedOn:
    def test_the_training_part_compromises_nothing(self) -> None:
        world = random_world(20_000)
        found = split(world)
        assert trained_on(MeasurementSet(nodes=world.nodes, observations=found.train), found) == dict.fromkeys(
            PROTOCOLS, 0
        )

    def test_all_measurements_compromise_everything_however_their_nodes_are_numbered(self) -> None:
        world = random_world(20_000)
        found = split(world)
        turned = dataclasses.replace(
            world.observations,
            source=len(world.nodes) - 1 - world.observations.source,
            destination=len(world.nodes) - 1 - world.observations.destination,
        )
        counts = trained_on(MeasurementSet(nodes=world.nodes[::-1], observations=turned), found)
        assert counts == {name: len(questions) for name, questions in found.questions.items()}

    def test_unknown_addresses_compromise_nothing(self) -> None:
        world = random_world(20_000)
        elsewhere = dataclasses.replace(world, nodes=tuple(f"2001:db8:{i:x}::" for i in range(len(world.nodes))))
        assert trained_on(elsewhere, split(world)) == dict.fromkeys(PROTOCOLS, 0)

    def test_counts_what_one_measurement_gives_away(self) -> None:
        world = random_world(20_000)
        found = split(world)

        def counts(known: Observations, **changes: Any) -> dict[str, int]:
            return trained_on(
                MeasurementSet(nodes=world.nodes, observations=dataclasses.replace(known, **changes)), found
            )

        def with_pair_of(questions: Observations, known: Observations) -> int:
            ends = {known.source[0], known.destination[0]}
            return sum({s, d} == ends for s, d in zip(questions.source, questions.destination, strict=True))

        pair = found.questions["disconnected"].take(slice(0, 1))
        nothing = dict.fromkeys(PROTOCOLS, 0)
        given_away = {name: with_pair_of(found.questions[name], pair) for name in ("unseen_pair", "disconnected")} | {
            "seen_pair": 0,
            "unseen_probe": 0,
        }
        early = np.array([found.cut_time_s - 1])
        assert counts(pair, time_s=early) == given_away
        assert counts(pair, source=pair.destination, destination=pair.source) == given_away

        seen = found.questions["seen_pair"].take(slice(0, 1))
        assert counts(seen, time_s=early) == nothing
        assert counts(seen) == {**nothing, "seen_pair": with_pair_of(found.questions["seen_pair"], seen)}
        assert counts(seen, time_s=np.array([np.nan])) == counts(seen), "what has no time may be late"

        probe = found.questions["unseen_probe"].take(slice(0, 1))
        of_probe = int((found.questions["unseen_probe"].source == probe.source[0]).sum())
        assert counts(probe, time_s=early) == {**nothing, "unseen_probe": of_probe}


class TestSampled:
    def test_is_a_part_in_the_same_order_and_the_same_every_time(self) -> None:
        questions = random_world(2_000).observations
        few, many = sampled(questions, 100), sampled(questions, 1_000)
        assert (len(few), len(many)) == (100, 1_000)
        assert equal(few, sampled(questions, 100))
        rank = {t: i for i, t in enumerate(questions.time_s.tolist())}
        assert (np.diff([rank[t] for t in few.time_s.tolist()]) > 0).all()
        assert set(few.time_s) <= set(many.time_s)
        assert not equal(few, sampled(questions, 100, seed=1))

    def test_is_everything_where_there_is_not_more(self) -> None:
        questions = random_world(50).observations
        assert equal(sampled(questions, 50), questions)
        assert equal(sampled(questions, 500), questions)
        assert len(sampled(questions, 0)) == 0

    def test_takes_from_everywhere(self) -> None:
        questions = random_world(100_000).observations
        middle = np.searchsorted(questions.time_s, sampled(questions, 10_000).time_s) / 100_000
        assert np.histogram(middle, 10, (0, 1))[0] == pytest.approx(1_000, rel=0.15)
