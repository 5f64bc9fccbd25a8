"""What gives an answer away is found: in the split itself, and in what a model was trained on."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from ping_llm.core.observations import Observations
from ping_llm.evaluate.split import PROTOCOLS, Split, leaks, split, trained_on
from ping_llm.rows.measurement_set import MeasurementSet
from split_fixtures import random_world, without_times


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
