"""Contexts and questions from real measurements, for fine-tuning, in the same form as those of `worlds`.

A pair is drawn at random, then one of its measurements. Its time is "now", one of its ends the source of questions, and
some nodes that were measured with it are queried. Only earlier measurements are known. In half of the contexts (in all
if there are no times) measurements of the queried pairs are hidden, and in half, some of the other pairs are, so that
the model also learns to answer from few measurements. Questions are about what was measured next, or, without times,
about what is not known.

The measurements lie on the device; a batch is made there from three numbers per row, as in `worlds`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import MIN_RTT_MS, Observations
from ping_llm.prior.prng import Columns, Draws, first_equal
from ping_llm.prior.selection import LEVELS, UNKNOWN_AGE, node_words, pair_distance
from ping_llm.prior.worlds import QUESTION_REACH_MS, Batch, WorldSettings, batch_of, make_context, words_of_groups

_UNSEEN: Final = 0.5
_FORGETFUL: Final = 0.5
_LEAST_REMEMBERED: Final = 0.1
"""Share of the contexts whose queried pairs are hidden; of those where other pairs are; and of the other pairs that are
not hidden there, at least."""
_TICKS: Final = 1 << 30
"""Time between the first and the last measurement, in units of the integer times on the device."""
_SOON: Final = 512
"""Questions are drawn from this many measurements, counted from now on."""


def on_device_measurements(known: Observations, addresses: Sequence[str]) -> Columns:
    """The measurements as columns on the device, with nodes renumbered; `addresses[i]` is the address of node i.

    Training needs a few hundred times their memory: some millions of measurements are possible.
    """
    if len(known) < 2:
        raise PingLlmError("at least two measurements are needed to learn one from the other")
    order = np.argsort(np.nan_to_num(known.time_s), kind="stable")
    known = known.take(order)
    nodes, number = np.unique(np.concatenate([known.source, known.destination]), return_inverse=True)
    source, destination = np.split(number, 2)
    low, high = np.minimum(source, destination), np.maximum(source, destination)
    _, pair, count = np.unique(low * len(nodes) + high, return_inverse=True, return_counts=True)
    by_pair = np.argsort(pair, kind="stable")
    words = node_words(addresses)[nodes]
    groups = np.empty((len(nodes), LEVELS), np.int64)
    for level, of_level in enumerate(words[:, 1:].T):
        _, first, number_of_group = np.unique(of_level, return_index=True, return_inverse=True)
        groups[:, level] = first[number_of_group]
    start = np.cumsum(count) - count
    rank = np.empty(len(pair), np.int64)
    rank[by_pair] = np.arange(len(pair)) - start[pair[by_pair]]
    is_timed = not np.isnan(known.time_s).any()
    since = known.time_s - known.time_s[0] if is_timed else np.zeros(len(known))
    tick_s = max(float(since[-1]), 1.0) / _TICKS
    columns = {
        "source": source,
        "destination": destination,
        "tick": np.floor(since / tick_s),
        "pair": pair,
        "rank": rank,  # how many earlier ones its pair has
        "by_pair": by_pair,  # measurements ordered by pair, then time
        "pair_start": start,
        "pair_count": count,
        "groups": groups,  # of shared prefixes, [nodes, levels]
    }
    return Columns(
        **{name: jnp.asarray(column, jnp.int32) for name, column in columns.items()},
        rtt_ms=jnp.asarray(known.rtt_ms, jnp.float32),
        tick_s=jnp.float32(tick_s),
        is_timed=jnp.asarray(is_timed),
    )


def measured_batch(s: WorldSettings, data: Columns, seed: Any, step: Any, row: Any) -> Batch:
    """One context for each (seed, step, row), [contexts] each."""
    return batch_of(partial(_shown, s, data), seed, step, row)


def _shown(s: WorldSettings, data: Columns, key: jax.Array) -> Batch:
    draw = Draws(jax.random.fold_in(key, 1))
    pair = draw.below(data.pair_count.shape[0])
    now = data.by_pair[data.pair_start[pair] + draw.below(data.pair_count[pair])]
    swap = draw.chance(0.5)
    centre = jnp.where(swap, data.destination[now], data.source[now])
    is_queried = _queried_nodes(s, draw, data, centre, jnp.where(swap, data.source[now], data.destination[now]))
    is_queried_pair = (data.source == centre) & is_queried[data.destination]
    is_queried_pair |= (data.destination == centre) & is_queried[data.source]
    unseen = ~data.is_timed | draw.chance(_UNSEEN)
    remembered = jnp.where(draw.chance(_FORGETFUL), draw.log_uniform(_LEAST_REMEMBERED, 1.0), 1.0)
    is_forgotten = (draw.uniform(shape=data.pair_count.shape) > remembered)[data.pair] & ~is_queried_pair
    is_past = ~data.is_timed | (data.tick < data.tick[now])
    known = is_past & ~(unseen & is_queried_pair) & ~is_forgotten

    known_of_pair = jax.ops.segment_sum(known.astype(jnp.int32), data.pair, data.pair_count.shape[0])
    round_ = jnp.maximum(known_of_pair[data.pair] - 1 - data.rank, 0)
    failed = jnp.isnan(data.rtt_ms)
    log_rtt = jnp.log(jnp.maximum(jnp.where(failed, 1.0, data.rtt_ms), MIN_RTT_MS))
    age_s = jnp.where(data.is_timed, (data.tick[now] - data.tick).astype(jnp.float32) * data.tick_s, UNKNOWN_AGE)
    seen = Columns(**vars(data), round=round_, known=known, failed=failed, log_rtt=log_rtt, age_s=age_s)
    context, near, _ = make_context(s, draw, seen, data.groups, centre, is_queried)
    query, is_question = _questions(s, draw, seen, now, is_queried_pair, near)
    ends = {
        "question_source": data.source[query],
        "question_destination": data.destination[query],
        **{name: context[name] for name in context if name.endswith(("source", "destination"))},
    }
    nodes = jnp.concatenate(list(ends.values()))
    numbers = jnp.split(first_equal(nodes), np.cumsum([len(column) for column in ends.values()])[:-1])
    return {
        **context,
        **dict(zip(ends, numbers, strict=True)),  # instead of identities for everybody
        "question_counts": is_question,
        "question_failed": failed[query],
        "question_log_rtt": log_rtt[query],
        "node_words": words_of_groups(first_equal(data.groups[nodes].T).T, jax.random.fold_in(key, 3)),
    }


def _queried_nodes(s: WorldSettings, draw: Draws, data: Columns, centre: jax.Array, other: jax.Array) -> jax.Array:
    """A mask over nodes: `other`, and further nodes that were measured with `centre`."""
    nodes = data.groups.shape[0]
    partner = jnp.zeros(nodes, bool).at[data.destination].max(data.source == centre)
    partner = partner.at[data.source].max(data.destination == centre)
    late = jnp.where(partner, draw.uniform(shape=(nodes,)), 2.0).at[other].set(-1.0)
    count = jnp.floor(draw.log_uniform(1, s.most_asked + 0.999)).astype(jnp.int32)
    earliest, node = jax.lax.top_k(-late, min(s.most_asked, nodes))
    taken = (jnp.arange(len(node)) < count) & (earliest > -2.0)
    return jnp.zeros(nodes, bool).at[node].max(taken)


def _questions(
    s: WorldSettings, draw: Draws, seen: Columns, now: jax.Array, is_queried_pair: jax.Array, near: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Measurements to predict: those of the queried pairs first, then others by distance."""
    distance = pair_distance(near, seen.source, seen.destination)
    late = jnp.where(is_queried_pair, 0.0, draw.exponential(distance.shape) * (distance + QUESTION_REACH_MS))
    first = jnp.searchsorted(seen.tick, seen.tick[now])
    row = jnp.arange(seen.tick.shape[0])
    is_next = (row >= first) & (row < first + _SOON)
    late = jnp.where(~seen.known & (is_next | ~seen.is_timed), late, jnp.inf).at[now].set(-1.0)
    earliest, query = jax.lax.top_k(-late, min(s.questions, late.shape[0]))
    room = (0, s.questions - len(query))
    return jnp.pad(query, room), jnp.pad(earliest > -jnp.inf, room)
