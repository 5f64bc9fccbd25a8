"""The evaluation split: leak-free, a function of the measurements alone, and the same when read back."""

import bz2
import dataclasses
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from conftest import random_measurements
from ping_llm.baselines.interface import Observations
from ping_llm.errors import PingLlmError
from ping_llm.evaluate import write_split as write_split_module
from ping_llm.evaluate.split import PROTOCOLS, Split, SplitSettings, leaks, sampled, split, trained_on
from ping_llm.evaluate.write_split import read_split, write_split
from ping_llm.measurements import SCHEMA
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.observations import Measured, read_observations, rows_observations

WriteParquet = Callable[..., Path]

Measurement = tuple[str, str, float | None, float | None]
"""Source, destination, time and RTT. None: no time; failed."""

NODES = tuple(f"10.0.{i}.1" for i in range(9)) + tuple(f"2001:db8::{i:x}" for i in range(1, 5))
GENEROUS = SplitSettings(held_out_pairs=0.3, unseen_probes=0.25, later=0.4)


def measured(measurements: Sequence[Measurement], nodes: Sequence[str] = NODES) -> Measured:
    number = {node: i for i, node in enumerate(nodes)}
    source, destination, time_s, rtt_ms = zip(*measurements, strict=True) if measurements else ((), (), (), ())
    return Measured(
        nodes=tuple(nodes),
        observations=Observations(
            source=np.array([number[s] for s in source], dtype=np.int64),
            destination=np.array([number[d] for d in destination], dtype=np.int64),
            time_s=np.array([np.nan if t is None else t for t in time_s], dtype=np.float64),
            rtt_ms=np.array([np.nan if r is None else r for r in rtt_ms], dtype=np.float32),
        ),
    )


def plain(nodes: Sequence[str], part: Observations) -> list[Measurement]:
    columns = zip(*(column.tolist() for column in vars(part).values()), strict=True)
    return [(nodes[s], nodes[d], None if t != t else t, None if r != r else r) for s, d, t, r in columns]


def random_world(count: int, *, sources: int = 120, targets: int = 60, seed: int = 0) -> Measured:
    """Sources measure targets and each other, in time order."""
    random = np.random.default_rng(seed)
    nodes = sources + targets
    return Measured(
        nodes=tuple(str(ip_address((10 << 24) + 7 * i)) for i in range(nodes)),
        observations=Observations(
            source=random.integers(0, sources, count),
            destination=random.integers(0, nodes, count),
            time_s=np.sort(random.integers(1_700_000_000_000_000, 1_700_001_000_000_000, count)) / 1e6,
            rtt_ms=np.where(random.random(count) < 0.05, np.nan, random.lognormal(3, 1, count)).astype(np.float32),
        ),
    )


def without_times(world: Measured) -> Measured:
    timeless = dataclasses.replace(world.observations, time_s=np.full(len(world.observations), np.nan))
    return dataclasses.replace(world, observations=timeless)


def equal(one: Observations, other: Observations) -> bool:
    columns = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in columns)


# --- the rule, a second time: one measurement after the other, in whole numbers -------------------------------------

MASK = 2**64 - 1


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def node_hash(node: str) -> int:
    address = ip_address(node)
    packed = address.packed.ljust(16, b"\0")
    low = (int.from_bytes(packed[8:]) + address.version * 0x9E3779B97F4A7C15) & MASK
    return mix(int.from_bytes(packed[:8]) ^ mix(low))


def pair_hash(one: str, other: str) -> int:
    low, high = sorted((node_hash(one), node_hash(other)))
    return mix(low ^ mix((high + 0x9E3779B97F4A7C15) & MASK))


def draw(value: int, salt: int, seed: int) -> float:
    return (mix(value ^ salt ^ mix((seed + 0x9E3779B97F4A7C15) & MASK)) >> 11) / 2**53


def expected_split(measurements: list[Measurement], settings: SplitSettings) -> dict[str, Counter[Measurement]] | None:
    """What goes where; None where there is too little to split."""
    timeless = all(t is None for _, _, t, _ in measurements)
    times = sorted(t for _, _, t, _ in measurements if t is not None)
    cut = 0.0
    if not timeless:
        if times[0] == times[-1]:
            return None
        cut = times[int((1 - settings.later) * len(times))]
        if cut == times[0]:
            cut = min(t for t in times if t > times[0])

    probes = {
        s for s, *_ in measurements if draw(node_hash(s), 0x9B0BE5A170000001, settings.seed) < settings.unseen_probes
    }
    places: list[str] = []
    for source, destination, at, _ in measurements:
        hashed = pair_hash(source, destination)
        held_out = draw(hashed, 0x9A125A1700000002, settings.seed) < settings.held_out_pairs
        kept = draw(hashed, 0x6E975A1700000003, settings.seed) < 0.8
        if source in probes:
            early = kept if timeless else at is not None and at < cut
            places.append("probe early" if early else "probe late")
        elif destination in probes:
            places.append("to a probe")
        elif held_out:
            places.append("pair late" if timeless or (at is not None and at >= cut) else "pair early")
        else:
            places.append("open early" if timeless or (at is not None and at < cut) else "open late")

    def placed(*names: str) -> list[Measurement]:
        return [m for m, place in zip(measurements, places, strict=True) if place in names]

    train = placed("open early")
    nodes = {node for s, d, *_ in train for node in (s, d)}
    pairs = {(s, d) for s, d, *_ in train}
    heard = {s for s, *_ in placed("probe early")}
    questions = {
        "unseen_pair": [m for m in placed("pair late") if m[0] in nodes and m[1] in nodes],
        "seen_pair": [m for m in placed("open late") if (m[0], m[1]) in pairs],
        "unseen_probe": [m for m in placed("probe late") if m[0] in heard and m[1] in nodes],
    }
    if not train or not any(questions.values()):
        return None
    history = placed("open early", "open late", "probe early", *([] if timeless else ["probe late"]))
    used = Counter(history) | Counter(questions["unseen_pair"]) | Counter(questions["unseen_probe"])
    return {name: Counter(part) for name, part in questions.items() if part} | {
        "train": Counter(train),
        "history": Counter(history),
        "unused": Counter(measurements) - used,
    }


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
            if protocol == "unseen_pair":
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
        assert tuple(found.questions) == ("unseen_pair", "unseen_probe")
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
            (("10.0.0.1", "nowhere"), "'nowhere' is not an address"),
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
    def test_splits_five_million_measurements_in_seconds(self) -> None:
        world = random_world(5_000_000, sources=40_000, targets=20_000)
        start = time.perf_counter()
        found = split(world)
        assert time.perf_counter() - start < 20, "4-6 s on one core"
        assert leaks(found) == []


class TestSampled:
    def test_is_a_part_in_the_same_order_and_the_same_every_time(self) -> None:
        questions = random_world(2_000).observations
        few, many = sampled(questions, 100), sampled(questions, 1_000)
        assert (len(few), len(many)) == (100, 1_000)
        assert equal(few, sampled(questions, 100))
        place = {t: i for i, t in enumerate(questions.time_s.tolist())}
        assert (np.diff([place[t] for t in few.time_s.tolist()]) > 0).all()
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


def with_more(found: Split, place: str, more: Observations) -> Split:
    """The split with measurements added to its train or history."""
    known: Observations = getattr(found, place)
    columns = {name: np.concatenate([column, vars(more)[name]]) for name, column in vars(known).items()}
    changes: dict[str, Any] = {place: Observations(**columns)}
    return dataclasses.replace(found, **changes)


class TestLeaks:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("place", ["train", "history"])
    def test_a_question_among_what_is_known_is_found(self, protocol: str, place: str) -> None:
        found = split(random_world(20_000))
        question = found.questions[protocol].take(slice(0, 1))
        broken = leaks(with_more(found, place, question))
        if place == "train":
            assert "1 measurements of train are not before the cut time" in broken
        elif protocol == "unseen_pair":
            assert [line for line in broken if "unseen_pair have their pair in the history" in line]
        else:  # their own later measurements belong there
            assert broken == []

    @pytest.mark.parametrize("place", ["train", "history"])
    def test_the_reverse_of_an_unseen_pair_is_found(self, place: str) -> None:
        found = split(random_world(20_000))
        question = found.questions["unseen_pair"].take(slice(0, 1))
        early = found.cut_time_s - 1
        reverse = dataclasses.replace(
            question, source=question.destination, destination=question.source, time_s=np.array([early])
        )
        broken = leaks(with_more(found, place, reverse))
        assert len(broken) == 1
        assert f"questions of unseen_pair have their pair in {'the ' * (place == 'history')}{place}" in broken[0]

    def test_an_unseen_probe_that_was_measured_by_others_is_found(self) -> None:
        found = split(random_world(20_000))
        probe = found.questions["unseen_probe"].source[:1]
        known = dataclasses.replace(found.train.take(slice(0, 1)), destination=probe)
        broken = leaks(with_more(found, "train", known))
        assert len(broken) == 1
        assert "questions of unseen_probe have a source that is in train" in broken[0]

    def test_a_seen_pair_that_was_never_seen_is_found(self) -> None:
        found = split(random_world(20_000))
        pair = found.questions["seen_pair"].pair[0]
        broken = leaks(dataclasses.replace(found, train=found.train.take(found.train.pair != pair)))
        assert [line for line in broken if "questions of seen_pair have a pair that is not in train" in line]

    def test_a_question_before_the_cut_is_found(self) -> None:
        found = split(random_world(20_000))
        questions = {**found.questions, "seen_pair": found.train.take(slice(0, 3))}
        assert leaks(dataclasses.replace(found, questions=questions)) == [
            "3 questions of seen_pair are before the cut time"
        ]

    def test_a_probe_that_is_known_by_nothing_is_found(self) -> None:
        found = split(random_world(20_000))
        probe = found.questions["unseen_probe"].source[0]
        history = found.history.take((found.history.source != probe) | (found.history.time_s >= found.cut_time_s))
        broken = leaks(dataclasses.replace(found, history=history))
        assert len(broken) == 1
        assert "questions of unseen_probe have a source without history" in broken[0]

    def test_without_times_a_probes_question_in_its_history_is_found(self) -> None:
        found = split(without_times(random_world(20_000)))
        question = found.questions["unseen_probe"].take(slice(0, 1))
        broken = leaks(with_more(found, "history", question))
        assert len(broken) == 1
        assert "questions of unseen_probe have their pair in the history" in broken[0]


class TestTrainedOn:
    def test_the_training_part_compromises_nothing(self) -> None:
        world = random_world(20_000)
        found = split(world)
        assert trained_on(Measured(nodes=world.nodes, observations=found.train), found) == dict.fromkeys(PROTOCOLS, 0)

    def test_all_measurements_compromise_everything_however_their_nodes_are_numbered(self) -> None:
        world = random_world(20_000)
        found = split(world)
        turned = dataclasses.replace(
            world.observations,
            source=len(world.nodes) - 1 - world.observations.source,
            destination=len(world.nodes) - 1 - world.observations.destination,
        )
        counts = trained_on(Measured(nodes=world.nodes[::-1], observations=turned), found)
        assert counts == {name: len(questions) for name, questions in found.questions.items()}

    def test_unknown_addresses_compromise_nothing(self) -> None:
        world = random_world(20_000)
        elsewhere = dataclasses.replace(world, nodes=tuple(f"2001:db8:{i:x}::" for i in range(len(world.nodes))))
        assert trained_on(elsewhere, split(world)) == dict.fromkeys(PROTOCOLS, 0)

    def test_counts_what_one_measurement_gives_away(self) -> None:
        world = random_world(20_000)
        found = split(world)

        def counts(known: Observations, **changes: Any) -> dict[str, int]:
            return trained_on(Measured(nodes=world.nodes, observations=dataclasses.replace(known, **changes)), found)

        def with_pair_of(questions: Observations, known: Observations) -> int:
            ends = {known.source[0], known.destination[0]}
            return sum({s, d} == ends for s, d in zip(questions.source, questions.destination, strict=True))

        pair = found.questions["unseen_pair"].take(slice(0, 1))
        expected = with_pair_of(found.questions["unseen_pair"], pair)
        nothing = dict.fromkeys(PROTOCOLS, 0)
        early = np.array([found.cut_time_s - 1])
        assert counts(pair, time_s=early) == {**nothing, "unseen_pair": expected}
        assert counts(pair, source=pair.destination, destination=pair.source) == {**nothing, "unseen_pair": expected}

        seen = found.questions["seen_pair"].take(slice(0, 1))
        assert counts(seen, time_s=early) == nothing
        assert counts(seen) == {**nothing, "seen_pair": with_pair_of(found.questions["seen_pair"], seen)}
        assert counts(seen, time_s=np.array([np.nan])) == counts(seen), "what has no time may be late"

        probe = found.questions["unseen_probe"].take(slice(0, 1))
        of_probe = int((found.questions["unseen_probe"].source == probe.source[0]).sum())
        assert counts(probe, time_s=early) == {**nothing, "unseen_probe": of_probe}


class TestFolder:
    @pytest.mark.parametrize(
        "world",
        [
            random_world(5_000),
            dataclasses.replace(random_world(5_000), nodes=tuple(f"2001:db8:{i:x}::1" for i in range(180))),
            without_times(random_world(5_000)),
        ],
        ids=["ipv4", "ipv6", "timeless"],
    )
    def test_is_read_back_exactly(self, tmp_path: Path, world: Measured) -> None:
        written = write_split(world, tmp_path / "a" / "split")
        found = read_split(tmp_path / "a" / "split")
        assert found.nodes == written.nodes == world.nodes
        assert str(found.cut_time_s) == str(written.cut_time_s)
        assert found.unused == written.unused
        assert list(found.questions) == list(written.questions)
        assert equal(found.train, written.train)
        assert equal(found.history, written.history)
        assert all(equal(found.questions[name], written.questions[name]) for name in written.questions)
        assert leaks(found) == []

    def test_numbers_that_the_schema_would_round_are_kept(self, tmp_path: Path) -> None:
        world = random_world(5_000)
        random = np.random.default_rng(0)
        fine = dataclasses.replace(
            world.observations, time_s=np.sort(random.random(5_000)), rtt_ms=random.lognormal(3, 1, 5_000)
        )
        written = write_split(dataclasses.replace(world, observations=fine), tmp_path / "split")
        assert equal(read_split(tmp_path / "split").history, written.history)

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        written = write_split(random_world(5_000), tmp_path / "split", GENEROUS)
        description = json.loads((tmp_path / "split" / "split.json").read_text())
        assert description["settings"] == dataclasses.asdict(GENEROUS)
        assert description["cut_time_s"] == written.cut_time_s
        assert description["questions"] == {name: len(questions) for name, questions in written.questions.items()}
        asked = len(written.questions["unseen_pair"])
        assert description["history"] + asked + description["unused"] == 5_000
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]

    def test_the_training_part_can_be_prepared(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        world = read_observations([write_parquet(random_measurements(20_000, whole_seconds=False))])
        written = write_split(world, tmp_path / "split")
        assert pq.read_schema(tmp_path / "split" / "train" / "measurements.parquet").equals(SCHEMA)
        inputs = (str(tmp_path / "split" / "train" / "*.parquet"),)
        prepare(PrepareSettings(inputs=inputs, output=tmp_path / "rows", train_ratio=1.0, workers=1))
        rows = rows_observations(tmp_path / "rows", "train")
        assert Counter(plain(rows.nodes, rows.observations)) == Counter(plain(written.nodes, written.train))
        assert trained_on(rows, written) == dict.fromkeys(PROTOCOLS, 0)

    def test_is_not_replaced_without_being_told(self, tmp_path: Path) -> None:
        write_split(random_world(5_000), tmp_path / "split")
        with pytest.raises(PingLlmError, match="already exists"):
            write_split(random_world(6_000), tmp_path / "split")
        assert len(read_split(tmp_path / "split").history) < 5_000
        write_split(random_world(6_000), tmp_path / "split", overwrite=True)
        assert len(read_split(tmp_path / "split").history) > 5_000
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]

    def test_another_folder_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("all of it")
        with pytest.raises(PingLlmError, match="something else than a split"):
            write_split(random_world(5_000), tmp_path, overwrite=True)
        assert (tmp_path / "thesis.txt").exists()

    def test_is_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = write_split(random_world(5_000), tmp_path / "split")

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(write_split_module, "_description", full)
        for name in ("split", "new"):
            with pytest.raises(PingLlmError, match="No space left"):
                write_split(random_world(6_000), tmp_path / name, overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]
        assert equal(read_split(tmp_path / "split").history, before.history)

    def test_what_is_no_split_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match="not a split"):
            read_split(tmp_path)
        write_split(random_world(5_000), tmp_path / "split")
        (tmp_path / "split" / "history.parquet").write_bytes(b"PAR1")
        with pytest.raises(PingLlmError, match="damaged"):
            read_split(tmp_path / "split")


def rows_of(table: pa.Table) -> Counter[Measurement]:
    times = (table["event_time"].cast(pa.int64()).to_numpy() / 1e6).tolist()
    return Counter(
        zip(*(table[c].to_pylist() for c in ("src_addr", "dst_addr")), times, table["rtt"].to_pylist(), strict=True)
    )


def atlas_result(source: str, destination: str, at: int, *packets: dict[str, Any]) -> dict[str, Any]:
    named = {"fw": 5000, "type": "ping", "prb_id": 1, "msm_id": 2, "af": ip_address(source).version}
    return {**named, "from": source, "dst_addr": destination, "timestamp": at, "result": list(packets)}


ATLAS = [
    atlas_result("192.0.2.1", "198.51.100.7", 1_700_000_000, {"rtt": 12.5}, {"rtt": 11.5}),
    atlas_result("2001:db8::5", "2001:DB8:0::9", 1_699_999_999, {"x": "*"}),
]


class TestReading:
    @pytest.mark.parametrize("whole_seconds", [True, False])
    def test_files_and_prepared_rows_give_every_measurement(
        self, tmp_path: Path, write_parquet: WriteParquet, whole_seconds: bool
    ) -> None:
        table = random_measurements(20_000, whole_seconds=whole_seconds)
        path = write_parquet(table, row_group_size=3_000)
        found = read_observations([path])
        assert Counter(plain(found.nodes, found.observations)) == rows_of(table)
        prepare(PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1, max_row_bytes=4096))
        parts = [rows_observations(tmp_path / "rows", name) for name in ("train", "eval")]
        assert sum((Counter(plain(p.nodes, p.observations)) for p in parts), Counter[Measurement]()) == rows_of(table)
        for part in (found, *parts):
            assert (np.diff(part.observations.time_s) >= 0).all()

    def test_rows_of_several_shards_and_of_times_decades_apart_are_read(
        self, tmp_path: Path, write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ping_llm.rows.prepare.SHARD_MEASUREMENTS", 2_000)
        monkeypatch.setattr("ping_llm.sources.observations._BATCH", 700)
        table = random_measurements(10_000, whole_seconds=False)
        late = pa.array(np.where(np.arange(10_000) % 7, 0, 10**15))
        times = pa.compute.add(table["event_time"].cast(pa.int64()), late).cast(SCHEMA.field("event_time").type)
        table = table.set_column(0, SCHEMA.field("event_time"), times)
        prepare(
            PrepareSettings(inputs=(str(write_parquet(table)),), output=tmp_path / "rows", workers=1, train_ratio=1.0)
        )
        assert len(list((tmp_path / "rows").glob("*.arrayrecord"))) > 1
        found = rows_observations(tmp_path / "rows", "train")
        assert Counter(plain(found.nodes, found.observations)) == rows_of(table)

    def test_a_split_without_rows_has_no_measurements(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        path = write_parquet(random_measurements(500))
        prepare(PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1, train_ratio=1.0))
        assert len(rows_observations(tmp_path / "rows", "eval").observations) == 0

    def test_nodes_are_numbered_by_address_however_files_are_cut(self, write_parquet: WriteParquet) -> None:
        table = random_measurements(3_000)
        whole = read_observations([write_parquet(table)])
        parts = [write_parquet(table.slice(i, 1_000), f"parts/{9 - i // 1000}.parquet") for i in (0, 1_000, 2_000)]
        cut = read_observations([str(parts[0].parent / "*.parquet")])
        assert whole.nodes == cut.nodes
        assert list(whole.nodes) == sorted(whole.nodes, key=lambda n: (ip_address(n).version, ip_address(n).packed))
        assert Counter(plain(whole.nodes, whole.observations)) == Counter(plain(cut.nodes, cut.observations))

    def test_equal_times_stay_in_the_order_of_the_input(self, write_parquet: WriteParquet) -> None:
        table = random_measurements(2_000)
        at = np.where(np.arange(2_000) % 2, 1_700_000_000, 1_600_000_000)
        column = pa.array(at * 1_000_000, SCHEMA.field("event_time").type)
        found = read_observations([write_parquet(table.set_column(0, SCHEMA.field("event_time"), column))])
        sources = table["src_addr"].to_pylist()
        assert [m[0] for m in plain(found.nodes, found.observations)] == sources[::2] + sources[1::2]

    def test_addresses_of_equal_bytes_but_different_families_are_different_nodes(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(
            "event_time,src_addr,dst_addr,rtt\n1,2001:db8::,::1,1\n2,32.1.13.184,200.0.0.1,2\n3,32.1.13.184,0.0.0.1,3\n"
        )
        found = read_observations([tmp_path / "a.csv"])
        assert found.nodes == ("0.0.0.1", "32.1.13.184", "200.0.0.1", "::1", "2001:db8::")
        assert found.observations.source.tolist() == [4, 1, 1]
        assert found.observations.destination.tolist() == [3, 2, 0]

    def test_csv_with_other_column_names_is_read_and_unusable_rows_are_counted(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(
            "when,src,dst,latency\n2024-01-01T00:00:02Z,10.0.0.1,10.0.0.2,7.5\n1704067201,10.0.0.2,10.0.0.1,\n"
            "1704067201,nowhere,10.0.0.1,3\n"
        )
        told: list[float] = []
        found = read_observations(
            [tmp_path / "a.csv"],
            columns={"event_time": "when", "rtt": "latency"},
            on_progress=lambda amount=1, *, total=None: told.append(amount),
        )
        assert plain(found.nodes, found.observations) == [
            ("10.0.0.2", "10.0.0.1", 1_704_067_201.0, None),
            ("10.0.0.1", "10.0.0.2", 1_704_067_202.0, 7.5),
        ]
        assert found.nodes == ("10.0.0.1", "10.0.0.2")
        assert found.dropped == {"bad_src_addr": 1}
        assert sum(told) == 3

    @pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.json.bz2", "ping-2024-05-01T0000.bz2"])
    def test_atlas_results_are_read(self, tmp_path: Path, name: str) -> None:
        lines = json.dumps(ATLAS) if ".json." in f"{name}." else "\n".join(json.dumps(result) for result in ATLAS)
        packed = lines.encode()
        if name.endswith(("gz", "bz2")):
            packed = gzip.compress(packed) if name.endswith("gz") else bz2.compress(packed)
        (tmp_path / name).write_bytes(packed)
        found = read_observations([tmp_path / name])
        assert plain(found.nodes, found.observations) == [
            ("2001:db8::5", "2001:db8::9", 1_699_999_999.0, None),
            ("192.0.2.1", "198.51.100.7", 1_700_000_000.0, 11.5),
        ]

    def test_nothing_usable_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("event_time,src_addr,dst_addr,rtt\n,10.0.0.1,10.0.0.2,7.5\n")
        with pytest.raises(PingLlmError, match="missing_time"):
            read_observations([tmp_path / "a.csv"])

    @pytest.mark.slow
    def test_the_real_atlas_set_splits_without_leaks(self, shared_data: Path) -> None:
        world = read_observations([shared_data / "ripe-atlas-ping-menog.jsonl.bz2"])
        found = split(world)
        assert leaks(found) == []
        assert {"unseen_pair", "seen_pair"} <= set(found.questions)
