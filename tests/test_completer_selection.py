"""Contexts: the written rule, the same in training and prediction, and nothing from after a question."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ping_llm.core.randomness import mix64
from ping_llm.core.rtt import Observations
from ping_llm.models.completer.network import LEVEL_SHARES, OWN_SHARE, identities
from ping_llm.prior.prng import Columns, first_equal
from ping_llm.prior.selection import (
    ANSWERED,
    EMPTY,
    FAILED,
    LEVELS,
    ContextIndex,
    node_words,
)
from ping_llm.prior.worlds import WorldSettings, make_world, prefix_distance, rank_measurements, select


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


def index_of(known: Observations) -> ContextIndex:
    """Of nodes that share no prefix."""
    own = mix64(np.arange(1001, dtype=np.uint64)).astype(np.uint32)
    return ContextIndex(known, np.tile(own[:, None], (1, 1 + LEVELS)))


def groups_of(nodes: list[str]) -> Any:
    """The first node with the same prefix, for each node and level."""
    return np.asarray(first_equal(jnp.asarray(node_words(nodes)[:, 1:]).T)).T


def context_of(known: Observations, room: int, source: int, destination: int, time_s: float = np.nan) -> list[Any]:
    """Rows of `known` that make the context, best first."""
    index = index_of(known)
    return index.given[index.choose(np.array([source]), np.array([destination]), time_s, room)].tolist()


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


def test_what_is_measured_is_what_was_before() -> None:
    known = observations([(2, 1, 5.0, 50.0)] + [(1, k, 0.0, 10.0 + k) for k in range(10, 32)])
    index = index_of(known)
    found = [index.is_measured(2, 1, time_s) for time_s in (4.0, 5.0, 6.0, np.nan)]
    assert found == [False, False, True, True]
    assert not index.is_measured(1, 9, np.nan)
    assert not index.is_measured(2, 10, np.nan)


def test_a_slot_of_a_pair_summarizes_its_latest_measurements_before_the_question() -> None:
    """By plain Python: the median of the latest 25, and failures as often as they failed."""
    known = random_observations(6000, 12, 3, failed=0.3)
    index = index_of(known)
    nothing = np.zeros(0, np.int64)
    for time_s in (3000.5, np.nan):
        rows = index.choose(nothing, nothing, time_s, 1000, of_pairs=True)
        columns = index.columns(rows, time_s, 1 + len(rows), of_pairs=True)
        failed = columns["kind"][1:] == FAILED
        answered_pairs = known.unordered_pair[index.given[rows[~failed]]]
        for pair in np.unique(known.unordered_pair).tolist():
            before = np.flatnonzero((known.unordered_pair == pair) & ~(known.time_s >= time_s))
            before = before[np.argsort(known.time_s[before])]
            last = int(np.flatnonzero(np.isfinite(known.rtt_ms[before]))[-1])
            latest = known.rtt_ms[before[: last + 1]][-25:]
            if np.isnan(known.rtt_ms[before][-25:]).mean() <= 0.5:
                assert (answered_pairs == pair).sum() == 1
            for slot in np.flatnonzero(~failed)[answered_pairs == pair].tolist():
                assert index.given[rows[slot]] == before[last]
                assert columns["log_rtt"][1 + slot] == pytest.approx(np.log(np.nanmedian(latest)), abs=1e-5)
        assert failed.mean() == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize(("rtt", "kind"), [([np.nan] * 3, FAILED), ([30.0, 10.0, 20.0], ANSWERED)])
def test_a_pair_that_always_answered_or_never_did_is_no_matter_of_chance(rtt: list[float], kind: int) -> None:
    known = observations([(1, 2, float(time), value) for time, value in enumerate(rtt)])
    index = index_of(known)
    rows = index.of_pairs(np.array([2]))
    columns = index.columns(rows, np.nan, 2, of_pairs=True)
    assert columns["kind"].tolist() == [EMPTY, kind]
    assert columns["log_rtt"][1] == pytest.approx(np.log(20.0) if kind == ANSWERED else 0.0)


def test_what_is_usable_does_not_depend_on_which_time_was_asked_before() -> None:
    known = random_observations(500, 12, 0)
    index = ContextIndex(known, node_words(some_addresses(12, 0)))
    for time_s in np.random.default_rng(1).permutation(np.append(np.unique(known.time_s)[::7], [-1.0, 1e12])):
        expected = np.bincount(index.pair, index.time_s < time_s)
        np.testing.assert_array_equal(index.usable(time_s), expected)


@pytest.mark.parametrize(("nodes", "count"), [(12, 150), (60, 1000)])
@pytest.mark.parametrize("seed", range(6))
def test_training_and_prediction_choose_the_same(seed: int, nodes: int, count: int) -> None:
    room = (16, 40, 100)[seed % 3]
    known = random_observations(count, nodes, seed)
    source, others = 3, np.array([5, 7, 9, 1, 2, 10][: 1 + seed])
    addresses = some_addresses(nodes, seed)
    word = node_words(addresses)[:, 0]  # what decides between equals in prediction: their order, in training
    known = known.take(np.lexsort((known.rtt_ms, known.time_s, word[known.destination], word[known.source])))
    index = ContextIndex(known, node_words(addresses))
    expected = index.given[index.choose(np.array([source]), others, np.nan, room)]

    low, high = np.minimum(known.source, known.destination), np.maximum(known.source, known.destination)
    later = (low[:, None] == low) & (high[:, None] == high) & (known.time_s > known.time_s[:, None])
    measured = Columns(
        source=jnp.asarray(known.source),
        destination=jnp.asarray(known.destination),
        rtt_ms=jnp.asarray(known.rtt_ms, jnp.float32),
        failed=jnp.isnan(known.rtt_ms),
        round=jnp.asarray(later.sum(axis=1)),
        known=jnp.ones(len(known), bool),
    )
    is_queried = jnp.isin(jnp.arange(nodes), others)
    class_, keys, _ = rank_measurements(measured, jnp.asarray(groups_of(addresses)), source, is_queried)
    rows, length = select(class_, keys, 100, room)
    assert np.asarray(rows)[: int(length)].tolist() == expected.tolist()


@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("room", [40, 700])
def test_looking_at_few_of_many_pairs_chooses_the_same(
    monkeypatch: pytest.MonkeyPatch, room: int, *, of_pairs: bool
) -> None:
    known = random_observations(3000, 300, 1)
    index, rng = ContextIndex(known, node_words(some_addresses(300, 1))), np.random.default_rng(2)
    ends, times = rng.integers(0, 300, (30, 2, 1)), rng.choice(known.time_s, 30).tolist()
    chosen = []
    for few in (0, 10**9):
        monkeypatch.setattr("ping_llm.prior.selection._FEW_PAIRS", few)
        asked = zip(ends, times, strict=True)
        rows = [index.choose(one, other, time_s, room, of_pairs=of_pairs) for (one, other), time_s in asked]
        chosen.append([each.tolist() for each in rows])
    assert chosen[0] == chosen[1]


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
    index = ContextIndex(known, node_words(nodes))
    rows = index.given[index.choose(np.array([0]), np.array([1]), np.nan, 40)].tolist()
    assert [set(rows[:2]), *rows[2:]] == [{3, 4}, 1, 2, 0]


def test_a_node_that_was_never_measured_gets_the_context_of_its_prefix() -> None:
    nodes = ["192.0.2.1", "198.51.100.1", "203.0.113.5", "192.0.2.77"]
    known = observations([(2, 1, 0.0, 30.0), (0, 1, 0.0, 82.0)])
    index = ContextIndex(known, node_words(nodes))
    assert index.given[index.choose(np.array([3]), np.array([1]), np.nan, 1)].tolist() == [1]


def test_only_what_was_measured_strictly_before_is_seen() -> None:
    known = random_observations(300, 10)
    for time_s in (0.0, 1.0, 57.0, 300.0):
        rows = context_of(known, 64, 1, 2, time_s)
        assert np.all(known.time_s[rows] < time_s)
        assert len(rows) == min(64, round(time_s))


def test_what_has_no_time_is_always_known() -> None:
    known = observations([(1, 2, np.nan, 50.0), (1, 3, 5.0, 20.0)])
    assert context_of(known, 8, 1, 2, 1.0) == [0]
    index = index_of(known)
    rows = index.choose(np.array([1]), np.array([2]), 9.0, 7)
    assert index.columns(rows, 9.0, 8)["age_s"][1:3].tolist() == [-1.0, 4.0]


def test_slots_say_what_was_measured_behind_one_that_is_empty() -> None:
    known = observations([(900, 70, 5.0, 20.0), (70, 33, 6.0, np.nan)])
    index = index_of(known)
    slots = index.columns(index.choose(np.array([900]), np.array([33]), 16.0, 9), 16.0, 4)
    assert slots["length"] == 3
    assert slots["kind"][0] == EMPTY  # which attention can turn to if nothing matches
    assert set(slots["kind"].tolist()) == {ANSWERED, FAILED, EMPTY}
    assert sorted(slots["age_s"].tolist()) == [-1.0, -1.0, 10.0, 11.0]
    assert set(slots["source"][1:3].tolist()) == {900, 70}


def test_nothing_known_makes_empty_slots() -> None:
    index = index_of(random_observations(0, 5))
    slots = index.columns(index.choose(np.array([1]), np.array([2]), np.nan, 3), np.nan, 4)
    assert slots["length"] == 1
    assert set(slots["kind"].tolist()) == {EMPTY}


def test_a_sample_has_the_latest_of_every_pair_before_any_older_one() -> None:
    known = random_observations(300, 8)
    index = index_of(known)
    for time_s, room in ((np.nan, 300), (np.nan, 20), (np.nan, 60), (150.0, 40)):
        rows = index.given[index.sample(time_s, room)]
        usable = np.flatnonzero(known.time_s < (np.inf if np.isnan(time_s) else time_s))
        assert len(set(rows.tolist())) == len(rows) == min(room, len(usable))
        assert set(rows.tolist()) <= set(usable.tolist())
        pair = known.unordered_pair
        later = [(pair[usable] == pair[row]) & (known.time_s[usable] > known.time_s[row]) for row in rows.tolist()]
        rounds = [int(mask.sum()) for mask in later]
        assert rounds == sorted(rounds)


def test_a_sample_does_not_depend_on_the_order_of_the_history() -> None:
    known = random_observations(200, 12)
    order = np.random.default_rng(0).permutation(len(known))
    one, other = index_of(known), index_of(known.take(order))
    assert set(one.given[one.sample(np.nan, 30)].tolist()) == set(order[other.given[other.sample(np.nan, 30)]].tolist())


def test_clusters_are_of_near_nodes_alike_in_size_and_at_most_so_many() -> None:
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(4), 12)
    source, destination = np.nonzero(~np.eye(48, dtype=bool))
    rtt = (1.0 + 40.0 * abs(site[source] - site[destination])) * rng.uniform(0.9, 1.1, len(source))
    known = Observations(source=source, destination=destination, time_s=np.full(len(source), np.nan), rtt_ms=rtt)
    known = known.take(rng.random(len(source)) < 0.5)
    for index in (index_of(known), index_of(known.take((known.source < 6) | (known.destination >= 42)))):
        for most, size, count in ((1, 4, 1), (4, 12, 4), (11, 5, 10), (3, 1, 3)):
            nodes = np.bincount(index.clusters(most, size))
            assert len(nodes) == count
            assert nodes.max() - nodes.min() <= 2
    cluster = index_of(known).clusters(4, 12)
    assert all(len(set(site[cluster == number])) == 1 for number in range(4))


# --- shared-prefix groups

ALIKE = ["192.0.2.1", "192.0.2.9", "192.0.3.1", "192.9.9.9", *(f"{n}.0.2.1" for n in range(193, 197))]
"""Less and less like the first."""


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
    assert groups_of(nodes).tolist() == [
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
    words = node_words(["a probe", "another", "0.0.0.0", ""])
    assert (words == words[:, :1])[[0, 1, 3]].all()
    assert len(np.unique(words[:, 1])) == 4


def test_a_prefix_that_most_known_nodes_share_makes_no_group() -> None:
    assert np.array_equal(groups_of([f"10.0.0.{n}" for n in range(5)]), np.tile(np.arange(5)[:, None], (1, LEVELS)))
    groups = groups_of([*(f"10.0.0.{n}" for n in range(3)), *(f"10.0.1.{n}" for n in range(3))])
    assert groups.tolist() == [[first, node, node] for node, first in enumerate([0, 0, 0, 3, 3, 3])]


def test_words_of_a_node_do_not_depend_on_what_else_is_queried() -> None:
    known = [f"10.{n}.0.1" for n in range(6)]
    is_known = np.array([True] * 6 + [False] * 20)
    strangers = [f"11.0.0.{n}" for n in range(20)]
    np.testing.assert_array_equal(node_words(known + strangers, is_known)[:6], node_words(known))
    np.testing.assert_array_equal(node_words(known[::-1]), node_words(known)[::-1])


def test_no_nodes_have_no_words() -> None:
    assert node_words([]).shape == (0, 1 + LEVELS)


def test_the_longest_shared_prefix_counts() -> None:
    groups = jnp.asarray(groups_of(ALIKE))
    distance = prefix_distance(groups, jnp.arange(len(ALIKE)) == 0)
    assert distance.tolist() == [2.0, 2.0, 10.0, 50.0, *[1e4] * 4]


def test_identities_are_as_alike_as_the_addresses() -> None:
    words = node_words(ALIKE)
    salts = np.random.default_rng(0).integers(1 << 32, size=(400, 1, 1), dtype=np.uint32)
    identity = identities(jnp.asarray(words ^ salts), 64)
    cosine = np.asarray(jnp.mean(identity @ identity.swapaxes(1, 2), axis=0)) / 9.0
    expected = [1.0, sum(LEVEL_SHARES), sum(LEVEL_SHARES[1:]), LEVEL_SHARES[2], 0.0]
    np.testing.assert_allclose(cosine[0, :5], expected, atol=0.03)
    assert OWN_SHARE + sum(LEVEL_SHARES) == pytest.approx(1.0)


@pytest.mark.slow
def test_worlds_have_shared_prefixes_or_none_and_those_who_share_a_longer_prefix_share_the_shorter_ones() -> None:
    settings = WorldSettings(context=16, questions=8, most_nodes=40)
    worlds = jax.jit(jax.vmap(lambda seed: make_world(settings, jax.random.key(seed))))(jnp.arange(64))
    groups = np.asarray(worlds.groups)
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
