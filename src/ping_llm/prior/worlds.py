"""Batches of simulated worlds: a pure function of (settings, seed, step), of which any rows can be made alone.

    world      a simulated Internet, part of whose pairs were measured
    context    measurements of a world that a question may look at, chosen by the rule of prediction (`selection`)
    question   a pair of the same world, at a moment after all of its measurements

Everything is made on the device, by vectorised arithmetic on counted keys: no files, no host work, nothing to wait for.
A world of the default settings takes some 250 k random numbers and one sort of 7 k keys.

A context is chosen for one source and a few destinations, the asked ones. They are asked about, and so are other pairs,
those near the asked ones more often: the same context then teaches a hundred answers instead of one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from ping_llm.prior.disturbances import make_disturbances, measured
from ping_llm.prior.draws import Draws
from ping_llm.prior.internet import make_nodes, undisturbed_ms
from ping_llm.prior.selection import chosen, order_keys
from ping_llm.prior.settings import WorldSettings
from ping_llm.prior.shared_prefixes import make_kin

# mypy: disallow-untyped-calls=False


Batch = dict[str, jax.Array]

ANSWERED: Final = 0
FAILED: Final = 1
NOTHING: Final = 2
"""Kinds of places in a context. An empty context has one place that holds nothing: something to look at."""

UNKNOWN_AGE: Final = -1.0
_QUESTION_REACH_MS: Final = 20.0
_SEEN_WEIGHT: Final = 6.0
"""Questions about pairs that were measured before, where noise allows them, are asked so much more often."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class World:
    """One world: its pairs, the measurements that are known of it, and what a measurement right now would give."""

    one: jax.Array
    other: jax.Array
    exists: jax.Array
    undisturbed_ms: jax.Array
    now_ms: jax.Array
    now_failed: jax.Array
    now_backwards: jax.Array
    weight: jax.Array
    """Of pairs: how often such a pair is measured, compared to others. Questions are drawn by it too."""
    may_be_asked: jax.Array
    pair: jax.Array
    """Of measurements, as the columns below. The first of them are the pairs in order, then come repetitions."""
    round: jax.Array
    known: jax.Array
    rtt_ms: jax.Array
    failed: jax.Array
    backwards: jax.Array
    age_s: jax.Array
    is_asked: jax.Array
    """Of nodes. The source is node 0."""
    kin: jax.Array
    """[nodes, levels], see `kinship`."""


def worlds_of(s: WorldSettings, seed: jax.Array, step: jax.Array, row: jax.Array) -> Batch:
    """The worlds of these numbers, [worlds] each: a world is made from its own three numbers alone."""

    def one(seed: jax.Array, step: jax.Array, row: jax.Array) -> Batch:
        return shown(s, jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), row))

    return jax.vmap(one)(*(column.astype(jnp.uint32) for column in (seed, step, row)))


@partial(jax.jit, static_argnums=(0, 4))
def world_batch(s: WorldSettings, seed: Any, step: Any, first: Any, count: int) -> Batch:
    """Rows `first` to `first + count` of the batch of a step.

    For a single row the compiler arranges the arithmetic differently, and the last bits differ.
    """
    row = jnp.arange(count) + first
    return worlds_of(s, jnp.full_like(row, seed), jnp.full_like(row, step), row)


def shown(s: WorldSettings, key: jax.Array) -> Batch:
    """What a batch shows of one world: its context and its questions."""
    w = _as_is(make_world(s, jax.random.fold_in(key, 1)))
    draw = Draws(jax.random.fold_in(key, 2))
    ends = w.one[w.pair], w.other[w.pair]
    source, destination = jnp.where(w.backwards, ends[1], ends[0]), jnp.where(w.backwards, ends[0], ends[1])
    rtt = jnp.where(w.failed, jnp.nan, w.rtt_ms)
    class_, keys, near = order_keys(
        source, destination, rtt, w.round, w.known, w.kin, asked_source=jnp.int32(0), is_asked=w.is_asked
    )
    rows, length = chosen(class_, keys, s.context - 1)
    asked, is_question = _questions(s, draw, w, near)
    forwards = ~w.now_backwards[asked]
    return {
        **told(length, source[rows], destination[rows], w.failed[rows], jnp.log(w.rtt_ms[rows]), w.age_s[rows]),
        "question_source": jnp.where(forwards, w.one[asked], w.other[asked]),
        "question_destination": jnp.where(forwards, w.other[asked], w.one[asked]),
        "question_counts": is_question,
        "question_failed": w.now_failed[asked],
        "question_log_rtt": jnp.log(w.now_ms[asked]),
        "node_kin": w.kin,
        "identity_key": jax.random.key_data(jax.random.fold_in(key, 3)),
    }


def told(
    length: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    failed: jax.Array,
    log_rtt: jax.Array,
    age_s: jax.Array,
) -> Batch:
    """A context of the first `length` measurements, behind a place that holds nothing.

    Attention has to go somewhere. Without that place it cannot tell a context in which everything matches from one in
    which nothing does, and a history of a single pair would say nothing.
    """
    counts = jnp.arange(source.shape[0]) < length
    kind = jnp.where(counts, jnp.where(failed, FAILED, ANSWERED), NOTHING)
    columns = {
        "context_source": (jnp.where(counts, source, 0), 0),
        "context_destination": (jnp.where(counts, destination, 0), 0),
        "context_kind": (kind, NOTHING),
        "context_log_rtt": (jnp.where(kind == ANSWERED, log_rtt, 0.0), 0.0),
        "context_age_s": (jnp.where(counts, age_s, UNKNOWN_AGE), UNKNOWN_AGE),
    }
    context = {name: jnp.pad(column, (1, 0), constant_values=empty) for name, (column, empty) in columns.items()}
    return {**context, "context_length": length + 1}


def make_world(s: WorldSettings, key: jax.Array) -> World:
    draw = Draws(key)
    log_size = jnp.log(jnp.array([s.fewest_nodes, s.most_nodes + 0.999]))
    count = jnp.exp(log_size[0] + (log_size[1] - log_size[0]) * draw.uniform() ** 0.6).astype(jnp.int32)
    asked = jnp.minimum(jnp.floor(draw.log_uniform(1, s.most_asked + 0.999)).astype(jnp.int32), count - 1)
    bipartite, series = draw.chance(s.bipartite_share), draw.chance(s.series_share)
    number = jnp.arange(s.most_nodes)
    is_asked = (number >= 1) & (number <= asked)

    one, other, exists = _pairs(draw, s, count, asked)
    late = exists & (one > asked)
    hub_is_probe = draw.chance(0.5)
    is_probe = draw.chance(draw.uniform(0.15, 0.6), (s.most_nodes,))
    is_probe = jnp.where(number == 0, hub_is_probe, jnp.where(is_asked, ~hub_is_probe, is_probe))
    exists &= ~bipartite | (is_probe[one] != is_probe[other])
    nodes, paths = _as_is(make_nodes(draw, s, count, bipartite & is_probe))
    swap = bipartite & is_probe[other]
    one, other = jnp.where(swap, other, one), jnp.where(swap, one, other)
    one, other, exists = _as_is((one, other, exists))
    undisturbed = _as_is(undisturbed_ms(draw, nodes, paths, one, other))

    often = _often_measured(draw, is_asked)
    weight = often[one] * often[other]
    is_asked_pair = (jnp.minimum(one, other) == 0) & is_asked[jnp.maximum(one, other)]
    share = draw.log_uniform(s.least_known, s.most_known)
    share = jnp.where(late, _late_share(share, late, count - 1 - asked), share)
    share = jnp.where(is_asked_pair, jnp.where(series, 0.5, 0.0), jnp.clip(share * weight, 0.0, 0.97))
    pair_known = exists & draw.chance(share, (s.pairs,))
    may_be_asked = exists & (~pair_known | series)

    pair, round_ = _measurements(draw, s, asked)
    interval = draw.log_uniform(5.0, 86_400.0)
    age = _ages(draw, s, interval, pair, round_)
    repeated = series & draw.chance(0.75)
    timed = draw.chance(jnp.where(series, 0.75, 0.15))
    disturbances = _as_is(make_disturbances(draw, s.most_nodes, s.pairs, noisy=series, interval_s=interval))
    flips = ~bipartite & draw.chance(0.5)
    now_backwards, backwards = flips & draw.chance(0.5, (s.pairs,)), flips & draw.chance(0.5, pair.shape)
    ends = {"one": one[pair], "other": other[pair], "pair": pair}
    rtt, failed = measured(draw, disturbances, undisturbed, **ends, backwards=backwards, age_s=age)
    now = {"one": one, "other": other, "pair": jnp.arange(s.pairs)}
    now_ms, now_failed = measured(
        draw, disturbances, undisturbed, **now, backwards=now_backwards, age_s=jnp.zeros(s.pairs)
    )
    return World(
        one=one,
        other=other,
        exists=exists,
        undisturbed_ms=undisturbed,
        now_ms=now_ms,
        now_failed=now_failed,
        now_backwards=now_backwards,
        weight=weight,
        may_be_asked=may_be_asked,
        pair=pair,
        round=round_,
        known=pair_known[pair] & ((round_ == 0) | repeated),
        rtt_ms=rtt,
        failed=failed,
        backwards=backwards,
        age_s=jnp.where(timed, age, UNKNOWN_AGE),
        is_asked=is_asked,
        kin=make_kin(draw, nodes),
    )


def _as_is(made: Any) -> Any:
    """Compute it once: otherwise the compiler draws columns of nodes again wherever they are looked up."""
    return jax.lax.optimization_barrier(made)


def _pairs(draw: Draws, s: WorldSettings, count: jax.Array, asked: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All pairs of the source and of the asked nodes, source first, then pairs of the others as far as there is room.

    No pair comes twice. Pairs of the others go around a circle of nodes by offsets in random order, which looks like a
    random graph from any node, and costs one sort of a hundred offsets instead of one of all pairs.
    """
    k = jnp.arange(s.pairs)
    first = k < (1 + asked) * count
    early_one, early_other = k // count, k % count
    circle = jnp.maximum(count - 1 - asked, 1)
    e = jnp.maximum(k - (1 + asked) * count, 0)
    offsets = s.most_nodes // 2
    keys = jnp.where(jnp.arange(offsets) < circle // 2, draw.uniform(shape=(offsets,)), 2.0)
    turn = jnp.minimum(e // circle, offsets - 1)
    offset = 1 + jnp.argsort(keys)[turn]
    late_one, late_other = e % circle, (e % circle + offset) % circle
    in_reach = (e // circle < circle // 2) & ((2 * offset != circle) | (late_one < late_other))
    one = jnp.where(first, early_one, 1 + asked + late_one)
    other = jnp.where(first, early_other, 1 + asked + late_other)
    exists = jnp.where(first, early_other > early_one, in_reach)
    return jnp.where(exists, one, 0), jnp.where(exists, other, 0), exists


def _often_measured(draw: Draws, is_asked: jax.Array) -> jax.Array:
    """Of nodes: how often they take part. In the MENOG study a probe has 1 to 65 destinations, half of them 1 to 9."""
    shape = is_asked.shape
    often = jnp.exp(draw.uniform(0.0, 0.9) * draw.normal(shape))
    is_focus = is_asked | (jnp.arange(shape[0]) == 0)
    new = is_focus & draw.chance(0.2, shape)  # a node that was seen a few times only
    return often * jnp.where(new, draw.log_uniform(0.02, 1.0, shape), 1.0)


def _late_share(share: jax.Array, late: jax.Array, nodes: jax.Array) -> jax.Array:
    """Which share of the drawn pairs of the other nodes is known.

    There is room for some of their pairs only: of a large world with little known we draw all that are known and few
    of those that are not, so that nobody misses neighbours.
    """
    there_are = nodes * (nodes - 1) / 2
    return jnp.clip(share * there_are / jnp.maximum(jnp.sum(late), 1), share, jnp.maximum(share, 0.8))


def _measurements(draw: Draws, s: WorldSettings, asked: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pair and round of every measurement: first one of each pair, then repetitions of the first few or many pairs."""
    few = (asked + 1).astype(jnp.float32)
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


def _questions(s: WorldSettings, draw: Draws, w: World, near: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pairs to ask about: all asked ones, others by weight and by how near they are."""
    distance = jnp.minimum(near[0, w.one] + near[1, w.other], near[0, w.other] + near[1, w.one])
    often = w.weight * jnp.where(w.known[: s.pairs], _SEEN_WEIGHT, 1.0)
    weight = jnp.clip(often, 0.05, 20.0) / (distance + _QUESTION_REACH_MS)
    is_asked_pair = (jnp.minimum(w.one, w.other) == 0) & w.is_asked[jnp.maximum(w.one, w.other)]
    late = jnp.where(is_asked_pair, 0.0, draw.exponential(distance.shape) / weight)
    late = jnp.where(w.may_be_asked, late, jnp.inf)
    earliest, asked = jax.lax.top_k(-late, s.questions)
    return asked, earliest > -jnp.inf
