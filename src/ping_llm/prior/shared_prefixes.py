"""Kin: nodes whose addresses share a prefix, and are often near each other.

    level   how long a prefix is shared: that of a site, of a network, or of a registry's block
    kin     [nodes, levels]: the first node that has the same prefix; a node itself, where no earlier one has it

A prefix that most nodes share tells none of them apart, and makes nobody kin: a laboratory's 10.0.0.0/8, say. What the
others are good for is for the context to show. A node's identity is made from its own random vector and from those of
its kin, so that nodes look alike as far as their addresses do; and kin stand in for each other where the context is
chosen. Nothing else of an address reaches the model: which prefixes they are plays no part.
"""

from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.core.addresses import UNPARSABLE, parse_addresses, prefix_numbers
from ping_llm.core.observations import Ints
from ping_llm.prior.draws import Draws
from ping_llm.prior.internet import Nodes

# mypy: disallow-untyped-calls=False


PREFIX_BITS: Final = {4: (24, 16, 8), 6: (48, 32, 16)}
"""By family, nearest kin first."""
LEVELS: Final = len(PREFIX_BITS[4])
KIN_MS: Final = (2.0, 10.0, 50.0)
"""How far apart kin of a level count as being, as long as nothing shorter was measured."""
OWN_SHARE: Final = 0.35
LEVEL_SHARES: Final = (0.25, 0.2, 0.2)
"""Of a node's own vector, and of those of its kin: two nodes with one /24 have a cosine of 0.65, with one /8 of 0.2."""


def kin_of(nodes: Sequence[str]) -> Ints:
    """Of addresses. What is not an address has no kin."""
    groups = prefix_numbers(nodes, PREFIX_BITS)
    told_apart = parse_addresses(nodes)[0] != UNPARSABLE
    for level, numbers in enumerate(groups):
        of_most = 2 * np.bincount(numbers, minlength=1) > len(nodes)
        groups[level] = np.where(told_apart & ~of_most[numbers], numbers, _all_different(len(nodes)))
    return first_of_groups(groups)


def without_kin(nodes: int) -> Ints:
    return np.tile(np.arange(nodes)[:, None], (1, LEVELS))


def kin_among(ids: Ints, kin: Ints) -> Ints:
    """Of some of the nodes, numbered anew in the order of `ids`. Negative ids are nodes that nobody knows."""
    groups = np.where(ids >= 0, kin[np.maximum(ids, 0)].T, _all_different(len(ids)))
    return first_of_groups(groups)


def first_of_groups(groups: Ints) -> Ints:
    """Kin of nodes that share a prefix where their numbers are equal: [levels, nodes]."""
    firsts = np.empty_like(groups)
    for level, numbers in enumerate(groups):
        _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
        firsts[level] = first[group]
    return firsts.T


def _all_different(count: int) -> Ints:
    return -1 - np.arange(count)


def first_equal(numbers: jax.Array) -> jax.Array:
    """Of each number, the place of the first one in its row that equals it."""
    return jnp.argmax(numbers[..., :, None] == numbers[..., None, :], axis=-1).astype(jnp.int32)


def kin_distance_ms(kin: jax.Array, is_target: jax.Array, far_ms: float) -> jax.Array:
    """Of each node, how far the nearest of its kin among the targets counts as being."""
    distance = jnp.full(is_target.shape, far_ms, jnp.float32)
    for level in reversed(range(LEVELS)):
        has_target = jnp.zeros(is_target.shape, bool).at[kin[:, level]].max(is_target)
        distance = jnp.where(has_target[kin[:, level]], KIN_MS[level], distance)
    return distance


def make_kin(draw: Draws, nodes: Nodes) -> jax.Array:
    """Who shares prefixes with whom in a simulated Internet.

    In a third of the worlds nobody does, and in a few it means nothing. Otherwise a site has one or two prefixes,
    within one of its network (everywhere, on its continent or in its city) or of its city, within a block that belongs
    to a continent, to a network, or to nothing in particular. Some nodes have addresses from elsewhere.
    """
    count = nodes.site.shape[0]
    several = jnp.floor(draw.log_uniform(1, 40))
    scattered = draw.below(several, (count,))
    network, continent, city = nodes.network, nodes.continent, nodes.city
    block = _one_of(draw, continent, continent, network, scattered[nodes.site % count])
    of_network = _one_of(draw, network, network * 8 + continent, network * 128 + city, city) + 4096 * block
    subnet = jnp.where(draw.chance(0.3), draw.below(2, (count,)), 0)
    groups = jnp.stack([of_network * (4 * count) + nodes.site * 2 + subnet, of_network, block])

    at_random = scattered * 4 + draw.below(4, (count,))
    kind = draw.uniform()
    groups = jnp.where(kind < 0.08, jnp.stack([at_random * 8 + draw.below(8, (count,)), at_random, scattered]), groups)
    is_stranger = draw.chance(draw.half_normal(0.06), (count,)) | (kind > 0.65)
    exists = jnp.arange(count) < nodes.count
    sharing = jnp.sum((groups[:, :, None] == groups[:, None, :]) & exists, axis=-1)
    groups = jnp.where(is_stranger | (2 * sharing > nodes.count), -1 - jnp.arange(count), groups)
    return first_equal(groups).T


def _one_of(draw: Draws, *columns: jax.Array) -> jax.Array:
    return jnp.stack(columns)[draw.below(len(columns))]
