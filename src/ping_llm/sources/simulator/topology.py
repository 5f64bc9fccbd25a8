"""The places of a simulated Internet and the hosts in them: regions > cities > autonomous systems > hosts > addresses.

Random numbers are looked up, not consumed: each is a function of the seed, a purpose and an index. Nothing depends on
what was drawn before, so any part of a world or of its measurements can be made on its own.
"""

import hashlib
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import ADDRESS_BYTES, format_address
from ping_llm.core.randomness import Words
from ping_llm.core.rtt import Bools, Floats, Ints
from ping_llm.sources.simulator.settings import SimulatorSettings


@dataclass(frozen=True)
class Columns:
    """A base of data classes whose fields are arrays of the same length."""

    def take(self, index: Ints) -> Self:
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))


def key_words(seed: int, purpose: str) -> Words:
    """Two random words for every (seed, purpose)."""
    return np.frombuffer(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest(), np.uint64)


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A generator of its own for every (seed, purpose, index). The index is the top word of the counter, so that the
    generators of one purpose cannot overlap."""
    counter = np.array([0, 0, 0, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key_words(seed, purpose), counter=counter))


def spread_out(count: int, dimensions: int, shift: Floats) -> Floats:
    """[dimensions, count] numbers in [0, 1) of which every prefix is evenly spread (Roberts' R-sequence).

    A handful of sources make a large part of all measurements. Placing the largest ones at random would make two seeds
    differ by whose luck they had; placed evenly, each seed is a different Internet with the same statistics.
    """
    root = 1.0
    for _ in range(50):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return np.asarray((shift[:, None] + steps[:, None] * np.arange(1.0, count + 1)) % 1.0, np.float64)


# Where networks are: regions on a sphere, their cities, and the points of presence of their autonomous systems.

EARTH_RADIUS_KM = 6371.0

# In units of the Earth's radius: how far cities lie from the centre of their region at most, and how far regions,
# cities and hosts are moved at random (standard deviation).
_REGION_RADIUS = 0.42
_REGION_WANDER = 0.05
_CITY_WANDER = 0.035
_HOST_WANDER = 0.004

_GOLDEN_ANGLE = np.pi * (3.0 - np.sqrt(5.0))

_HOSTING_EVERY = 3  # every third system of a region hosts servers; the others connect people


@dataclass(frozen=True)
class Geography:
    """Arrays by region, city, system (AS) and point of presence (PoP: one system in one city).

    PoPs are ordered by region, then by city, so that those of a city and those of a region are each one range.
    """

    region_weight: Floats
    city_position: Floats  # [city, 3], unit vectors
    city_region: Ints
    system_region: Ints
    system_is_hosting: Ints
    pop_system: Ints
    pop_city: Ints
    access_weight: Floats  # by PoP: where hosts of access networks are; sums to 1
    hosting_weight: Floats  # by PoP: where hosts of hosting networks are; sums to 1


def build_geography(settings: SimulatorSettings) -> Geography:
    rng = generator(settings.seed, "geography")
    regions, cities, systems = settings.regions, settings.cities_per_region, settings.systems_per_region

    # An evenly covered sphere, rotated and disturbed at random: every seed has other places at comparable distances.
    rotation, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    centre = _on_sphere(_even_points(regions) @ rotation + _REGION_WANDER * rng.standard_normal((regions, 3)))
    city_region = np.repeat(np.arange(regions), cities)
    city_position = _cities_around(centre, cities, rng)

    region_weight = _zipf(regions, 0.5)
    city_weight = _zipf(cities, 0.6)
    system_size = _zipf(systems, 0.8)
    system_is_hosting = np.arange(systems) % _HOSTING_EVERY == _HOSTING_EVERY - 1

    # [region, city, system]: the larger a system, the more cities it is in; each has at least its home city.
    presence = rng.random((regions, cities, systems)) < np.sqrt(system_size / system_size.max())
    home = rng.integers(cities, size=(regions, systems))
    presence[np.arange(regions)[:, None], home, np.arange(systems)] = True
    pop_region, city_in_region, system_in_region = np.nonzero(presence)
    size = city_weight[city_in_region] * system_size[system_in_region]
    hosting = system_is_hosting[system_in_region]

    def weights(chosen: Bools) -> Floats:
        chosen = chosen if chosen.any() else ~chosen  # a world of one system makes do with it
        in_region = np.bincount(pop_region, size * chosen, regions)
        return np.asarray(region_weight[pop_region] * size * chosen / in_region[pop_region], np.float64)

    return Geography(
        region_weight=region_weight,
        city_position=city_position,
        city_region=city_region,
        system_region=np.repeat(np.arange(regions), systems),
        system_is_hosting=np.tile(system_is_hosting.astype(np.int64), regions),
        pop_system=pop_region * systems + system_in_region,
        pop_city=pop_region * cities + city_in_region,
        access_weight=weights(~hosting),
        hosting_weight=weights(hosting),
    )


def great_circle_km(one: Floats, other: Floats) -> Floats:
    half_chord = np.sqrt(((one - other) ** 2).sum(axis=1)) / 2.0
    return np.asarray(2.0 * EARTH_RADIUS_KM * np.arcsin(np.minimum(half_chord, 1.0)), np.float64)


def _cities_around(centre: Floats, cities: int, rng: np.random.Generator) -> Floats:
    """Cities in every direction from the centres, denser near the middle (uniform in the radius, not in the area),
    which makes short and long paths within a region about equally common."""
    regions = len(centre)
    _, _, axes = np.linalg.svd(centre[:, None, :])  # the centre, then two directions across it
    east, north = axes[:, 1, None, :], axes[:, 2, None, :]
    radius = _REGION_RADIUS * np.stack([spread_out(cities, 1, rng.random(1))[0] for _ in range(regions)])[..., None]
    angle = (2.0 * np.pi * rng.random((regions, 1)) + _GOLDEN_ANGLE * np.arange(cities))[..., None]
    position = centre[:, None, :] + radius * (np.cos(angle) * east + np.sin(angle) * north)
    position += _CITY_WANDER * rng.standard_normal(position.shape)
    return _on_sphere(position.reshape(-1, 3))


def _even_points(count: int) -> Floats:
    """The Fibonacci lattice on the unit sphere."""
    height = 1.0 - (2.0 * np.arange(count) + 1.0) / count
    angle = _GOLDEN_ANGLE * np.arange(count)
    radius = np.sqrt(1.0 - height**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)


def _on_sphere(points: Floats) -> Floats:
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True), np.float64)


def _zipf(count: int, exponent: float) -> Floats:
    weight = np.arange(1.0, count + 1) ** -exponent
    return np.asarray(weight / weight.sum(), np.float64)


# Hosts: sources (a probe's address) and targets, and what is true of each.

_PROBES_IN_HOSTING = 0.26
_TARGETS_IN_HOSTING = 0.85

# How far values scatter around their median (standard deviation of the logarithm), from system to host.
_ACCESS_SCATTER = {"system": 0.4, "pop": 0.2, "host": 0.4}
_QUEUE_SCATTER, _CONGESTION_SCATTER, _LOSS_SCATTER = 0.5, 1.0, 1.0

# Servers are better connected than homes.
_HOSTING_ACCESS, _HOSTING_QUEUE, _HOSTING_CONGESTION = 0.1, 0.15, 0.25

# Loss relative to a typical host: some probes are lossy, some targets hardly ever answer.
_LOSSY_PROBES, _LOSSY_HAZARD = 0.02, 40.0
_DEAD_TARGETS, _DEAD_HAZARD = 0.012, 300.0

_POPULARITY = 0.7  # Zipf exponent of the targets: a few are measured by everybody


@dataclass(frozen=True)
class Endpoints:
    """Arrays by endpoint, an address of one family. Sources come first, in descending order of their measurements;
    then IPv4 targets, then IPv6 targets, each ordered by region and city. A dual-stack host is two endpoints."""

    sources: int
    address: pa.StringArray
    family: npt.NDArray[np.int8]
    host: Ints
    pop: Ints
    position: Floats  # [endpoint, 3], unit vectors
    access_ms: Floats
    queue_ms: Floats
    congestion_ms: Floats
    hazard: Floats  # how readily packets get lost; relative, see World.loss_scale
    popularity: Floats  # of targets; 0 for sources


def build_endpoints(settings: SimulatorSettings, geography: Geography, source_sizes: Ints) -> Endpoints:
    rng = generator(settings.seed, "hosts")
    sources = len(source_sizes)
    targets = max(1, round(sources / settings.sources_per_target))

    # Hosts: one for each source (some are left without, see below), then the targets.
    systems = len(geography.system_region)
    probe_quantile, probe_access = spread_out(sources, 2, rng.random(2))
    target_quantile, target_access = spread_out(targets, 2, rng.random(2))
    probe_in_hosting = _share_of_weight(source_sizes, _PROBES_IN_HOSTING, rng)
    target_in_hosting = rng.random(targets) < _TARGETS_IN_HOSTING
    (system_access,) = spread_out(systems, 1, rng.random(1))
    probe_pop = _pick_pop(geography, probe_in_hosting, probe_quantile)
    pop = np.concatenate([probe_pop, np.sort(_pick_pop(geography, target_in_hosting, target_quantile))])
    city_position = geography.city_position[geography.pop_city[pop]]
    position = _on_sphere(city_position + _HOST_WANDER * rng.standard_normal(city_position.shape))
    system = geography.pop_system[pop]
    hosting = geography.system_is_hosting[system] == 1

    def scattered(sigma: float, count: int) -> Floats:
        return np.exp(sigma * rng.standard_normal(count))

    def if_hosting(factor: float) -> Floats:
        return np.where(hosting, factor, 1.0)

    access_ms = (
        settings.access_ms
        * if_hosting(_HOSTING_ACCESS)
        * _log_logistic(system_access, _ACCESS_SCATTER["system"])[system]
        * scattered(_ACCESS_SCATTER["pop"], len(geography.pop_city))[pop]
        * _log_logistic(np.concatenate([probe_access, target_access]), _ACCESS_SCATTER["host"])
    )
    queue_ms = settings.queue_ms * if_hosting(_HOSTING_QUEUE) * scattered(_QUEUE_SCATTER, len(pop))
    of_systems = scattered(_CONGESTION_SCATTER, systems)
    congestion_ms = settings.congestion_ms * if_hosting(_HOSTING_CONGESTION) * of_systems[system]
    hazard = scattered(_LOSS_SCATTER, len(pop))
    unlucky = rng.random(len(pop))
    hazard[:sources][unlucky[:sources] < _LOSSY_PROBES] += _LOSSY_HAZARD
    hazard[sources:][unlucky[sources:] < _DEAD_TARGETS] += _DEAD_HAZARD

    # Endpoints: sources share a host where a probe is dual-stack; every target has an IPv4 address, many an IPv6 one.
    is_ipv6 = _share_of_weight(source_sizes, settings.ipv6_share, rng)
    source_host = _dual_stack_hosts(is_ipv6, settings.dual_stack_share, rng)
    dual_stack = np.sort(rng.permutation(targets)[: max(1, round(settings.dual_stack_share * targets))])
    host = np.concatenate([source_host, sources + np.arange(targets), sources + dual_stack])
    family = np.concatenate([np.where(is_ipv6, 6, 4), np.full(targets, 4), np.full(len(dual_stack), 6)]).astype(np.int8)
    popularity = rng.permutation(np.arange(1.0, targets + 1) ** -_POPULARITY)

    return Endpoints(
        sources=sources,
        address=_addresses(settings.seed, geography, pop[host], family),
        family=family,
        host=host,
        pop=pop[host],
        position=position[host],
        access_ms=access_ms[host],
        queue_ms=queue_ms[host],
        congestion_ms=congestion_ms[host],
        hazard=hazard[host],
        popularity=np.concatenate([np.zeros(sources), popularity, popularity[dual_stack]]),
    )


def _addresses(seed: int, geography: Geography, pop: Ints, family: npt.NDArray[np.int8]) -> pa.StringArray:
    text = np.empty(len(pop), object)
    for version, addresses_of in ((4, _ipv4_addresses), (6, _ipv6_addresses)):
        packed, width = addresses_of(seed, geography, pop[family == version]), ADDRESS_BYTES[version]
        text[family == version] = [format_address(version, packed[i : i + width]) for i in range(0, len(packed), width)]
    return pa.array(text, pa.string())


def _pick_pop(geography: Geography, in_hosting: Bools, quantile: Floats) -> Ints:
    """A PoP of an access or a hosting network for every quantile of their weights."""
    access, hosting = (
        np.searchsorted(np.cumsum(weight)[:-1], quantile, side="right")
        for weight in (geography.access_weight, geography.hosting_weight)
    )
    return np.where(in_hosting, hosting, access)


def _log_logistic(quantile: Floats, sigma: float) -> Floats:
    """A distribution that is close to a log-normal one of this sigma, but has a closed form; trimmed at
    the ends, where it would be heavier."""
    quantile = 0.01 + 0.98 * quantile
    return np.asarray((quantile / (1.0 - quantile)) ** (sigma * np.sqrt(3.0) / np.pi), np.float64)


def _share_of_weight(weights: Ints, share: float, rng: np.random.Generator) -> Bools:
    """A random choice of items that hold `share` of the weight, although a single item may hold several per cent:
    whatever the larger items (they come first) leave uneven is made up for by the smaller ones."""
    chosen = np.empty(len(weights), bool)
    surplus = 0.0
    for index, (weight, chance) in enumerate(zip(weights.tolist(), rng.random(len(weights)).tolist(), strict=True)):
        chosen[index] = surplus < weight * (chance - 1.0 + share)
        surplus += weight * (float(chosen[index]) - share)
    return chosen


def _dual_stack_hosts(is_ipv6: Bools, share: float, rng: np.random.Generator) -> Ints:
    """The host of every source: its own, but a share of the IPv6 sources are on one host with an IPv4 source. Of the
    two hosts it is the busier source's, so that the busiest stay where they were spread out."""
    host = np.arange(len(is_ipv6))
    ipv4, ipv6 = rng.permutation(np.flatnonzero(~is_ipv6)), rng.permutation(np.flatnonzero(is_ipv6))
    shared = min(round(share * len(ipv6)), len(ipv4))
    host[np.maximum(ipv4[:shared], ipv6[:shared])] = np.minimum(ipv4[:shared], ipv6[:shared])
    return host


# Addresses that tell where a host is: region block > AS prefix > PoP prefix > host, in both families.
#
# IPv4   /8 region   /16 AS    /24 PoP    host 1-254    (a crowded level takes a shorter prefix, still aligned)
# IPv6   /16 region  /32 AS    /48 PoP    /64 subnet    random interface identifier

_HOSTS_PER_24 = 254
_SPECIAL_OCTETS = (0, 10, 100, 127, 169, 172, 192, 198, 203, *range(224, 256))
"""First octets that hold private, shared, loopback, documentation or multicast space."""

_HOST_STEP = 89  # coprime to 254·2^k, so that stepping by it visits every host number of a PoP once

_IPV6_REGIONS = range(0x2400, 0x2D00)
"""First 16 bits: inside the space that is handed out today, away from 6to4, Teredo and documentation."""


def _ipv4_addresses(seed: int, geography: Geography, pops: Ints) -> bytes:
    """One address for each entry of `pops`, the PoP of an IPv4 host.

    Sizes (in /24) are added up from PoPs to regions, blocks are handed down from regions to PoPs; inside a block the
    largest comes first, which keeps every block aligned to its size.
    """
    hosts = np.bincount(pops, minlength=len(geography.pop_city))
    pop_size = _power_of_two_above(-(-hosts // _HOSTS_PER_24))
    system_size = _power_of_two_above(np.bincount(geography.pop_system, pop_size, len(geography.system_region)), 256)
    used = np.bincount(geography.system_region, system_size, len(geography.region_weight))
    region_start = _region_octets(seed, _power_of_two_above(used, 65_536) // 65_536) * 65_536
    system_start = region_start[geography.system_region] + _packed(geography.system_region, system_size)
    start = system_start[geography.pop_system] + _packed(geography.pop_system, pop_size)

    number = (_number_within(pops) * _HOST_STEP + pops) % (_HOSTS_PER_24 * pop_size)[pops]
    value = start[pops] * 256 + number // _HOSTS_PER_24 * 256 + number % _HOSTS_PER_24 + 1
    return value.astype(">u4").tobytes()


def _ipv6_addresses(seed: int, geography: Geography, pops: Ints) -> bytes:
    """One address for each entry of `pops`, the PoP of an IPv6 host."""
    rng = generator(seed, "ipv6 addresses")
    region_block = rng.choice(np.array(_IPV6_REGIONS), size=len(geography.region_weight), replace=False)
    system_block = rng.permutation(0x10000)[_number_within(geography.system_region)]
    pop_block = _number_within(geography.pop_system)
    system = geography.pop_system[pops]
    groups = np.empty((len(pops), 8), ">u2")
    groups[:, 0] = region_block[geography.system_region[system]]
    groups[:, 1] = system_block[system]
    groups[:, 2] = pop_block[pops]
    groups[:, 3] = _number_within(pops) & 0xFFFF
    groups[:, 4:] = rng.integers(0x10000, size=(len(pops), 4))
    return groups.tobytes()


def _region_octets(seed: int, sizes: Ints) -> Ints:
    """The first octet of every region's block, at random among the aligned blocks that are free."""
    rng = generator(seed, "ipv4 addresses")
    free = np.ones(256, bool)
    free[list(_SPECIAL_OCTETS)] = False
    first = np.empty(len(sizes), np.int64)
    for region in np.argsort(-sizes, kind="stable"):
        size = int(sizes[region])
        blocks = np.flatnonzero(free.reshape(-1, size).all(axis=1)) if size <= 128 else np.empty(0, np.int64)
        if not len(blocks):
            raise PingLlmError("the simulated hosts do not fit into IPv4: ask for fewer measurements or regions")
        first[region] = size * rng.choice(blocks)
        free[first[region] : first[region] + size] = False
    return first


def _packed(group: Ints, size: Ints) -> Ints:
    """Offsets of items laid one after the other within their group, largest first."""
    order = np.lexsort((-size, group))
    end = np.cumsum(size[order])
    first_of_group = np.searchsorted(group[order], group[order])
    offset = np.empty(len(group), np.int64)
    offset[order] = end - size[order] - (end - size[order])[first_of_group]
    return offset


def _number_within(group: Ints) -> Ints:
    """0, 1, 2... for the items of each group, in their order."""
    return _packed(group, np.ones_like(group))


def _power_of_two_above(size: Ints | Floats, least: int = 1) -> Ints:
    return (2 ** np.ceil(np.log2(np.maximum(size, least)))).astype(np.int64)
