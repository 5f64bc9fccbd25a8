"""Who measures whom, when: streams, each a source that measures one target at a steady interval for a while."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats, Ints
from ping_llm.sources.simulator.settings import SimulatorSettings
from ping_llm.sources.simulator.topology import Columns, Endpoints, Geography, generator

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

    interval_ms = _shares_of_weight(count, INTERVALS, rng) * 1000
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
    reach = _shares_of_weight(count, ((0, local), (1, regional), (2, 1 - local - regional)), rng)
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


def _shares_of_weight(weight: Ints, shares: tuple[tuple[int, float], ...], rng: np.random.Generator) -> Ints:
    """One of the values for every item, at random, such that the items of a value hold its share of the weight."""
    order = rng.permutation(len(weight))
    end = np.cumsum(weight[order])
    middle = (end - weight[order] / 2.0) / end[-1]
    bounds = np.cumsum([share for _, share in shares])
    which = np.minimum(np.searchsorted(bounds / bounds[-1], middle, side="right"), len(shares) - 1)
    values = np.empty(len(weight), np.int64)
    values[order] = np.array([value for value, _ in shares])[which]
    return values
