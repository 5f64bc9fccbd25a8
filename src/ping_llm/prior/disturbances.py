"""How levels wander: the longer ago a measurement was made, the less it says.

Between pings of one pair of the MENOG study that lie one, five, or forty measurements apart, the median difference is
1.0, 1.9, or 3.8 %: it grows like a power of the time between them, about 0.4. So levels are sums of steps that last
one, two, four … as long as the first, each lasting twice as long and 2^0.4 times as high as the one before.

    step    a time through which a level does not change
    octave  all steps of one length

The height of a step is a hash of who wanders, octave, and number of the step: any moment can be asked for alone.
"""

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp

from ping_llm.prior.draws import Draws, hashed
from ping_llm.prior.internet import LEAST_MS

# mypy: disallow-untyped-calls=False


OCTAVES: Final = 8
_ROUGHNESS: Final = 0.4
_GOLDEN: Final = 0x9E3779B9


def wandered(who: jax.Array, age_s: jax.Array, shortest_step_s: jax.Array, salt: jax.Array) -> jax.Array:
    """Sums of steps up and down, with many small and few large ones. The shortest have a mean height of 1."""
    total = jnp.zeros(age_s.shape)
    of_whom = hashed(who.astype(jnp.uint32) * jnp.uint32(OCTAVES) ^ salt)
    for octave in range(OCTAVES):
        of_octave = hashed(of_whom + jnp.uint32(octave * _GOLDEN & 0xFFFFFFFF))
        begins = _unit(of_octave)  # in the middle of a step
        number = jnp.floor(age_s / (shortest_step_s * 2.0**octave) + begins).astype(jnp.uint32)
        unit = 2.0 * _unit(hashed(of_octave ^ hashed(number + jnp.uint32(1)))) - 1.0
        total += 2.0 ** (_ROUGHNESS * octave) * jnp.sign(unit) * -jnp.log1p(-jnp.abs(unit))
    return total


def _unit(words: jax.Array) -> jax.Array:
    """Uniform in (0, 1)."""
    return ((words >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


# What time does to a pair: load by day, changes of route, wandering levels, jitter, losses, the clock's resolution.
#
# Ages are seconds before the moment of the questions, so a question has age 0. A world either reports one value for
# each pair without any of this (as PlanetLab's matrix does), or single pings with all of it. Of the pairs of the
# MENOG study the median spread within a pair is 2.4 % (5 % of pairs: 0.4 %, 95 %: 12 %), the median share of pings
# that take half as long again is 0.7 % (95 %: 11 %), and 36 % of pairs never failed while 1 % always did.

# mypy: disallow-untyped-calls=False


_DAY_S: Final = 86_400.0
_RESOLUTIONS_MS: Final = (0.0, 0.001, 0.01, 0.1, 1.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Disturbances:
    """Columns of nodes, columns of pairs, and numbers of the world."""

    strength: jax.Array
    """0: the world reports undisturbed values; 1: single pings."""
    resolution_ms: jax.Array
    asymmetry: jax.Array
    """Of pairs: factor of ln RTT of the opposite direction; 0 in symmetric worlds."""
    node_jitter_ms: jax.Array
    pair_jitter: jax.Array
    """Of pairs, relative to the RTT."""
    spike_chance: jax.Array
    node_load_ms: jax.Array
    node_phase: jax.Array
    node_change_s: jax.Array
    node_before_ms: jax.Array
    node_after_ms: jax.Array
    """Added before and after the node's change; infinitely long ago where there was none."""
    pair_change_s: jax.Array
    pair_before: jax.Array
    """[2, pairs]: two changes of route, and ln of the factor before each."""
    second_route: jax.Array
    second_route_chance: jax.Array
    """Of pairs: ln of the factor of a parallel route, and how often a ping takes it."""
    wander_salt: jax.Array
    wander_step_s: jax.Array
    pair_wander: jax.Array
    """Of pairs: mean height of the shortest steps, in ln RTT."""
    node_wander_ms: jax.Array
    node_loss: jax.Array
    pair_loss: jax.Array


def make_disturbances(draw: Draws, nodes: int, pairs: int, *, noisy: jax.Array, interval_s: jax.Array) -> Disturbances:
    def sometimes(chance: float, value: jax.Array) -> jax.Array:
        return jnp.where(draw.chance(chance), value, 0.0)

    ever = jnp.inf
    change = interval_s * draw.log_uniform(0.5, 300.0, (nodes,))
    node_changed = draw.chance(draw.half_normal(0.04), (nodes,))
    steps_ms = jnp.where(node_changed, draw.log_normal(8.0, 1.2, (2, nodes)), 0.0)
    pair_change = interval_s * draw.log_uniform(0.5, 300.0, (2, pairs))
    # Where routes seldom change, a model learns to trust many old pings more than a few new ones.
    restless = sometimes(0.3, draw.uniform(0.1, 0.6))
    pair_changed = draw.chance(draw.half_normal(0.06) + restless, (2, pairs))
    size = 0.15 * draw.normal((2, pairs)) * jnp.exp(0.8 * draw.normal((2, pairs)))
    detour = draw.chance(0.4, (pairs,))  # the usual route, another one for a while, and back
    size = size.at[1].set(jnp.where(detour, -size[0], size[1]))
    jitter = draw.log_uniform(0.003, 0.5)
    load = sometimes(0.35, draw.log_uniform(0.1, 6.0))
    wanders = draw.log_uniform(6e-5, 0.004)
    losses = draw.chance(jnp.where(noisy, 0.75, 0.15))
    rare = draw.log_uniform(5e-4, 4e-2)
    return Disturbances(
        strength=noisy.astype(jnp.float32),
        resolution_ms=jnp.asarray(_RESOLUTIONS_MS)[draw.below(len(_RESOLUTIONS_MS))],
        asymmetry=sometimes(0.4, draw.log_uniform(0.002, 0.1)) * draw.normal((pairs,)),
        node_jitter_ms=jitter * jnp.exp(draw.uniform(0.3, 1.3) * draw.normal((nodes,))),
        pair_jitter=draw.log_uniform(5e-5, 0.008) * jnp.exp(draw.uniform(0.2, 1.0) * draw.normal((pairs,))),
        spike_chance=draw.half_normal(0.012) * jnp.exp(draw.normal((nodes,))),
        node_load_ms=load * jnp.exp(1.2 * draw.normal((nodes,))),
        node_phase=draw.uniform(0.0, 2 * jnp.pi) + draw.uniform(0.0, 2.0) * draw.normal((nodes,)),
        node_change_s=jnp.where(node_changed, change, ever),
        node_before_ms=steps_ms[0],
        node_after_ms=steps_ms[1] * draw.chance(0.3, (nodes,)),
        pair_change_s=jnp.where(pair_changed, pair_change, ever),
        pair_before=jnp.clip(size, -1.0, 1.5),
        second_route=jnp.clip(0.12 * draw.normal((pairs,)) * jnp.exp(0.5 * draw.normal((pairs,))), -0.5, 1.0),
        second_route_chance=draw.uniform(0.02, 0.5, (pairs,)) * draw.chance(draw.half_normal(0.1), (pairs,)),
        wander_salt=draw.below(1 << 23).astype(jnp.uint32),
        wander_step_s=interval_s * draw.log_uniform(0.2, 5.0),
        pair_wander=wanders * jnp.exp(draw.uniform(0.3, 1.2) * draw.normal((pairs,))),
        node_wander_ms=sometimes(0.5, draw.log_uniform(0.002, 0.1)) * jnp.exp(draw.normal((nodes,))),
        node_loss=losses * jnp.minimum(rare * jnp.exp(draw.uniform(0.5, 2.5) * draw.normal((nodes,))), 1.0),
        pair_loss=losses * jnp.minimum(rare * jnp.exp(draw.uniform(0.5, 3.0) * draw.normal((pairs,))), 1.0),
    )


def measured(
    draw: Draws,
    d: Disturbances,
    undisturbed_ms: jax.Array,
    *,
    one: jax.Array,
    other: jax.Array,
    pair: jax.Array,
    backwards: jax.Array,
    age_s: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """RTT in ms and whether it failed, of measurements of `pair` (whose nodes are `one` and `other`)."""
    shape = pair.shape
    before = age_s > d.pair_change_s[:, pair]
    route = jnp.sum(jnp.where(before, d.pair_before[:, pair], 0.0), axis=0)
    route += jnp.where(draw.chance(d.second_route_chance[pair], shape), d.second_route[pair], 0.0)
    route += d.pair_wander[pair] * wandered(pair, age_s, d.wander_step_s, d.wander_salt)
    level = undisturbed_ms[pair] * jnp.exp(d.strength * jnp.clip(route, -1.5, 2.0))
    level += d.strength * (_level_ms(d, one, age_s) + _level_ms(d, other, age_s))
    level *= jnp.exp(jnp.where(backwards, d.asymmetry[pair], 0.0))

    busy = (_load_ms(d, one, age_s) + _load_ms(d, other, age_s)) * (0.3 + draw.exponential(shape))
    jitter = (d.node_jitter_ms[one] + d.node_jitter_ms[other] + d.pair_jitter[pair] * level) * draw.exponential(shape)
    spike = draw.chance(d.spike_chance[one] + d.spike_chance[other], shape)
    queue = busy + jitter + jnp.where(spike, draw.log_normal(25.0, 1.2, shape), 0.0)
    rtt = level + d.strength * queue

    resolution = jnp.maximum(d.resolution_ms, 1e-9)
    rounded = jnp.maximum(jnp.round(rtt / resolution), 1.0) * resolution
    rtt = jnp.where(d.resolution_ms > 0.002, rounded, rtt)  # finer than any bin: rounding would only cost precision
    arrives = (1 - d.node_loss[one]) * (1 - d.node_loss[other]) * (1 - d.pair_loss[pair])
    return jnp.maximum(rtt, LEAST_MS), draw.chance(1.0 - arrives, shape)


def _level_ms(d: Disturbances, node: jax.Array, age_s: jax.Array) -> jax.Array:
    changed = jnp.where(age_s > d.node_change_s[node], d.node_before_ms[node], d.node_after_ms[node])
    queue = d.node_wander_ms[node] * jnp.abs(wandered(node, age_s, d.wander_step_s, ~d.wander_salt))
    return changed + queue


def _load_ms(d: Disturbances, node: jax.Array, age_s: jax.Array) -> jax.Array:
    wave = 0.5 + 0.5 * jnp.sin(d.node_phase[node] - 2 * jnp.pi * age_s / _DAY_S)
    return d.node_load_ms[node] * wave**3
