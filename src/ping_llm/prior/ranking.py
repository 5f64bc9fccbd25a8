"""The rule of `selection` over every measurement of a simulated world, compiled for training."""

from typing import Any

import jax
import jax.numpy as jnp

from ping_llm.prior.prng import Columns
from ping_llm.prior.selection import (
    FAR_MS,
    HALF_MS,
    LEVELS,
    MAX_ROUNDS,
    OTHERS,
    OWN,
    PREFIX_MS,
    UNKNOWN,
    Target,
    quotas,
    score_pairs,
)

# mypy: disallow-untyped-calls=False


def rank_measurements(
    m: Columns, groups: jax.Array, query_source: int | jax.Array, is_queried: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Classes and sortable keys of measurements, and how near nodes are to (the source, a queried node).

    Columns of measurements are source, destination, rtt_ms, failed, round, known; `is_queried` is a mask of nodes.
    """
    rtt = jnp.where(m.known & ~m.failed, jnp.minimum(m.rtt_ms, FAR_MS), FAR_MS)
    is_source = jnp.arange(is_queried.shape[0]) == query_source
    targets = [Target(mask, prefix_distance(groups, mask)) for mask in (is_source, is_queried)]
    class_, shared, stand_in, near = score_pairs(m.source, m.destination, rtt, *targets)
    third = jnp.where((is_source | is_queried)[m.source], m.destination, m.source)
    distance = jnp.where(class_ == OTHERS, stand_in, shared[third])
    doubled = (distance + HALF_MS) * jnp.exp2(jnp.minimum(m.round, MAX_ROUNDS).astype(jnp.float32))
    score = jnp.where(class_ == OWN, m.round.astype(jnp.float32), doubled)
    class_ = jnp.where(m.known, class_, UNKNOWN)
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)  # of positive numbers: ordered like them
    return class_, (class_.astype(jnp.uint32) << 30) | (bits >> 1), near


def select(class_: jax.Array, keys: jax.Array, slots: int, room: Any) -> tuple[jax.Array, jax.Array]:
    """Indices of the measurements of `slots`, best first, and how many of them count: at most `room`."""
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((keys, rows), num_keys=1, is_stable=True)
    count = jnp.sum(class_[:, None] == jnp.arange(UNKNOWN), axis=0)
    own, shared, *_ = parts = quotas(count, room, jnp)
    lengths = jnp.stack(parts)
    starts = jnp.stack([jnp.zeros_like(own), count[0], count[0] + count[1], count[0] + shared, own])
    ends = jnp.cumsum(lengths)
    slot = jnp.arange(slots)
    part = jnp.minimum(jnp.sum(slot[:, None] >= ends, axis=1), len(parts) - 1)
    at = starts[part] + slot - (ends - lengths)[part]
    return order[jnp.minimum(at, len(rows) - 1)], ends[-1].astype(jnp.int32)


def first_equal(numbers: jax.Array) -> jax.Array:
    """Of each number, the index of the first one in its row that equals it."""
    return jnp.argmax(numbers[..., :, None] == numbers[..., None, :], axis=-1).astype(jnp.int32)


def prefix_distance(groups: jax.Array, is_target: jax.Array) -> jax.Array:
    """Of each node, the distance that the longest prefix shared with a target suggests."""
    distance = jnp.full(is_target.shape, FAR_MS, jnp.float32)
    for level in reversed(range(LEVELS)):
        has_target = jnp.zeros(is_target.shape, bool).at[groups[:, level]].max(is_target)
        distance = jnp.where(has_target[groups[:, level]], PREFIX_MS[level], distance)
    return distance
