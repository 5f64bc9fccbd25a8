"""The token grammar spelled out for one measurement, in plain Python.

It is the yardstick of `bench/pipeline_speed.py`, and the specification to which the tests hold the other encoders. It
shares no code with them. All arithmetic is on whole numbers, so nothing here rounds but where it says so.
"""

from collections.abc import Iterable, Sequence

MEASUREMENT_START = 0
SRC_IPV4, SRC_IPV6 = 1, 2
DST_IPV4, DST_IPV6 = 3, 4
RTT_START, FAILED = 8, 10
TIMES = {"absolute": (5, 8), "delta1": (6, 1), "delta4": (7, 4)}  # the role of each kind, and its bytes
FIRST_BYTE = 11


def encode_one(
    family: int,
    source: bytes,
    destination: bytes,
    rtt_ms: float | None,
    time_kind: str,
    time_value: int,
    order: Iterable[str],
) -> list[int]:
    """Tokens of a measurement. `rtt_ms` None: unanswered. `time_kind` is none, absolute, delta1 or delta4."""
    tokens = [MEASUREMENT_START]
    for field in order:
        if field == "source":
            tokens += [SRC_IPV4 if family == 4 else SRC_IPV6, *_spell(source)]
        elif field == "destination":
            tokens += [DST_IPV4 if family == 4 else DST_IPV6, *_spell(destination)]
        elif field == "result":
            tokens += [FAILED] if rtt_ms is None else [RTT_START, *_spell(rtt_code(rtt_ms).to_bytes(2, "big"))]
        elif time_kind != "none":
            role, size = TIMES[time_kind]
            tokens += [role, *_spell(time_value.to_bytes(size, "big", signed=time_kind == "absolute"))]
    return tokens


def _spell(data: Sequence[int]) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def rtt_code(rtt_ms: float) -> int:
    """The code e·2^11 + m whose value m·2^e µs is nearest to the RTT, and of two as near the one with the even m.

    The smallest exponent whose mantissa fits its 11 bits gives the normalised code. Nothing is shorter than 1 µs.
    """
    numerator, denominator = rtt_ms.as_integer_ratio()
    numerator *= 1000  # the RTT is now exactly numerator / denominator microseconds
    if numerator < denominator:
        return 1
    exponent = max(0, (numerator // denominator).bit_length() - 11)
    denominator <<= exponent
    mantissa, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and mantissa % 2 == 1):
        mantissa += 1
    if mantissa == 2048:
        exponent, mantissa = exponent + 1, 1024
    if exponent > 31:
        raise OverflowError(f"an RTT of {rtt_ms} ms has no code")
    return exponent * 2048 + mantissa
