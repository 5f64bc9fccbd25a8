"""Kin: who shares prefixes with whom, from addresses, in simulated worlds, and in identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ping_llm.models.completer.model import identities
from ping_llm.prior.settings import WorldSettings
from ping_llm.prior.shared_prefixes import (
    LEVEL_SHARES,
    LEVELS,
    OWN_SHARE,
    kin_among,
    kin_distance_ms,
    kin_of,
    without_kin,
)
from ping_llm.prior.worlds import make_world, world_batch

ALIKE = ["192.0.2.1", "192.0.2.9", "192.0.3.1", "192.9.9.9", *(f"{n}.0.2.1" for n in range(193, 197))]
"""Less and less like the first."""

octets = st.tuples(*[st.integers(1, 3)] * 4)


def test_kin_share_a_24_a_16_or_an_8_and_in_ipv6_a_48_a_32_or_a_16() -> None:
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
    assert kin_of(nodes).tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [2, 0, 0],
        [3, 3, 0],
        [4, 4, 4],
        [5, 5, 5],
        [6, 5, 5],
        [7, 7, 5],
    ]


def test_what_is_not_an_address_has_no_kin() -> None:
    assert kin_of(["a probe", "another", "0.0.0.0", ""]).tolist() == without_kin(4).tolist()


def test_a_prefix_that_most_nodes_share_makes_nobody_kin() -> None:
    assert kin_of([f"10.0.0.{n}" for n in range(5)]).tolist() == without_kin(5).tolist()
    kin = kin_of([*(f"10.0.0.{n}" for n in range(3)), *(f"10.0.1.{n}" for n in range(3))])
    assert kin.tolist() == [[first, node, node] for node, first in enumerate([0, 0, 0, 3, 3, 3])]


def test_no_nodes_have_no_kin() -> None:
    assert kin_of([]).shape == (0, LEVELS)


@given(st.lists(octets, max_size=20), st.data())
def test_kin_among_some_nodes_are_those_of_their_addresses(nodes: list[tuple[int, ...]], data: st.DataObject) -> None:
    addresses = [".".join(map(str, node)) for node in nodes]
    ids = np.array(data.draw(st.permutations(range(len(nodes)))), np.int64)[: len(nodes) // 2 + 1]
    kin = kin_of(addresses)
    among = kin_among(ids, kin)
    for one, node in enumerate(ids):
        for other, another in enumerate(ids):
            assert ((among[one] == among[other]) == (kin[node] == kin[another])).all()


def test_unknown_nodes_have_no_kin_among_others() -> None:
    kin = kin_of(["192.0.2.1", "192.0.2.2", "198.51.100.1", "203.0.113.1"])
    assert kin_among(np.array([-1, 1, 0, -2]), kin).tolist() == [[0] * 3, [1] * 3, [1] * 3, [3] * 3]


def test_the_nearest_kin_count() -> None:
    kin = jnp.asarray(kin_of(ALIKE))
    distance = kin_distance_ms(kin, jnp.arange(len(ALIKE)) == 0, 1e4)
    assert distance.tolist() == [2.0, 2.0, 10.0, 50.0, *[1e4] * 4]


def test_identities_are_as_alike_as_the_addresses() -> None:
    kin = kin_of(ALIKE)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 400))
    identity = identities(keys, jnp.broadcast_to(jnp.asarray(kin), (400, *kin.shape)), 64)
    cosine = np.asarray(jnp.mean(identity @ identity.swapaxes(1, 2), axis=0)) / 9.0
    expected = [1.0, sum(LEVEL_SHARES), sum(LEVEL_SHARES[1:]), LEVEL_SHARES[2], 0.0]
    np.testing.assert_allclose(cosine[0, :5], expected, atol=0.03)
    assert OWN_SHARE + sum(LEVEL_SHARES) == pytest.approx(1.0)


@pytest.mark.slow
def test_worlds_have_kin_or_none_and_those_who_share_a_longer_prefix_share_the_shorter_ones() -> None:
    settings = WorldSettings(context=16, questions=8, most_nodes=40)
    kin = np.asarray(world_batch(settings, 0, 0, 0, 64)["node_kin"])
    related = kin != np.arange(40)[:, None]
    share = related.any(axis=(1, 2)).mean()
    assert 0.4 < share < 0.8
    same = kin[:, :, None] == kin[:, None]
    alone = same.sum(axis=2) == 1  # or one of most: a prefix that most share is nobody's
    for longer in (0, 1):
        assert np.all(~same[..., longer] | same[..., longer + 1] | alone[:, :, None, longer + 1])
    np.testing.assert_array_equal(np.take_along_axis(kin, kin, axis=1), kin)  # the first is its own first


@pytest.mark.slow
def test_kin_in_worlds_are_nearer_than_others() -> None:
    settings = WorldSettings(context=48, questions=8, most_nodes=60)
    worlds = jax.jit(jax.vmap(lambda seed: make_world(settings, jax.random.key(seed))))(jnp.arange(200))
    kin, one, other, exists = (np.asarray(column) for column in (worlds.kin, worlds.one, worlds.other, worlds.exists))
    rtt = np.asarray(worlds.undisturbed_ms)
    same = np.stack([np.take_along_axis(kin[..., 0], end, axis=1) for end in (one, other)])
    is_kin = exists & (same[0] == same[1])
    assert is_kin.sum() > 500
    assert np.median(rtt[is_kin]) < np.median(rtt[exists & ~is_kin]) / 5
