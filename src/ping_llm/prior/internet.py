"""A simulated Internet: the location of its nodes, the undisturbed RTT of each pair, and its disturbances over time.

Continents hold cities, cities hold sites, sites hold nodes. A site is a campus or a rack, whose nodes have nearly the
same delays to all others and fractions of a millisecond among each other. A path is fibre along a detour that depends
on the world, the pair of networks and the pair of cities; some pairs of networks meet only in a distant hub, which
causes most violations of the triangle inequality. Added to this are the delays of both ends, noise of the pair, and
outliers. Some nodes are far from all others (a satellite, a slow line; seconds away in a few worlds), and anycast nodes
are near all others. Some worlds are backbones, with hardly any delay but that of fibre.

Single pings are then disturbed by load that follows the time of day, route changes, levels that drift, jitter, packet
loss and the resolution of the clock. A world reports either one value per pair with little or nothing of this (like
PlanetLab's matrix), or single pings with all of it. Ages are seconds before the questions, which have age 0.

The functions are for one world; `jax.vmap` makes many.
"""

from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp

from ping_llm.core.geography import EARTH_KM, KM_PER_MS, distance_km
from ping_llm.core.randomness import hash32, hash_with, unit_interval
from ping_llm.prior.prng import Columns, Draws, first_equal, symmetric

if TYPE_CHECKING:
    from ping_llm.prior.worlds import WorldSettings

_CONTINENTS: Final = 6
_REGION: Final = 8
"""Cities in the region that holds all probes of a regional world."""
_HUBS: Final = 4
_OPERATORS: Final = 4
"""Anycast services: their nodes answer from the same cities."""
_INSTANCES: Final = 16
_DAY_S: Final = 86_400.0
_RESOLUTIONS_MS: Final = (0.0, 0.001, 0.01, 0.1, 1.0)
MIN_MS: Final = 0.03
MAX_MS: Final = 1e4
OCTAVES: Final = 8
_ROUGHNESS: Final = 0.4


def make_nodes(draw: Draws, s: "WorldSettings", count: jax.Array, is_probe: jax.Array) -> tuple[Columns, Columns]:
    """Columns of `most_nodes` nodes, of which the first `count` exist, and columns on which their paths depend.

    `is_probe` is a column of nodes: in worlds with probes, these may share a region of their own.
    """
    most, cities = s.most_nodes, s.most_cities
    continents = _unit_vectors(draw.normal((_CONTINENTS, 3)))
    city_continent = draw.below(jnp.floor(draw.uniform(1, _CONTINENTS + 0.999)), (cities,))
    regional, apart = jnp.any(is_probe) & draw.chance(0.6), draw.chance(0.6)
    abroad = jnp.where(apart, jnp.maximum(city_continent, 1), city_continent)
    city_continent = jnp.where(regional, jnp.where(jnp.arange(cities) < _REGION, 0, abroad), city_continent)
    spread = jnp.deg2rad(draw.log_uniform(1.5, 25.0))
    city_position = _unit_vectors(continents[city_continent] + spread * draw.normal((cities, 3)))

    sites = jnp.clip(count * draw.log_uniform(0.15, 6.0), 2.0, 2.0 * most)
    site_city = _popular(draw, jnp.floor(draw.log_uniform(2, cities - _REGION + 0.999)), (2 * most,))
    in_region = jnp.arange(2 * most) % 2 == 1
    region_city = draw.below(jnp.floor(draw.log_uniform(1, _REGION + 0.999)), (2 * most,))
    site_city = jnp.where(regional, jnp.where(in_region, region_city, site_city + _REGION * apart), site_city)
    site_position = _unit_vectors(city_position[site_city] + draw.log_uniform(2e-4, 0.02) * draw.normal((2 * most, 3)))
    site_ms = draw.log_uniform(0.03, 10.0) * jnp.exp(draw.uniform(0.2, 1.6) * draw.normal((2 * most,)))
    site_ms += jnp.where(draw.chance(draw.half_normal(0.04), (2 * most,)), draw.log_uniform(5, 150, (2 * most,)), 0)
    networks = jnp.floor(draw.log_uniform(1, s.most_networks + 0.999))
    site_network = draw.below(networks, (2 * most,))
    of_continent = city_continent[site_city] * (s.most_networks // _CONTINENTS)
    regional_network = of_continent + draw.below(jnp.maximum(networks // _CONTINENTS, 1), (2 * most,))
    site_network = jnp.where(draw.chance(0.3), regional_network, site_network)

    site = _popular(draw, sites, (most,))
    site = jnp.where(regional, (site // 2) * 2 + is_probe, site)
    far = jnp.where(draw.chance(draw.half_normal(0.03), (most,)), draw.log_uniform(10, 300, (most,)), 0)
    has_satellites = draw.chance(0.08)
    satellite = has_satellites & draw.chance(0.06, (most,))
    own = draw.log_uniform(0.03, 1.5) * jnp.exp(draw.uniform(0.1, 1.2) * draw.normal((most,)))
    own *= jnp.where(draw.chance(0.3), draw.log_uniform(1.0, 12.0), 1.0)  # lines into homes
    is_slow = draw.chance(0.08) & draw.chance(draw.uniform(0.02, 0.5), (most,))
    far += jnp.where(is_slow, draw.log_uniform(200, 6000, (most,)), 0)
    backbone = draw.chance(0.08)
    site_ms *= jnp.where(backbone, 0.1, 1.0)
    own *= jnp.where(backbone, 0.1, 1.0)
    nodes = Columns(
        count=count,
        position=site_position[site],  # [nodes, 3], on the unit sphere
        site=site,
        city=site_city[site],
        continent=city_continent[site_city[site]],
        network=site_network[site],
        site_ms=site_ms[site],  # delay of the line into the site, shared by its nodes
        own_ms=own + far + jnp.where(satellite, draw.uniform(450, 650, (most,)), 0),
        messiness=jnp.exp(draw.uniform(0.0, 1.0) * draw.normal((most,))),  # factor of the noise of the node's pairs
        anycast=jnp.where(  # the operator, or -1
            draw.chance(0.15) & draw.chance(draw.uniform(0.02, 0.4), (most,)), draw.below(_OPERATORS, (most,)), -1
        ),
    )
    networks_squared, cities_squared = (s.most_networks, s.most_networks), (cities, cities)
    hub = jnp.floor(symmetric(draw.uniform(shape=networks_squared)) * _HUBS).astype(jnp.int32)
    is_indirect = symmetric(draw.uniform(shape=networks_squared))
    meets_in_hub = is_indirect < jnp.where(draw.chance(0.4), draw.half_normal(0.25), 0)
    paths = Columns(
        stretch=jnp.where(backbone, draw.uniform(1.05, 1.5), draw.uniform(1.05, 2.2)),  # fibre over the distance
        network_effect=symmetric(draw.normal(networks_squared)) * draw.half_normal(0.17),
        city_effect=symmetric(draw.normal(cities_squared)) * draw.half_normal(0.15),
        hub=jnp.where(meets_in_hub, jnp.minimum(hub, _HUBS - 1), -1),  # where two networks meet; -1: everywhere
        hub_position=city_position[draw.below(cities, (_HUBS,))],
        instance_position=city_position[draw.below(cities, (_INSTANCES,))],
        instance_operator=draw.below(_OPERATORS, (_INSTANCES,)),
        pair_noise=draw.half_normal(0.05),
        outliers=draw.half_normal(0.03) * draw.chance(0.7),
        scale=draw.log_normal(1.0, 0.2),
    )
    return nodes, paths


def undisturbed_ms(draw: Draws, nodes: Columns, paths: Columns, one: jax.Array, other: jax.Array) -> jax.Array:
    """RTTs of pairs of nodes. Each pair may occur only once, since its noise is drawn here."""
    shape = one.shape
    distance = distance_km(nodes.position[one], nodes.position[other])
    hub = paths.hub[nodes.network[one], nodes.network[other]]
    by_way_of = paths.hub_position[jnp.maximum(hub, 0)]
    through_hub = distance_km(nodes.position[one], by_way_of) + distance_km(by_way_of, nodes.position[other])
    same_site = nodes.site[one] == nodes.site[other]
    distance = jnp.where((hub >= 0) & ~same_site, through_hub, distance)
    nearest = _nearest_instance_km(nodes, paths)
    for end, operator in ((other, nodes.anycast[one]), (one, nodes.anycast[other])):
        distance = jnp.where(operator >= 0, nearest[end, jnp.maximum(operator, 0)], distance)

    effect = paths.network_effect[nodes.network[one], nodes.network[other]]
    effect += paths.city_effect[nodes.city[one], nodes.city[other]]
    fibre = distance / KM_PER_MS * jnp.maximum(paths.stretch * jnp.exp(effect), 1.0)
    ends = jnp.where(same_site, 0.0, nodes.site_ms[one] + nodes.site_ms[other])
    rtt = fibre + ends + nodes.own_ms[one] + nodes.own_ms[other]
    spread = paths.pair_noise * jnp.sqrt(nodes.messiness[one] * nodes.messiness[other])
    rtt *= jnp.exp(jnp.clip(spread * draw.normal(shape) * jnp.exp(0.6 * draw.normal(shape)), -1.0, 2.0))
    kind = draw.uniform(shape=shape) / jnp.maximum(paths.outliers, 1e-9)
    rtt *= jnp.where(kind < 0.8, draw.uniform(1.1, 3.5, shape), 1.0)
    rtt += jnp.where((kind >= 0.8) & (kind < 1.0), draw.log_uniform(20, 500, shape), 0.0)
    return rtt * paths.scale + MIN_MS


def _popular(draw: Draws, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random indices below `count`, small ones more often."""
    skew = draw.uniform(0.7, 2.0)
    return jnp.minimum(draw.uniform(shape=shape) ** skew * count, count - 1).astype(jnp.int32)


def _unit_vectors(vectors: jax.Array) -> jax.Array:
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def _nearest_instance_km(nodes: Columns, paths: Columns) -> jax.Array:
    """[nodes, operators]: distance to the nearest instance of each anycast operator, half the equator without any."""
    distance = distance_km(nodes.position[:, None], paths.instance_position[None])
    mine = paths.instance_operator == jnp.arange(_OPERATORS)[:, None]
    farthest = jnp.pi * EARTH_KM
    return jnp.min(jnp.where(mine[None], distance[:, None], farthest), axis=-1)


def known_positions(draw: Draws, position: jax.Array, is_probe: jax.Array) -> jax.Array:
    """[nodes, 3]: positions as people have them, zeros where they have none.

    They are off by 1 to 300 km (the centre of a city, of a country), a few are grossly wrong. They are known of all
    nodes, of a part of them, or of one side only, as those of RIPE Atlas probes are.
    """
    shape = position.shape[:1]
    found = _unit_vectors(position + draw.log_uniform(1.0, 300.0) / EARTH_KM * draw.normal(position.shape))
    somewhere = found[draw.below(shape[0], shape)]
    found = jnp.where(draw.chance(draw.half_normal(0.03), shape)[:, None], somewhere, found)
    part = draw.chance(draw.uniform(0.2, 1.0), shape)
    side = jnp.where(jnp.any(is_probe), is_probe == draw.chance(0.7), part)
    is_known = draw.one_of(jnp.ones(shape, bool), jnp.ones(shape, bool), part, side)
    return jnp.where(is_known[:, None], found, 0.0)


def make_prefix_groups(draw: Draws, nodes: Columns) -> jax.Array:
    """[nodes, levels]: the first node whose address shares a prefix of each length.

    In a third of the worlds no addresses share prefixes, and in a few, prefixes are random. Otherwise a site has one or
    two prefixes, within a larger block of its network (everywhere, on its continent or in its city) or of its city,
    within a block of a continent, of a network, or of neither. Some nodes have unrelated addresses.
    """
    count = nodes.site.shape[0]
    several = jnp.floor(draw.log_uniform(1, 40))
    scattered = draw.below(several, (count,))
    network, continent, city = nodes.network, nodes.continent, nodes.city
    block = draw.one_of(continent, continent, network, scattered[nodes.site % count])
    allocation = draw.one_of(network, network * 8 + continent, network * 128 + city, city) + 4096 * block
    subnet = jnp.where(draw.chance(0.3), draw.below(2, (count,)), 0)
    groups = jnp.stack([allocation * (4 * count) + nodes.site * 2 + subnet, allocation, block])

    at_random = scattered * 4 + draw.below(4, (count,))
    kind = draw.uniform()
    groups = jnp.where(kind < 0.08, jnp.stack([at_random * 8 + draw.below(8, (count,)), at_random, scattered]), groups)
    is_alone = draw.chance(draw.half_normal(0.06), (count,)) | (kind > 0.65)
    exists = jnp.arange(count) < nodes.count
    sharing = jnp.sum((groups[:, :, None] == groups[:, None, :]) & exists, axis=-1)
    groups = jnp.where(is_alone | (2 * sharing > nodes.count), -1 - jnp.arange(count), groups)
    return first_equal(groups).T


# Disturbances over time.


def drift(who: jax.Array, age_s: jax.Array, shortest_step_s: jax.Array, salt: jax.Array) -> jax.Array:
    """The drift of levels at an age: the older a measurement, the less it is worth.

    Between pings of one pair of the MENOG study that lie one, five, or forty measurements apart, the median difference
    is 1.0, 1.9, or 3.8 %: it grows like a power of the time between them, about 0.4. So a level is a sum of octaves,
    step functions each twice as slow and 2^0.4 times as high as the one before; the first has a mean height of 1. The
    height of a step is a hash of (`who`, octave, number of the step), so the level at any age can be computed alone.
    """
    total = jnp.zeros(age_s.shape)
    of_node = hash32(who.astype(jnp.uint32) * jnp.uint32(OCTAVES) ^ salt)
    for octave in range(OCTAVES):
        stream = hash_with(of_node, octave)
        begins = unit_interval(stream)  # in the middle of a step
        number = jnp.floor(age_s / (shortest_step_s * 2.0**octave) + begins).astype(jnp.uint32)
        signed = 2.0 * unit_interval(hash32(stream ^ hash32(number + jnp.uint32(1)))) - 1.0
        total += 2.0 ** (_ROUGHNESS * octave) * jnp.sign(signed) * -jnp.log1p(-jnp.abs(signed))
    return total


def make_disturbances(draw: Draws, nodes: int, pairs: int, *, noisy: jax.Array, interval_s: jax.Array) -> Columns:
    """The parameters of all disturbances: of nodes, of pairs, and of the world. Ratios are differences in ln RTT.

    Of the pairs of the MENOG study the median spread within a pair is 2.4 % (5 % of pairs: 0.4 %, 95 %: 12 %), the
    median share of pings that take half as long again is 0.7 % (95 %: 11 %), and 36 % of pairs never failed while 1 %
    always did.
    """
    change = interval_s * draw.log_uniform(0.5, 300.0, (nodes,))
    node_changed = draw.chance(draw.half_normal(0.04), (nodes,))
    steps_ms = jnp.where(node_changed, draw.log_normal(8.0, 1.2, (2, nodes)), 0.0)
    pair_change = interval_s * draw.log_uniform(0.5, 300.0, (2, pairs))
    # Where routes seldom change, a model learns to trust many old pings more than a few new ones.
    unstable = draw.sometimes(0.3, draw.uniform(0.1, 0.6))
    pair_changed = draw.chance(draw.half_normal(0.06) + unstable, (2, pairs))
    size = 0.15 * draw.normal((2, pairs)) * jnp.exp(0.8 * draw.normal((2, pairs)))
    detour = draw.chance(0.4, (pairs,))  # the usual route, another one for a while, and back
    size = size.at[1].set(jnp.where(detour, -size[0], size[1]))
    jitter = draw.log_uniform(0.003, 0.5)
    load = draw.sometimes(0.35, draw.log_uniform(0.1, 6.0))
    drifts = draw.log_uniform(6e-5, 0.004)
    losses = draw.chance(jnp.where(noisy, 0.75, 0.15))
    rare = draw.log_uniform(5e-4, 4e-2)
    is_mobile = draw.chance(0.12) & draw.chance(draw.uniform(0.05, 1.0), (nodes,))
    mobile_ms = jnp.where(is_mobile, draw.log_uniform(1.0, 60.0, (nodes,)), 0.0)
    uneven = jnp.where(draw.chance(0.1), draw.log_uniform(0.1, 0.45), draw.sometimes(0.4, draw.log_uniform(0.002, 0.1)))
    return Columns(
        # 0: the world reports undisturbed values; 1: single pings; between: values of few pings
        strength=jnp.where(noisy, 1.0, draw.sometimes(0.25, draw.uniform(0.05, 1.0))),
        resolution_ms=jnp.asarray(_RESOLUTIONS_MS)[draw.below(len(_RESOLUTIONS_MS))],
        # of the opposite direction; 0 in symmetric worlds
        asymmetry=uneven * draw.normal((pairs,)),
        node_asymmetry=draw.sometimes(0.12, draw.log_uniform(0.02, 0.4)) * draw.normal((nodes,)),
        node_jitter_ms=jitter * jnp.exp(draw.uniform(0.3, 1.3) * draw.normal((nodes,))) + mobile_ms,
        # relative to the RTT
        pair_jitter=draw.log_uniform(5e-5, 0.008) * jnp.exp(draw.uniform(0.2, 1.0) * draw.normal((pairs,))),
        spike_chance=draw.half_normal(0.012) * jnp.exp(draw.normal((nodes,))),
        node_load_ms=load * jnp.exp(1.2 * draw.normal((nodes,))),
        node_phase=draw.uniform(0.0, 2 * jnp.pi) + draw.uniform(0.0, 2.0) * draw.normal((nodes,)),
        node_change_s=jnp.where(node_changed, change, jnp.inf),
        node_before_ms=steps_ms[0],  # added before the change, and after it
        node_after_ms=steps_ms[1] * draw.chance(0.3, (nodes,)),
        pair_change_s=jnp.where(pair_changed, pair_change, jnp.inf),
        pair_before=jnp.clip(size, -1.0, 1.5),  # [2, pairs]: two route changes, and the ratio before each
        # a parallel route, and how often a ping takes it
        second_route=jnp.clip(0.12 * draw.normal((pairs,)) * jnp.exp(0.5 * draw.normal((pairs,))), -0.5, 1.0),
        second_route_chance=draw.uniform(0.02, 0.5, (pairs,)) * draw.chance(draw.half_normal(0.1), (pairs,)),
        drift_salt=draw.below(1 << 23).astype(jnp.uint32),
        drift_step_s=interval_s * draw.log_uniform(0.2, 5.0),
        # mean height of the shortest steps
        pair_drift=drifts * jnp.exp(draw.uniform(0.3, 1.2) * draw.normal((pairs,))),
        node_drift_ms=draw.sometimes(0.5, draw.log_uniform(0.002, 0.1)) * jnp.exp(draw.normal((nodes,))),
        node_loss=losses * jnp.minimum(rare * jnp.exp(draw.uniform(0.5, 2.5) * draw.normal((nodes,))), 1.0),
        source_loss=_dead(draw, nodes),  # of whatever a node sends, and of whatever is sent to it
        destination_loss=_dead(draw, nodes),
        pair_loss=losses * jnp.minimum(rare * jnp.exp(draw.uniform(0.5, 3.0) * draw.normal((pairs,))), 1.0),
    )


def _dead(draw: Draws, nodes: int) -> jax.Array:
    """Packet loss of nodes that answer hardly ever, or never. They are in a quarter of the worlds, and more often among
    the first nodes, which questions are about."""
    share = draw.log_uniform(0.005, 0.2)
    is_dead = draw.chance(0.25) & draw.chance(
        jnp.where(jnp.arange(nodes) < 9, jnp.maximum(share, 0.15), share), (nodes,)
    )
    return jnp.where(is_dead, jnp.where(draw.chance(0.6, (nodes,)), 1.0, draw.uniform(0.2, 1.0, (nodes,))), 0.0)


def disturbed(draw: Draws, d: Columns, undisturbed_ms: jax.Array, m: Columns) -> tuple[jax.Array, jax.Array]:
    """RTT in ms, and whether the probe failed, of the measurements `m` of pairs (whose nodes are `one` and `other`)."""
    one, other, pair, age_s, shape = m.one, m.other, m.pair, m.age_s, m.pair.shape
    before = age_s > d.pair_change_s[:, pair]
    route = jnp.sum(jnp.where(before, d.pair_before[:, pair], 0.0), axis=0)
    route += jnp.where(draw.chance(d.second_route_chance[pair], shape), d.second_route[pair], 0.0)
    route += d.pair_drift[pair] * drift(pair, age_s, d.drift_step_s, d.drift_salt)
    level = undisturbed_ms[pair] * jnp.exp(d.strength * jnp.clip(route, -1.5, 2.0))
    level += d.strength * (_level_ms(d, one, age_s) + _level_ms(d, other, age_s))
    uneven = jnp.clip(d.asymmetry[pair] + d.node_asymmetry[one] - d.node_asymmetry[other], -1.0, 1.0)
    level *= jnp.exp(jnp.where(m.backwards, uneven, 0.0))

    busy = (_load_ms(d, one, age_s) + _load_ms(d, other, age_s)) * (0.3 + draw.exponential(shape))
    jitter = (d.node_jitter_ms[one] + d.node_jitter_ms[other] + d.pair_jitter[pair] * level) * draw.exponential(shape)
    spike = draw.chance(d.spike_chance[one] + d.spike_chance[other], shape)
    queue = busy + jitter + jnp.where(spike, draw.log_normal(25.0, 1.2, shape), 0.0)
    rtt = level + d.strength * queue

    resolution = jnp.maximum(d.resolution_ms, 1e-9)
    rounded = jnp.maximum(jnp.round(rtt / resolution), 1.0) * resolution
    rtt = jnp.where(d.resolution_ms > 0.002, rounded, rtt)  # finer than any bin: rounding would only cost precision
    source, destination = jnp.where(m.backwards, other, one), jnp.where(m.backwards, one, other)
    arrives = (1 - d.node_loss[one]) * (1 - d.node_loss[other]) * (1 - d.pair_loss[pair])
    arrives *= (1 - d.source_loss[source]) * (1 - d.destination_loss[destination])
    return jnp.clip(rtt, MIN_MS, MAX_MS), draw.chance(1.0 - arrives, shape)


def _level_ms(d: Columns, node: jax.Array, age_s: jax.Array) -> jax.Array:
    changed = jnp.where(age_s > d.node_change_s[node], d.node_before_ms[node], d.node_after_ms[node])
    queue = d.node_drift_ms[node] * jnp.abs(drift(node, age_s, d.drift_step_s, ~d.drift_salt))
    return changed + queue


def _load_ms(d: Columns, node: jax.Array, age_s: jax.Array) -> jax.Array:
    wave = 0.5 + 0.5 * jnp.sin(d.node_phase[node] - 2 * jnp.pi * age_s / _DAY_S)
    return d.node_load_ms[node] * wave**3
