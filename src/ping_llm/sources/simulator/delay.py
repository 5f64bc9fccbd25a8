"""What a measurement between two endpoints takes: the parts that do not change, and those that change with time.

floor = propagation · (1 + detour of the current route) + access of both ends + evening congestion of both ends
RTT   = floor + queueing, where queueing is ordinary, sometimes busy, rarely a spike
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from ping_llm.core.randomness import Words, uniform
from ping_llm.sources.simulator.distribution import Distribution, Floats, Ints, mixed, normal, salt
from ping_llm.sources.simulator.endpoints import Endpoints
from ping_llm.sources.simulator.geography import Geography, great_circle_km
from ping_llm.sources.simulator.settings import SimulatorSettings

FIBRE_KM_PER_MS = 200.0
DAY_S = 86_400.0
PEAK_HOUR = 20.5

# How much the stretch of a path scatters (standard deviation of the logarithm): by pair of regions (cables, and hubs
# that traffic has to pass), by pair of systems (who peers with whom), and what IPv6 adds to the latter.
_REGION_PAIR_SCATTER = 0.04
_SYSTEM_PAIR_SCATTER = 0.07
_IPV6_SCATTER = 0.05
_LEAST_STRETCH = 1.05

_MEAN_DETOUR_KM = 60.0
"""Two systems rarely meet at the doorstep: what the way to their exchange adds whatever the distance."""

# Routes: a pair of systems chooses again about once a period, which is log-uniform between these.
_ROUTE_PERIOD_S = (6 * 3600.0, 8 * DAY_S)
_ROUTE_CHANGE_SCATTER = 0.8  # of a period
_REROUTE_STRETCH = (0.03, 0.3)  # least and most that a longer route adds to the propagation
_REROUTE_MS = 4.0  # and at most, whatever the distance

_CONGESTED_QUEUE = 0.4
"""Queueing, relative to the delay that congestion adds."""

_CALM_SIGMA, _BUSY_SIGMA, _SPIKE_SIGMA = 0.5, 0.8, 0.9
_BUSY_QUEUE = 6.0
"""Median of a busy queue, relative to an ordinary one."""


@dataclass(frozen=True)
class Paths:
    """Arrays by path, a pair of endpoints: everything about it that does not depend on time."""

    propagation_ms: Floats
    access_ms: Floats
    queue_ms: Floats
    hazard: Floats
    source_congestion_ms: Floats
    target_congestion_ms: Floats
    source_day: Floats  # local time minus UTC, in days
    target_day: Floats
    route_key: Words
    route_period_s: Floats

    def take(self, index: Ints) -> "Paths":
        return Paths(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class DelayModel:
    """Symmetric: A to B and B to A have the same distribution at the same time."""

    settings: SimulatorSettings
    geography: Geography
    endpoints: Endpoints

    def paths(self, source: Ints, target: Ints) -> Paths:
        ends, places = self.endpoints, self.geography
        source_pop, target_pop = ends.pop[source], ends.pop[target]
        systems = _pair(places.pop_system[source_pop], places.pop_system[target_pop], len(places.system_region))
        regions = _pair(places.pop_region[source_pop], places.pop_region[target_pop], len(places.region_weight))
        by_regions = mixed(salt(self.settings.seed, "region pair"), regions)
        by_systems = mixed(salt(self.settings.seed, "system pair"), systems)
        by_route = mixed(by_systems, ends.family[source].astype(np.uint64))  # IPv4 and IPv6 reroute on their own

        stretch = self.settings.inflation * np.exp(
            _REGION_PAIR_SCATTER * normal(by_regions)
            + _SYSTEM_PAIR_SCATTER * normal(by_systems)
            + _IPV6_SCATTER * normal(by_route) * (ends.family[source] == 6)
        )
        way_km = great_circle_km(ends.position[source], ends.position[target]) * np.maximum(stretch, _LEAST_STRETCH)
        detour_km = -_MEAN_DETOUR_KM * np.log1p(-uniform(mixed(by_systems, np.uint64(3))))
        shortest, longest = _ROUTE_PERIOD_S
        return Paths(
            propagation_ms=2.0 * (way_km + detour_km) / FIBRE_KM_PER_MS,
            access_ms=ends.access_ms[source] + ends.access_ms[target],
            queue_ms=ends.queue_ms[source] + ends.queue_ms[target],
            hazard=ends.hazard[source] + ends.hazard[target],
            source_congestion_ms=ends.congestion_ms[source],
            target_congestion_ms=ends.congestion_ms[target],
            source_day=self._local_day(source_pop),
            target_day=self._local_day(target_pop),
            route_key=mixed(by_route, np.uint64(4)),
            route_period_s=shortest * (longest / shortest) ** uniform(mixed(by_route, np.uint64(5))),
        )

    def distribution(self, paths: Paths, time_s: Floats, loss_scale: float) -> Distribution:
        """`time_s` in Unix seconds, one for each path."""
        settings = self.settings
        source_load = _load(time_s, paths.source_day)
        target_load = _load(time_s, paths.target_day)
        load = source_load + target_load
        congestion_ms = paths.source_congestion_ms * source_load + paths.target_congestion_ms * target_load
        log_queue = np.log(paths.queue_ms + _CONGESTED_QUEUE * congestion_ms)
        busy = settings.busy_share * (0.5 + 0.5 * load)
        spike = np.full(len(busy), settings.spike_share)
        return Distribution(
            failed_probability=-np.expm1(-loss_scale * _loss_hazard(paths.hazard, load)),
            floor_ms=paths.propagation_ms + self._reroute_ms(paths, time_s) + paths.access_ms + congestion_ms,
            weight=(1.0 - busy - spike, busy, spike),
            log_median=(log_queue, log_queue + np.log(_BUSY_QUEUE), np.full(len(busy), np.log(settings.spike_ms))),
            sigma=(_CALM_SIGMA, _BUSY_SIGMA, _SPIKE_SIGMA),
        )

    def hazard(self, paths: Paths, time_s: Floats) -> Floats:
        """What the loss scale multiplies."""
        return _loss_hazard(paths.hazard, _load(time_s, paths.source_day) + _load(time_s, paths.target_day))

    def _reroute_ms(self, paths: Paths, time_s: Floats) -> Floats:
        """0 on the usual route. Which route a pair of systems uses is a function of the number of its last change."""
        share = self.settings.reroute_share
        if share == 0.0:
            return np.zeros(len(time_s))
        position = time_s / paths.route_period_s
        number = np.floor(position)
        change = number.astype(np.int64).view(np.uint64)
        # Change `number` happens a random part into the period; before that, the previous one still holds.
        wait = _ROUTE_CHANGE_SCATTER * uniform(mixed(paths.route_key, change))
        change -= (position - number < wait).astype(np.uint64)
        choice = uniform(mixed(mixed(paths.route_key, change), np.uint64(6)))
        least, most = _REROUTE_STRETCH
        extent = choice / share  # uniform in [0, 1) on the longer routes
        longer = paths.propagation_ms * (least + (most - least) * extent) + _REROUTE_MS * extent
        return np.where(choice < share, longer, 0.0)

    def _local_day(self, pop: Ints) -> Floats:
        position = self.geography.city_position[self.geography.pop_city[pop]]
        return np.arctan2(position[:, 1], position[:, 0]) / (2.0 * np.pi)


def _loss_hazard(hazard: Floats, load: Floats) -> Floats:
    return hazard * (0.5 + 0.5 * load)


def _load(time_s: Floats, local_day: Floats) -> Floats:
    """How busy a place is, between 0 (early morning) and 1 (evening peak)."""
    phase = time_s / DAY_S + (local_day - PEAK_HOUR / 24.0)
    return np.asarray((0.5 + 0.5 * np.cos(2.0 * np.pi * phase)) ** 2, np.float64)


def _pair(one: Ints, other: Ints, count: int) -> Words:
    """The same number for (a, b) and (b, a)."""
    return (np.minimum(one, other) * count + np.maximum(one, other)).astype(np.uint64)
