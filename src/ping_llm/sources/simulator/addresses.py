"""Addresses that tell where a host is: region block > AS prefix > PoP prefix > host, in both families.

IPv4   /8 region   /16 AS    /24 PoP    host 1-254    (a crowded level takes a shorter prefix, still aligned)
IPv6   /16 region  /32 AS    /48 PoP    /64 subnet    random interface identifier
"""

import socket

import numpy as np

from ping_llm.errors import PingLlmError
from ping_llm.sources.simulator.geography import Geography
from ping_llm.sources.simulator.randomness import Floats, Ints, generator

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
