"""Who measures whom: hosts and their addresses, and streams of measurements from a source to a target."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import ADDRESS_BYTES, format_address
from ping_llm.core.rtt import Bools, Floats, Ints
from ping_llm.sources.simulator.geography import Columns, Geography, SimulatorSettings, generator, on_sphere, spread_out

# Hosts: sources (a probe's address) and targets, and what is true of each.

_HOST_WANDER = 0.004  # how far a host is from the middle of its city, as in `geography`
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
    position = on_sphere(city_position + _HOST_WANDER * rng.standard_normal(city_position.shape))
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


# Streams: a source measures one target at a steady interval for a while.

INTERVALS = ((10, 0.03), (30, 0.08), (60, 0.56), (120, 0.15), (180, 0.13), (300, 0.03), (600, 0.016), (1800, 0.004))
"""Seconds between two measurements of a stream, and the share of the measurements made at that interval."""

_INTERVAL_DRIFT_MS = 300  # no probe's clock is exact: at most this much is added to or taken from an interval, for good

_STREAMS_EXPONENT = 0.4
"""A source with n measurements has about n^0.4 streams: a few for most, hundreds for the largest."""

_SOURCE_WINDOW = 0.1
"""The streams of a source start within this part of the observed period, so that its history is of one piece."""

_JUST_BELOW_ONE = 1.0 - 1e-12
"""Keeps whole parts from adding up to more than the whole through rounding; what is missing is handed out after."""


@dataclass(frozen=True)
class Streams(Columns):
    """Arrays by stream, in the order in which they start. Measurement k of a stream is at start_ms + k·interval_ms."""

    source: npt.NDArray[np.int32]  # endpoint
    target: npt.NDArray[np.int32]  # endpoint
    count: npt.NDArray[np.int32]
    interval_ms: npt.NDArray[np.int32]
    start_ms: Ints  # since the start of the observed period

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def last_ms(self) -> Ints:
        return self.start_ms + (self.count - np.int64(1)) * self.interval_ms


def source_sizes(settings: SimulatorSettings) -> Ints:
    """Measurements of every source, the largest first: the quantiles of a Lomax distribution, made whole and exact."""
    sources = min(settings.sources, settings.measurements)
    survival = (np.arange(sources) + 0.5) / sources
    size = survival ** (-1.0 / settings.source_size_tail) - 1.0
    spare = settings.measurements - sources  # every source has one measurement at least
    whole = np.floor(size * (spare / size.sum()) * _JUST_BELOW_ONE).astype(np.int64)
    whole[: spare - int(whole.sum())] += 1
    return whole + 1


def build_streams(settings: SimulatorSettings, geography: Geography, endpoints: Endpoints, sizes: Ints) -> Streams:
    rng = generator(settings.seed, "streams")
    span_ms = settings.span_s * 1000
    source, count = _split(sizes, span_ms, rng)
    target = _choose_targets(settings, geography, endpoints, source, count, rng)
    # Where a source has fewer targets in reach than streams, the streams to one target become one.
    _, first, which = np.unique(_pair_key(source, target), return_index=True, return_inverse=True)
    source, target, count = source[first], target[first], np.bincount(which, count).astype(np.int64)

    interval_ms = _values_by_weight(count, INTERVALS, rng) * 1000
    interval_ms += rng.integers(-_INTERVAL_DRIFT_MS, _INTERVAL_DRIFT_MS + 1, len(count))
    interval_ms = np.minimum(interval_ms, span_ms // count)
    if interval_ms.min() < 1:
        raise PingLlmError("so many measurements of one pair do not fit into the period: ask for more days or targets")
    begin = (1.0 - _SOURCE_WINDOW) * rng.random(len(sizes))[source] + _SOURCE_WINDOW * rng.random(len(count))
    start_ms = np.floor(begin * (span_ms - (count - 1) * interval_ms)).astype(np.int64)

    order = np.argsort(start_ms, kind="stable")
    return Streams(
        source=source[order].astype(np.int32),
        target=target[order].astype(np.int32),
        count=count[order].astype(np.int32),
        interval_ms=interval_ms[order].astype(np.int32),
        start_ms=start_ms[order],
    )


def _split(sizes: Ints, span_ms: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """The measurements of every source over its streams: (source, count) by stream."""
    usual = np.rint(sizes**_STREAMS_EXPONENT * rng.uniform(0.5, 1.5, len(sizes))).astype(np.int64)
    needed = -(-sizes * 60_000 * 2 // span_ms)  # at a minute's interval a stream fills half of the period at most
    streams = np.clip(np.maximum(usual, needed), 1, sizes)
    source = np.repeat(np.arange(len(sizes)), streams)
    first = np.cumsum(streams) - streams
    part = 0.2 + rng.standard_exponential(len(source))
    part /= np.add.reduceat(part, first)[source]
    count = 1 + np.floor(part * (sizes - streams)[source] * _JUST_BELOW_ONE).astype(np.int64)
    left = sizes - np.add.reduceat(count, first)
    count += np.arange(len(source)) - first[source] < left[source]
    return source, count


def _choose_targets(
    settings: SimulatorSettings,
    geography: Geography,
    endpoints: Endpoints,
    source: Ints,
    count: Ints,
    rng: np.random.Generator,
) -> Ints:
    """A target of the source's family for every stream: in its city, in its region, or in another region."""
    local, regional = settings.local_share, settings.regional_share
    reach = _values_by_weight(count, ((0, local), (1, regional), (2, 1 - local - regional)), rng)
    target = np.full(len(source), -1, np.int64)
    city = geography.pop_city[endpoints.pop]
    region = geography.city_region[city]
    for family in (4, 6):
        candidates = endpoints.sources + np.flatnonzero(endpoints.family[endpoints.sources :] == family)
        # Targets are ordered by region and city, so that each city and each region is one range of popularity.
        cumulative = np.concatenate([[0.0], np.cumsum(endpoints.popularity[candidates])])
        by_city = cumulative[np.searchsorted(city[candidates], np.arange(len(geography.city_region) + 1))]
        by_region = cumulative[np.searchsorted(region[candidates], np.arange(len(geography.region_weight) + 1))]
        waiting = np.flatnonzero(endpoints.family[source] == family)
        for _ in range(12):  # a source measures a target in one stream only: choose again where it came up twice
            if not len(waiting):
                break
            home, area = city[source[waiting]], region[source[waiting]]
            bounds = np.stack([by_city[home], by_city[home + 1], by_region[area], by_region[area + 1]])
            target[waiting] = candidates[_choose(cumulative, bounds, reach[waiting], rng)]
            waiting = _repeated(source, target, waiting)
    return target


def _choose(cumulative: Floats, bounds: Floats, reach: Ints, rng: np.random.Generator) -> Ints:
    """Random targets by popularity: in the city (reach 0), in the region (1) or elsewhere (2), of which the first two
    are ranges of the cumulative popularity."""
    within, elsewhere = rng.random((2, len(reach)))
    city_low, city_high, region_low, region_high = bounds
    total = cumulative[-1]
    local = (reach == 0) & (city_high > city_low)
    low, high = np.where(local, city_low, region_low), np.where(local, city_high, region_high)
    # Elsewhere is what remains on both sides of the region. A region without targets measures the whole world.
    remote = ((reach == 2) & (total > region_high - region_low)) | (region_high == region_low)
    elsewhere *= total - (region_high - region_low)
    elsewhere += np.where(elsewhere >= region_low, region_high - region_low, 0.0)
    at = np.where(remote, elsewhere, low + within * (high - low))
    return np.clip(np.searchsorted(cumulative, at, side="right") - 1, 0, len(cumulative) - 2)


def _repeated(source: Ints, target: Ints, among: Ints) -> Ints:
    """Those of `among` whose (source, target) pair occurs in an earlier stream too."""
    concerned = np.zeros(int(source.max()) + 1, bool)
    concerned[source[among]] = True
    streams = np.flatnonzero(concerned[source])
    _, first = np.unique(_pair_key(source[streams], target[streams]), return_index=True)
    repeated = np.ones(len(source), bool)
    repeated[streams[first]] = False
    return among[repeated[among]]


def _pair_key(source: Ints, target: Ints) -> Ints:
    return source * (target.max() + 1) + target


def _values_by_weight(weight: Ints, shares: tuple[tuple[int, float], ...], rng: np.random.Generator) -> Ints:
    """One of the values for every item, at random, such that the items of a value hold its share of the weight."""
    order = rng.permutation(len(weight))
    end = np.cumsum(weight[order])
    middle = (end - weight[order] / 2.0) / end[-1]
    bounds = np.cumsum([share for _, share in shares])
    which = np.minimum(np.searchsorted(bounds / bounds[-1], middle, side="right"), len(shares) - 1)
    values = np.empty(len(weight), np.int64)
    values[order] = np.array([value for value, _ in shares])[which]
    return values
