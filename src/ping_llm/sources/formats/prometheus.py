"""Prometheus: what its HTTP API answers to a query (`/api/v1/query_range` or `/api/v1/query`), or `promtool query`.

Gauges in seconds are measurements: `probe_icmp_duration_seconds{phase="rtt"}` and `probe_duration_seconds` of the
blackbox exporter, `ping_rtt_seconds{type="mean"}` of ping_exporter, or any expression. Where `probe_success` is in the
answer too (query `{__name__=~"probe_success|probe_duration_seconds"}`), failed probes are known as such.

Counters are what happened between two samples: `smokeping_response_duration_seconds_sum` and `_count` (and
`smokeping_requests_total`, without which nothing is known of lost packets) of smokeping_prober give mean RTTs.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from ping_llm.core.errors import PingLlmError, shown
from ping_llm.sources.formats import Row, Source, documents, host_of, listed, mapped, number, summary

_SOURCES: Final = ("source", "src", "src_addr", "vantage", "probe", "site", "location")
_TARGETS: Final = ("ip", "target", "destination", "dst", "dst_addr")

_RTT: Final = re.compile(r"rtt|duration|latency|ping|delay|response_time")
_NO_RTT: Final = re.compile(
    r"(?:^|_)(?:dns|ratio|loss|lost|dev|stddev|jitter|ttl|total|bucket|success|count|up|timestamp|expiry)(?:_|$)"
)
_CHOSEN: Final = {"phase": "rtt", "type": "mean", "quantile": "0.5"}
"""Of metrics with these labels, the one series that is an RTT."""

_OF_METRIC: Final = frozenset({"__name__", *_CHOSEN})

_UNITS: Final = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}

Series = dict[float, float]
"""Values by time."""


def matches(head: str) -> bool:
    compact = head.replace(" ", "").replace("\n", "").lstrip()
    if compact.startswith("{"):
        return '"status":' in compact and ('"resultType":' in compact or '"errorType":' in compact)
    return compact.startswith('[{"metric":{') and '"value' in compact


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    bare = []  # series as `promtool query range -o json` writes them
    for answer in documents(lines):
        if answer.get("status") == "error":
            raise PingLlmError(f"Prometheus answered with an error: {shown(answer.get('error'))}")
        bare += [answer] * ("metric" in answer)
        yield from _answered(listed(mapped(answer.get("data")).get("result")), source)
    yield from _answered(bare, source)


def _answered(result: list[dict[str, Any]], source: Source) -> Iterator[Row]:
    # What one exporter says of one target: series whose other labels are the same.
    targets: dict[tuple[tuple[str, str], frozenset[tuple[str, str]]], dict[str, Series]] = defaultdict(dict)
    for one in result:
        labels = {key: value for key, value in mapped(one.get("metric")).items() if isinstance(value, str)}
        if all(labels.get(key, chosen) == chosen for key, chosen in _CHOSEN.items()):
            others = frozenset((key, value) for key, value in labels.items() if key not in _OF_METRIC)
            series = targets[_ends(labels, source), others]
            series.setdefault(labels.get("__name__", ""), {}).update(_samples(one))
    for ((src, dst), _), metrics in targets.items():
        if dst:
            yield from _measured(src, dst, metrics, _UNITS.get(source.labels.get("rtt_unit", ""), 0))


def _ends(labels: Mapping[str, str], source: Source) -> tuple[str, str]:
    """Who pings whom. For the blackbox exporter `instance` is the target, for others the exporter."""
    given = source.labels
    targets = (*_TARGETS, "host") if labels.get("__name__", "").startswith("smokeping_") else _TARGETS
    dst = next(
        (labels[name] for name in ([given["dst_addr"]] if "dst_addr" in given else targets) if labels.get(name)), ""
    )
    sources = [given["src_addr"]] if "src_addr" in given else [*_SOURCES, *(["instance"] if dst else [])]
    src = next((labels[name] for name in sources if labels.get(name)), "")
    dst = dst or ("" if "dst_addr" in given else labels.get("instance") or labels.get("host", ""))
    return host_of(src) or source.vantage, host_of(dst)


def _samples(series: Mapping[str, Any]) -> Series:
    values = series.get("values", [series.get("value")])
    pairs = [one for one in values if isinstance(one, list) and len(one) == 2] if isinstance(values, list) else []
    found = [(number(time), number(value)) for time, value in pairs]
    return {time: value for time, value in found if time is not None and value is not None}


def _measured(src: str, dst: str, metrics: dict[str, Series], unit: float) -> Iterator[Row]:
    """`unit`: milliseconds of one, where the user says so; else 0."""
    success = metrics.pop("probe_success", {})
    gauges = {name for name in metrics if not name or (_RTT.search(name) and not _NO_RTT.search(name))}
    for name in [name for name in metrics if name.endswith("_sum") and f"{name[:-4]}_count" in metrics]:
        gauges.discard(name)
        sent = metrics.get("smokeping_requests_total", {}) if name.startswith("smokeping_") else {}
        yield from _between(src, dst, metrics[name], metrics[f"{name[:-4]}_count"], sent, unit or _unit(name))
    if any(name.startswith("probe_icmp_duration") for name in gauges):
        gauges.discard("probe_duration_seconds")  # which has the look-up of the name in it
    for name in sorted(gauges):
        for time, value in metrics[name].items():
            failed = value <= 0 or success.get(time) == 0
            yield Row(time, src, dst, None if failed else value * (unit or _unit(name)))


def _between(src: str, dst: str, total: Series, count: Series, sent: Series, factor: float) -> Iterator[Row]:
    """One report for each two samples of the counters; none where they were reset."""
    for before, now in pairwise(sorted(total.keys() & count.keys())):
        received, spent = count[now] - count[before], total[now] - total[before]
        requests = sent[now] - sent[before] if before in sent and now in sent else received
        if 0 <= received < 1e9 and spent >= 0 and 0 < requests < 1e9:
            mean = spent / received * factor if received else None
            yield from summary(now, src, dst, round(max(requests, received)), round(received), mean)


def _unit(name: str) -> float:
    """Milliseconds of one unit of a metric: seconds, by Prometheus's own rule, unless its name says otherwise."""
    return 1.0 if re.search(r"_(ms|msec|milliseconds)(_|$)", name) else 1000.0
