"""One RIPE Atlas result (a decoded JSON object) becomes the ping it describes, or the reason why it cannot be used.

The result format changed with the probe firmware; instead of asking for the version, every spelling is understood:

    source        `from`, the address the controller saw (`src_addr`, older `srcaddr`, is mostly a private address)
    destination   `dst_addr`, before firmware 4460 `addr`
    family        `af`, before 4460 `pf`; only a check, the addresses decide
    packets       `result`: a list of {"rtt": 12.3}, {"x": "*"} (timeout) and {"error": "..."};
                  firmware 1 and, until 2023, the built-in pings of the first hop have only `min`, `sent` and `rcvd`

The format "atlas" of `sources.files` reads files of them: bytes -> chunks of whole lines -> batches of measurements.
"""

import math
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from ipaddress import ip_address
from itertools import chain
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError, shown
from ping_llm.core.measurements import MAX_RTT_MS, MAX_TIME_US, SCHEMA
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.sources.objects import DEFAULT_SIZES, Chunk, ReadSizes, read_chunks
from ping_llm.tasks.pool import map_in_order

DROP_REASONS: Final = {
    "malformed_json": "the line or array element is not valid JSON, for example cut off",
    "not_a_result": "valid JSON, but not an object",
    "not_ping": "a result of another kind: traceroute, dns, sslcert, http, ntp, wifi",
    "missing_time": "no `timestamp`",
    "bad_time": "`timestamp` is not a number, or not between 1970 and 2100",
    "missing_source": "no `from`, and no `src_addr` with a public address to stand in for it",
    "bad_src_addr": "`from` is not an address",
    "missing_destination": "no `dst_addr`: the probe could not resolve the name of the destination",
    "bad_dst_addr": "`dst_addr` is not an address",
    "family_mismatch": "source, destination and `af` are not all IPv4 or all IPv6",
    "malformed_packets": "`result` is not a list of objects",
    "bad_rtt": "an `rtt` that is negative, NaN or not a number",
    "absurd_rtt": "an `rtt` above ten minutes",
    "no_packets": "no packet to judge by: nothing was sent, only duplicates came, "
    "or `--packets each` and the result has only a summary",
}
"""Why a result can be dropped. A result with several faults is counted under the first one in this order."""


class Unusable(Exception):  # noqa: N818 - an outcome that is counted, not an error
    """The result is dropped. `args` are one of the `DROP_REASONS`, and what is wrong in this case."""


class Ping(NamedTuple):
    """What one result says: `rtts` has one entry per measurement, in milliseconds, None where no answer came."""

    time_us: int
    source: str
    destination: str
    ip_version: int
    rtts: list[float | None]
    probe: int | None = None
    measurement: int | None = None


def read_ping(result: Any, *, each_packet: bool) -> Ping:
    """The ping a result describes: its minimum RTT, or every packet's. Raises `Unusable`."""
    if not isinstance(result, dict):
        raise Unusable("not_a_result", f"{shown(result)} is not an object")
    if result.get("type") != "ping" and not _is_ping(result):
        raise Unusable("not_ping", f"type is {shown(result.get('type'))}")
    time_us = _time_us(result.get("timestamp"))
    source, source_version = _source(result)
    destination, ip_version = _destination(result)
    stated = result.get("af", result.get("pf"))
    # A missing or unreadable family says nothing.
    if source_version != ip_version or (stated != ip_version and _whole(stated) not in (None, ip_version)):
        raise Unusable("family_mismatch", f"from {source} to {destination}, af {shown(stated)}")
    probe, measurement = (_id(result.get(name)) for name in ("prb_id", "msm_id"))
    return Ping(time_us, source, destination, ip_version, _rtts(result, each_packet), probe, measurement)


def _id(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and 0 <= number < 1 << 63 else None


def _is_ping(result: dict[str, Any]) -> bool:
    kind = result.get("type") or result.get("msm_name")
    if kind is None:  # before firmware 4460 results did not name their type; only pings count packets
        return "sent" in result and "rcvd" in result
    return isinstance(kind, str) and kind.lower() in ("ping", "ping6")


def _time_us(timestamp: Any) -> int:
    if timestamp is None:
        raise Unusable("missing_time", "no timestamp")
    if isinstance(timestamp, int | float) and not isinstance(timestamp, bool):
        time_us = timestamp * 1_000_000
        if 0 <= time_us < MAX_TIME_US:
            return round(time_us)
    raise Unusable("bad_time", f"timestamp is {shown(timestamp)}")


def _source(result: dict[str, Any]) -> tuple[str, int]:
    if seen_by_controller := result.get("from"):
        address = _address(seen_by_controller)
        if address is None:
            raise Unusable("bad_src_addr", f"from is {shown(seen_by_controller)}")
        return address
    own = result.get("src_addr") or result.get("srcaddr")
    address = _address(own)
    if address is None or not _is_public(address[0]):
        raise Unusable("missing_source", f"no from, and src_addr is {shown(own)}")
    return address


def _destination(result: dict[str, Any]) -> tuple[str, int]:
    destination = result.get("dst_addr") or result.get("addr")
    if not destination:
        raise Unusable("missing_destination", f"no dst_addr for {shown(result.get('dst_name', result.get('name')))}")
    address = _address(destination)
    if address is None:
        raise Unusable("bad_dst_addr", f"dst_addr is {shown(destination)}")
    return address


def _address(value: Any) -> tuple[str, int] | None:
    """Usual spelling and IP version of an address, None if it is none."""
    return _parse_address(value) if isinstance(value, str) else None


@lru_cache(maxsize=1 << 16)  # a dump repeats few addresses many times
def _parse_address(text: str) -> tuple[str, int] | None:
    kind, version = (socket.AF_INET6, 6) if ":" in text else (socket.AF_INET, 4)
    try:
        return socket.inet_ntop(kind, socket.inet_pton(kind, text)), version
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1 << 16)
def _is_public(address: str) -> bool:
    parsed = ip_address(address)
    return parsed.is_global and not parsed.is_multicast


def _rtts(result: dict[str, Any], each_packet: bool) -> list[float | None]:
    packets = result.get("result")
    if not packets:
        return [_rtt_of_summary(result, each_packet)]
    if not isinstance(packets, list):
        raise Unusable("malformed_packets", f"result is {shown(packets)}")
    rtts: list[float | None] = []
    for packet in packets:
        if not isinstance(packet, dict):
            raise Unusable("malformed_packets", f"result holds {shown(packet)}")
        if "dup" not in packet:  # a second answer to the same packet is no measurement of its own
            rtts.append(_rtt(packet["rtt"]) if "rtt" in packet else None)
    if not rtts:
        raise Unusable("no_packets", "result holds only duplicates")
    if each_packet:
        return rtts
    return [min((rtt for rtt in rtts if rtt is not None), default=None)]


def _rtt_of_summary(result: dict[str, Any], each_packet: bool) -> float | None:
    """The minimum of a result without a packet list. No packet sent means no measurement, not a failed one."""
    sent, received = _whole(result.get("sent")), _whole(result.get("rcvd"))
    if each_packet or not sent or received is None:
        raise Unusable("no_packets", f"no packets in result, sent {shown(sent)}, rcvd {shown(received)}")
    return _rtt(result.get("min")) if received else None


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _rtt(value: Any) -> float:
    try:
        rtt = math.nan if isinstance(value, bool) else float(value)  # also takes whole numbers, and numbers in quotes
    except (TypeError, ValueError, OverflowError):
        rtt = math.nan
    if not rtt >= 0.0:  # negative or NaN
        raise Unusable("bad_rtt", f"rtt is {shown(value)}")
    if rtt > MAX_RTT_MS:
        raise Unusable("absurd_rtt", f"rtt is {shown(value)} ms")
    return rtt + 0.0  # -0.0 becomes 0.0: equal measurements have equal bytes


# A file, in bounded memory.


@dataclass(kw_only=True)
class Counts:
    """What became of results: each that was read is dropped, or in one measurement or several."""

    results: int = 0
    measurements: int = 0
    failed: int = 0  # measurements without an answer, which are among the measurements
    dropped: dict[str, int] = field(default_factory=dict)  # results that gave no measurement, by reason
    examples: dict[str, str] = field(default_factory=dict)
    """Where the first result dropped for each reason is, and what is wrong with it."""
    bytes: int = 0  # of the input, as stored

    def add(self, part: "Counts") -> None:
        for name in ("results", "measurements", "failed", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for reason, count in part.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.examples = part.examples | self.examples


IDS: Final = ("prb_id", "msm_id")
ATLAS_SCHEMA: Final = SCHEMA.append(pa.field("prb_id", pa.int64())).append(pa.field("msm_id", pa.int64()))
"""What Atlas results are read as: measurements, and the ids of probe and measurement."""


class ParsedChunk(NamedTuple):
    batch: pa.RecordBatch
    counts: Counts
    position: int


def parse_file(
    file: str,
    counts: Counts,
    *,
    each_packet: bool,
    strict: bool,
    sizes: ReadSizes = DEFAULT_SIZES,
    pool: Executor | None = None,
    window: int = 1,
) -> Iterator[ParsedChunk]:
    """The chunks of a file, parsed here or by a pool, at most `window` at a time, and added to the counts.

    The next chunk is always being read in a thread: decompression runs beside parsing. A file without any JSON is the
    wrong file, not one with many bad results.
    """
    parse = partial(parse_chunk, each_packet=each_packet, strict=strict)
    chunks = _read_ahead(read_chunks(file, sizes))
    for parsed in map(parse, chunks) if pool is None else map_in_order(pool, parse, chunks, window=window):
        counts.add(parsed.counts)
        yield parsed
    if counts.results and counts.dropped.get("malformed_json") == counts.results:
        raise PingLlmError(
            f"{file}: not RIPE Atlas JSON: expected one result per line or one array, "
            f"and none of {counts.results:,} is valid JSON"
        )


def _read_ahead(items: Iterator[Chunk]) -> Iterator[Chunk]:
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


def _results_of(value: Any) -> list[Any]:
    """Those of a page of the API's, which has them in a list; else a result by itself."""
    if isinstance(value, dict) and isinstance(page := value.get("results"), list) and "prb_id" not in value:
        return page
    return [value]


def parse_chunk(chunk: Chunk, *, each_packet: bool, strict: bool = False) -> ParsedChunk:
    """A worker's task. Every result of the chunk is in its batch, or is counted as dropped."""
    counts = Counts()
    pings: list[Ping] = []

    def drop(number: int, reason: str, detail: str) -> None:
        where = f"{chunk.file} element {number}" if chunk.in_array else f"{chunk.file}:{number}"
        if strict:
            raise MeasurementError(f"{where}: {reason}: {detail}")
        counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
        counts.examples.setdefault(reason, f"{where}: {detail}")

    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
        try:
            result = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.strip():
                drop(number, "malformed_json", str(error))
            continue
        for one in _results_of(result):
            try:
                pings.append(read_ping(one, each_packet=each_packet))
            except Unusable as unusable:
                drop(number, *unusable.args)

    each = [(ping, number) for ping in pings for number in range(len(ping.rtts))]  # one for each measurement
    columns: tuple[list[Any], ...] = (
        # Packets of one result are a microsecond apart: two that took equally long are no copies of each other.
        [ping.time_us + number for ping, number in each],
        [ping.source for ping, _ in each],
        [ping.destination for ping, _ in each],
        [ping.ip_version for ping, _ in each],
        [ping.rtts[number] for ping, number in each],
        [ping.probe for ping, _ in each],
        [ping.measurement for ping, _ in each],
    )
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, ATLAS_SCHEMA, strict=True)]
    counts.results = len(pings) + sum(counts.dropped.values())
    counts.measurements, counts.failed = len(each), arrays[4].null_count
    return ParsedChunk(pa.RecordBatch.from_arrays(arrays, schema=ATLAS_SCHEMA), counts, chunk.position)


# The format "atlas" of `sources.files`: one measurement per result, its minimum RTT. (`ping-llm import atlas` can also
# keep every packet.)


def plan_atlas(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    """The ids of probes and measurements may be the nodes: `src_addr=prb_id`, `dst_addr=msm_id`."""
    for column, name in options.columns.items():
        if name != column and (column not in ("src_addr", "dst_addr") or name not in IDS):
            raise PingLlmError(
                f"{whole.path}: in RIPE Atlas results, only src_addr and dst_addr may be others: prb_id or msm_id"
            )
    said = "RIPE Atlas results, of each the least RTT"
    return None, [replace(whole, columns=dict(options.columns), understood=said)]


def read_atlas(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row, batches, counts = 0, list[pa.RecordBatch](), Counts()
    parsed = parse_file(piece.path, Counts(), each_packet=False, strict=strict)
    for chunk in chain(parsed, [None]):  # None: the end
        if chunk is not None:
            batches.append(chunk.batch)
            counts.add(chunk.counts)
        if batches and (chunk is None or counts.measurements >= batch_rows):
            batch = pa.concat_batches(batches)
            chosen = {name: piece.columns.get(name, name) for name in SCHEMA.names}
            batch = batch.select(list(chosen.values())).rename_columns(list(chosen))
            dropped = Counter(counts.dropped)
            yield RawBatch(batch=batch, first_row=first_row, dropped=dropped, examples=counts.examples)
            first_row, batches, counts = first_row + counts.results, [], Counts()
