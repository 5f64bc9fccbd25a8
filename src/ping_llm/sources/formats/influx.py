"""InfluxDB line protocol, as telegraf writes it: its `ping` plugin, and lines of others with an RTT field and a target.

ping,host=ams1,url=192.0.2.7 average_response_ms=11.2,packets_received=5i,packets_transmitted=5i 1700000000000000000
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from ping_llm.sources.formats import Row, Source, host_of, number, summary, whole

_SOURCES: Final = ("source", "src", "src_addr", "vantage", "probe", "site", "host")
_TARGETS: Final = ("url", "target", "destination", "dst", "dst_addr", "server")
_RTTS: Final = {"average_response_ms": 1.0, "rtt_ms": 1.0, "rtt_avg": 1.0, "rtt": 1.0, "response_time": 1000.0}
"""Fields that hold an RTT, and the milliseconds of one unit of theirs (`response_time` is of `net_response`)."""

# Commas, spaces and equals signs in names are escaped; strings are in quotes. Times of HTTP and DNS are no RTTs.
_ESCAPED: Final = r"(?:\\.|[^\\,= ])+"
_LINE: Final = re.compile(
    rf"(?!http|dns)(?:\\.|[^\\, #])(?:\\.|[^\\, ])*+(?P<tags>(?:,{_ESCAPED}={_ESCAPED})*+)"
    r" +(?P<fields>(?:\\.|\"(?:\\.|[^\"\\])*+\"|[^\\\" ])++)(?: +(?P<time>-?\d+))?\s*"
)
_PAIR: Final = re.compile(r"((?:\\.|[^\\,=])+)=(\"(?:\\.|[^\"\\])*\"|(?:\\.|[^\\,])*),?")
_ESCAPE: Final = re.compile(r"\\([,= ])")

_TICKS: Final = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (float("inf"), 1e9))
"""Times below a bound have so many ticks per second: the precision is not written in the file."""


def matches(head: str) -> bool:
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith("#")]
    parsed = [match for line in lines[:-1] or lines if (match := _LINE.fullmatch(line.removeprefix("> ")))]
    return bool(parsed) and any(_RTTS.keys() & _pairs(one["fields"]).keys() for one in parsed)


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    given = source.labels
    for line in lines:
        if len(line) > 1 << 16 or (match := _LINE.fullmatch(line.removeprefix("> ").rstrip("\r\n"))) is None:
            continue
        tags, fields = _pairs(match["tags"][1:]), _pairs(match["fields"])
        dst = host_of(_first(tags, (given["dst_addr"],) if "dst_addr" in given else _TARGETS))
        if not dst:
            continue
        src = _first(tags, (given["src_addr"],) if "src_addr" in given else _SOURCES) or source.vantage
        field = given.get("rtt") or next((name for name in _RTTS if name in fields), "")
        value = number(fields.get(field))
        rtt = None if value is None else value * _RTTS.get(field, 1.0)
        time_s = _seconds(match["time"])
        if sent := whole(fields.get("packets_transmitted", "").rstrip("iu")):
            received = whole(fields.get("packets_received", "").rstrip("iu"))
            yield from summary(time_s, src, dst, sent, received, rtt)
        elif rtt is not None or fields.get("result_code", "").rstrip("iu") not in ("", "0"):
            failed = fields.get("result_code", "0").rstrip("iu") != "0"
            yield Row(time_s, src, dst, None if failed else rtt)


def _pairs(text: str) -> dict[str, str]:
    return {_ESCAPE.sub(r"\1", key): _ESCAPE.sub(r"\1", value).strip('"') for key, value in _PAIR.findall(text)}


def _first(tags: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((tags[name] for name in names if tags.get(name)), "")


def _seconds(ticks: str | None) -> float | None:
    if ticks is None:
        return None
    time = float(ticks[:25])
    return time / next(scale for bound, scale in _TICKS if time < bound)
