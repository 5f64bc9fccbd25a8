"""The chosen measurements of contexts in their order, as tokens."""

from typing import Any, Final

import numpy as np

from ping_llm.batches.kernels.planning import FULL
from ping_llm.batches.kernels.sampling import sort_random
from ping_llm.core.compiled import Array, column, kernel, part_of_kernels, table, types
from ping_llm.rows.format import LONG_GAP_S
from ping_llm.tokens.encode import FIELD_ORDERS, FIRST_BYTE, Role, TimeKind, field_places

_SOURCE, _DESTINATION, _RESULT, _TIME, _LENGTH = 0, 1, 2, 3, 4
_PLACES: Final = field_places()
_ORDERS: Final = len(FIELD_ORDERS)

_UNTIMED: Final = int(TimeKind.NONE)
_ABSOLUTE: Final = int(TimeKind.ABSOLUTE)
_DELTA1: Final = int(TimeKind.DELTA1)
_DELTA4: Final = int(TimeKind.DELTA4)
_KINDS: Final = len(TimeKind)

_MEASUREMENT_START: Final = int(Role.MEASUREMENT_START)
_SRC_IPV4: Final = int(Role.SRC_IPV4)
_SRC_IPV6: Final = int(Role.SRC_IPV6)
_DST_IPV4: Final = int(Role.DST_IPV4)
_DST_IPV6: Final = int(Role.DST_IPV6)
_TIMESTAMP_ABS: Final = int(Role.TIMESTAMP_ABS)
_TIMESTAMP_DELTA1: Final = int(Role.TIMESTAMP_DELTA1)
_TIMESTAMP_DELTA4: Final = int(Role.TIMESTAMP_DELTA4)
_RTT_START: Final = int(Role.RTT_START)
_FAILED: Final = int(Role.FAILED)

_U16: Final = np.uint64(16)
_U48: Final = np.uint64(48)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_NUMBER: Final = (1 << 20) - 1


@part_of_kernels
def rtt_code(rtt_ms: Any) -> Any:
    """The code nearest to an RTT, as `tokens.rtt_code.encode_rtt`."""
    micros = max(np.float64(rtt_ms) * 1000.0, 1.0)
    bits = (np.float64(micros).view(np.int64) >> 52) - 1022  # micros < 2^bits
    exponent: Any = max(bits - 11, 0)
    mantissa = np.int64(np.rint(micros * np.int64((1023 - exponent) << 52).view(np.float64)))
    carry = mantissa >> 11  # 2047.5 and more round up to the next exponent's 1024
    return (exponent + carry) << 11 | mantissa >> carry


@part_of_kernels
def _spell(tokens: Any, at: Any, value: Any, size: Any) -> None:
    """The last `size` bytes of a number, the highest first."""
    for i in range(size):
        tokens[at + i] = FIRST_BYTE + (value >> (8 * (size - 1 - i)) & 255)


@part_of_kernels
def _write_time(tokens: Any, at: Any, kind: Any, value: Any) -> None:
    if kind == _DELTA1:
        tokens[at] = _TIMESTAMP_DELTA1
        tokens[at + 1] = FIRST_BYTE + (value & 255)
    elif kind == _DELTA4:
        tokens[at] = _TIMESTAMP_DELTA4
        _spell(tokens, at + 1, value, 4)
    elif kind == _ABSOLUTE:
        tokens[at] = _TIMESTAMP_ABS
        _spell(tokens, at + 1, value, 8)


@part_of_kernels
def _write_address(tokens: Any, at: Any, role: Any, address: Any, is_wide: Any) -> None:
    tokens[at] = role
    if is_wide:
        for i in range(16):
            tokens[at + 1 + i] = FIRST_BYTE + np.uint16(address[i])
    else:
        for i in range(4):
            tokens[at + 1 + i] = FIRST_BYTE + np.uint16(address[i])


@kernel(
    column(types.uint8),
    column(types.uint8),
    table(types.uint8),
    column(types.int64),
    column(types.int32),
    column(types.int64),
    column(types.int64),
    column(types.int32),
    column(types.uint64),
    column(types.bool_),
    column(types.int64),
    column(types.float32),
    table(types.uint8),
    returns=types.Tuple((column(types.uint16), column(types.int64), column(types.uint8))),
)
def write(
    family: Array,
    mode: Array,
    source: Array,
    counts: Array,
    sizes: Array,
    first: Array,
    position: Array,
    rank: Array,
    words: Array,
    timed: Array,
    time_s: Array,
    rtt_ms: Array,
    destination: Array,
) -> Any:
    """Tokens of the candidates of rank below `counts[u]` of each unit u; the position and field order of each.

    A random place is drawn for each measurement. The places that fall to timed ones are then given to the timed ones in
    time order. With all timed that is time order, with none timed a plain shuffle: the three modes are one rule.
    """
    most = counts.max() if len(counts) else 0
    used, in_time = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    keys, spare = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    ends = np.empty(2 * most + 17, dtype=np.int64)
    tokens = np.empty(sizes.sum(), dtype=np.uint16)
    written, field_orders = np.empty(counts.sum(), dtype=np.int64), np.empty(counts.sum(), dtype=np.uint8)
    at = number = 0
    for u in range(len(counts)):
        is_wide = family[u] == 6
        count = with_time = 0
        for i in range(first[u], first[u + 1]):
            if rank[i] < counts[u]:
                used[count] = i
                keys[count] = np.int64(words[i] >> _U16 & _LOW_32) << 20 | count
                count += 1
                if timed[i]:
                    in_time[with_time] = i
                    with_time += 1
        if mode[u] != FULL:
            sort_random(keys, spare, ends, count, 52)
        next_timed, previous = 0, np.int64(0)
        for k in range(count):
            i = used[k] if mode[u] == FULL else used[keys[k] & _NUMBER]
            kind, value = _UNTIMED, np.int64(0)
            if timed[i]:
                i = in_time[next_timed]
                value = time_s[i] - previous
                kind = _ABSOLUTE if next_timed == 0 else _DELTA1 if value <= LONG_GAP_S else _DELTA4
                previous = time_s[i]
                next_timed += 1
            failed = np.isnan(rtt_ms[i])
            order = np.int64((words[i] >> _U48) * np.uint64(_ORDERS) >> _U16)
            form = ((np.int64(is_wide) * 2 + np.int64(failed)) * _KINDS + kind) * _ORDERS + order
            tokens[at] = _MEASUREMENT_START
            role = _SRC_IPV6 if is_wide else _SRC_IPV4
            _write_address(tokens, at + _PLACES[form, _SOURCE], role, source[u], is_wide)
            role = _DST_IPV6 if is_wide else _DST_IPV4
            _write_address(tokens, at + _PLACES[form, _DESTINATION], role, destination[i], is_wide)
            if failed:
                tokens[at + _PLACES[form, _RESULT]] = _FAILED
            else:
                tokens[at + _PLACES[form, _RESULT]] = _RTT_START
                _spell(tokens, at + _PLACES[form, _RESULT] + 1, rtt_code(rtt_ms[i]), 2)
            _write_time(tokens, at + _PLACES[form, _TIME], kind, value)
            at += _PLACES[form, _LENGTH]
            written[number], field_orders[number] = position[i], order
            number += 1
    return tokens, written, field_orders


# Segments side by side in the arrays of the batch contract.

NAMES: Final = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)
INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_POSITION, TARGETS_SEGMENTATION = range(len(NAMES))
_ARRAYS: Final = len(NAMES)


@part_of_kernels
def _write(place: Any, tokens: Any) -> None:
    for i in range(len(place)):
        place[i] = tokens[i]


@part_of_kernels
def _count_up(place: Any) -> None:
    for i in range(len(place)):
        place[i] = i


@part_of_kernels
def _lay_out(tokens: Any, sizes: Any, sequence: Any, arrays: Any) -> None:
    """One loop for each array: this is how they become wide stores, at the speed of memory."""
    segments, length = len(sizes), arrays.shape[2]
    read = segment = 0
    for s in range(arrays.shape[1]):
        at = number = 0
        while segment < segments and sequence[segment] == s:
            size = min(np.int64(sizes[segment]), length - at)
            number += 1
            _write(arrays[INPUTS, s, at : at + size], tokens[read : read + size])
            _count_up(arrays[INPUTS_POSITION, s, at : at + size])
            arrays[INPUTS_SEGMENTATION, s, at : at + size] = number
            # A segment's last token has nothing to predict within it: that place carries no loss.
            last = at + max(size - 1, 0)
            _write(arrays[TARGETS, s, at:last], tokens[read + 1 : read + size])
            _count_up(arrays[TARGETS_POSITION, s, at:last])
            arrays[TARGETS_SEGMENTATION, s, at:last] = number
            at += size
            for name in range(TARGETS, TARGETS_SEGMENTATION + 1):
                arrays[name, s, last:at] = 0
            read += size
            segment += 1
        for name in range(_ARRAYS):
            arrays[name, s, at:] = 0


@kernel(column(types.uint16), column(types.int32), column(types.int32), types.Array(types.int32, 3, "C"))
def lay_out_16(tokens: Array, sizes: Array, sequence: Array, arrays: Array) -> None:
    _lay_out(tokens, sizes, sequence, arrays)


@kernel(column(types.uint32), column(types.int32), column(types.int32), types.Array(types.int32, 3, "C"))
def lay_out_32(tokens: Array, sizes: Array, sequence: Array, arrays: Array) -> None:
    _lay_out(tokens, sizes, sequence, arrays)
