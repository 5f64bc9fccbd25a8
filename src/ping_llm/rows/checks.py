"""Whether rows are what the index says, compiled: their place in the shard, their header, their checksum.

Only rows that passed may be given to `picking.py`, which would read anything anywhere.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.compiled import Array, carray, column, kernel, mapped, part_of_kernels, pointer, types
from ping_llm.rows.arrayrecord_layout import BLOCK_PAYLOAD
from ping_llm.rows.format import FORMAT_VERSION, HEADER, MAGIC, TIME_UNITS_US
from ping_llm.rows.picking import first_column, physical, time_width

ALL_SOUND: Final = -1

_FIELDS: Any = HEADER.fields
_HEADER_BYTES: Final = HEADER.itemsize
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
