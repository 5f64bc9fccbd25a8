"""The addresses that take part: sources (a probe's address) and targets, and what is true of the hosts behind them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.sources.simulator.distribution import Floats, Ints, generator, spread_out
from ping_llm.sources.simulator.geography import Geography, ipv4_addresses, ipv6_addresses
from ping_llm.sources.simulator.settings import SimulatorSettings

_PROBES_IN_HOSTING = 0.26
_TARGETS_IN_HOSTING = 0.85

# How far values scatter around their median (standard deviation of the logarithm), from system to host.
_ACCESS_SCATTER = {"system": 0.4, "pop": 0.2, "host": 0.4}
_QUEUE_SCATTER = 0.5
_CONGESTION_SCATTER = 1.0
_LOSS_SCATTER = 1.0

# Servers are better connected than homes.
_HOSTING_ACCESS, _HOSTING_QUEUE, _HOSTING_CONGESTION = 0.1, 0.15, 0.25

# Loss relative to a typical host: some probes are lossy, some targets hardly ever answer.
_LOSSY_PROBES, _LOSSY_HAZARD = 0.02, 40.0
_DEAD_TARGETS, _DEAD_HAZARD = 0.012, 300.0

_POPULARITY = 0.7
"""Zipf exponent of the targets: a few are measured by everybody."""


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
    probe_place, probe_access = spread_out(sources, 2, rng.random(2))
    target_place, target_access = spread_out(targets, 2, rng.random(2))
    probe_in_hosting = _share_of_weight(source_sizes, _PROBES_IN_HOSTING, rng)
    target_in_hosting = rng.random(targets) < _TARGETS_IN_HOSTING
    (system_access,) = spread_out(systems, 1, rng.random(1))
    pop = np.concatenate(
        [
            _pick_pop(geography, probe_in_hosting, probe_place),
            np.sort(_pick_pop(geography, target_in_hosting, target_place)),
        ]
    )
    position = geography.scatter(pop, rng)
    system = geography.pop_system[pop]
    hosting = geography.system_is_hosting[system] == 1

    def scattered(sigma: float, count: int) -> Floats:
        return np.exp(sigma * rng.standard_normal(count))

    access_ms = (
        settings.access_ms
        * np.where(hosting, _HOSTING_ACCESS, 1.0)
        * _log_logistic(system_access, _ACCESS_SCATTER["system"])[system]
        * scattered(_ACCESS_SCATTER["pop"], len(geography.pop_city))[pop]
        * _log_logistic(np.concatenate([probe_access, target_access]), _ACCESS_SCATTER["host"])
    )
    queue_ms = settings.queue_ms * np.where(hosting, _HOSTING_QUEUE, 1.0) * scattered(_QUEUE_SCATTER, len(pop))
    congestion_ms = (
        settings.congestion_ms
        * np.where(hosting, _HOSTING_CONGESTION, 1.0)
        * scattered(_CONGESTION_SCATTER, systems)[system]
    )
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
    text[family == 4] = ipv4_addresses(seed, geography, pop[family == 4])
    text[family == 6] = ipv6_addresses(seed, geography, pop[family == 6])
    return pa.array(text, pa.string())


def _pick_pop(geography: Geography, in_hosting: npt.NDArray[np.bool_], place: Floats) -> Ints:
    """A PoP of the wanted kind of network for every place in [0, 1)."""
    access, hosting = (
        np.searchsorted(np.cumsum(weight)[:-1], place, side="right")
        for weight in (geography.access_weight, geography.hosting_weight)
    )
    return np.where(in_hosting, hosting, access)


def _log_logistic(place: Floats, sigma: float) -> Floats:
    """Quantiles of a distribution that is close to a log-normal one of this sigma, but has a closed form; trimmed at
    the ends, where it would be heavier."""
    place = 0.01 + 0.98 * place
    return np.asarray((place / (1.0 - place)) ** (sigma * np.sqrt(3.0) / np.pi), np.float64)


def _share_of_weight(weights: Ints, share: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A random choice of items that hold `share` of the weight, although a single item may hold several per cent:
    whatever the larger items (they come first) leave uneven is made up for by the smaller ones."""
    chosen = np.empty(len(weights), bool)
    surplus = 0.0
    for index, (weight, chance) in enumerate(zip(weights.tolist(), rng.random(len(weights)).tolist(), strict=True)):
        chosen[index] = surplus < weight * (chance - 1.0 + share)
        surplus += weight * (float(chosen[index]) - share)
    return chosen


def _dual_stack_hosts(is_ipv6: npt.NDArray[np.bool_], share: float, rng: np.random.Generator) -> Ints:
    """The host of every source: its own, but a share of the IPv6 sources are on one host with an IPv4 source. Of the
    two hosts it is the busier source's, so that the busiest stay where they were spread out."""
    host = np.arange(len(is_ipv6))
    ipv4, ipv6 = rng.permutation(np.flatnonzero(~is_ipv6)), rng.permutation(np.flatnonzero(is_ipv6))
    shared = min(round(share * len(ipv6)), len(ipv4))
    host[np.maximum(ipv4[:shared], ipv6[:shared])] = np.minimum(ipv4[:shared], ipv6[:shared])
    return host
