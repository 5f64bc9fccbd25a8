"""Contexts: the written rule, the same in training and prediction, and nothing from after a question."""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ping_llm.core.observations import Observations, Questions
from ping_llm.models.completer.context import Known, filled, groups
from ping_llm.prior.selection import chosen, order_keys
from ping_llm.prior.shared_prefixes import kin_of, without_kin
from ping_llm.prior.worlds import ANSWERED, FAILED, NOTHING


def observations(rows: list[tuple[int, int, float, float]]) -> Observations:
    source, destination, time_s, rtt = (np.array(column) for column in zip(*rows, strict=True))
    return Observations(
        source=source.astype(np.int64),
        destination=destination.astype(np.int64),
        time_s=time_s.astype(float),
        rtt_ms=rtt,
    )


def random_observations(count: int, nodes: int, seed: int = 0, *, failed: float = 0.1) -> Observations:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, nodes, count)
    rtt = rng.lognormal(3.5, 1.0, count)
    return Observations(
        source=source,
        destination=(source + rng.integers(1, nodes, count)) % nodes,
        time_s=rng.permutation(count).astype(float),
        rtt_ms=np.where(rng.random(count) < failed, np.nan, rtt),
    )


def some_addresses(count: int, seed: int) -> list[str]:
    """Of few prefixes, so that many share them."""
    return [".".join(map(str, octets)) for octets in np.random.default_rng(seed).integers(1, 3, (count, 4))]


def known_without_kin(known: Observations, room: int) -> Known:
    return Known(known, room, without_kin(1001))


def asked(*pairs: tuple[int, int], time_s: float = np.nan) -> Questions:
    source, destination = np.array(pairs, np.int64).T
    return Questions(source=source, destination=destination, time_s=np.full(len(pairs), time_s))


def context_of(known: Observations, room: int, source: int, destination: int, time_s: float = np.nan) -> list[Any]:
    """Rows of `known` that make the context, best first."""
    index = known_without_kin(known, room)
    return index.given[index.choose(source, np.array([destination]), time_s)].tolist()


def test_the_pair_itself_comes_first_latest_first_then_shared_ends_then_stand_ins() -> None:
    known = observations(
        [
            (5, 6, 1.0, 10.0),  # 0: neither end; 5 is near the source, 6 near the destination
            (1, 2, 1.0, 50.0),  # 1: the pair, older
            (2, 1, 2.0, 51.0),  # 2: the pair backwards, later
            (1, 3, 1.0, 40.0),  # 3: 3 was measured with both
            (3, 2, 1.0, 30.0),  # 4
            (1, 5, 1.0, 2.0),  # 5: 5 with the source only
            (2, 6, 1.0, 3.0),  # 6: 6 with the destination only
            (7, 8, 1.0, 1.0),  # 7: not connected
            (3, 5, 1.0, 20.0),  # 8: worse than 0 in standing in
        ]
    )
    assert context_of(known, 40, 1, 2) == [2, 1, 3, 4, 5, 6, 0, 8, 7]


def test_a_full_context_keeps_room_for_every_part_of_the_rule() -> None:
    own = [(1, 2, float(t), 50.0) for t in range(100)]
    shared = [(1, k, 0.0, 10.0 + k) for k in range(10, 110)]
    others = [(k, k + 1, 0.0, 5.0) for k in range(10, 110)]
    rows = context_of(observations(own + shared + others), 40, 1, 2)
    assert len(rows) == len(set(rows)) == 40
    assert rows[:10] == list(range(99, 89, -1))
    assert rows[10:30] == list(range(100, 120))
    assert all(row >= 200 for row in rows[30:])


def test_room_that_is_left_goes_to_shared_ends_and_then_to_the_pair() -> None:
    own = [(1, 2, float(t), 50.0) for t in range(100)]
    shared = [(1, k, 0.0, 10.0 + k) for k in range(10, 32)]
    rows = context_of(observations(own + shared), 40, 1, 2)
    assert sum(row >= 100 for row in rows) == 22
    assert sorted(row for row in rows if row < 100) == list(range(82, 100))


def test_many_measurements_of_one_pair_do_not_displace_other_pairs() -> None:
    near = [(1, 3, float(t), 1.0) for t in range(50)]
    far = [(1, k, 0.0, 60.0) for k in range(10, 20)]
    rows = context_of(observations(near + far), 16, 1, 2)
    assert sum(row >= 50 for row in rows) >= 10


@pytest.mark.parametrize(("nodes", "count"), [(12, 150), (60, 1000)])
@pytest.mark.parametrize("seed", range(6))
def test_training_and_prediction_choose_the_same(seed: int, nodes: int, count: int) -> None:
    room = (16, 40, 100)[seed % 3]
    known = random_observations(count, nodes, seed)
    source, others = 3, np.array([5, 7, 9, 1, 2, 10][: 1 + seed])
    kin = kin_of(some_addresses(nodes, seed))
    index = Known(known, room, kin)
    expected = index.given[index.choose(source, others, np.nan)]

    low, high = np.minimum(known.source, known.destination), np.maximum(known.source, known.destination)
    later = (low[:, None] == low) & (high[:, None] == high) & (known.time_s > known.time_s[:, None])
    class_, keys, _ = order_keys(
        jnp.asarray(known.source),
        jnp.asarray(known.destination),
        jnp.asarray(known.rtt_ms, jnp.float32),
        jnp.asarray(later.sum(axis=1)),
        jnp.ones(len(known), bool),
        jnp.asarray(kin),
        asked_source=jnp.int32(source),
        is_asked=jnp.isin(jnp.arange(nodes), others),
    )
    rows, length = chosen(class_, keys, room)
    assert np.asarray(rows)[: int(length)].tolist() == expected.tolist()


def test_kin_of_both_ends_stand_in_for_them_before_all_others() -> None:
    nodes = ["192.0.2.1", "198.51.100.1", "192.0.2.77", "198.51.100.9", "203.0.113.5", "204.1.7.7"]
    known = observations(
        [
            (4, 5, 0.0, 9.0),  # 0: strangers
            (0, 4, 0.0, 30.0),  # 1: from the source to a stranger
            (2, 3, 0.0, 80.0),  # 2: between kin of both
            (0, 3, 0.0, 81.0),  # 3: from the source to kin of the destination
            (2, 1, 0.0, 82.0),  # 4: from kin of the source to the destination
        ]
    )
    index = Known(known, 40, kin_of(nodes))
    assert index.given[index.choose(0, np.array([1]), np.nan)].tolist() == [3, 4, 1, 2, 0]


def test_a_node_that_was_never_measured_gets_the_context_of_its_kin() -> None:
    nodes = ["192.0.2.1", "198.51.100.1", "203.0.113.5", "192.0.2.77"]
    known = observations([(2, 1, 0.0, 30.0), (0, 1, 0.0, 82.0)])
    index = Known(known, 1, kin_of(nodes))
    assert index.given[index.choose(3, np.array([1]), np.nan)].tolist() == [1]
    questions = asked((3, 1))
    row = filled(index, questions, next(groups(questions, 1)), 2, 1)
    kin_of_source = row["node_kin"][row["context_source"][1]]
    assert kin_of_source.tolist() == [row["question_source"][0]] * 3


def test_only_what_was_measured_strictly_before_is_seen() -> None:
    known = random_observations(300, 10)
    for time_s in (0.0, 1.0, 57.0, 300.0):
        rows = context_of(known, 64, 1, 2, time_s)
        assert np.all(known.time_s[rows] < time_s)
        assert len(rows) == min(64, round(time_s))


def test_what_has_no_time_is_always_known() -> None:
    known = observations([(1, 2, np.nan, 50.0), (1, 3, 5.0, 20.0)])
    assert context_of(known, 8, 1, 2, 1.0) == [0]
    row = filled(
        known_without_kin(known, 8), asked((1, 2), time_s=9.0), next(groups(asked((1, 2), time_s=9.0), 1)), 8, 1
    )
    assert row["context_age_s"][1:3].tolist() == [-1.0, 4.0]


def test_a_row_says_what_was_measured_and_numbers_nodes_as_it_meets_them() -> None:
    known = observations([(900, 70, 5.0, 20.0), (70, 33, 6.0, np.nan)])
    questions = asked((900, 33), time_s=16.0)
    row = filled(known_without_kin(known, 4), questions, next(groups(questions, 2)), 4, 2)
    assert row["question_source"].tolist() == [0, 0]
    assert row["question_destination"].tolist() == [1, 0]
    assert row["context_length"] == 3
    assert row["context_kind"][0] == NOTHING  # which attention can turn to if nothing matches
    assert set(row["context_kind"].tolist()) == {ANSWERED, FAILED, NOTHING}
    assert sorted(row["context_age_s"].tolist()) == [-1.0, -1.0, 10.0, 11.0]
    assert np.max(row["context_source"]) <= 2


def test_nothing_known_makes_a_context_that_holds_nothing() -> None:
    empty = random_observations(0, 5)
    questions = asked((1, 2))
    row = filled(known_without_kin(empty, 4), questions, next(groups(questions, 1)), 4, 1)
    assert row["context_length"] == 1
    assert set(row["context_kind"].tolist()) == {NOTHING}


def test_groups_share_one_end_and_one_time() -> None:
    rng = np.random.default_rng(0)
    questions = Questions(
        source=rng.integers(0, 5, 200),
        destination=rng.integers(10, 60, 200),
        time_s=rng.choice([1.0, 2.0, np.nan], 200),
    )
    found = list(groups(questions, 8))
    assert sorted(np.concatenate([group.rows for group in found])) == list(range(200))
    for group in found:
        part = questions.take(group.rows)
        assert len(part) <= 8
        assert len(np.unique(part.source)) == 1
        assert np.all((part.time_s == group.time_s) | (np.isnan(part.time_s) & np.isnan(group.time_s)))
    assert len(found) < 60
    assert len(list(groups(questions.reversed(), 8))) == len(found)


@pytest.mark.slow
def test_hundreds_of_questions_against_a_hundred_thousand_measurements_take_seconds() -> None:
    known = random_observations(100_000, 1000, failed=0.05)
    index = known_without_kin(known, 512)
    begin = time.perf_counter()
    for number in range(100):
        index.choose(number, np.array([number + 500]), np.nan)
    assert time.perf_counter() - begin < 6
