"""A simulated Internet: where its nodes are, and the RTT of any pair when nothing disturbs it.

Continents hold cities, cities hold sites, sites hold nodes: a site is a campus or a rack, whose nodes see nearly the
same delays to everybody else and fractions of a millisecond among each other. A path is fibre along a detour that
depends on the world, the pair of networks and the pair of cities; some pairs of networks meet only in a distant hub,
which is where most violations of the triangle inequality come from. To that come the delays of both ends, noise of the
pair, and outliers. Some nodes are far from everybody (a satellite, a slow line), and anycast nodes are near everybody.

All of one world; `jax.vmap` makes many.
"""

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp

from ping_llm.prior.draws import Draws
from ping_llm.prior.settings import WorldSettings

# mypy: disallow-untyped-calls=False


_EARTH_KM: Final = 6371.0
_KM_PER_MS: Final = 100.0
"""Of fibre there and back: light in glass covers 200 km in a millisecond."""
_CONTINENTS: Final = 6
_REGION: Final = 8
"""Cities of the region that all probes of a regional world are in."""
_HUBS: Final = 4
_OPERATORS: Final = 4
"""Anycast services that share their places."""
_INSTANCES: Final = 16
LEAST_MS: Final = 0.03


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Columns of length `most_nodes`; those from `count` on do not exist."""

    count: jax.Array
    place: jax.Array
    """[nodes, 3], on the unit sphere."""
    site: jax.Array
    city: jax.Array
    continent: jax.Array
    network: jax.Array
    site_ms: jax.Array
    """Delay of the line into the site, shared by its nodes."""
    own_ms: jax.Array
    messiness: jax.Array
    """Factor of the noise of the node's pairs."""
    anycast: jax.Array
    """The operator, or -1."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Paths:
    """What a path between two places depends on."""

    stretch: jax.Array
    """Length of the fibre over the distance, of the world."""
    network_effect: jax.Array
    city_effect: jax.Array
    hub: jax.Array
    """[networks, networks]: the hub where two networks meet, or -1: they meet everywhere."""
    hub_place: jax.Array
    instance_place: jax.Array
    instance_operator: jax.Array
    pair_noise: jax.Array
    outliers: jax.Array
    scale: jax.Array


def make_nodes(draw: Draws, s: WorldSettings, count: jax.Array, is_probe: jax.Array) -> tuple[Nodes, Paths]:
    """`is_probe` is a column of nodes: in worlds where it is not all false, probes may share a region of their own."""
    most, cities = s.most_nodes, s.most_cities
    continents = _unit(draw.normal((_CONTINENTS, 3)))
    city_continent = draw.below(jnp.floor(draw.uniform(1, _CONTINENTS + 0.999)), (cities,))
    regional, apart = jnp.any(is_probe) & draw.chance(0.6), draw.chance(0.6)
    abroad = jnp.where(apart, jnp.maximum(city_continent, 1), city_continent)
    city_continent = jnp.where(regional, jnp.where(jnp.arange(cities) < _REGION, 0, abroad), city_continent)
    spread = jnp.deg2rad(draw.log_uniform(1.5, 25.0))
    city_place = _unit(continents[city_continent] + spread * draw.normal((cities, 3)))

    sites = jnp.clip(count * draw.log_uniform(0.15, 6.0), 2.0, 2.0 * most)
    site_city = _popular(draw, jnp.floor(draw.log_uniform(2, cities - _REGION + 0.999)), (2 * most,))
    in_region = jnp.arange(2 * most) % 2 == 1
    region_city = draw.below(jnp.floor(draw.log_uniform(1, _REGION + 0.999)), (2 * most,))
    site_city = jnp.where(regional, jnp.where(in_region, region_city, site_city + _REGION * apart), site_city)
    site_place = _unit(city_place[site_city] + draw.log_uniform(2e-4, 0.02) * draw.normal((2 * most, 3)))
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
    nodes = Nodes(
        count=count,
        place=site_place[site],
        site=site,
        city=site_city[site],
        continent=city_continent[site_city[site]],
        network=site_network[site],
        site_ms=site_ms[site],
        own_ms=own + far + jnp.where(satellite, draw.uniform(450, 650, (most,)), 0),
        messiness=jnp.exp(draw.uniform(0.0, 1.0) * draw.normal((most,))),
        anycast=jnp.where(
            draw.chance(0.15) & draw.chance(draw.uniform(0.02, 0.4), (most,)), draw.below(_OPERATORS, (most,)), -1
        ),
    )
    hub = jnp.floor(draw.symmetric_uniform(s.most_networks) * _HUBS).astype(jnp.int32)
    meets_in_hub = draw.symmetric_uniform(s.most_networks) < jnp.where(draw.chance(0.4), draw.half_normal(0.25), 0)
    paths = Paths(
        stretch=draw.uniform(1.05, 2.2),
        network_effect=draw.symmetric_normal(s.most_networks) * draw.half_normal(0.17),
        city_effect=draw.symmetric_normal(cities) * draw.half_normal(0.15),
        hub=jnp.where(meets_in_hub, jnp.minimum(hub, _HUBS - 1), -1),
        hub_place=city_place[draw.below(cities, (_HUBS,))],
        instance_place=city_place[draw.below(cities, (_INSTANCES,))],
        instance_operator=draw.below(_OPERATORS, (_INSTANCES,)),
        pair_noise=draw.half_normal(0.05),
        outliers=draw.half_normal(0.03) * draw.chance(0.7),
        scale=draw.log_normal(1.0, 0.2),
    )
    return nodes, paths


def undisturbed_ms(draw: Draws, nodes: Nodes, paths: Paths, one: jax.Array, other: jax.Array) -> jax.Array:
    """RTTs of pairs of nodes. No pair may be given twice: its own noise would be drawn twice."""
    shape = one.shape
    distance = _distance_km(nodes.place[one], nodes.place[other])
    hub = paths.hub[nodes.network[one], nodes.network[other]]
    by_way_of = paths.hub_place[jnp.maximum(hub, 0)]
    through_hub = _distance_km(nodes.place[one], by_way_of) + _distance_km(by_way_of, nodes.place[other])
    same_site = nodes.site[one] == nodes.site[other]
    distance = jnp.where((hub >= 0) & ~same_site, through_hub, distance)
    nearest = _nearest_instance_km(nodes, paths)
    for end, operator in ((other, nodes.anycast[one]), (one, nodes.anycast[other])):
        distance = jnp.where(operator >= 0, nearest[end, jnp.maximum(operator, 0)], distance)

    effect = paths.network_effect[nodes.network[one], nodes.network[other]]
    effect += paths.city_effect[nodes.city[one], nodes.city[other]]
    fibre = distance / _KM_PER_MS * jnp.maximum(paths.stretch * jnp.exp(effect), 1.0)
    ends = jnp.where(same_site, 0.0, nodes.site_ms[one] + nodes.site_ms[other])
    rtt = fibre + ends + nodes.own_ms[one] + nodes.own_ms[other]
    spread = paths.pair_noise * jnp.sqrt(nodes.messiness[one] * nodes.messiness[other])
    rtt *= jnp.exp(jnp.clip(spread * draw.normal(shape) * jnp.exp(0.6 * draw.normal(shape)), -1.0, 2.0))
    kind = draw.uniform(shape=shape) / jnp.maximum(paths.outliers, 1e-9)
    rtt *= jnp.where(kind < 0.8, draw.uniform(1.1, 3.5, shape), 1.0)
    rtt += jnp.where((kind >= 0.8) & (kind < 1.0), draw.log_uniform(20, 500, shape), 0.0)
    return rtt * paths.scale + LEAST_MS


def _popular(draw: Draws, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which of `count` things each picks, some more popular than others."""
    skew = draw.uniform(0.7, 2.0)
    return jnp.minimum(draw.uniform(shape=shape) ** skew * count, count - 1).astype(jnp.int32)


def _unit(vectors: jax.Array) -> jax.Array:
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def _distance_km(one: jax.Array, other: jax.Array) -> jax.Array:
    """Along the surface, from the chord: the cosine would lose short distances to rounding."""
    chord = jnp.sqrt(jnp.sum((one - other) ** 2, axis=-1))
    return 2.0 * _EARTH_KM * jnp.arcsin(jnp.minimum(chord / 2.0, 1.0))


def _nearest_instance_km(nodes: Nodes, paths: Paths) -> jax.Array:
    """[nodes, operators]: to the nearest place of each anycast operator; half way around the world if it has none."""
    distance = _distance_km(nodes.place[:, None], paths.instance_place[None])
    mine = paths.instance_operator == jnp.arange(_OPERATORS)[:, None]
    farthest = jnp.pi * _EARTH_KM
    return jnp.min(jnp.where(mine[None], distance[:, None], farthest), axis=-1)
