"""What a measurement between two endpoints takes: what does not change, what changes with time, and chance.

floor = propagation · (1 + detour of the current route) + access of both ends + evening congestion of both ends
RTT   = floor + queueing, where queueing is ordinary, sometimes busy, rarely a spike
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.special import ndtr  # type: ignore[import-untyped]

from ping_llm.core.randomness import GOLDEN, Words, mix64, uniform
from ping_llm.core.rtt import Floats, Ints, RttDistribution
from ping_llm.sources.simulator.geography import Columns, Geography, SimulatorSettings, great_circle_km, key_words
from ping_llm.sources.simulator.hosts import Endpoints


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DelayDistribution(RttDistribution):
    """What is true of n measurements before they are made: a mixture of log-normal delays above a floor."""

    floor_ms: Floats  # [n]
    weight: Floats  # [n, components], adds up to 1
    log_median: Floats  # [n, components]: ln of the median delay above the floor, in ms
    sigma: tuple[float, ...]  # of each component's logarithm

    _SHARED: ClassVar = frozenset({"sigma"})

    def _cdf(self, rtt_ms: Floats) -> Floats:
        return self._cdf_above(self._log_above_floor(rtt_ms))

    def _quantile(self, level: Floats) -> Floats:
        """By bisection to the precision of a float."""
        reach = 9.0 * max(self.sigma)  # beyond nine standard deviations a float holds no probability
        low = np.broadcast_to(self.log_median.min(axis=1, keepdims=True) - reach, level.shape)
        high = np.broadcast_to(self.log_median.max(axis=1, keepdims=True) + reach, level.shape)
        for _ in range(52):
            middle = (low + high) / 2.0
            below = self._cdf_above(middle) < level
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        floor = self.floor_ms[:, None]
        found = floor + np.exp((low + high) / 2.0)
        return np.where(level == 0, floor, np.where(level == 1, np.inf, found))

    @property
    def mean(self) -> Floats:
        return sum((w * np.exp(m + s**2 / 2.0) for w, m, s in self._components()), self.floor_ms[:, None])[:, 0]

    def log_pdf(self, rtt_ms: Any) -> Floats:
        """Natural logarithm of the density per millisecond, at one RTT or one for each; -inf at or below the floor."""
        log_above = self._log_above_floor(self._column(rtt_ms))
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [
                np.log(w) - 0.5 * ((log_above - m) / s) ** 2 - np.log(s * np.sqrt(2.0 * np.pi)) - log_above
                for w, m, s in self._components()
            ]
            return np.where(np.isneginf(log_above), -np.inf, np.logaddexp.reduce(logs))[:, 0]

    def draw(self, rng: np.random.Generator) -> Floats:
        """An outcome for each of the n measurements: an RTT, or NaN where it failed."""
        chance = rng.random(len(self))
        failed = chance < self.p_failed
        # Given that it did not fail, what is left of the chance is uniform again: it chooses the component.
        with np.errstate(divide="ignore"):  # the probability may be 1
            chance = (chance - self.p_failed) / (1.0 - self.p_failed)
        which = (chance[:, None] >= np.cumsum(self.weight, axis=1)[:, :-1]).sum(axis=1)
        log_median, sigma = self.log_median[np.arange(len(self)), which], np.array(self.sigma)[which]
        rtt = self.floor_ms + np.exp(log_median + sigma * rng.standard_normal(len(self)))
        return np.where(failed, np.nan, rtt)

    def _components(self) -> Iterator[tuple[Floats, Floats, float]]:
        return zip(self.weight.T[..., None], self.log_median.T[..., None], self.sigma, strict=True)

    def _cdf_above(self, log_above: Floats) -> Floats:
        """P(ln(RTT - floor) <= log_above)."""
        return sum((w * ndtr((log_above - m) / s) for w, m, s in self._components()), np.zeros(()))

    def _log_above_floor(self, rtt_ms: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.maximum(rtt_ms - self.floor_ms[:, None], 0.0)), np.float64)


# Random words of pairs, and the numbers they stand for.


def mixed(word: Words | np.uint64, value: Words | np.uint64) -> Words:
    """Folds a value into a word with splitmix64."""
    with np.errstate(over="ignore"):
        return np.asarray(mix64(value * GOLDEN + word), np.uint64)


def normal(words: Words) -> Floats:
    """Standard normal, by Box and Muller from two words derived from each one."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(mixed(words, np.uint64(1)))))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(mixed(words, np.uint64(2)))), np.float64)


# The delay model.

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
"""Two systems rarely meet at the doorstep: what the path to their exchange adds whatever the distance."""

# Routes: a pair of systems chooses again about once a period, which is log-uniform between these.
_ROUTE_PERIOD_S = (6 * 3600.0, 8 * DAY_S)
_ROUTE_CHANGE_SCATTER = 0.8  # of a period
_REROUTE_STRETCH = (0.03, 0.3)  # least and most that a longer route adds to the propagation
_REROUTE_MS = 4.0  # and at most, whatever the distance

_CONGESTED_QUEUE = 0.4  # queueing, relative to the delay that congestion adds

_CALM_SIGMA, _BUSY_SIGMA, _SPIKE_SIGMA = 0.5, 0.8, 0.9
_BUSY_QUEUE = 6.0  # median of a busy queue, relative to an ordinary one


@dataclass(frozen=True)
class Paths(Columns):
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

    def loss_hazard(self, load: Floats) -> Floats:
        """What the loss scale multiplies, at this load of both ends together."""
        return self.hazard * (0.5 + 0.5 * load)


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
        source_region, target_region = (places.city_region[places.pop_city[pop]] for pop in (source_pop, target_pop))
        regions = _pair(source_region, target_region, len(places.region_weight))
        by_regions = mixed(key_words(self.settings.seed, "region pair")[0], regions)
        by_systems = mixed(key_words(self.settings.seed, "system pair")[0], systems)
        by_route = mixed(by_systems, ends.family[source].astype(np.uint64))  # IPv4 and IPv6 reroute on their own

        stretch = self.settings.inflation * np.exp(
            _REGION_PAIR_SCATTER * normal(by_regions)
            + _SYSTEM_PAIR_SCATTER * normal(by_systems)
            + _IPV6_SCATTER * normal(by_route) * (ends.family[source] == 6)
        )
        path_km = great_circle_km(ends.position[source], ends.position[target]) * np.maximum(stretch, _LEAST_STRETCH)
        detour_km = -_MEAN_DETOUR_KM * np.log1p(-uniform(mixed(by_systems, np.uint64(3))))
        shortest, longest = _ROUTE_PERIOD_S
        return Paths(
            propagation_ms=2.0 * (path_km + detour_km) / FIBRE_KM_PER_MS,
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

    def distribution(self, paths: Paths, time_s: Floats, loss_scale: float) -> DelayDistribution:
        """`time_s` in Unix seconds, one for each path."""
        settings = self.settings
        source_load, target_load = load_at(time_s, paths.source_day), load_at(time_s, paths.target_day)
        load = source_load + target_load
        congestion_ms = paths.source_congestion_ms * source_load + paths.target_congestion_ms * target_load
        log_queue = np.log(paths.queue_ms + _CONGESTED_QUEUE * congestion_ms)
        busy = settings.busy_share * (0.5 + 0.5 * load)
        spike, log_spike = np.full(len(busy), settings.spike_share), np.log(settings.spike_ms)
        return DelayDistribution(
            p_failed=-np.expm1(-loss_scale * paths.loss_hazard(load)),
            floor_ms=paths.propagation_ms + self._reroute_ms(paths, time_s) + paths.access_ms + congestion_ms,
            weight=np.stack([1.0 - busy - spike, busy, spike]).T,
            log_median=np.stack([log_queue, log_queue + np.log(_BUSY_QUEUE), np.full(len(busy), log_spike)]).T,
            sigma=(_CALM_SIGMA, _BUSY_SIGMA, _SPIKE_SIGMA),
        )

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


def load_at(time_s: Floats, local_day: Floats) -> Floats:
    """How busy a place is, between 0 (early morning) and 1 (evening peak)."""
    phase = time_s / DAY_S + (local_day - PEAK_HOUR / 24.0)
    return np.asarray((0.5 + 0.5 * np.cos(2.0 * np.pi * phase)) ** 2, np.float64)


def _pair(one: Ints, other: Ints, count: int) -> Words:
    """The same number for (a, b) and (b, a)."""
    return (np.minimum(one, other) * count + np.maximum(one, other)).astype(np.uint64)
