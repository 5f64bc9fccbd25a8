"""The encoder of measurements as tokens, compiled. `bench/plain_encoder.py` is its specification in plain Python.

Where each field of a measurement begins depends on its *form*: family, failed or not, kind of time, order of fields.
There are 384 forms, and a table holds the offsets for each, so that no branch depends on the random field order.

Importing this module loads (or compiles) the kernel: modules that are also used without encoding import it where they
call it.
"""

from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.compiled import Array, kernel, part_of_kernels, types
from ping_llm.core.rtt import TOO_LONG_US
from ping_llm.tokens import FIELD_ORDERS, FIELDS, FIRST_BYTE, LONGEST_DELTA1_S, Role, TimeKind, field_sizes

_TIMES: Final = len(TimeKind)
_ORDERS: Final = len(FIELD_ORDERS)
_SOURCE, _DESTINATION, _RESULT, _TIME, _LENGTH = range(5)
_INDEX: Final = (1 << 40) - 1


def _offsets_of_form(family: int, failed: bool, time_kind: TimeKind, order: tuple[str, ...]) -> list[int]:
    """Offsets of source, destination, result and time in a measurement, and its length."""
    sizes = dict(zip(FIELDS, field_sizes(family, failed, time_kind), strict=True))
    ends = np.cumsum([1, *(sizes[name] for name in order)])
    return [int(ends[order.index(name)]) for name in FIELDS] + [int(ends[-1])]


_OFFSETS: Final = np.array(
    [_offsets_of_form(*form) for form in product((4, 6), (False, True), TimeKind, FIELD_ORDERS)], dtype=np.uint8
)


@part_of_kernels
def rtt_code(rtt_ms: Any) -> Any:
    """The code nearest to an RTT, as `core.rtt.encode_rtt`."""
    micros = max(np.float64(rtt_ms) * 1000.0, 1.0)
    bits = (np.float64(micros).view(np.int64) >> 52) - 1022  # micros < 2^bits
    exponent: Any = max(bits - 11, 0)
    mantissa = np.int64(np.rint(micros * np.int64((1023 - exponent) << 52).view(np.float64)))
    carry = mantissa >> 11  # 2047.5 and more round up to the next exponent's 1024
    return (exponent + carry) << 11 | mantissa >> carry


@part_of_kernels
def _write_number(tokens: Any, at: Any, value: Any, size: Any) -> None:
    """The last `size` bytes of a number, the highest first."""
    for i in range(size):
        tokens[at + i] = FIRST_BYTE + (value >> (8 * (size - 1 - i)) & 255)


@part_of_kernels
def _write_address(tokens: Any, at: Any, role: Any, addresses: Any, index: Any, is_v6: Any) -> None:
    tokens[at] = role
    if is_v6:  # two loops of a fixed length each: they become wide stores
        for i in range(16):
            tokens[at + 1 + i] = FIRST_BYTE + np.uint16(addresses[index, i])
    else:
        for i in range(4):
            tokens[at + 1 + i] = FIRST_BYTE + np.uint16(addresses[index, i])


@part_of_kernels
def write_measurement(
    tokens: Any,
    at: Any,
    is_v6: Any,
    source: Any,
    s: Any,
    destination: Any,
    d: Any,
    rtt_ms: Any,
    kind: Any,
    time: Any,
    order: Any,
) -> Any:
    """Write one measurement to `tokens` from `at` on; gives where it ends.

    The addresses are rows `s` and `d` of two tables: a view of each would cost as much as writing it.
    """
    at &= _INDEX  # tells the compiler that it is not negative; each store would check that for negative indexing
    failed = np.isnan(rtt_ms)
    form = ((np.int64(is_v6) * 2 + np.int64(failed)) * _TIMES + kind) * _ORDERS + order
    tokens[at] = Role.MEASUREMENT_START
    _write_address(tokens, at + _OFFSETS[form, _SOURCE], Role.SRC_IPV6 if is_v6 else Role.SRC_IPV4, source, s, is_v6)
    role = Role.DST_IPV6 if is_v6 else Role.DST_IPV4
    _write_address(tokens, at + _OFFSETS[form, _DESTINATION], role, destination, d, is_v6)
    result_at = at + _OFFSETS[form, _RESULT]
    if failed:
        tokens[result_at] = Role.FAILED
    else:
        tokens[result_at] = Role.RTT_START
        _write_number(tokens, result_at + 1, rtt_code(rtt_ms), 2)
    time_at = at + _OFFSETS[form, _TIME]
    if kind == TimeKind.DELTA1:
        tokens[time_at] = Role.TIMESTAMP_DELTA1
        tokens[time_at + 1] = FIRST_BYTE + (time & 255)
    elif kind == TimeKind.DELTA4:
        tokens[time_at] = Role.TIMESTAMP_DELTA4
        _write_number(tokens, time_at + 1, time, 4)
    elif kind == TimeKind.ABSOLUTE:
        tokens[time_at] = Role.TIMESTAMP_ABS
        _write_number(tokens, time_at + 1, time, 8)
    return at + _OFFSETS[form, _LENGTH]


_U8, _I64, _ADDRESSES = types.uint8[::1], types.int64[::1], types.uint8[:, ::1]
_COLUMNS: Final = types.Tuple((_U8, _ADDRESSES, _ADDRESSES, types.float32[::1], _U8, _I64, _U8))


@kernel(_COLUMNS, _I64, returns=types.uint16[::1])
def _encode(columns: Any, lengths: Array) -> Any:
    family, source, destination, rtt_ms, time_kind, time_value, field_order = columns
    tokens = np.empty(len(family) * _OFFSETS[:, _LENGTH].max(), dtype=np.uint16)
    end = 0
    for i in range(len(family)):
        at, is_v6, kind, order = end, family[i] == 6, np.int64(time_kind[i]), np.int64(field_order[i])
        end = write_measurement(tokens, at, is_v6, source, i, destination, i, rtt_ms[i], kind, time_value[i], order)
        lengths[i] = end - at
    return tokens[:end].copy()


def encode(
    *,
    family: npt.ArrayLike,
    source: npt.ArrayLike,
    destination: npt.ArrayLike,
    rtt_ms: npt.ArrayLike,
    time_kind: npt.ArrayLike,
    time_value: npt.ArrayLike,
    order: npt.ArrayLike,
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """The tokens of measurements, one after the other, and the number of tokens of each.

    Addresses are (measurements, 16) bytes, IPv4 in the first four; `rtt_ms` is NaN where no answer came; `time_value`
    is Unix seconds, or the seconds since the previous timed measurement, as `time_kind` says; `order` is an index into
    `FIELD_ORDERS`.
    """
    rtt_ms = np.asarray(rtt_ms, dtype=np.float32)
    if np.any(rtt_ms * np.float64(1000.0) >= TOO_LONG_US):
        raise OverflowError(f"an RTT of {np.nanmax(rtt_ms)} ms has no code")
    columns = (family, source, destination, rtt_ms, time_kind, time_value, order)
    kinds = (np.uint8, np.uint8, np.uint8, np.float32, np.uint8, np.int64, np.uint8)
    lengths = np.empty(len(rtt_ms), dtype=np.int64)
    contiguous = tuple(np.require(c, kind, ["C", "W"]) for c, kind in zip(columns, kinds, strict=True))
    return _encode(contiguous, lengths), lengths


def encode_history(
    family: int,
    source: bytes,
    destinations: npt.NDArray[np.uint8],
    rtt_ms: npt.NDArray[np.float32],
    time_s: npt.NDArray[np.int64] | None,
    *,
    starts: npt.ArrayLike = (0,),
    order: npt.ArrayLike,
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Consecutive measurements of one source as tokens, all with their times or (`time_s` is None) all without.

    `destinations` are (measurements, 4 or 16) bytes, `starts` the indices at which a new context begins: there the time
    is absolute, elsewhere it is the delta since the measurement before.
    """
    count, width = destinations.shape
    kind, value = np.full(count, TimeKind.NONE), np.zeros(count, dtype=np.int64)
    if time_s is not None:
        value = np.diff(time_s, prepend=0)
        kind = np.where(value <= LONGEST_DELTA1_S, TimeKind.DELTA1, TimeKind.DELTA4)
        kind[np.asarray(starts)], value[np.asarray(starts)] = TimeKind.ABSOLUTE, time_s[np.asarray(starts)]
    addresses = np.zeros((2, count, 16), dtype=np.uint8)
    addresses[0, :, :width], addresses[1, :, :width] = np.frombuffer(source, dtype=np.uint8), destinations
    return encode(
        family=np.full(count, family),
        source=addresses[0],
        destination=addresses[1],
        rtt_ms=rtt_ms,
        time_kind=kind,
        time_value=value,
        order=np.broadcast_to(order, count),
    )
