"""Globalping: what `GET /v1/measurements/ID` and `globalping ping --json` answer. A probe is city, country and AS."""

from collections.abc import Iterator
from typing import Any

from ping_llm.sources.formats import Row, Source, documents, listed, mapped, moment, number, summary, text, whole


def matches(head: str) -> bool:
    return head.lstrip()[:1] in ("{", "[") and all(key in head for key in ('"results"', '"probe"', '"result"', '"asn"'))


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for measurement in documents(lines):
        if measurement.get("type", "ping") != "ping":
            continue
        time_s = moment(text(measurement.get("createdAt")))
        for one in listed(measurement.get("results")):
            result = mapped(one.get("result"))
            src = source.labels.get("src_addr") or _name(mapped(one.get("probe")))
            dst = text(result.get("resolvedAddress")) or text(measurement.get("target"))
            if dst and result.get("status", "finished") == "finished":
                yield from _packets(time_s, src, dst, result)


def _packets(time_s: float | None, src: str, dst: str, result: dict[str, Any]) -> Iterator[Row]:
    stats = mapped(result.get("stats"))
    rtts = [rtt for packet in listed(result.get("timings")) if (rtt := number(packet.get("rtt"))) is not None]
    if not rtts:  # only a summary, or nothing but timeouts
        sent = whole(stats.get("total")) or 1
        received = sent * (1 - whole(stats.get("loss")) / 100)
        yield from summary(time_s, src, dst, sent, round(received), number(stats.get("avg")))
        return
    lost = min(whole(stats.get("drop")), 1000)
    yield from (Row(time_s, src, dst, rtt) for rtt in [*rtts, *[None] * lost])


def _name(probe: dict[str, Any]) -> str:
    """Globalping does not tell the address of a probe."""
    network = f"AS{whole(probe['asn'])}" if whole(probe.get("asn")) else ""
    parts = (text(probe.get("city")), text(probe.get("country")), network)
    return "-".join(part.replace(" ", "_") for part in parts if part) or "unknown"
