"""Round-trip times as 16-bit codes: a small floating-point number that bytes can spell.

A code is a 5-bit exponent e and an 11-bit mantissa m and stands for m·2^e µs. It is normalised (e = 0, or m ≥ 1024), so
each value has one code, codes are ordered like the values, and rounding to the nearest changes a value from 1.024 ms on
by at most one part in 2^11. Below that the step is 1 µs. Nothing is shorter than 1 µs.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

TOO_LONG_US: Final = 2047.5 * 2**31
"""From here on an RTT, 51 days, would round beyond the largest code."""


def encode_rtt(rtt_ms: Any) -> npt.NDArray[np.uint16]:
    """The code nearest to each RTT. What is not a number gets code 0, which no RTT has."""
    micros = np.fmax(np.asarray(rtt_ms, dtype=np.float64) * 1000.0, 1.0)
    micros = np.where(np.isnan(rtt_ms), 0.0, micros)
    if np.any(micros >= TOO_LONG_US):
        raise OverflowError(f"an RTT of {np.nanmax(rtt_ms)} ms has no code")
    _, bits = np.frexp(micros)  # micros < 2^bits
    exponent = np.maximum(bits - 11, 0)
    mantissa = np.rint(np.ldexp(micros, -exponent)).astype(np.int64)
    carry = mantissa >> 11  # 2047.5 and more round up to the next exponent's 1024
    exponent, mantissa = exponent + carry, mantissa >> carry
    return (exponent << 11 | mantissa).astype(np.uint16)


def decode_rtt(codes: Any) -> npt.NDArray[np.float64]:
    """Milliseconds of each code (of any 16-bit number: one that is not normalised has a value too)."""
    codes = np.asarray(codes, dtype=np.int64)
    return np.ldexp((codes & 0x7FF).astype(np.float64), codes >> 11) / 1000.0


def normalised_codes() -> npt.NDArray[np.uint16]:
    """All codes that an RTT can have, in order: the support of a predicted distribution."""
    codes = np.arange(1, 1 << 16)
    return codes[(codes < 1 << 11) | ((codes & 0x7FF) >= 1024)].astype(np.uint16)


def code_bounds(rtt_ms: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The two RTTs between which all have the same code: its probability is what a distribution has between them."""
    codes = normalised_codes()
    place = np.searchsorted(codes, encode_rtt(rtt_ms))
    values = decode_rtt(codes)
    middles = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([[0.0], middles, [TOO_LONG_US / 1000.0]])
    return edges[place], edges[place + 1]
