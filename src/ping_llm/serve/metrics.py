"""The metrics that Prometheus scrapes at `/metrics`: of the watched pairs, and of the server itself.

A scrape computes nothing: it gets the values of the last refresh (watch.py). The number of label values is bounded by
the watched pairs and the routes, whatever clients send.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from ping_llm import __version__
from ping_llm.core.rtt import Floats, Ints, RttDistribution

__all__ = ["CONTENT_TYPE", "QUANTILES", "PairValues", "ServerMetrics"]

QUANTILES: Final = (0.05, 0.1, 0.5, 0.9, 0.95)
_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ENDS: Final = ("source", "destination")
_METHODS: Final = frozenset({"GET", "POST", "HEAD"})


@dataclass(frozen=True, kw_only=True)
class PairValues:
    """The latest measurement of every watched pair and the prediction of the next one; NaN where unknown."""

    pairs: tuple[tuple[str, str], ...]
    expected: RttDistribution
    expected_bits: Floats
    """The mean anomaly score of a result, if the prediction is right."""
    observed_s: Floats  # NaN with a time is a timeout
    observed_at: Floats
    observations: Ints
    anomalies: Ints
    bits: Floats
    support: Mapping[str, Floats] = field(default_factory=dict)  # columns as `predict_df` has them

    def families(self) -> list[Metric]:
        """Metrics with a sample for each pair whose value is known."""
        families: list[Metric] = []

        def add(name: str, about: str, *columns: tuple[Any, str], label: str | None = None, kind: Any = None) -> None:
            labels = [*_ENDS, label] if label else list(_ENDS)
            family = (kind or GaugeMetricFamily)(f"ping_llm_{name}", about, labels=labels)
            for values, of_label in columns:
                for pair, value in zip(self.pairs, np.asarray(values, np.float64).tolist(), strict=True):
                    if value == value:
                        family.add_metric([*pair, of_label] if label else pair, value)
            if family.samples:
                families.append(family)

        was_observed = ~np.isnan(self.observed_at)
        levels = self.expected.quantile(list(QUANTILES)).T / 1000
        add(
            "expected_rtt_seconds",
            "Predicted RTT of the next measurement, if an answer comes: quantiles, by level.",
            *zip(levels, (f"{level:g}" for level in QUANTILES), strict=True),
            label="level",
        )
        add("expected_timeout_ratio", "Predicted probability that no answer comes.", (self.expected.p_failed, ""))
        add("observed_rtt_seconds", "RTT of the latest measurement; no sample if it timed out.", (self.observed_s, ""))
        timed_out = np.where(was_observed, np.isnan(self.observed_s), np.nan)
        add("observed_timeout", "Whether the latest measurement timed out.", (timed_out, ""))
        add("observed_timestamp_seconds", "Time of the latest measurement.", (self.observed_at, ""))
        add("observations_total", "Measurements since the start.", (self.observations, ""), kind=CounterMetricFamily)
        add("anomaly_score", "NLL of the latest result in bits, given what was known before it.", (self.bits, ""))
        add("usual_anomaly_score", "Anomaly score that is usual for the pair, in bits.", (self.expected_bits, ""))
        add(
            "anomalies_total",
            "Measurements since the start whose score was ten bits or more above the usual.",
            (self.anomalies, ""),
            kind=CounterMetricFamily,
        )
        if self.support:
            of_what = {"pair": "pair_measurements", "source": "src_measurements", "destination": "dst_measurements"}
            add(
                "support_measurements",
                "Measurements that the prediction is based on: of the pair, of its source, of its destination.",
                *((self.support[column], what) for what, column in of_what.items()),
                label="of",
            )
            add("support_chain_hops", "Shortest chain of measurements between the ends.", (self.support["chain"], ""))
            add("extrapolating", "Whether the prediction is an extrapolation.", (self.support["extrapolating"], ""))
        return families


class ServerMetrics:
    """Metrics of one server, counted from its start."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._pairs = b""
        build = Gauge("ping_llm_build_info", "Version of ping-llm.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        routes = ["method", "route", "status"]
        self._requests = Counter("ping_llm_http_requests_total", "Requests answered.", routes, registry=registry)
        self._seconds = Histogram(
            "ping_llm_http_request_duration_seconds",
            "From the arrival of a request to its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.warm = Gauge(
            "ping_llm_model_warm",
            "Whether all shapes are compiled; until then some answers take seconds.",
            registry=registry,
        )
        self.known = Gauge("ping_llm_known_measurements", "Measurements that the server knows.", registry=registry)
        self.watched = Gauge("ping_llm_watched_pairs", "Pairs that have metrics.", registry=registry)
        self.over_limit = Gauge("ping_llm_pairs_over_limit", "Pairs beyond the limit, not watched.", registry=registry)
        self.refreshed = Gauge("ping_llm_refresh_timestamp_seconds", "Time of the last refresh.", registry=registry)
        self.refresh_seconds = Gauge("ping_llm_refresh_seconds", "Duration of the last refresh.", registry=registry)
        self.refresh_errors = Counter("ping_llm_refresh_errors_total", "Failed refreshes.", registry=registry)
        self.arrived = Counter("ping_llm_feed_measurements_total", "New measurements.", ["feed"], registry=registry)
        self.dropped = Counter("ping_llm_feed_dropped_total", "Unusable measurements.", ["feed"], registry=registry)
        self.feed_errors = Counter("ping_llm_feed_errors_total", "Failed reads.", ["feed"], registry=registry)

    def add_feed(self, name: str) -> None:
        """Begin its counters at zero, so that their first increase is visible."""
        for counter in (self.arrived, self.dropped, self.feed_errors):
            counter.labels(name)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; all paths that are no route share one label value."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def show(self, pairs: PairValues) -> None:
        self._pairs = generate_latest(SimpleNamespace(collect=pairs.families))
        self.watched.set(len(pairs.pairs))

    def text(self) -> bytes:
        return generate_latest(self._registry) + self._pairs
