"""Which measurements make the context of a question, and how a context is laid out: for training and prediction.

    source, queried   the source of some questions, and their destinations
    distance          of a node to the source (or to the nearest queried one): the least RTT measured between the two,
                      or what a common prefix of their addresses suggests; if there is neither, the shortest way over a
                      third node
    round             of a measurement, how many later ones its pair has

1. Measurements of the queried pairs, latest first, up to a quarter of the context.
2. Measurements that share one end with them, up to half of the context: first those whose other end is near both the
   source and a queried node, nearest to either first; no way over a third node counts here.
3. All others, by how well they stand in for a queried pair: one end near the source, the other near a queried node.
   The first of them are between nodes of the same prefixes, or between nodes that were measured with both.
4. If there is still room, what was left over from 2, then from 1.

In 2 and 3 every later round counts as twice the distance, so many measurements of one pair do not displace the others.
Answers of the questions play no part, nor does anything that was measured after them.

`score_pairs`, `quotas` and `context_columns` are the rule, on NumPy and on JAX arrays alike. `rank_measurements` and
`select` apply it to every measurement of a small world, compiled; `models.completer.inference.ContextIndex` applies it
to the pairs of a history of any size. A test holds the two to the same choice.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.core.addresses import UNPARSABLE, parse_addresses, prefix_numbers
from ping_llm.core.observations import Ints

# mypy: disallow-untyped-calls=False

Array = Any
"""Of NumPy or of JAX."""

ANSWERED: Final = 0
FAILED: Final = 1
EMPTY: Final = 2
"""Kinds of slots of a context."""
UNKNOWN_AGE: Final = -1.0

OWN, SHARED, OTHERS, UNKNOWN = range(4)
"""Classes of measurements: the first three steps of the rule, and what may not be used."""
FAR_MS: Final = 1e4
"""Distance of what was never measured. Longer RTTs count as this."""
HALF_MS: Final = 5.0
"""Added to distances before they are doubled for each round, so that neighbours at 0.1 ms do not fill everything."""
MAX_ROUNDS: Final = 20

PREFIX_BITS: Final = {4: (24, 16, 8), 6: (48, 32, 16)}
"""Levels of shared prefixes, by family, longest first: those of a site, of a network, of a registry's block."""
LEVELS: Final = len(PREFIX_BITS[4])
PREFIX_MS: Final = (2.0, 10.0, 50.0)
"""How far apart nodes that share a prefix count as being, as long as nothing shorter was measured."""


class Target(NamedTuple):
    """One side of the questions: the source, or the queried nodes. Columns of nodes."""

    is_target: Array
    prefix_ms: Array
    """Distance that a common prefix with the nearest target suggests."""


def score_pairs(one: Array, other: Array, rtt_ms: Array, source: Target, queried: Target) -> tuple[Array, ...]:
    """The class of each pair and its distances: (class, shared, stand-in, near).

    `rtt_ms` is the least RTT known of a pair, `FAR_MS` where there is none. `shared` is a column of nodes: how far a
    measurement between an end of the questions and this node counts as being. `stand-in` is a column of pairs for those
    that share no end, and `near` are the columns of nodes it is made of, [2, nodes].
    """
    xp = _module(rtt_ms)
    direct_source, near_source = _near(one, other, rtt_ms, source)
    direct_queried, near_queried = _near(one, other, rtt_ms, queried)
    is_source, is_queried = source.is_target, queried.is_target
    is_end = is_source | is_queried
    is_own = (is_source[one] & is_queried[other]) | (is_source[other] & is_queried[one])
    class_ = xp.where(is_own, OWN, xp.where(is_end[one] | is_end[other], SHARED, OTHERS))
    by_both = (direct_source < FAR_MS) & (direct_queried < FAR_MS)
    shared = xp.minimum(direct_source, direct_queried) + xp.where(by_both, 0.0, FAR_MS).astype(np.float32)
    stand_in = xp.minimum(near_source[one] + near_queried[other], near_source[other] + near_queried[one])
    return class_, shared, stand_in, xp.stack([near_source, near_queried])


def quotas(count: Any, room: int, xp: Any = jnp) -> list[Any]:
    """How many are chosen, from how many there are of the three classes: own, shared, others, more shared, more own."""
    own = xp.minimum(count[OWN], -(-room // 4))
    shared = xp.minimum(count[SHARED], room // 2)
    others = xp.minimum(count[OTHERS], room - own - shared)
    more_shared = xp.minimum(count[SHARED] - shared, room - own - shared - others)
    more_own = xp.minimum(count[OWN] - own, room - own - shared - others - more_shared)
    return [own, shared, others, more_shared, more_own]


def context_columns(
    length: Any, source: Array, destination: Array, failed: Array, log_rtt: Array, age_s: Array
) -> dict[str, Any]:
    """A context of the first `length` measurements, behind one empty slot.

    Attention has to go somewhere. Without that slot it cannot tell a context in which everything matches from one in
    which nothing does, and a history of a single pair would say nothing.
    """
    xp = _module(log_rtt)
    counts = xp.arange(source.shape[0]) < length
    kind = xp.where(counts, xp.where(failed, FAILED, ANSWERED), EMPTY)
    columns = {
        "context_source": (xp.where(counts, source, 0), 0),
        "context_destination": (xp.where(counts, destination, 0), 0),
        "context_kind": (kind, EMPTY),
        "context_log_rtt": (xp.where(kind == ANSWERED, log_rtt, 0.0), 0.0),
        "context_age_s": (xp.where(counts, age_s, UNKNOWN_AGE), UNKNOWN_AGE),
    }
    context = {name: xp.pad(column, (1, 0), constant_values=empty) for name, (column, empty) in columns.items()}
    return {**context, "context_length": length + 1}


def _near(one: Array, other: Array, rtt_ms: Array, target: Target) -> tuple[Array, Array]:
    """Of each node, the distance to the nearest target: directly, and over at most one third node."""
    xp, is_target = _module(rtt_ms), target.is_target
    start = xp.where(is_target, 0.0, FAR_MS).astype(np.float32)
    touching: Any = slice(None)
    if xp is np:  # few of many pairs: no other pair can shorten anything yet
        touching = np.flatnonzero(is_target[one] | is_target[other])
    measured = _shortened(start, one[touching], other[touching], rtt_ms[touching])
    direct = xp.minimum(measured, target.prefix_ms)
    return direct, _shortened(direct, one, other, rtt_ms)


def _shortened(distance: Array, one: Array, other: Array, rtt_ms: Array) -> Array:
    """Distances of nodes, after one more hop."""
    if _module(distance) is np:
        further = distance.copy()
        np.minimum.at(further, other, distance[one] + rtt_ms)
        np.minimum.at(further, one, distance[other] + rtt_ms)
        return np.minimum(further, np.float32(FAR_MS))
    further = distance.at[other].min(distance[one] + rtt_ms)
    return jnp.minimum(further.at[one].min(distance[other] + rtt_ms), FAR_MS)


def _module(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


# The rule over every measurement of a world, compiled for training.


def rank_measurements(
    source: jax.Array,
    destination: jax.Array,
    rtt_ms: jax.Array,
    round_: jax.Array,
    known: jax.Array,
    groups: jax.Array,
    *,
    query_source: jax.Array,
    is_queried: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Classes and sortable keys of measurements, and how near nodes are to (the source, a queried node).

    `rtt_ms` is NaN where a measurement failed; `groups` are those of shared prefixes; `is_queried` is a mask of nodes.
    """
    rtt = jnp.where(known & ~jnp.isnan(rtt_ms), jnp.minimum(rtt_ms, FAR_MS), FAR_MS)
    is_source = jnp.arange(is_queried.shape[0]) == query_source
    targets = [Target(mask, prefix_distance(groups, mask)) for mask in (is_source, is_queried)]
    class_, shared, stand_in, near = score_pairs(source, destination, rtt, *targets)
    third = jnp.where((is_source | is_queried)[source], destination, source)
    distance = jnp.where(class_ == OTHERS, stand_in, shared[third])
    doubled = (distance + HALF_MS) * jnp.exp2(jnp.minimum(round_, MAX_ROUNDS).astype(jnp.float32))
    score = jnp.where(class_ == OWN, round_.astype(jnp.float32), doubled)
    class_ = jnp.where(known, class_, UNKNOWN)
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)  # of positive numbers: ordered like them
    return class_, (class_.astype(jnp.uint32) << 30) | (bits >> 1), near


def select(class_: jax.Array, keys: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the measurements of the context, best first, and how many of them count."""
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((keys, rows), num_keys=1, is_stable=True)
    count = jnp.sum(class_[:, None] == jnp.arange(UNKNOWN), axis=0)
    own, shared, *_ = parts = quotas(count, room)
    lengths = jnp.stack(parts)
    starts = jnp.stack([jnp.zeros_like(own), count[0], count[0] + count[1], count[0] + shared, own])
    ends = jnp.cumsum(lengths)
    slot = jnp.arange(room)
    part = jnp.minimum(jnp.sum(slot[:, None] >= ends, axis=1), len(parts) - 1)
    at = starts[part] + slot - (ends - lengths)[part]
    return order[jnp.minimum(at, len(rows) - 1)], ends[-1].astype(jnp.int32)


# Shared-prefix groups: nodes whose addresses share a prefix are often near each other.
#
# Groups are [nodes, levels]: the first node that has the same prefix; a node itself, where no earlier one has it.
# Nothing else of an address reaches the model. A prefix that most nodes share (a laboratory's 10.0.0.0/8, say)
# distinguishes none of them and makes no group.


def prefix_groups(nodes: Sequence[str]) -> Ints:
    """Of addresses. What is not an address shares nothing."""
    numbers = prefix_numbers(nodes, PREFIX_BITS)
    is_address = parse_addresses(nodes)[0] != UNPARSABLE
    for level, of_level in enumerate(numbers):
        of_most = 2 * np.bincount(of_level, minlength=1) > len(nodes)
        numbers[level] = np.where(is_address & ~of_most[of_level], of_level, _all_different(len(nodes)))
    return _first_of_equals(numbers)


def no_prefix_groups(nodes: int) -> Ints:
    return np.tile(np.arange(nodes)[:, None], (1, LEVELS))


def groups_among(ids: Ints, groups: Ints) -> Ints:
    """Of some of the nodes, numbered anew in the order of `ids`. Negative ids are nodes that nobody knows."""
    return _first_of_equals(np.where(ids >= 0, groups[np.maximum(ids, 0)].T, _all_different(len(ids))))


def _first_of_equals(numbers: Ints) -> Ints:
    """Groups of nodes that share a prefix where their numbers are equal: [levels, nodes]."""
    firsts = np.empty_like(numbers)
    for level, of_level in enumerate(numbers):
        _, first, group = np.unique(of_level, return_index=True, return_inverse=True)
        firsts[level] = first[group]
    return firsts.T


def _all_different(count: int) -> Ints:
    return -1 - np.arange(count)


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
