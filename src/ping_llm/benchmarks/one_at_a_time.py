"""The yardstick for tokenising: one measurement at a time, from the record as it is stored, in plain Python.

This is how such an encoder is usually written: it parses the addresses, computes the delta, spells the RTT and shuffles
the fields of each measurement, and gives back a list of tokens. It does no sampling, reading or packing.
"""

import ipaddress
import math
from typing import Any

import numpy as np

from ping_llm.tokens.vocabulary import FIRST_BYTE, Role


def encode_measurement(measurement: dict[str, Any], previous_s: int | None, rng: np.random.Generator) -> list[int]:
    """Tokens of a measurement dict (`event_time` in seconds, `src_addr`, `dst_addr`, `rtt` or None)."""
    source = ipaddress.ip_address(measurement["src_addr"])
    destination = ipaddress.ip_address(measurement["dst_addr"])
    fields = [
        [Role.SRC_IPV4 if source.version == 4 else Role.SRC_IPV6, *_spell(source.packed)],
        [Role.DST_IPV4 if destination.version == 4 else Role.DST_IPV6, *_spell(destination.packed)],
        _result(measurement["rtt"]),
        _time(measurement["event_time"], previous_s),
    ]
    tokens: list[int] = [Role.MEASUREMENT_START]
    for field in rng.permutation(4):
        tokens += fields[field]
    return tokens


def _result(rtt_ms: float | None) -> list[int]:
    if rtt_ms is None:
        return [Role.FAILED]
    micros = max(1.0, rtt_ms * 1000.0)
    exponent = max(0, math.frexp(micros)[1] - 11)
    mantissa = round(micros / 2**exponent)
    if mantissa == 2048:
        exponent, mantissa = exponent + 1, 1024
    return [Role.RTT_START, *_spell((exponent << 11 | mantissa).to_bytes(2, "big"))]


def _time(time_s: int, previous_s: int | None) -> list[int]:
    if previous_s is None:
        return [Role.TIMESTAMP_ABS, *_spell(time_s.to_bytes(8, "big"))]
    delta = time_s - previous_s
    if delta <= 255:
        return [Role.TIMESTAMP_DELTA1, *_spell(delta.to_bytes(1, "big"))]
    return [Role.TIMESTAMP_DELTA4, *_spell(delta.to_bytes(4, "big"))]


def _spell(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]
