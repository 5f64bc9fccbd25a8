"""Batches of simulated worlds: a pure function of (settings, seed, step), of which any rows can be made alone.

    world      a simulated Internet, some of whose pairs were measured
    context    measurements of a world from which questions are answered: chosen by the rule of prediction (`selection`)
               for one source and a few queried destinations, or else all measurements, or a random part of them
    question   a pair of the same world, at a time after all of its measurements

Everything is computed on the device from keys: no files, no work for the host, nothing to wait for. A world of the
default settings takes some 250 k random numbers and one sort of 7 k keys.

Questions are about the queried pairs and about others, more often those near the queried ones: a context then teaches
a hundred answers instead of one. If the context was not chosen for particular pairs, questions are about any pair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from ping_llm.core.randomness import hash32
from ping_llm.prior import internet
from ping_llm.prior.prng import Columns, Draws
from ping_llm.prior.selection import (
    FAR_MS,
    HALF_MS,
    LEVELS,
    MAX_ROUNDS,
    OTHERS,
    OWN,
    PREFIX_MS,
    UNKNOWN,
    UNKNOWN_AGE,
    Target,
    pair_distance,
    quotas,
    score_pairs,
    slot_columns,
)

Batch = dict[str, jax.Array]

QUESTION_REACH_MS: Final = 20.0
"""Distance from the queried pairs at which a pair is drawn for a question half as often."""
_NEW_CHANCE: Final = 0.6
_NEW_SHARE: Final = 0.5
"""Where positions are known: share of the worlds with nodes that were never measured, and of their nodes, at most."""
_SEEN_WEIGHT: Final = 6.0
"""Factor by which pairs that were measured before are drawn more often (in worlds that allow questions about them)."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The parameters of the prior, and the sizes of contexts and questions."""

    context: int = 1024
    """Slots of a context. One of them is empty, the others hold measurements."""
    questions: int = 256
    """Questions per world."""
    fewest_nodes: int = 2
    most_nodes: int = 400
    """Sizes are log-uniform, tilted to the larger. Without very small worlds, training stays on a plateau for thousands
    of steps; without those of one pair, a model trusts no history in which only one pair is measured."""
    most_asked: int = 16
    """Queried destinations, for which a context is chosen: 1 to this many, log-uniform."""
    pairs_per_slot: int = 8
    """Pairs drawn in a world per slot of its context; the context is chosen from their measurements."""
    most_cities: int = 64
    most_networks: int = 24
    least_known: float = 0.005
    most_known: float = 0.9
    """Share of pairs that were measured, log-uniform between the two."""
    bipartite_share: float = 0.35
    """Worlds of probes and targets, where no probe is measured from another probe."""
    series_share: float = 0.4
    """Worlds of single pings, repeated over time; the others have one value for each pair."""
    disconnected_share: float = 0.12
    """Worlds whose nodes fall into parts between which nothing was measured."""
    chosen_share: float = 0.65
    """Worlds whose context is chosen for the queried pairs."""
    geography: bool = False
    """Whether positions of nodes are known, most of them, and more nodes than usual were never measured."""

    @property
    def pairs(self) -> int:
        return max(self.context * self.pairs_per_slot, self.questions)

    @property
    def repeats(self) -> int:
        """The number of further measurements of pairs that were measured already."""
        return self.context


def worlds_of(s: WorldSettings, seed: jax.Array, step: jax.Array, row: jax.Array) -> Batch:
    """One world for each (seed, step, row), [worlds] each: a function of these three numbers alone."""
    return batch_of(partial(_shown, s), seed, step, row)


def batch_of(make: Callable[[jax.Array], Batch], seed: Any, step: Any, row: Any) -> Batch:
    """`make` applied to the random key of each (seed, step, row)."""

    def one(seed: jax.Array, step: jax.Array, row: jax.Array) -> Batch:
        return make(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), row))

    return jax.vmap(one)(*(column.astype(jnp.uint32) for column in (seed, step, row)))


def _shown(s: WorldSettings, key: jax.Array) -> Batch:
    """The context and questions of one world."""
    w = _computed_once(make_world(s, jax.random.fold_in(key, 1)))
    draw = Draws(jax.random.fold_in(key, 2))
    shown = {"node_words": words_of_groups(w.groups, jax.random.fold_in(key, 3))}
    if s.geography:
        draw_positions = Draws(jax.random.fold_in(key, 4))
        shown["node_position"] = internet.known_positions(draw_positions, w.position, w.is_probe)
        is_new = draw_positions.chance(
            draw_positions.sometimes(_NEW_CHANCE, draw_positions.uniform(0, _NEW_SHARE)), (s.most_nodes,)
        )
        is_new_pair = is_new[w.one] | is_new[w.other]
        w.known &= ~is_new_pair[w.pair]
        w.may_be_queried |= is_new_pair & w.exists
    one, other = w.one[w.pair], w.other[w.pair]
    w.source, w.destination = jnp.where(w.backwards, other, one), jnp.where(w.backwards, one, other)
    w.log_rtt = jnp.log(w.rtt_ms)
    context, near, is_chosen = make_context(s, draw, w, w.groups, 0, w.is_queried)
    pair, is_question = _questions(s, draw, w, near, is_chosen)
    forwards = ~w.now_backwards[pair]
    return {
        **context,
        "question_source": jnp.where(forwards, w.one[pair], w.other[pair]),
        "question_destination": jnp.where(forwards, w.other[pair], w.one[pair]),
        "question_counts": is_question,
        "question_failed": w.now_failed[pair],
        "question_log_rtt": jnp.log(w.now_ms[pair]),
        **shown,
    }


def make_context(
    s: WorldSettings, draw: Draws, m: Columns, groups: jax.Array, query_source: int | jax.Array, is_queried: jax.Array
) -> tuple[Batch, jax.Array, jax.Array]:
    """A context; the distances of nodes to the queried ones; and whether the context was chosen for the queries.

    Three of four contexts use all slots, the others fewer. A context that is not chosen holds the latest measurement of
    each pair, in random order, then the ones before. `m` has the columns of measurements that `rank_measurements` and
    `slot_columns` need.
    """
    class_, keys, near = rank_measurements(m, groups, query_source, is_queried)
    slots = s.context - 1
    room = jnp.where(draw.chance(0.75), slots, draw.log_uniform(min(32, slots), slots)).astype(jnp.int32)
    is_chosen = draw.chance(s.chosen_share)
    late = jnp.where(m.known, m.round + draw.uniform(shape=m.known.shape), jnp.inf)
    _, at_random = jax.lax.top_k(-late, slots)
    chosen, count = select(class_, keys, slots, room)
    rows = jnp.where(is_chosen, chosen, at_random)
    length = jnp.where(is_chosen, count, jnp.minimum(jnp.sum(m.known), room))
    columns = (column[rows] for column in (m.source, m.destination, m.failed, m.log_rtt, m.age_s))
    context = {f"context_{name}": column for name, column in slot_columns(length, *columns).items()}
    return context, near, is_chosen


def rank_measurements(
    m: Columns, groups: jax.Array, query_source: int | jax.Array, is_queried: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Classes and sortable keys of measurements by the rule of `selection`, compiled; and the distances of nodes to the
    source and to the queried nodes.

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
    """Indices of measurements for the slots, best first, and how many of them count: at most `room`."""
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


def prefix_distance(groups: jax.Array, is_target: jax.Array) -> jax.Array:
    """For each node, the distance suggested by the longest prefix it shares with a target."""
    distance = jnp.full(is_target.shape, FAR_MS, jnp.float32)
    for level in reversed(range(LEVELS)):
        has_target = jnp.zeros(is_target.shape, bool).at[groups[:, level]].max(is_target)
        distance = jnp.where(has_target[groups[:, level]], PREFIX_MS[level], distance)
    return distance


def words_of_groups(groups: jax.Array, key: jax.Array) -> jax.Array:
    """Numbers that stand for nodes and their prefix groups in the context with this random key."""
    own = jnp.arange(len(groups))[:, None]
    salt = hash32(jax.random.key_data(key).astype(jnp.uint32))
    return hash32(jnp.concatenate([own, groups], axis=1).astype(jnp.uint32) ^ salt[0]) ^ salt[1]


def make_world(s: WorldSettings, key: jax.Array) -> Columns:
    """One world: its pairs, its known measurements, and the results of measuring every pair now."""
    draw = Draws(key)
    log_size = jnp.log(jnp.array([s.fewest_nodes, s.most_nodes + 0.999]))
    count = jnp.exp(log_size[0] + (log_size[1] - log_size[0]) * draw.uniform() ** 0.4).astype(jnp.int32)
    queried = jnp.minimum(jnp.floor(draw.log_uniform(1, s.most_asked + 0.999)).astype(jnp.int32), count - 1)
    bipartite, series = draw.chance(s.bipartite_share), draw.chance(s.series_share)
    number = jnp.arange(s.most_nodes)
    is_queried = (number >= 1) & (number <= queried)

    one, other, exists = _pairs(draw, s, count, queried)
    late = exists & (one > queried)
    hub_is_probe = draw.chance(0.5)
    is_probe = draw.chance(draw.uniform(0.15, 0.6), (s.most_nodes,))
    is_probe = jnp.where(number == 0, hub_is_probe, jnp.where(is_queried, ~hub_is_probe, is_probe))
    exists &= ~bipartite | (is_probe[one] != is_probe[other])
    nodes, paths = _computed_once(internet.make_nodes(draw, s, count, bipartite & is_probe))
    swap = bipartite & is_probe[other]
    one, other = jnp.where(swap, other, one), jnp.where(swap, one, other)
    one, other, exists = _computed_once((one, other, exists))
    undisturbed = _computed_once(internet.undisturbed_ms(draw, nodes, paths, one, other))

    often = _often_measured(draw, is_queried)
    weight = often[one] * often[other]
    is_queried_pair = (jnp.minimum(one, other) == 0) & is_queried[jnp.maximum(one, other)]
    share = draw.log_uniform(s.least_known, s.most_known)
    share = jnp.where(late, _late_share(share, late, count - 1 - queried), share)
    share = jnp.where(is_queried_pair, jnp.where(series, 0.5, 0.0), jnp.clip(share * weight, 0.0, 0.97))
    pair_known = exists & draw.chance(share, (s.pairs,)) & ~_apart(s, draw, nodes)(one, other)

    pair, round_ = _measurements(draw, s, queried)
    interval = draw.log_uniform(5.0, 86_400.0)
    age = _ages(draw, s, interval, pair, round_)
    repeated = series & draw.chance(0.75)
    timed = draw.chance(jnp.where(series, 0.75, 0.15))
    disturbances = _computed_once(
        internet.make_disturbances(draw, s.most_nodes, s.pairs, noisy=series, interval_s=interval)
    )
    flips = ~bipartite & draw.chance(0.5)
    now_backwards, backwards = flips & draw.chance(0.5, (s.pairs,)), flips & draw.chance(0.5, pair.shape)
    measured = Columns(one=one[pair], other=other[pair], pair=pair, backwards=backwards, age_s=age)
    rtt, failed = internet.disturbed(draw, disturbances, undisturbed, measured)
    rtt = _with_errors(draw, rtt)
    copied = draw.chance(0.06) & (round_ > 0)  # a file that was read twice, an export that repeats itself
    rtt, failed, age, backwards = (jnp.where(copied, column[pair], column) for column in (rtt, failed, age, backwards))
    numbers, no_age = jnp.arange(s.pairs), jnp.zeros(s.pairs)
    now = Columns(one=one, other=other, pair=numbers, backwards=now_backwards, age_s=no_age)
    now_ms, now_failed = internet.disturbed(draw, disturbances, undisturbed, now)
    return Columns(
        # of pairs
        one=one,
        other=other,
        exists=exists,
        undisturbed_ms=undisturbed,
        now_ms=now_ms,
        now_failed=now_failed,
        now_backwards=now_backwards,
        weight=weight,  # how often such a pair is measured, compared to others; questions are drawn by it too
        may_be_queried=exists & (~pair_known | series),
        # of measurements: first one of each pair, in their order, then repetitions
        pair=pair,
        round=round_,
        known=pair_known[pair] & ((round_ == 0) | repeated),
        rtt_ms=rtt,
        failed=failed,
        backwards=backwards,
        age_s=jnp.where(timed, age, UNKNOWN_AGE),
        # of nodes; the source is node 0
        is_queried=is_queried,
        groups=internet.make_prefix_groups(draw, nodes),
        position=nodes.position,
        is_probe=bipartite & is_probe,
    )


def _computed_once(made: Any) -> Any:
    """Keep the compiler from computing columns of nodes again wherever they are looked up."""
    return jax.lax.optimization_barrier(made)


def _pairs(draw: Draws, s: WorldSettings, count: jax.Array, queried: jax.Array) -> tuple[jax.Array, ...]:
    """All pairs of the source and of the queried nodes, source first, then pairs of the others up to `s.pairs`.

    No pair comes twice. The other nodes form a circle, and their pairs are those at random distances along it: from any
    node this looks like a random graph, and needs a sort of a few hundred distances instead of one of all pairs.
    """
    k = jnp.arange(s.pairs)
    first = k < (1 + queried) * count
    early_one, early_other = k // count, k % count
    circle = jnp.maximum(count - 1 - queried, 1)
    e = jnp.maximum(k - (1 + queried) * count, 0)
    offsets = s.most_nodes // 2
    keys = jnp.where(jnp.arange(offsets) < circle // 2, draw.uniform(shape=(offsets,)), 2.0)
    turn = jnp.minimum(e // circle, offsets - 1)
    offset = 1 + jnp.argsort(keys)[turn]
    late_one, late_other = e % circle, (e % circle + offset) % circle
    in_reach = (e // circle < circle // 2) & ((2 * offset != circle) | (late_one < late_other))
    one = jnp.where(first, early_one, 1 + queried + late_one)
    other = jnp.where(first, early_other, 1 + queried + late_other)
    exists = jnp.where(first, early_other > early_one, in_reach)
    return jnp.where(exists, one, 0), jnp.where(exists, other, 0), exists


def _often_measured(draw: Draws, is_queried: jax.Array) -> jax.Array:
    """How often each node takes part. In the MENOG study a probe has 1 to 65 destinations, half of them 1 to 9."""
    shape = is_queried.shape
    often = jnp.exp(draw.uniform(0.0, 0.9) * draw.normal(shape))
    is_focus = is_queried | (jnp.arange(shape[0]) == 0)
    new = is_focus & draw.chance(0.2, shape)  # a node that was seen a few times only, or never
    return often * jnp.where(new, draw.log_uniform(0.02, 1.0, shape) * draw.chance(0.8, shape), 1.0)


def _apart(s: WorldSettings, draw: Draws, nodes: Columns) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function: whether two nodes are in parts of the world between which nothing was measured. Parts are made of
    continents, of networks, or at random."""
    parts = jnp.floor(draw.uniform(2, 4.999)).astype(jnp.int32)
    at_random = draw.below(1 << 16, nodes.site.shape)
    part = draw.one_of(nodes.continent, nodes.network, at_random) % parts
    is_disconnected = draw.chance(s.disconnected_share)
    return lambda one, other: is_disconnected & (part[one] != part[other])


def _with_errors(draw: Draws, rtt_ms: jax.Array) -> jax.Array:
    """Make some values grossly wrong in a fifth of the worlds: another unit, a clock that jumped, an extra digit."""
    is_wrong = draw.chance(draw.sometimes(0.2, draw.log_uniform(0.003, 0.15)), rtt_ms.shape)
    tenfold = jnp.where(draw.chance(0.5, rtt_ms.shape), 10.0, 0.1)
    factor = jnp.where(draw.chance(0.4), tenfold, draw.log_uniform(1 / 30, 30.0, rtt_ms.shape))
    return jnp.where(is_wrong, jnp.clip(rtt_ms * factor, internet.MIN_MS, internet.MAX_MS), rtt_ms)


def _late_share(share: jax.Array, late: jax.Array, nodes: jax.Array) -> jax.Array:
    """The share of the drawn pairs of the other nodes that is known.

    Only some of their pairs are drawn. In a large world with few known pairs, mostly known ones are, so that nodes have
    as many measured neighbours as they would have if all pairs were drawn.
    """
    there_are = nodes * (nodes - 1) / 2
    return jnp.clip(share * there_are / jnp.maximum(jnp.sum(late), 1), share, jnp.maximum(share, 0.8))


def _measurements(draw: Draws, s: WorldSettings, queried: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pair and round of every measurement: one of each pair, then repetitions of the first pairs, few or many."""
    few = (queried + 1).astype(jnp.float32)
    many = jnp.maximum(float(min(s.pairs, s.repeats)), few)
    repeated_pairs = jnp.exp(jnp.log(few) + draw.uniform() * (jnp.log(many) - jnp.log(few))).astype(jnp.int32)
    k = jnp.arange(s.repeats)
    pair = jnp.concatenate([jnp.arange(s.pairs), k % repeated_pairs])
    return pair, jnp.concatenate([jnp.zeros(s.pairs, jnp.int32), 1 + k // repeated_pairs])


def _ages(draw: Draws, s: WorldSettings, interval: jax.Array, pair: jax.Array, round_: jax.Array) -> jax.Array:
    """Seconds before the questions. Later rounds are older; some pairs, and some worlds, were not measured lately."""
    gap = jnp.where(draw.chance(0.3), draw.log_uniform(1.0, 100.0), 0.0)
    stale = draw.chance(draw.half_normal(0.2), (s.pairs,))
    latest = draw.uniform(0.001, 1.0, (s.pairs,)) + jnp.where(stale, draw.log_uniform(1.0, 300.0, (s.pairs,)), 0.0)
    irregular = draw.chance(0.5) * draw.uniform(0.0, 0.99, pair.shape)
    return interval * (gap + latest[pair] + round_ + irregular)


def _questions(
    s: WorldSettings, draw: Draws, w: Columns, near: jax.Array, is_chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Pairs of the questions: all queried ones, and others by weight and, for chosen contexts, by distance."""
    distance = pair_distance(near, w.one, w.other)
    often = w.weight * jnp.where(w.known[: s.pairs], _SEEN_WEIGHT, 1.0)
    weight = jnp.clip(often, 0.05, 20.0) / jnp.where(is_chosen, distance + QUESTION_REACH_MS, 1.0)
    is_queried_pair = (jnp.minimum(w.one, w.other) == 0) & w.is_queried[jnp.maximum(w.one, w.other)]
    late = jnp.where(is_queried_pair, 0.0, draw.exponential(distance.shape) / weight)
    late = jnp.where(w.may_be_queried, late, jnp.inf)
    earliest, pair = jax.lax.top_k(-late, s.questions)
    return pair, earliest > -jnp.inf
