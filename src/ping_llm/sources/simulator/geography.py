"""Where networks are: regions on a sphere, their cities, and the points of presence of their autonomous systems."""

import socket
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ping_llm.core.errors import PingLlmError
from ping_llm.sources.simulator.distribution import Floats, Ints, generator, spread_out
from ping_llm.sources.simulator.settings import SimulatorSettings

EARTH_RADIUS_KM = 6371.0

# In units of the Earth's radius: how far cities lie from the centre of their region at most, and how far regions,
# cities and hosts are moved at random (standard deviation).
_REGION_RADIUS = 0.42
_REGION_WANDER = 0.05
_CITY_WANDER = 0.035
_HOST_WANDER = 0.004

_GOLDEN_TURN = np.pi * (3.0 - np.sqrt(5.0))

_HOSTING_EVERY = 3
"""Every third system of a region hosts servers; the others connect people."""


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

    @property
    def pop_region(self) -> Ints:
        return self.city_region[self.pop_city]

    def scatter(self, pops: Ints, rng: np.random.Generator) -> Floats:
        """Positions of hosts around the cities of their PoPs."""
        return _on_sphere(self.city_position[self.pop_city[pops]] + _HOST_WANDER * rng.standard_normal((len(pops), 3)))


def build_geography(settings: SimulatorSettings) -> Geography:
    rng = generator(settings.seed, "geography")
    regions, cities, systems = settings.regions, settings.cities_per_region, settings.systems_per_region

    # An evenly covered sphere, turned at random and disturbed: every seed has other places at comparable distances.
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    centre = _on_sphere(_even_points(regions) @ turn + _REGION_WANDER * rng.standard_normal((regions, 3)))
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

    def weights(chosen: npt.NDArray[np.bool_]) -> Floats:
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
    which makes short and long ways within a region about equally common."""
    regions = len(centre)
    _, _, axes = np.linalg.svd(centre[:, None, :])  # the centre, then two directions across it
    east, north = axes[:, 1, None, :], axes[:, 2, None, :]
    radius = _REGION_RADIUS * np.stack([spread_out(cities, 1, rng.random(1))[0] for _ in range(regions)])[..., None]
    turn = (2.0 * np.pi * rng.random((regions, 1)) + _GOLDEN_TURN * np.arange(cities))[..., None]
    place = centre[:, None, :] + radius * (np.cos(turn) * east + np.sin(turn) * north)
    place += _CITY_WANDER * rng.standard_normal(place.shape)
    return _on_sphere(place.reshape(-1, 3))


def _even_points(count: int) -> Floats:
    """The Fibonacci lattice on the unit sphere."""
    height = 1.0 - (2.0 * np.arange(count) + 1.0) / count
    turn = _GOLDEN_TURN * np.arange(count)
    radius = np.sqrt(1.0 - height**2)
    return np.stack([radius * np.cos(turn), radius * np.sin(turn), height], axis=1)


def _on_sphere(points: Floats) -> Floats:
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True), np.float64)


def _zipf(count: int, exponent: float) -> Floats:
    weight = np.arange(1.0, count + 1) ** -exponent
    return np.asarray(weight / weight.sum(), np.float64)


# Addresses that tell where a host is: region block > AS prefix > PoP prefix > host, in both families.
#
# IPv4   /8 region   /16 AS    /24 PoP    host 1-254    (a crowded level takes a shorter prefix, still aligned)
# IPv6   /16 region  /32 AS    /48 PoP    /64 subnet    random interface identifier

_HOSTS_PER_24 = 254
_SPECIAL_OCTETS = (0, 10, 100, 127, 169, 172, 192, 198, 203, *range(224, 256))
"""First octets that hold private, shared, loopback, documentation or multicast space."""

_HOST_STEP = 89
"""Coprime to 254·2^k, so that stepping by it visits every host number of a PoP once."""

_IPV6_REGIONS = range(0x2400, 0x2D00)
"""First 16 bits: inside the space that is handed out today, away from 6to4, Teredo and documentation."""


def ipv4_addresses(seed: int, geography: Geography, pops: Ints) -> list[str]:
    """One address for each entry of `pops`, the PoP of an IPv4 host."""
    start = _ipv4_pop_starts(seed, geography, np.bincount(pops, minlength=len(geography.pop_city)))
    room = _HOSTS_PER_24 * _power_of_two_above(-(-np.bincount(pops, minlength=len(start)) // _HOSTS_PER_24))
    number = (_number_within(pops) * _HOST_STEP + pops) % room[pops]
    value = start[pops] * 256 + number // _HOSTS_PER_24 * 256 + number % _HOSTS_PER_24 + 1
    octets = value.astype(">u4").tobytes()
    return [socket.inet_ntop(socket.AF_INET, octets[i : i + 4]) for i in range(0, len(octets), 4)]


def ipv6_addresses(seed: int, geography: Geography, pops: Ints) -> list[str]:
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
    octets = groups.tobytes()
    return [socket.inet_ntop(socket.AF_INET6, octets[i : i + 16]) for i in range(0, len(octets), 16)]


def _ipv4_pop_starts(seed: int, geography: Geography, hosts: Ints) -> Ints:
    """The first /24 of every PoP. Sizes are added up from PoPs to regions, places are handed down from regions to PoPs;
    inside a block the largest comes first, which keeps every block aligned to its size."""
    pop_size = _power_of_two_above(-(-hosts // _HOSTS_PER_24))
    system_size = _power_of_two_above(np.bincount(geography.pop_system, pop_size, len(geography.system_region)), 256)
    used = np.bincount(geography.system_region, system_size, len(geography.region_weight))
    region_size = _power_of_two_above(used, 65_536)

    region_start = _region_octets(seed, region_size // 65_536) * 65_536
    system_start = region_start[geography.system_region] + _packed(geography.system_region, system_size)
    return np.asarray(system_start[geography.pop_system] + _packed(geography.pop_system, pop_size), np.int64)


def _region_octets(seed: int, sizes: Ints) -> Ints:
    """The first octet of every region's block, at random among the aligned places that are free."""
    rng = generator(seed, "ipv4 addresses")
    free = np.ones(256, bool)
    free[list(_SPECIAL_OCTETS)] = False
    first = np.empty(len(sizes), np.int64)
    for region in np.argsort(-sizes, kind="stable"):
        size = int(sizes[region])
        places = np.flatnonzero(free.reshape(-1, size).all(axis=1)) if size <= 128 else np.empty(0, np.int64)
        if not len(places):
            raise PingLlmError("the simulated hosts do not fit into IPv4: ask for fewer measurements or regions")
        first[region] = size * rng.choice(places)
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
    order = np.argsort(group, kind="stable")
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.searchsorted(group[order], group[order])
    return number


def _power_of_two_above(size: Ints | Floats, least: int = 1) -> Ints:
    return (2 ** np.ceil(np.log2(np.maximum(size, least)))).astype(np.int64)
