"""Batches beside a plain encoder: `python bench/pipeline_speed.py [--rows big] [--workers 2]`.

The plain encoder is how such code is usually written: one measurement at a time, from the record as it is stored, to a
list of tokens. It parses the addresses, computes the delta, spells the RTT and shuffles the fields of each measurement.
It does no sampling, reading or packing, which `ping-llm bench pipeline` measures with all the rest.
"""

import argparse
import ipaddress
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ping_llm.cli.benchmarks import benchmark_rows, measure_pipeline
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.summary import measurement_as_json
from plain_encoder import encode_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="typical", help="`typical` or `big` simulated rows, or a prepared folder")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = vars(parser.parse_args())
    with benchmark_rows(options.pop("rows")) as rows:
        sys.stdout.write(json.dumps(compared(rows, **options), indent=1) + "\n")


def compared(rows: Path, **settings: Any) -> dict[str, Any]:
    reference = _reference_rate(rows)
    found = measure_pipeline(rows, **settings)
    speedup = round(found["real_tokens_per_s"] / reference, 1)
    return {**found, "reference_tokens_per_s": round(reference), "speedup": speedup}


def _reference_rate(rows: Path) -> float:
    """Tokens per second of the plain encoder, on measurements of these rows as records."""
    histories: list[list[dict[str, Any]]] = []
    with RowSet(rows) as row_set:
        for number in np.unique(np.linspace(0, len(row_set) - 1, 400).astype(int)).tolist():
            row = row_set[number]
            source, measured = {"src_addr": row.source_address}, range(min(len(row), 200))
            histories.append(
                [measurement_as_json(row, i) | source | {"t": int(row.time_us[i]) // 10**6} for i in measured]
            )
    rng = np.random.default_rng(0)
    tokens, started = 0, time.perf_counter()
    for history in histories:
        previous_s = None
        for record in history:
            tokens += len(_encoded(record, previous_s, rng))
            previous_s = record["t"]
    return tokens / (time.perf_counter() - started)


def _encoded(record: dict[str, Any], previous_s: int | None, rng: np.random.Generator) -> list[int]:
    source, destination = ipaddress.ip_address(record["src_addr"]), ipaddress.ip_address(record["dst_addr"])
    kind, value = "absolute", record["t"]
    if previous_s is not None:
        value -= previous_s
        kind = "delta1" if value <= 255 else "delta4"
    order = [("source", "destination", "result", "time")[field] for field in rng.permutation(4)]
    return encode_one(source.version, source.packed, destination.packed, record["rtt"], kind, value, order)


if __name__ == "__main__":
    main()
