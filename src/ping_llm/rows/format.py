"""Where the bytes of a record lie inside an ArrayRecord file.

ArrayRecord files are Riegeli files. With `group_size:1,uncompressed` every record is one chunk that holds the record's
bytes as they are, so a reader that knows a record's place can map the file and touch only the pages it needs, where
ArrayRecord itself must read (and copy) the whole record: 5 ms for a row of 8 MB.

Glossary
  block      the file is cut into blocks of 64 KiB; each begins with a 24-byte block header
  physical   a position in the file
  logical    a position in the file with all block headers taken out
  chunk      40-byte chunk header, 1 byte of compression type, the size of the size list, the size list, the record

Chunks follow each other without gaps in logical space, so all positions follow from the record sizes alone. Shards
are checked against this arithmetic when they are written: an ArrayRecord release that lays files out differently is
an error at preparation time, never a wrong read later.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.addresses import ADDRESS_BYTES, format_address

WRITER_OPTIONS: Final = "group_size:1,uncompressed"

BLOCK: Final = 65536
BLOCK_HEADER: Final = 24
BLOCK_PAYLOAD: Final = BLOCK - BLOCK_HEADER

FIRST_CHUNK: Final = 40
"""Logical position of the first record's chunk: the file signature, an empty chunk, comes before it."""

_CHUNK_HEADER: Final = 40


def varint_length(value: Any) -> Any:
    """Bytes of a base-128 number (of each, for an array)."""
    return 1 + sum((value >= 1 << bits) * 1 for bits in (7, 14, 21, 28, 35))


def record_prefix(size: Any) -> Any:
    """Bytes of the chunk that come before the record's own `size` bytes."""
    length = varint_length(size)
    return _CHUNK_HEADER + 1 + varint_length(length) + length


def physical(logical: Any) -> Any:
    """The position in the file of a logical position."""
    return logical + BLOCK_HEADER * (logical // BLOCK_PAYLOAD + 1)


def gather_bytes(file: npt.NDArray[np.uint8], logical: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.uint8]:
    """`width` bytes at each logical position of a mapped file, shape (positions, width)."""
    return file[physical(logical[:, None] + np.arange(width))]


# The probe row: one probe's history as a fixed-width columnar record. Decoding is three `np.frombuffer`.
#
#     header   48 bytes, see `HEADER`
#     padding  0-7 bytes, so that the columns start on a multiple of 8 in the shard (see `record_shape`)
#     time     count × uint32 or uint64: ticks of `time_unit_us` since `first_time_us`
#     dst      count × 4 or 16 bytes: destination address, network byte order
#     rtt      count × float32: milliseconds, NaN for a failed probe
#     padding  to a multiple of 8
#
# All numbers are little-endian. Source and destination of a measurement are of one family, so a row is too. A failed
# probe *is* its NaN: a separate flag would cost 8 % more bytes and could contradict the RTT beside it. Times are
# exact: the tick is the largest of 1 s, 1 ms and 1 µs that loses nothing, which for whole-second data (RIPE Atlas)
# makes an IPv4 measurement 12 bytes and an IPv6 one 24.

MAGIC: Final = b"PROW"
FORMAT_VERSION: Final = 1

HEADER: Final = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("columns_at", "<u2"),
        ("family", "u1"),
        ("time_width", "u1"),
        ("reserved", "<u2"),
        ("count", "<u4"),
        ("time_unit_us", "<u4"),
        ("first_time_us", "<i8"),
        ("source", "V16"),
        ("crc32", "<u4"),
    ]
)
_CRC_AT: Final = HEADER.itemsize - 4

TIME_UNITS_US: Final = (1_000_000, 1_000, 1)

LONG_GAP_S: Final = 255
"""A longer gap takes more than one byte to write down. Counting them per row lets sizes be planned from the index."""


class CorruptRecordError(ValueError):
    """These bytes are not a probe row."""


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One decoded row. Columns are read-only views of the record where their type allows it."""

    family: int
    source: bytes
    time_us: npt.NDArray[np.int64]
    destinations: npt.NDArray[np.uint8]
    rtt_ms: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def source_address(self) -> str:
        return format_address(self.family, self.source)


@dataclass(frozen=True, kw_only=True)
class SourceRuns:
    """Measurements of one family ordered by source and time, cut into rows: row r is `counts[r]` from `starts[r]`."""

    family: int
    sources: npt.NDArray[np.uint8]
    """(rows, 4 or 16): the source address of each row."""
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    time_us: npt.NDArray[np.int64]
    destinations: npt.NDArray[np.uint8]
    """(measurements, 4 or 16)"""
    rtt_ms: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Records of many rows in one buffer, spaced as they will be in the shard."""

    buffer: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    """Position of each record in the buffer, equal to its logical position in the shard less the first chunk's."""
    sizes: npt.NDArray[np.int64]
    time_units_us: npt.NDArray[np.int64]
    first_times_us: npt.NDArray[np.int64]
    last_times_us: npt.NDArray[np.int64]
    failed: npt.NDArray[np.int64]
    long_gaps: npt.NDArray[np.int64]
    """Gaps between consecutive measurements of more than `LONG_GAP_S` whole seconds."""

    def __len__(self) -> int:
        return len(self.sizes)

    def record(self, row: int) -> bytes:
        start = self.starts[row]
        return self.buffer[start : start + self.sizes[row]].tobytes()

    @property
    def chunk_bytes(self) -> int:
        """Logical bytes that the records' chunks take in the shard: a multiple of 8."""
        return len(self.buffer)


def measurement_bytes(family: int, time_width: int) -> int:
    return time_width + ADDRESS_BYTES[family] + 4


def record_shape(body: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Size of the record and place of its columns, for column bytes `body`.

    A record's chunk is to take a multiple of 8 logical bytes, with the columns on a multiple of 8. Then every number
    of every column lies aligned in the mapped shard and never across a block header. What precedes the record in its
    chunk has the length of the record's size as a varint in it, hence the search over that length.
    """
    size = np.zeros_like(body)
    columns_at = np.zeros_like(body)
    for slack in (0, 8):  # at a varint boundary no size agrees with its own length; 8 bytes more always do
        for length in (1, 2, 3, 4, 5):
            prefix = record_prefix(1 << 7 * (length - 1) if length > 1 else 0)
            at = HEADER.itemsize + (-(prefix + HEADER.itemsize)) % 8
            candidate = at + body + (-body) % 8 + slack
            fits = (size == 0) & (varint_length(candidate) == length)
            size[fits] = candidate[fits]
            columns_at[fits] = at
    return size, columns_at


def encode_rows(runs: SourceRuns) -> EncodedRows:
    """Build the records of many rows in one vectorised pass; only the checksums are computed row by row."""
    counts, starts = runs.counts, runs.starts
    ends = starts + counts
    row_of = np.repeat(np.arange(len(counts)), counts)
    first, last = runs.time_us[starts], runs.time_us[ends - 1]
    offsets = runs.time_us[starts[0] : ends[-1]] - first[row_of]

    units = np.ones(len(counts), dtype=np.int64)
    for unit in reversed(TIME_UNITS_US):
        units[np.bitwise_and.reduceat(offsets % unit == 0, starts - starts[0])] = unit
    widths = np.where((last - first) // units < 2**32, 4, 8)

    address_bytes = ADDRESS_BYTES[runs.family]
    sizes, columns_at = record_shape(counts * (widths + address_bytes + 4))
    prefixes = record_prefix(sizes)
    chunk_ends = np.cumsum(prefixes + sizes)
    record_starts = chunk_ends - sizes
    columns = record_starts + columns_at

    buffer = np.zeros(int(chunk_ends[-1]), dtype=np.uint8)
    words = buffer.view("<u4")
    within = np.arange(len(offsets)) - (starts - starts[0])[row_of]
    _scatter_times(words, columns // 4, offsets // units[row_of], widths, row_of, within)
    destination_words = np.ascontiguousarray(runs.destinations[starts[0] : ends[-1]]).view("<u4")
    place = ((columns + counts * widths) // 4)[row_of] + within * (address_bytes // 4)
    for i in range(address_bytes // 4):
        words[place + i] = destination_words[:, i]
    rtt = runs.rtt_ms[starts[0] : ends[-1]]
    words[((columns + counts * (widths + address_bytes)) // 4)[row_of] + within] = rtt.view("<u4")

    headers = np.zeros(len(counts), dtype=HEADER)
    headers["magic"], headers["version"], headers["family"] = MAGIC, FORMAT_VERSION, runs.family
    headers["columns_at"], headers["time_width"] = columns_at, widths
    headers["count"], headers["time_unit_us"], headers["first_time_us"] = counts, units, first
    sources = np.zeros((len(counts), 16), dtype=np.uint8)
    sources[:, :address_bytes] = runs.sources
    headers["source"] = sources.view("V16")[:, 0]
    buffer[record_starts[:, None] + np.arange(HEADER.itemsize)] = headers.view(np.uint8).reshape(-1, HEADER.itemsize)
    _write_checksums(buffer, record_starts, sizes)

    return EncodedRows(
        buffer=buffer,
        starts=record_starts,
        sizes=sizes,
        time_units_us=units,
        first_times_us=first,
        last_times_us=last,
        failed=np.add.reduceat(np.isnan(rtt), starts - starts[0], dtype=np.int64),
        long_gaps=_long_gaps(runs.time_us[starts[0] : ends[-1]], starts - starts[0]),
    )


def _long_gaps(time_us: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    is_long = np.diff(time_us // 1_000_000, prepend=0) > LONG_GAP_S
    is_long[starts] = False
    return np.add.reduceat(is_long, starts, dtype=np.int64)


def _scatter_times(
    words: npt.NDArray[np.uint32],
    columns: npt.NDArray[np.int64],
    ticks: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    row_of: npt.NDArray[np.int64],
    within: npt.NDArray[np.int64],
) -> None:
    if (widths == 4).all():
        words[columns[row_of] + within] = ticks
        return
    wide = (widths == 8)[row_of]
    place = columns[row_of] + within * np.where(wide, 2, 1)
    words[place] = (ticks & 0xFFFFFFFF).astype(np.uint32)
    words[place[wide] + 1] = (ticks[wide] >> 32).astype(np.uint32)


def _write_checksums(
    buffer: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> None:
    view = buffer.data
    checksums = np.fromiter(
        (_checksum(view[start:end]) for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)),
        dtype="<u4",
        count=len(starts),
    )
    buffer[(starts + _CRC_AT)[:, None] + np.arange(4)] = checksums.view(np.uint8).reshape(-1, 4)


def _checksum(record: memoryview | bytes) -> int:
    return zlib.crc32(record[_CRC_AT + 4 :], zlib.crc32(record[:_CRC_AT]))


def is_sound(record: bytes) -> bool:
    """Whether the checksum holds: the quick form of `check_record`, for readers that know what the record should be."""
    return len(record) > HEADER.itemsize and int.from_bytes(record[_CRC_AT : _CRC_AT + 4], "little") == _checksum(
        record
    )


def check_record(record: bytes) -> np.void:
    """Check everything that could be wrong with a record, and give back its header."""
    if len(record) < HEADER.itemsize:
        raise CorruptRecordError(f"record of {len(record)} bytes is shorter than a header")
    header = np.frombuffer(record, dtype=HEADER, count=1)[0]
    if header["magic"] != MAGIC:
        raise CorruptRecordError(f"record starts with {bytes(record[:4])!r}, not {MAGIC!r}")
    if header["version"] != FORMAT_VERSION:
        raise CorruptRecordError(f"record has format version {header['version']}; this program reads {FORMAT_VERSION}")
    if int(header["crc32"]) != _checksum(record):
        raise CorruptRecordError("checksum mismatch")
    family, width, count, at = (int(header[name]) for name in ("family", "time_width", "count", "columns_at"))
    if family not in ADDRESS_BYTES or width not in (4, 8):
        raise CorruptRecordError(f"record has family {family} and time width {width}")
    if at + count * measurement_bytes(family, width) > len(record):
        raise CorruptRecordError(f"record of {len(record)} bytes is too short for {count} measurements")
    return header


def decode_row(record: bytes) -> ProbeRow:
    """Decode one record, after checking it."""
    header = check_record(record)
    family, width, count, at = (int(header[name]) for name in ("family", "time_width", "count", "columns_at"))
    ticks = np.frombuffer(record, dtype=f"<u{width}", count=count, offset=at).astype(np.int64)
    at += count * width
    address_bytes = ADDRESS_BYTES[family]
    destinations = np.frombuffer(record, dtype=np.uint8, count=count * address_bytes, offset=at)
    at += count * address_bytes
    return ProbeRow(
        family=family,
        source=header["source"].tobytes()[:address_bytes],
        time_us=int(header["first_time_us"]) + ticks * int(header["time_unit_us"]),
        destinations=destinations.reshape(count, address_bytes),
        rtt_ms=np.frombuffer(record, dtype="<f4", count=count, offset=at),
    )
