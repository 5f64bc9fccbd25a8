"""What monitoring systems keep: SmokePing's round-robin databases, Prometheus, InfluxDB or telegraf, and Globalping."""

import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ping_llm.core.errors import PingLlmError, shown
from ping_llm.sources.objects import documents
from ping_llm.sources.tools import Row, Source, count, listed, mapped, moment, number, summary, text

# SmokePing's round-robin databases: `rrdtool dump` (XML), `rrdtool fetch FILE AVERAGE` (text), or the file itself.
#
# A database keeps, for each step of mostly 300 s, the sorted RTTs `ping1`, `ping2`, … in seconds and the number of lost
# packets. Only what is as fine as the step is read: further back it keeps averages, which nobody has measured. The
# target is the name of the file: `AmsterdamGW.rrd`, or `AmsterdamGW~paris.rrd` where the slave `paris` pings.
#
# The dump is read line by line as rrdtool writes it, not by an XML parser: there are no entities to expand.

RRD_MAGIC: Final = "RRD\0"

_RRD_NAME: Final = re.compile(r"\s*<name>\s*(\S+?)\s*</name>")
_STEPS: Final = re.compile(r"\s*<pdp_per_row>\s*(\d+)")
_FUNCTION: Final = re.compile(r"\s*<cf>\s*(\w+)")
_ROW: Final = re.compile(r"\s*<!--.*?(\d{9,10})\s*-->\s*<row>(.*)</row>")
_VALUE: Final = re.compile(r"<v>\s*([^<]*?)\s*</v>")
_FETCHED: Final = re.compile(r"\s*(\d{9,10}):((?:\s+[-+\w.,]+)+)\s*")
_PING: Final = re.compile(r"ping(\d+)")


def is_rrd(head: str) -> bool:
    return head.startswith(RRD_MAGIC) or "<rrd>" in head or _is_fetched(head)


def _is_fetched(head: str) -> bool:
    names = head.split("\n", 1)[0].split()
    return "ping1" in names or {"loss", "median"} <= set(names)


def dumped(path: Path) -> Iterator[str]:
    """The lines of `rrdtool dump` of a database."""
    program = shutil.which("rrdtool")
    if program is None:
        raise PingLlmError(f"{path} is a round-robin database: install rrdtool, or give the output of rrdtool dump")
    command = [program, "dump", str(path.absolute())]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        try:
            yield from process.stdout
            if process.wait():
                said.seek(0)
                raise PingLlmError(
                    f"rrdtool cannot read {path}: {shown(said.read(500).decode(errors='replace').strip())}"
                )
        finally:
            process.kill()


def read_rrd(lines: Iterator[str], source: Source) -> Iterator[Row]:
    target, _, slave = source.name.partition("~")
    src = source.labels.get("src_addr") or slave or "localhost"
    dst = source.labels.get("dst_addr") or target or "target"
    names: list[str] = []
    function, finest = "", False
    for line in lines:
        if match := _ROW.match(line):
            if finest:
                yield from _step(float(match[1]), names, _VALUE.findall(match[2]), src, dst)
        elif match := _FETCHED.fullmatch(line):
            yield from _step(float(match[1]), names, match[2].split(), src, dst)
        elif match := _RRD_NAME.match(line):
            names.append(match[1])
        elif match := _FUNCTION.match(line):
            function = match[1]
        elif match := _STEPS.match(line):
            finest = function == "AVERAGE" and int(match[1][:9]) == 1
        elif not names and _is_fetched(line):
            names = line.split()
    if names and not any(_PING.fullmatch(name) for name in names) and "median" not in names:
        raise PingLlmError(f"a round-robin database, but not of SmokePing: it has {shown(', '.join(names))}")


def _step(time_s: float, names: list[str], values: list[str], src: str, dst: str) -> Iterator[Row]:
    """The packets of one step. `loss` is not always whole: rrdtool moves values to the borders of its steps."""
    known = {name: number(value.replace(",", ".")) for name, value in zip(names, values, strict=False)}
    sent = sum(1 for name in names if _PING.fullmatch(name))
    found = [value for name, value in known.items() if value is not None and _PING.fullmatch(name)]
    loss, median = known.get("loss"), known.get("median")
    if not sent and median is not None:  # without the single packets
        found, sent = [median], 1
    if loss is None and not found:
        return  # nothing was measured
    lost = min(round(loss), sent) if loss is not None and 0 <= loss <= 1e6 else sent - len(found)
    for value in sorted(found)[: sent - lost]:
        yield Row(time_s, src, dst, value * 1000)
    yield from (Row(time_s, src, dst, None) for _ in range(lost))


# Prometheus: what its HTTP API answers to a query (`/api/v1/query_range` or `/api/v1/query`), or `promtool query`.
#
# Gauges in seconds are measurements: `probe_icmp_duration_seconds{phase="rtt"}` and `probe_duration_seconds` of the
# blackbox exporter, `ping_rtt_seconds{type="mean"}` of ping_exporter, or any expression. Where the answer has
# `probe_success` too (query `{__name__=~"probe_success|probe_duration_seconds"}`), failed probes are known as such.
#
# Counters are what happened between two samples: `smokeping_response_duration_seconds_sum` and `_count` (and
# `smokeping_requests_total`, without which nothing is known of lost packets) of smokeping_prober give mean RTTs.

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


def is_prometheus(head: str) -> bool:
    compact = head.replace(" ", "").replace("\n", "").lstrip()
    if compact.startswith("{"):
        return '"status":' in compact and ('"resultType":' in compact or '"errorType":' in compact)
    return compact.startswith('[{"metric":{') and '"value' in compact


def read_prometheus(lines: Iterator[str], source: Source) -> Iterator[Row]:
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
    return _host_of(src) or source.vantage, _host_of(dst)


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


def _between(src: str, dst: str, total: Series, counts: Series, sent: Series, factor: float) -> Iterator[Row]:
    """One report for each two samples of the counters; none where they were reset."""
    for before, now in pairwise(sorted(total.keys() & counts.keys())):
        received, spent = counts[now] - counts[before], total[now] - total[before]
        requests = sent[now] - sent[before] if before in sent and now in sent else received
        if 0 <= received < 1e9 and spent >= 0 and 0 < requests < 1e9:
            mean = spent / received * factor if received else None
            yield from summary(now, src, dst, round(max(requests, received)), round(received), mean)


def _unit(name: str) -> float:
    """Milliseconds of one unit of a metric: seconds, by Prometheus's own rule, unless its name says otherwise."""
    return 1.0 if re.search(r"_(ms|msec|milliseconds)(_|$)", name) else 1000.0


# InfluxDB line protocol, as telegraf writes it: its `ping` plugin, and lines of others with an RTT field and a target.
#
#     ping,host=ams1,url=192.0.2.7 average_response_ms=11.2,packets_received=5i,packets_transmitted=5i 1700000000

_TAGS_OF_SOURCES: Final = ("source", "src", "src_addr", "vantage", "probe", "site", "host")
_TAGS_OF_TARGETS: Final = ("url", "target", "destination", "dst", "dst_addr", "server")
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


def is_influx(head: str) -> bool:
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith("#")]
    parsed = [match for line in lines[:-1] or lines if (match := _LINE.fullmatch(line.removeprefix("> ")))]
    return bool(parsed) and any(_RTTS.keys() & _pairs(one["fields"]).keys() for one in parsed)


def read_influx(lines: Iterator[str], source: Source) -> Iterator[Row]:
    given = source.labels
    for line in lines:
        if len(line) > 1 << 16 or (match := _LINE.fullmatch(line.removeprefix("> ").rstrip("\r\n"))) is None:
            continue
        tags, fields = _pairs(match["tags"][1:]), _pairs(match["fields"])
        dst = _host_of(_first(tags, (given["dst_addr"],) if "dst_addr" in given else _TAGS_OF_TARGETS))
        if not dst:
            continue
        src = _first(tags, (given["src_addr"],) if "src_addr" in given else _TAGS_OF_SOURCES) or source.vantage
        field = given.get("rtt") or next((name for name in _RTTS if name in fields), "")
        value = number(fields.get(field))
        rtt = None if value is None else value * _RTTS.get(field, 1.0)
        time_s = _influx_time(match["time"])
        if sent := count(fields.get("packets_transmitted", "").rstrip("iu")):
            received = count(fields.get("packets_received", "").rstrip("iu"))
            yield from summary(time_s, src, dst, sent, received, rtt)
        elif rtt is not None or fields.get("result_code", "").rstrip("iu") not in ("", "0"):
            failed = fields.get("result_code", "0").rstrip("iu") != "0"
            yield Row(time_s, src, dst, None if failed else rtt)


def _pairs(text: str) -> dict[str, str]:
    return {_ESCAPE.sub(r"\1", key): _ESCAPE.sub(r"\1", value).strip('"') for key, value in _PAIR.findall(text)}


def _first(tags: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((tags[name] for name in names if tags.get(name)), "")


def _influx_time(ticks: str | None) -> float | None:
    if ticks is None:
        return None
    time = float(ticks[:25])
    return time / next(scale for bound, scale in _TICKS if time < bound)


def _host_of(said: str) -> str:
    """The host of a target that may be written as a URL or with a port."""
    host = said.partition("://")[2].partition("/")[0] if "://" in said else said.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


# Globalping: what `GET /v1/measurements/ID` and `globalping ping --json` answer. A probe is city, country and AS.


def is_globalping(head: str) -> bool:
    return head.lstrip()[:1] in ("{", "[") and all(key in head for key in ('"results"', '"probe"', '"result"', '"asn"'))


def read_globalping(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for measurement in documents(lines):
        if measurement.get("type", "ping") != "ping":
            continue
        time_s = moment(text(measurement.get("createdAt")))
        for one in listed(measurement.get("results")):
            result = mapped(one.get("result"))
            src = source.labels.get("src_addr") or _probe_name(mapped(one.get("probe")))
            dst = text(result.get("resolvedAddress")) or text(measurement.get("target"))
            if dst and result.get("status", "finished") == "finished":
                yield from _globalping_packets(time_s, src, dst, result)


def _globalping_packets(time_s: float | None, src: str, dst: str, result: dict[str, Any]) -> Iterator[Row]:
    stats = mapped(result.get("stats"))
    rtts = [rtt for packet in listed(result.get("timings")) if (rtt := number(packet.get("rtt"))) is not None]
    if not rtts:  # only a summary, or nothing but timeouts
        sent = count(stats.get("total")) or 1
        received = sent * (1 - count(stats.get("loss")) / 100)
        yield from summary(time_s, src, dst, sent, round(received), number(stats.get("avg")))
        return
    lost = min(count(stats.get("drop")), 1000)
    yield from (Row(time_s, src, dst, rtt) for rtt in [*rtts, *[None] * lost])


def _probe_name(probe: dict[str, Any]) -> str:
    """Globalping does not tell the address of a probe."""
    network = f"AS{count(probe['asn'])}" if count(probe.get("asn")) else ""
    parts = (text(probe.get("city")), text(probe.get("country")), network)
    return "-".join(part.replace(" ", "_") for part in parts if part) or "unknown"
