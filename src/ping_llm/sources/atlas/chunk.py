"""A chunk of result lines becomes a batch of measurements and a count of what was dropped. This is a worker's task."""

from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from ping_llm.measurements import SCHEMA
from ping_llm.sources.atlas.result import Unusable, read_ping
from ping_llm.sources.atlas.stream import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedChunk:
    """Every result of the chunk is in `batch` or in `dropped`."""

    batch: Any
    """`pyarrow.RecordBatch` of the measurement schema."""
    results: int
    dropped: dict[str, int]
    examples: dict[str, tuple[int, str]]
    """For each reason the first dropped result, in the order of the lines: its number and what is wrong with it."""
    in_array: bool
    position: int


def parse_chunk(chunk: Chunk, *, each_packet: bool) -> ParsedChunk:
    times: list[int] = []
    sources: list[str] = []
    destinations: list[str] = []
    ip_versions: list[int] = []
    rtts: list[float | None] = []
    results = 0
    dropped: dict[str, int] = {}
    examples: dict[str, tuple[int, str]] = {}

    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
        try:
            ping = read_ping(orjson.loads(line), each_packet=each_packet)
        except orjson.JSONDecodeError as error:
            if not line.strip():
                continue
            problem = Unusable("malformed_json", str(error))
        except Unusable as unusable:
            problem = unusable
        else:
            results += 1
            for rtt in ping.rtts:
                times.append(ping.time_us)
                sources.append(ping.source)
                destinations.append(ping.destination)
                ip_versions.append(ping.ip_version)
                rtts.append(rtt)
            continue
        results += 1
        dropped[problem.reason] = dropped.get(problem.reason, 0) + 1
        examples.setdefault(problem.reason, (number, problem.detail))

    columns = (times, sources, destinations, ip_versions, rtts)
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return ParsedChunk(
        batch=pa.RecordBatch.from_arrays(arrays, schema=SCHEMA),
        results=results,
        dropped=dropped,
        examples=examples,
        in_array=chunk.in_array,
        position=chunk.position,
    )
