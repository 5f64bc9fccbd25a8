"""What a simulated Internet is made from: its settings, its random numbers, and where its networks are.

The same settings always give the same Internet and the same measurements. Random numbers are looked up, not consumed:
each is a function of the seed, a purpose and an index. Nothing depends on what was drawn before, so any part of a world
or of its measurements can be made on its own.
"""

import hashlib
import math
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import model_validator

from ping_llm.config.keys import Rule, Section, above, at_least
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Words
from ping_llm.core.rtt import Bools, Floats, Ints


def _unix_seconds(start: str | int) -> int | None:
    if isinstance(start, int):
        return start
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        return None
    return math.floor((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


Count = Annotated[int, at_least(1)]
Positive = Annotated[int | float, above(0)]
Share = Annotated[int | float, at_least(0, up_to=1)]
SmallShare = Annotated[int | float, at_least(0, up_to=0.25)]
Time = Annotated[str | int, Rule("an ISO 8601 time or Unix seconds", lambda start: _unix_seconds(start) is not None)]


class SimulatorSettings(Section):
    """The defaults are calibrated against a real RIPE Atlas extract (docs/simulator.md shows both)."""

    noun: ClassVar[str] = "simulator setting"
    max_digits: ClassVar[int] = 100  # of a seed

    seed: int = 0  # another seed is another Internet: other places, networks, addresses, routes and schedules

    # What is measured, and how often.
    measurements: Count = 1_000_000
    start: Time = "2025-01-01T00:00:00Z"
    """First second of the observed period: ISO 8601 (UTC unless it says otherwise) or Unix seconds."""
    days: Positive = 7.0
    """Length of the observed period. It does not depend on `measurements`: more measurements are more sources."""
    measurements_per_source: Annotated[int | float, at_least(1)] = 118.0
    """The mean. The median source has about a quarter of it."""
    source_size_tail: Annotated[int | float, above(1)] = 1.5
    """Tail exponent of the measurements per source (Lomax); smaller is heavier."""
    ipv6_share: Share = 0.423  # share of the measurements, not of the sources
    dual_stack_share: Share = 0.7
    """Share of the IPv6 probes (and of all targets) that also have an address of the other family."""
    sources_per_target: Positive = 4.0

    # Where things are.
    regions: Annotated[int, at_least(1, up_to=128)] = 8  # each needs an IPv4 /8
    cities_per_region: Count = 24
    systems_per_region: Count = 40  # autonomous systems; each has points of presence in some of its region's cities
    local_share: Share = 0.15
    """Share of the measurements whose target is in the source's own city (where that city has one)."""
    regional_share: Share = 0.583
    """Share whose target is anywhere in the source's region. The rest go to other regions."""

    # What an answer takes.
    inflation: Positive = 1.76  # median length of a path relative to the great circle
    access_ms: Positive = 8.2
    """Median delay of the last mile of a probe in an access network; hosting networks take a tenth of it."""
    queue_ms: Positive = 0.9  # median of what a probe's own queue adds to an ordinary measurement
    congestion_ms: Annotated[int | float, at_least(0)] = 0.8
    """Median over access networks of the delay added at the evening peak."""
    reroute_share: Share = 0.12  # share of the time that a path spends on a longer route than its usual one
    busy_share: SmallShare = 0.05  # share of the measurements that meet a queue several times the ordinary one
    spike_share: SmallShare = 0.0032
    """Share of the measurements that are delayed by something unrelated to the network's load."""
    spike_ms: Positive = 710.0  # median delay of such a spike
    failed_share: Annotated[int | float, at_least(0, up_to=0.9)] = 0.035  # share of the measurements without an answer

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        if self.local_share + self.regional_share > 1:
            raise PingLlmError("local_share + regional_share must be at most 1")
        return self

    @property
    def start_s(self) -> int:
        """Unix seconds of the first second."""
        return _unix_seconds(self.start) or 0

    @property
    def span_s(self) -> int:
        """Length of the observed period in whole seconds."""
        return max(1, round(self.days * 86_400))

    @property
    def sources(self) -> int:
        return max(1, round(self.measurements / self.measurements_per_source))


# Random numbers.


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

# In units of the Earth's radius: how far cities lie from the centre of their region at most, and how far regions and
# cities are moved at random (standard deviation).
_REGION_RADIUS = 0.42
_REGION_WANDER = 0.05
_CITY_WANDER = 0.035

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
    centre = on_sphere(_even_points(regions) @ rotation + _REGION_WANDER * rng.standard_normal((regions, 3)))
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
    return on_sphere(position.reshape(-1, 3))


def _even_points(count: int) -> Floats:
    """The Fibonacci lattice on the unit sphere."""
    height = 1.0 - (2.0 * np.arange(count) + 1.0) / count
    angle = _GOLDEN_ANGLE * np.arange(count)
    radius = np.sqrt(1.0 - height**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)


def on_sphere(points: Floats) -> Floats:
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True), np.float64)


def _zipf(count: int, exponent: float) -> Floats:
    weight = np.arange(1.0, count + 1) ** -exponent
    return np.asarray(weight / weight.sum(), np.float64)
