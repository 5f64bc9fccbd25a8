"""Single measurements out of mapped shards, compiled: the loop in which the pipeline touches its data.

Nothing is checked here. What is asked for must lie within rows that `checks.py` has found sound.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.compiled import (
    Array,
    carray,
    column,
    kernel,
    mapped,
    part_of_kernels,
    pointer,
    prefetch,
    table,
    types,
)
from ping_llm.rows.format import BLOCK_HEADER, BLOCK_PAYLOAD, FORMAT_VERSION, HEADER, MAGIC, TIME_UNITS_US

_SECOND_US: Final = 1_000_000
_AHEAD: Final = 3
"""Rows whose measurements are asked for before they are picked."""
_OF_A_RUN: Final = 4
"""Of measurements that lie side by side so many come with one load, at least."""
_HEADER_BYTES: Final = HEADER.itemsize


@part_of_kernels
def physical(logical: Any) -> Any:
    """The position in the file of a logical position, as `arrayrecord_layout.physical`."""
    return logical + BLOCK_HEADER * (logical // BLOCK_PAYLOAD + 1)


@part_of_kernels
def first_column(offset: Any) -> Any:
    """Logical place of a row's columns: the first multiple of 8 after its header."""
    return (offset + (_HEADER_BYTES + 7)) & ~7


@part_of_kernels
def time_width(first_us: Any, last_us: Any, unit_us: Any) -> Any:
    """Bytes of each time of a row, whose ticks take 32 bits if they can."""
    return 8 if last_us - first_us >= unit_us << 32 else 4


@part_of_kernels
def _ask_for(address: Any, positions: Any, times: Any, width: Any, destinations: Any, step: Any, rtts: Any) -> None:
    """Begin to load the numbers of a row's measurements: a hundred loads at once take little longer than one."""
    last = len(positions) - 1
    is_run = last >= 0 and positions[last] - positions[0] == last
    for i in range(0, len(positions), _OF_A_RUN if is_run else 1):
        prefetch(address + physical(rtts + positions[i] * 4))
        prefetch(address + physical(destinations + positions[i] * step))
        if width > 0:
            prefetch(address + physical(times + positions[i] * width))


@kernel(
    column(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.bool_),
    mapped(types.uint32),
    mapped(types.uint64),
    mapped(types.uint32),
    mapped(types.uint8),
    mapped(types.uint32),
    mapped(types.int64),
    mapped(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.float32),
    table(types.uint32),
)
def pick_runs(
    rows: Array,
    first: Array,
    positions: Array,
    wants_times: Array,
    shard: Array,
    offset: Array,
    row_count: Array,
    family: Array,
    unit_us: Array,
    first_us: Array,
    last_us: Array,
    shard_at: Array,
    shard_bytes: Array,
    time_s: Array,
    rtt_ms: Array,
    destination: Array,
) -> None:
    """Measurements `positions[first[i]:first[i + 1]]` of row `rows[i]`, for all i: fills the columns from `time_s` on.

    `shard_at` and `shard_bytes` say where each shard is mapped. Times are whole Unix seconds, and picked where they are
    wanted. An IPv4 destination fills the first of its four words.
    """
    count = len(rows)
    addresses, widths, steps = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    times, destinations, rtts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        row = rows[i]
        addresses[i] = shard_at[shard[row]]
        widths[i] = time_width(first_us[row], last_us[row], np.int64(unit_us[row]))
        steps[i] = 16 if family[row] == 6 else 4
        times[i] = first_column(np.int64(offset[row]))
        destinations[i] = times[i] + row_count[row] * widths[i]
        rtts[i] = destinations[i] + row_count[row] * steps[i]

    for ahead in range(count + _AHEAD):
        if ahead < count:
            i = ahead
            width = widths[i] if wants_times[i] else 0
            wanted = positions[first[i] : first[i + 1]]
            _ask_for(addresses[i], wanted, times[i], width, destinations[i], steps[i], rtts[i])
        if ahead < _AHEAD:
            continue
        i = ahead - _AHEAD
        row, begin, end = rows[i], first[i], first[i + 1]
        words = carray(pointer(addresses[i]), (shard_bytes[shard[row]] // 4,), np.uint32)
        for j in range(begin, end):
            rtt_ms[j] = np.uint32(words[physical(rtts[i] + positions[j] * 4) >> 2]).view(np.float32)
        if wants_times[i]:
            unit, since, width = np.int64(unit_us[row]), first_us[row], widths[i]
            for j in range(begin, end):
                at = times[i] + positions[j] * width
                ticks = np.int64(words[physical(at) >> 2])
                if width == 8:
                    ticks += np.int64(words[physical(at + 4) >> 2]) << 32
                time_s[j] = (since + ticks * unit) // _SECOND_US
        if steps[i] == 4:
            for j in range(begin, end):
                destination[j, 0] = words[physical(destinations[i] + positions[j] * 4) >> 2]
        else:
            for j in range(begin, end):
                at = destinations[i] + positions[j] * 16
                for k in range(4):
                    destination[j, k] = words[physical(at + 4 * k) >> 2]


# Whether rows are what the index says, compiled: their place in the shard, their header, their checksum.
#
# Only rows that passed may be given to `picking.py`, which would read anything anywhere.

ALL_SOUND: Final = -1

_FIELDS: Any = HEADER.fields

_VERSION_AT: Final = _FIELDS["version"][1]
_FAMILY_AT: Final = _FIELDS["family"][1]
_WIDTH_AT: Final = _FIELDS["time_width"][1]
_COUNT_AT: Final = _FIELDS["count"][1]
_UNIT_AT: Final = _FIELDS["time_unit_us"][1]
_FIRST_AT: Final = _FIELDS["first_time_us"][1]
_CRC_AT: Final = _FIELDS["crc32"][1]

_SECOND, _MILLISECOND, _MICROSECOND = TIME_UNITS_US
_MAGIC: Final = int.from_bytes(MAGIC, "little")
_FARTHEST: Final = 1 << 50
"""No shard is that large: positions below it can be added up without an overflow."""


def _crc_tables() -> npt.NDArray[np.uint32]:
    """(16, 256): what each byte does to the CRC-32 (that of zlib) of all that follows it, 0 to 15 bytes later."""
    value = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        value = np.where(value & 1, value >> 1 ^ np.uint32(0xEDB88320), value >> 1)
    tables = [value]
    for _ in range(15):
        tables.append(tables[-1] >> 8 ^ value[tables[-1] & 255])
    return np.array(tables, dtype=np.uint32)


_CRC: Final = _crc_tables()


@part_of_kernels
def _crc32(crc: Any, data: Any) -> Any:
    """A running CRC-32 after these bytes: sixteen at a time, whose tables are looked up side by side."""
    at, crc = 0, np.uint32(crc)
    while at + 16 <= len(data):
        mixed = np.uint32(0)
        for i in range(4):
            mixed ^= _CRC[15 - i, (crc >> (8 * i) ^ data[at + i]) & 255]
        for i in range(4, 16):
            mixed ^= _CRC[15 - i, data[at + i]]
        crc = np.uint32(mixed)
        at += 16
    while at < len(data):
        crc = np.uint32(_CRC[0, (crc ^ data[at]) & 255] ^ crc >> 8)
        at += 1
    return crc


@part_of_kernels
def _crc32_logical(crc: Any, file: Any, begin: Any, end: Any) -> Any:
    """The same of logical positions `begin` to `end`: the block headers in between are left out."""
    while begin < end:
        stop = min(end, (begin // BLOCK_PAYLOAD + 1) * BLOCK_PAYLOAD)
        at = physical(begin)
        crc = _crc32(crc, file[at : at + stop - begin])
        begin = stop
    return crc


@part_of_kernels
def _number(file: Any, logical: Any, size: Any) -> Any:
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(file[physical(logical + i)]) << (8 * i)
    return value


@kernel(
    column(types.int64),
    column(types.uint8),
    mapped(types.uint32),
    mapped(types.uint64),
    mapped(types.uint32),
    mapped(types.uint32),
    mapped(types.uint8),
    mapped(types.uint32),
    mapped(types.int64),
    mapped(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.int64),
    returns=types.int64,
)
def check_rows(
    rows: Array,
    checked: Array,
    shard: Array,
    offset: Array,
    size: Array,
    row_count: Array,
    family: Array,
    unit_us: Array,
    first_us: Array,
    last_us: Array,
    addresses: Array,
    sizes: Array,
    read_whole: Array,
) -> Any:
    """Mark rows in `checked` until one is not sound; gives its index, or `ALL_SOUND`.

    `addresses` and `sizes` say where each shard is mapped. Its records of up to `read_whole` bytes are read whole, of
    others the header.
    """
    for i in range(len(rows)):
        row = rows[i]
        if checked[row]:
            continue
        if shard[row] >= len(addresses) or addresses[shard[row]] == 0:
            return i
        begin, bytes_, count = np.int64(offset[row]), np.int64(size[row]), np.int64(row_count[row])
        if begin < 0 or begin > _FARTHEST or bytes_ <= _HEADER_BYTES:
            return i
        if unit_us[row] != _SECOND and unit_us[row] != _MILLISECOND and unit_us[row] != _MICROSECOND:
            return i
        if family[row] != 4 and family[row] != 6:
            return i
        if physical(begin + bytes_ - 1) >= sizes[shard[row]]:
            return i
        width = time_width(first_us[row], last_us[row], np.int64(unit_us[row]))
        body = count * (width + (16 if family[row] == 6 else 4) + 4)
        if first_column(begin) + body > begin + bytes_:
            return i

        file = carray(pointer(addresses[shard[row]]), (sizes[shard[row]],), np.uint8)
        if _number(file, begin, 4) != _MAGIC or _number(file, begin + _VERSION_AT, 2) != FORMAT_VERSION:
            return i
        if _number(file, begin + _COUNT_AT, 4) != count or _number(file, begin + _FAMILY_AT, 1) != family[row]:
            return i
        if _number(file, begin + _WIDTH_AT, 1) != width or _number(file, begin + _UNIT_AT, 4) != unit_us[row]:
            return i
        if _number(file, begin + _FIRST_AT, 8) != first_us[row]:
            return i
        if bytes_ <= read_whole[shard[row]]:
            crc = _crc32_logical(0xFFFFFFFF, file, begin, begin + _CRC_AT)
            crc = _crc32_logical(crc, file, begin + _HEADER_BYTES, begin + bytes_)
            if crc ^ np.uint32(0xFFFFFFFF) != _number(file, begin + _CRC_AT, 4):
                return i
        checked[row] = 1
    return ALL_SOUND
