"""What a simulated Internet is made from. The same settings always give the same Internet and the same measurements."""

import math
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from ping_llm.config.keys import Rule, Section, above, at_least
from ping_llm.core.errors import PingLlmError


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
