"""Picks single measurements out of mapped shards, for many rows at once: the loops in which batches touch their data.

A context needs a few dozen measurements of a history that may have hundreds of thousands. Shards are mapped, and since
every number of every column lies aligned in the file (`format.record_shape`), the numbers are picked as 32-bit words by
index arithmetic, compiled: only the pages that hold them are touched, and nothing is parsed or copied but the result.

Picking does not verify a record's checksum, so each row of up to `CHECKED_BYTES` is checked as a whole the first time
this process uses it. Checking a longer row takes milliseconds, more than all other work for a context: only its header
is checked (unless it was just fetched in parts), and `ping-llm inspect rows` checks everything.

Importing this module loads (or compiles) the kernels.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ping_llm.core.compiled import Array, carray, kernel, mapped, part_of_kernels, pointer, prefetch, types
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import BLOCK_PAYLOAD, FORMAT_VERSION, HEADER, MAGIC, TIME_UNITS_US, Bytes, Ints, physical
from ping_llm.rows.manifest import INDEX_SCHEMA

CHECKED_BYTES: Final = 1 << 20

_ANY_SIZE: Final = 1 << 62
_ALL_SOUND: Final = -1
_SECOND: Final = TIME_UNITS_US[0]
_ROWS_AHEAD: Final = 3  # rows whose measurements are prefetched before they are picked
_PER_LOAD: Final = 4  # adjacent measurements that one load brings into the cache, at least

_HEADER_BYTES: Final = HEADER.itemsize
_MAGIC: Final = int.from_bytes(MAGIC, "little")
_CHECKED_FIELDS: Final = "magic", "version", "count", "family", "time_width", "time_unit_us", "first_time_us"
_FIELDS: Any = HEADER.fields
_FIELD_AT: Final = np.array([_FIELDS[name][1] for name in _CHECKED_FIELDS])
_FIELD_BYTES: Final = np.array([_FIELDS[name][0].itemsize for name in _CHECKED_FIELDS])
_CRC_AT: Final = _FIELDS["crc32"][1]


class _Index(NamedTuple):
    """The columns of the index that say where a row lies and how it is laid out."""

    shard: Array
    offset: Array
    size: Array
    count: Array  # type: ignore[assignment]  # instead of tuple.count
    family: Array
    time_unit_us: Array
    first_time_us: Array
    last_time_us: Array


class _Maps(NamedTuple):
    """Where each shard is mapped (0: it is not), its bytes, and the size up to which its records are checked whole."""

    address: Ints
    bytes: Ints
    read_whole: Ints


_INDEX: Final = types.NamedTuple(
    [mapped(getattr(types, str(INDEX_SCHEMA.field(name).type))) for name in _Index._fields], _Index
)
_INTS: Final = types.int64[::1]
_MAPS: Final = types.NamedUniTuple(_INTS, len(_Maps._fields), _Maps)

_physical: Final = part_of_kernels(physical)


@part_of_kernels
def _time_width(first_us: Any, last_us: Any, unit_us: Any) -> Any:
    """Bytes of each time of a row, whose ticks take 32 bits if they can."""
    return 8 if last_us - first_us >= unit_us << 32 else 4


@part_of_kernels
def _prefetch_row(
    address: Any, positions: Any, times: Any, width: Any, destinations: Any, step: Any, rtts: Any
) -> None:
    """Begin to load the numbers of a row's measurements: a hundred loads at once take little longer than one."""
    last = len(positions) - 1
    is_run = last >= 0 and positions[last] - positions[0] == last
    for i in range(0, len(positions), _PER_LOAD if is_run else 1):
        prefetch(address + _physical(rtts + positions[i] * 4))
        prefetch(address + _physical(destinations + positions[i] * step))
        if width > 0:
            prefetch(address + _physical(times + positions[i] * width))


@kernel(_INTS, _INTS, _INTS, types.bool_[::1], _INDEX, _MAPS, _INTS, types.float32[::1], types.uint32[:, ::1])
def _pick(
    rows: Array,
    first: Array,
    positions: Array,
    with_times: Array,
    index: Any,
    maps: Any,
    time_s: Array,
    rtt_ms: Array,
    destination: Array,
) -> None:
    """Write what `RowReader.pick` returns into the last three. Nothing is checked here: rows must have been before.

    An IPv4 destination fills the first of its four words.
    """
    count = len(rows)
    addresses, widths, steps = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    times, destinations, rtts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        row = rows[i]
        addresses[i] = maps.address[index.shard[row]]
        widths[i] = _time_width(index.first_time_us[row], index.last_time_us[row], np.int64(index.time_unit_us[row]))
        steps[i] = 16 if index.family[row] == 6 else 4
        times[i] = (np.int64(index.offset[row]) + (_HEADER_BYTES + 7)) & ~7  # the first multiple of 8 after the header
        destinations[i] = times[i] + index.count[row] * widths[i]
        rtts[i] = destinations[i] + index.count[row] * steps[i]

    for ahead in range(count + _ROWS_AHEAD):
        if ahead < count:
            i = ahead
            width = widths[i] if with_times[i] else 0
            chosen = positions[first[i] : first[i + 1]]
            _prefetch_row(addresses[i], chosen, times[i], width, destinations[i], steps[i], rtts[i])
        if ahead < _ROWS_AHEAD:
            continue
        i = ahead - _ROWS_AHEAD
        row, begin, end = rows[i], first[i], first[i + 1]
        words = carray(pointer(addresses[i]), (maps.bytes[index.shard[row]] // 4,), np.uint32)
        for j in range(begin, end):
            rtt_ms[j] = np.uint32(words[_physical(rtts[i] + positions[j] * 4) >> 2]).view(np.float32)
        if with_times[i]:
            unit, since, width = np.int64(index.time_unit_us[row]), index.first_time_us[row], widths[i]
            for j in range(begin, end):
                at = times[i] + positions[j] * width
                ticks = np.int64(words[_physical(at) >> 2])
                if width == 8:
                    ticks += np.int64(words[_physical(at + 4) >> 2]) << 32
                time_s[j] = (since + ticks * unit) // _SECOND
        if steps[i] == 4:
            for j in range(begin, end):
                destination[j, 0] = words[_physical(destinations[i] + positions[j] * 4) >> 2]
        else:
            for j in range(begin, end):
                at = destinations[i] + positions[j] * 16
                for k in range(4):
                    destination[j, k] = words[_physical(at + 4 * k) >> 2]


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
    """The same for logical offsets `begin` to `end`: the block headers in between are skipped."""
    while begin < end:
        stop = min(end, (begin // BLOCK_PAYLOAD + 1) * BLOCK_PAYLOAD)
        at = _physical(begin)
        crc = _crc32(crc, file[at : at + stop - begin])
        begin = stop
    return crc


@part_of_kernels
def _number(file: Any, logical: Any, size: Any) -> Any:
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(file[_physical(logical + i)]) << (8 * i)
    return value


@part_of_kernels
def _is_sound(row: Any, index: Any, maps: Any) -> Any:
    """Whether a row's header agrees with the index and (unless the row is long) its checksum is right."""
    shard, unit, family = index.shard[row], np.int64(index.time_unit_us[row]), np.int64(index.family[row])
    begin, size, count = np.int64(index.offset[row]), np.int64(index.size[row]), np.int64(index.count[row])
    first = index.first_time_us[row]
    width = np.int64(_time_width(first, index.last_time_us[row], unit))
    file = carray(pointer(maps.address[shard]), (maps.bytes[shard],), np.uint8)
    expected = _MAGIC, FORMAT_VERSION, count, family, width, unit, first
    for i in range(len(_FIELD_AT)):
        if _number(file, begin + _FIELD_AT[i], _FIELD_BYTES[i]) != expected[i]:
            return False
    if size > maps.read_whole[shard]:
        return True
    crc = _crc32_logical(0xFFFFFFFF, file, begin, begin + _CRC_AT)
    crc = _crc32_logical(crc, file, begin + _HEADER_BYTES, begin + size)
    return crc ^ np.uint32(0xFFFFFFFF) == _number(file, begin + _CRC_AT, 4)


@kernel(_INTS, types.uint8[::1], _INDEX, _MAPS, returns=types.int64)
def _check(rows: Array, checked: Array, index: Any, maps: Any) -> Any:
    """Mark rows in `checked` until one is not sound; returns its position in `rows`, or `_ALL_SOUND`."""
    for i in range(len(rows)):
        if not checked[rows[i]]:
            if not _is_sound(rows[i], index, maps):
                return i
            checked[rows[i]] = 1
    return _ALL_SOUND


class Picked(NamedTuple):
    """Measurements as columns, in the order in which they were requested."""

    time_s: Ints  # whole Unix seconds: what tokens can say
    rtt_ms: npt.NDArray[np.float32]
    destination: Bytes  # (measurements, 16), IPv4 in the first four bytes


class RowReader:
    """Random access to the measurements of one split."""

    def __init__(self, rows: RowSet) -> None:
        self.rows = rows
        self._index = _Index(*(rows.column(name) for name in _Index._fields))
        self._checked = np.zeros(len(rows), dtype=np.uint8)
        self._maps = _Maps(*(np.zeros(len(rows.info.shards), dtype=np.int64) for _ in _Maps._fields))
        self._arrays: dict[int, Bytes] = {}

    def check(self, rows: Ints) -> None:
        """Fetch the rows if they are remote, and check those that this process has not used before."""
        self._bring(rows)
        fetched_again: set[int] = set()
        while (at := _check(rows, self._checked, self._index, self._maps)) != _ALL_SOUND:
            row = int(rows[at])
            if row in fetched_again or not self.rows.forget(row):
                _ = self.rows[row]  # raises where the record itself is damaged, and says how
                raise self.rows.corrupt(row, "the record is not the one that the index names")
            fetched_again.add(row)
            self._bring(rows)  # what was damaged may have been the copy, and others may have lain in it

    def _bring(self, rows: Ints) -> None:
        """Fetch the rows if they are remote, and note where their shards are mapped."""
        if self.rows.folder.is_remote:  # then any shard may have been mapped anew
            self._checked[self.rows.fetch(rows)] = 0
            self._maps.address[:] = 0
            self._arrays.clear()
        shards = self._index.shard[rows]
        for shard in set(shards[self._maps.address[shards] == 0].tolist()):
            self._arrays[shard] = file = self.rows.shard_bytes(shard)
            self._maps.address[shard], self._maps.bytes[shard] = file.ctypes.data, len(file)
            self._maps.read_whole[shard] = CHECKED_BYTES if self.rows.is_verified(shard) else _ANY_SIZE

    def pick(self, rows: Ints, first: Ints, positions: Ints, with_times: npt.NDArray[np.bool_]) -> Picked:
        """Measurements `positions[first[i]:first[i + 1]]` of row `rows[i]`, for all i, once these rows were checked.

        Times are read only for rows that `with_times` marks.
        """
        count = len(positions)
        time_s, rtt_ms = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        destination = np.zeros((count, 4), dtype=np.uint32)
        _pick(rows, first, positions, with_times, self._index, self._maps, time_s, rtt_ms, destination)
        return Picked(time_s=time_s, rtt_ms=rtt_ms, destination=destination.view(np.uint8))
