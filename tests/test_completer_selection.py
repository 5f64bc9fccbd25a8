"""Contexts: the written rule, the same in training and prediction, and nothing from after a question."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ping_llm.core.rtt import Observations, Questions
from ping_llm.models.completer.model import LEVEL_SHARES, OWN_SHARE, identities
from ping_llm.prior.selection import (
    ANSWERED,
    EMPTY,
    FAILED,
    LEVELS,
    ContextIndex,
    group_questions,
    groups_among,
    no_prefix_groups,
    prefix_distance,
    prefix_groups,
    rank_measurements,
    select,
)
from ping_llm.prior.worlds import WorldSettings, make_world, world_batch


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


def index_of(known: Observations, room: int) -> ContextIndex:
    return ContextIndex(known, room, no_prefix_groups(1001))


def asked(*pairs: tuple[int, int], time_s: float = np.nan) -> Questions:
    source, destination = np.array(pairs, np.int64).T
    return Questions(source=source, destination=destination, time_s=np.full(len(pairs), time_s))


def context_of(known: Observations, room: int, source: int, destination: int, time_s: float = np.nan) -> list[Any]:
    """Rows of `known` that make the context, best first."""
    index = index_of(known, room)
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
    groups = prefix_groups(some_addresses(nodes, seed))
    index = ContextIndex(known, room, groups)
    expected = index.given[index.choose(source, others, np.nan)]

    low, high = np.minimum(known.source, known.destination), np.maximum(known.source, known.destination)
    later = (low[:, None] == low) & (high[:, None] == high) & (known.time_s > known.time_s[:, None])
    class_, keys, _ = rank_measurements(
        jnp.asarray(known.source),
        jnp.asarray(known.destination),
        jnp.asarray(known.rtt_ms, jnp.float32),
        jnp.asarray(later.sum(axis=1)),
        jnp.ones(len(known), bool),
        jnp.asarray(groups),
        query_source=jnp.int32(source),
        is_queried=jnp.isin(jnp.arange(nodes), others),
    )
    rows, length = select(class_, keys, room)
    assert np.asarray(rows)[: int(length)].tolist() == expected.tolist()


def test_nodes_with_the_prefixes_of_both_ends_stand_in_for_them_before_all_others() -> None:
    nodes = ["192.0.2.1", "198.51.100.1", "192.0.2.77", "198.51.100.9", "203.0.113.5", "204.1.7.7"]
    known = observations(
        [
            (4, 5, 0.0, 9.0),  # 0: strangers
            (0, 4, 0.0, 30.0),  # 1: from the source to a stranger
            (2, 3, 0.0, 80.0),  # 2: between nodes with the prefixes of both
            (0, 3, 0.0, 81.0),  # 3: from the source to the prefix of the destination
            (2, 1, 0.0, 82.0),  # 4: from the prefix of the source to the destination
        ]
    )
    index = ContextIndex(known, 40, prefix_groups(nodes))
    assert index.given[index.choose(0, np.array([1]), np.nan)].tolist() == [3, 4, 1, 2, 0]


def test_a_node_that_was_never_measured_gets_the_context_of_its_prefix() -> None:
    nodes = ["192.0.2.1", "198.51.100.1", "203.0.113.5", "192.0.2.77"]
    known = observations([(2, 1, 0.0, 30.0), (0, 1, 0.0, 82.0)])
    index = ContextIndex(known, 1, prefix_groups(nodes))
    assert index.given[index.choose(3, np.array([1]), np.nan)].tolist() == [1]
    questions = asked((3, 1))
    row = index.fill(questions, next(group_questions(questions, 1)), 1)
    groups_of_source = row["node_groups"][row["context_source"][1]]
    assert groups_of_source.tolist() == [row["question_source"][0]] * 3


def test_only_what_was_measured_strictly_before_is_seen() -> None:
    known = random_observations(300, 10)
    for time_s in (0.0, 1.0, 57.0, 300.0):
        rows = context_of(known, 64, 1, 2, time_s)
        assert np.all(known.time_s[rows] < time_s)
        assert len(rows) == min(64, round(time_s))


def test_what_has_no_time_is_always_known() -> None:
    known = observations([(1, 2, np.nan, 50.0), (1, 3, 5.0, 20.0)])
    assert context_of(known, 8, 1, 2, 1.0) == [0]
    questions = asked((1, 2), time_s=9.0)
    row = index_of(known, 7).fill(questions, next(group_questions(questions, 1)), 1)
    assert row["context_age_s"][1:3].tolist() == [-1.0, 4.0]


def test_a_row_says_what_was_measured_and_numbers_nodes_as_it_meets_them() -> None:
    known = observations([(900, 70, 5.0, 20.0), (70, 33, 6.0, np.nan)])
    questions = asked((900, 33), time_s=16.0)
    row = index_of(known, 3).fill(questions, next(group_questions(questions, 2)), 2)
    assert row["question_source"].tolist() == [0, 0]
    assert row["question_destination"].tolist() == [1, 0]
    assert row["context_length"] == 3
    assert row["context_kind"][0] == EMPTY  # which attention can turn to if nothing matches
    assert set(row["context_kind"].tolist()) == {ANSWERED, FAILED, EMPTY}
    assert sorted(row["context_age_s"].tolist()) == [-1.0, -1.0, 10.0, 11.0]
    assert np.max(row["context_source"]) <= 2


def test_nothing_known_makes_a_context_of_empty_slots() -> None:
    empty = random_observations(0, 5)
    questions = asked((1, 2))
    row = index_of(empty, 3).fill(questions, next(group_questions(questions, 1)), 1)
    assert row["context_length"] == 1
    assert set(row["context_kind"].tolist()) == {EMPTY}


def test_groups_share_one_end_and_one_time() -> None:
    rng = np.random.default_rng(0)
    questions = Questions(
        source=rng.integers(0, 5, 200),
        destination=rng.integers(10, 60, 200),
        time_s=rng.choice([1.0, 2.0, np.nan], 200),
    )
    found = list(group_questions(questions, 8))
    assert sorted(np.concatenate([group.rows for group in found])) == list(range(200))
    for group in found:
        part = questions.take(group.rows)
        assert len(part) <= 8
        assert len(np.unique(part.source)) == 1
        assert np.all((part.time_s == group.time_s) | (np.isnan(part.time_s) & np.isnan(group.time_s)))
    assert len(found) < 60
    assert len(list(group_questions(questions.reversed(), 8))) == len(found)


# --- shared-prefix groups

ALIKE = ["192.0.2.1", "192.0.2.9", "192.0.3.1", "192.9.9.9", *(f"{n}.0.2.1" for n in range(193, 197))]
"""Less and less like the first."""

octets = st.tuples(*[st.integers(1, 3)] * 4)


def test_groups_share_a_24_a_16_or_an_8_and_in_ipv6_a_48_a_32_or_a_16() -> None:
    nodes = [
        "192.0.2.1",
        "192.0.2.9",
        "192.0.3.1",
        "192.1.2.1",
        "193.0.2.1",
        "2001:db8:1::1",
        "2001:db8:2::1",
        "2001::",
    ]
    assert prefix_groups(nodes).tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [2, 0, 0],
        [3, 3, 0],
        [4, 4, 4],
        [5, 5, 5],
        [6, 5, 5],
        [7, 7, 5],
    ]


def test_what_is_not_an_address_shares_no_prefix() -> None:
    assert prefix_groups(["a probe", "another", "0.0.0.0", ""]).tolist() == no_prefix_groups(4).tolist()


def test_a_prefix_that_most_nodes_share_makes_no_group() -> None:
    assert prefix_groups([f"10.0.0.{n}" for n in range(5)]).tolist() == no_prefix_groups(5).tolist()
    groups = prefix_groups([*(f"10.0.0.{n}" for n in range(3)), *(f"10.0.1.{n}" for n in range(3))])
    assert groups.tolist() == [[first, node, node] for node, first in enumerate([0, 0, 0, 3, 3, 3])]


def test_no_nodes_have_no_groups() -> None:
    assert prefix_groups([]).shape == (0, LEVELS)


@given(st.lists(octets, max_size=20), st.data())
def test_groups_among_some_nodes_are_those_of_their_addresses(
    nodes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    addresses = [".".join(map(str, node)) for node in nodes]
    ids = np.array(data.draw(st.permutations(range(len(nodes)))), np.int64)[: len(nodes) // 2 + 1]
    groups = prefix_groups(addresses)
    among = groups_among(ids, groups)
    for one, node in enumerate(ids):
        for other, another in enumerate(ids):
            assert ((among[one] == among[other]) == (groups[node] == groups[another])).all()


def test_unknown_nodes_share_no_prefix_with_others() -> None:
    groups = prefix_groups(["192.0.2.1", "192.0.2.2", "198.51.100.1", "203.0.113.1"])
    assert groups_among(np.array([-1, 1, 0, -2]), groups).tolist() == [[0] * 3, [1] * 3, [1] * 3, [3] * 3]


def test_the_longest_shared_prefix_counts() -> None:
    groups = jnp.asarray(prefix_groups(ALIKE))
    distance = prefix_distance(groups, jnp.arange(len(ALIKE)) == 0)
    assert distance.tolist() == [2.0, 2.0, 10.0, 50.0, *[1e4] * 4]


def test_identities_are_as_alike_as_the_addresses() -> None:
    groups = prefix_groups(ALIKE)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 400))
    identity = identities(keys, jnp.broadcast_to(jnp.asarray(groups), (400, *groups.shape)), 64)
    cosine = np.asarray(jnp.mean(identity @ identity.swapaxes(1, 2), axis=0)) / 9.0
    expected = [1.0, sum(LEVEL_SHARES), sum(LEVEL_SHARES[1:]), LEVEL_SHARES[2], 0.0]
    np.testing.assert_allclose(cosine[0, :5], expected, atol=0.03)
    assert OWN_SHARE + sum(LEVEL_SHARES) == pytest.approx(1.0)


@pytest.mark.slow
def test_worlds_have_shared_prefixes_or_none_and_those_who_share_a_longer_prefix_share_the_shorter_ones() -> None:
    settings = WorldSettings(context=16, questions=8, most_nodes=40)
    groups = np.asarray(world_batch(settings, 0, 0, 0, 64)["node_groups"])
    related = groups != np.arange(40)[:, None]
    share = related.any(axis=(1, 2)).mean()
    assert 0.4 < share < 0.8
    same = groups[:, :, None] == groups[:, None]
    alone = same.sum(axis=2) == 1  # or one of most: a prefix that most share is nobody's
    for longer in (0, 1):
        assert np.all(~same[..., longer] | same[..., longer + 1] | alone[:, :, None, longer + 1])
    np.testing.assert_array_equal(np.take_along_axis(groups, groups, axis=1), groups)  # the first is its own first


@pytest.mark.slow
def test_nodes_of_one_prefix_in_worlds_are_nearer_than_others() -> None:
    settings = WorldSettings(context=48, questions=8, most_nodes=60)
    worlds = jax.jit(jax.vmap(lambda seed: make_world(settings, jax.random.key(seed))))(jnp.arange(200))
    groups, one, other, exists = (
        np.asarray(column) for column in (worlds.groups, worlds.one, worlds.other, worlds.exists)
    )
    rtt = np.asarray(worlds.undisturbed_ms)
    same = np.stack([np.take_along_axis(groups[..., 0], end, axis=1) for end in (one, other)])
    is_shared = exists & (same[0] == same[1])
    assert is_shared.sum() > 500
    assert np.median(rtt[is_shared]) < np.median(rtt[exists & ~is_shared]) / 5
