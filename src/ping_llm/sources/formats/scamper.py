"""scamper's pings as JSON lines: `scamper -O json`, or `sc_warts2json` of its own files."""

from collections.abc import Iterator
from typing import Any

from ping_llm.sources.formats import Row, Source, documents, listed, mapped, number, text, whole

_MAX_LOST = 1000


def matches(head: str) -> bool:
    compact = head.replace(" ", "").lstrip()
    return compact.startswith("{") and ('"ping_sent":' in compact or '"type":"cycle-start"' in compact)


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for ping in documents(lines):
        dst = text(ping.get("dst"))
        if ping.get("type") == "ping" and dst:
            yield from _packets(ping, text(ping.get("src")) or source.vantage, dst)


def _packets(ping: dict[str, Any], src: str, dst: str) -> Iterator[Row]:
    start, answered = _seconds(ping.get("start")), set[int]()
    for answer in listed(ping.get("responses")):
        rtt, seq = number(answer.get("rtt")), whole(answer.get("seq"))
        # Routers on the way may answer, too, with an error; and a packet may be answered twice.
        if rtt is not None and text(answer.get("from")) == dst and seq not in answered:
            answered.add(seq)
            sent = _seconds(answer.get("tx"))
            yield Row(start if sent is None else sent, src, dst, rtt)
    lost = min(whole(ping.get("ping_sent")) - len(answered), _MAX_LOST)
    yield from (Row(start, src, dst, None) for _ in range(lost))


def _seconds(time: Any) -> float | None:
    seconds = number(mapped(time).get("sec"))
    return None if seconds is None else seconds + (number(mapped(time).get("usec")) or 0) / 1e6
