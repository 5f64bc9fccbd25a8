"""Helpers of the Atlas importer's tests: results, files of them, and what an import wrote."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

TIME = 1_557_653_294
ABSENT = object()
Row = tuple[Any, ...]


def ping(**changes: Any) -> dict[str, Any]:
    """A result as current firmware writes it, with some fields changed or left out."""
    result = {
        "af": 4,
        "dst_addr": "192.0.2.7",
        "dst_name": "example.org",
        "dup": 0,
        "from": "198.51.100.1",
        "fw": 5020,
        "min": 20.5,
        "msm_id": 1,
        "msm_name": "Ping",
        "prb_id": 2,
        "rcvd": 3,
        "result": [{"rtt": 21.5}, {"rtt": 20.5}, {"rtt": 22.5}],
        "sent": 3,
        "src_addr": "10.0.0.2",
        "timestamp": TIME,
        "type": "ping",
    } | changes
    return {key: value for key, value in result.items() if value is not ABSENT}


def as_lines(results: list[Any]) -> bytes:
    return b"".join(json.dumps(result).encode() + b"\n" for result in results)


def written(folder: Path) -> list[Row]:
    tables = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    return [tuple(row.values())[:5] for table in tables for row in table.to_pylist()]


def visible(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def several_files(folder: Path) -> list[Path]:
    """Three files of different kinds with some bad results in them."""
    contents = []
    for first in range(3):
        results = [
            ping(
                **{"from": f"198.51.100.{i % 200}"},
                timestamp=TIME + i,
                result=[{"rtt": i / 8}, {"x": "*"}] if i % 7 else [{"x": "*"}],
                **({"type": "dns"} if i % 50 == first else {}),
            )
            for i in range(first, 3000)
        ]
        contents.append(results)
    files = [folder / "a.bz2", folder / "b.gz", folder / "c.json"]
    files[0].write_bytes(bz2.compress(as_lines(contents[0])))
    files[1].write_bytes(gzip.compress(as_lines(contents[1])))
    files[2].write_text(json.dumps(contents[2]))
    return files
