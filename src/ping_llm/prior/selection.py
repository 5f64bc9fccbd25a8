"""Which measurements make the context of questions that share a source: the rule, for training.

`context` is the same rule in NumPy, for prediction; a test holds the two to the same answer. In words:

    source, asked   the source of the questions, and their destinations
    near            of a node, how far it is from the source (or the nearest asked one): the least RTT measured between
                    the two, or what a common prefix of their addresses suggests (`kinship`); if there is neither, the
                    shortest way over a third node
    round           of a measurement, how many later ones its pair has

1. Measurements of the asked pairs, latest first, up to a quarter of the context.
2. Measurements that share one end with them, up to half of the context: first those whose other end is near both the
   source and an asked one, nearest to either first; no way over a third node counts here.
3. All others, by how well they stand in for an asked pair: one end near the source and the other near an asked one.
   The first of them are between kin, or between nodes that were measured with both.
4. If there is still room, what was left over from 2, then from 1.

In 2 and 3 every later round counts as twice the distance, so many measurements of one pair do not displace the others.
Answers of the questions play no part, nor does anything that was measured after them.
"""

from typing import Final

import jax
import jax.numpy as jnp

from ping_llm.prior.shared_prefixes import kin_distance_ms

# mypy: disallow-untyped-calls=False


FAR_MS: Final = 1e4
"""Distance of what was never measured. Longer RTTs count as this."""
HALF_MS: Final = 5.0
"""Added to distances before they are doubled for each round, so that neighbours at 0.1 ms do not fill everything."""
MOST_ROUNDS: Final = 20
NEVER: Final = 3
"""The class of what is not known: the classes 0, 1 and 2 are the first three steps of the rule."""


def order_keys(
    source: jax.Array,
    destination: jax.Array,
    rtt_ms: jax.Array,
    round_: jax.Array,
    known: jax.Array,
    kin: jax.Array,
    *,
    asked_source: jax.Array,
    is_asked: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Classes and sortable keys of measurements, and the stand-in distance of any pair as (near source, near asked).

    `rtt_ms` is NaN where a measurement failed; `is_asked` is a mask over nodes.
    """
    nodes = is_asked.shape[0]
    usable = known & ~jnp.isnan(rtt_ms)
    rtt = jnp.where(usable, jnp.minimum(rtt_ms, FAR_MS), FAR_MS)
    is_source = jnp.arange(nodes) == asked_source
    direct_source, near_source = _near(source, destination, rtt, kin, is_source)
    direct_asked, near_asked = _near(source, destination, rtt, kin, is_asked)

    ends_source = is_source[source], is_source[destination]
    ends_asked = is_asked[source], is_asked[destination]
    is_pair = (ends_source[0] & ends_asked[1]) | (ends_source[1] & ends_asked[0])
    shares = ends_source[0] | ends_source[1] | ends_asked[0] | ends_asked[1]

    first_is_end = ends_source[0] | ends_asked[0]
    third = jnp.where(first_is_end, destination, source)
    by_both = (direct_source[third] < FAR_MS) & (direct_asked[third] < FAR_MS)
    nearest = jnp.minimum(direct_source[third], direct_asked[third])
    shared_distance = nearest + jnp.where(by_both, 0.0, FAR_MS)
    stand_in = jnp.minimum(near_source[source] + near_asked[destination], near_source[destination] + near_asked[source])
    distance = jnp.where(shares, shared_distance, stand_in)
    doubled = (distance + HALF_MS) * jnp.exp2(jnp.minimum(round_, MOST_ROUNDS).astype(jnp.float32))
    score = jnp.where(is_pair, round_.astype(jnp.float32), doubled)
    class_ = jnp.where(known, jnp.where(is_pair, 0, jnp.where(shares, 1, 2)), NEVER)
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)  # of positive numbers: ordered like them
    return class_, (class_.astype(jnp.uint32) << 30) | (bits >> 1), jnp.stack([near_source, near_asked])


def chosen(class_: jax.Array, keys: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the measurements of the context, best first, and how many of them count."""
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((keys, rows), num_keys=1, is_stable=True)
    count = jnp.sum(class_[:, None] == jnp.arange(NEVER), axis=0)
    own = jnp.minimum(count[0], -(-room // 4))
    shared = jnp.minimum(count[1], room // 2)
    others = jnp.minimum(count[2], room - own - shared)
    more_shared = jnp.minimum(count[1] - shared, room - own - shared - others)
    more_own = jnp.minimum(count[0] - own, room - own - shared - others - more_shared)
    lengths = jnp.stack([own, shared, others, more_shared, more_own])
    starts = jnp.stack([jnp.zeros_like(own), count[0], count[0] + count[1], count[0] + shared, own])
    ends = jnp.cumsum(lengths)
    place = jnp.arange(room)
    part = jnp.minimum(jnp.sum(place[:, None] >= ends, axis=1), len(lengths) - 1)
    at = starts[part] + place - (ends - lengths)[part]
    return order[jnp.minimum(at, len(rows) - 1)], ends[-1].astype(jnp.int32)


def _near(
    source: jax.Array, destination: jax.Array, rtt: jax.Array, kin: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of each node, the distance to the nearest target: directly, and over at most one third node."""
    measured = _shorter(jnp.where(targets, 0.0, FAR_MS), source, destination, rtt)
    direct = jnp.minimum(measured, kin_distance_ms(kin, targets, FAR_MS))
    return direct, _shorter(direct, source, destination, rtt)


def _shorter(distance: jax.Array, source: jax.Array, destination: jax.Array, rtt: jax.Array) -> jax.Array:
    further = distance.at[destination].min(distance[source] + rtt)
    return jnp.minimum(further.at[source].min(distance[destination] + rtt), FAR_MS)
