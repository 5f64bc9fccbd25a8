"""What a simulated Internet is made from. The same settings always give the same Internet and the same measurements."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from ping_llm.core.errors import PingLlmError


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings:
    """The defaults are calibrated against a real RIPE Atlas extract (docs/simulator.md shows both)."""

    seed: int = 0
    """Another seed is another Internet: other places, networks, addresses, routes and schedules."""

    # What is measured, and how often.
    measurements: int = 1_000_000
    start: str | int = "2025-01-01T00:00:00Z"
    """First second of the observed period: ISO 8601 (UTC unless it says otherwise) or Unix seconds."""
    days: float = 7.0
    """Length of the observed period. It does not depend on `measurements`: more measurements are more sources."""
    measurements_per_source: float = 118.0
    """The mean. The median source has about a quarter of it."""
    source_size_tail: float = 1.5
    """Tail exponent of the measurements per source (Lomax); smaller is heavier, and it must exceed 1."""
    ipv6_share: float = 0.423
    """Share of the measurements, not of the sources."""
    dual_stack_share: float = 0.7
    """Share of the IPv6 probes (and of all targets) that also have an address of the other family."""
    sources_per_target: float = 4.0

    # Where things are.
    regions: int = 8
    cities_per_region: int = 24
    systems_per_region: int = 40
    """Autonomous systems; each has points of presence in some of its region's cities."""
    local_share: float = 0.15
    """Share of the measurements whose target is in the source's own city (where that city has one)."""
    regional_share: float = 0.583
    """Share whose target is anywhere in the source's region. The rest go to other regions."""

    # What an answer takes.
    inflation: float = 1.76
    """Median length of a path relative to the great circle."""
    access_ms: float = 8.2
    """Median delay of the last mile of a probe in an access network; hosting networks take a tenth of it."""
    queue_ms: float = 0.9
    """Median of what a probe's own queue adds to an ordinary measurement."""
    congestion_ms: float = 0.8
    """Median over access networks of the delay added at the evening peak."""
    reroute_share: float = 0.12
    """Share of the time that a path spends on a longer route than its usual one."""
    busy_share: float = 0.05
    """Share of the measurements that meet a queue several times the ordinary one."""
    spike_share: float = 0.0032
    """Share of the measurements that are delayed by something unrelated to the network's load."""
    spike_ms: float = 710.0
    """Median delay of such a spike."""
    failed_share: float = 0.035
    """Share of the measurements without an answer."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "start":
                _require(isinstance(getattr(self, field.name), int | float), field.name, "a number")
        for name in ("measurements", "regions", "cities_per_region", "systems_per_region"):
            _require(isinstance(getattr(self, name), int) and getattr(self, name) >= 1, name, "a whole number ≥ 1")
        for name in (
            "ipv6_share",
            "dual_stack_share",
            "local_share",
            "regional_share",
            "reroute_share",
        ):
            _require(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("days", "inflation", "access_ms", "queue_ms", "spike_ms", "sources_per_target"):
            _require(0 < getattr(self, name) < math.inf, name, "above 0")
        for name in ("busy_share", "spike_share"):
            _require(0 <= getattr(self, name) <= 0.25, name, "between 0 and 0.25")
        _require(isinstance(self.seed, int), "seed", "a whole number")
        _require(self.measurements_per_source >= 1, "measurements_per_source", "at least 1")
        _require(self.source_size_tail > 1, "source_size_tail", "above 1")
        _require(self.congestion_ms >= 0, "congestion_ms", "at least 0")
        _require(0 <= self.failed_share <= 0.9, "failed_share", "between 0 and 0.9")
        _require(self.local_share + self.regional_share <= 1, "local_share + regional_share", "at most 1")
        _require(self.regions <= 128, "regions", "at most 128: each needs an IPv4 /8")
        _ = self.start_s  # an unreadable start is an error now, not in the middle of the work

    @property
    def start_s(self) -> int:
        """Unix seconds of the first second."""
        if isinstance(self.start, int):
            return self.start
        try:
            moment = datetime.fromisoformat(self.start)
        except ValueError:
            raise PingLlmError(f"start must be an ISO 8601 time or Unix seconds, not {self.start!r}") from None
        return math.floor((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())

    @property
    def span_s(self) -> int:
        """Length of the observed period in whole seconds."""
        return max(1, round(self.days * 86_400))

    @property
    def sources(self) -> int:
        return max(1, round(self.measurements / self.measurements_per_source))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes as they are."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise PingLlmError(f"unknown simulator setting {name!r}; {advice}")
        return cls(**values)


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise PingLlmError(f"simulator setting {name} must be {what}")
