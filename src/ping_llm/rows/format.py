"""The probe row, one source's history as a fixed-width columnar record, and where its bytes lie in an ArrayRecord file.

docs/rows.md lists the record's fields. An unanswered probe is an RTT of NaN: a separate flag would take 8 % more bytes
and could contradict the RTT. Times are exact: the tick is the largest of 1 s, 1 ms and 1 µs that loses nothing, so for
data in whole seconds (RIPE Atlas) a measurement takes 12 bytes with IPv4 and 24 with IPv6.

ArrayRecord files are Riegeli files. With `group_size:1,uncompressed` every record is one chunk that holds the record's
bytes as they are, so a reader that knows a record's offset can map the file and touch only the pages it needs, whereas
ArrayRecord itself reads and copies the whole record: 5 ms for a row of 8 MB.

    block      the file is cut into blocks of 64 KiB; each begins with a 24-byte block header
    physical   an offset in the file
    logical    an offset in the file that does not count block headers
    chunk      40-byte chunk header, 1 byte of compression type, the size of the size list, the size list, the record

Chunks follow each other without gaps in logical space, so record sizes alone determine all offsets. Shards are checked
against this arithmetic when they are written: an ArrayRecord release with another layout is an error at preparation
time, never a wrong read later.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.measurements import ADDRESS_BYTES, format_address

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

WRITER_OPTIONS: Final = "group_size:1,uncompressed"
BLOCK: Final = 65536
BLOCK_HEADER: Final = 24
BLOCK_PAYLOAD: Final = BLOCK - BLOCK_HEADER

FIRST_CHUNK: Final = 40  # logical offset of the first record's chunk, after the file signature (an empty chunk)
FARTHEST: Final = 1 << 50  # no shard is that large: offsets below it can be added up without an overflow
_CHUNK_HEADER: Final = 40

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
"""A longer gap between two measurements takes more than one byte as a time delta. The index counts a row's long gaps,
so that sequences can be planned from it alone."""


class CorruptRecordError(ValueError):
    """These bytes are not a probe row."""


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One decoded row. Columns are read-only views of the record where their type allows it."""

    family: int
    source: bytes
    time_us: Ints
    destinations: Bytes  # (measurements, 4 or 16)
    rtt_ms: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def source_address(self) -> str:
        return format_address(self.family, self.source)


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Measurements of one family in row order, row after row: the first `counts[0]` are row 0, and so on."""

    family: int
    sources: Bytes  # (rows, 16): the source address of each row, IPv4 in the first 4 bytes
    counts: Ints
    time_us: Ints
    destinations: Bytes  # (measurements, 4 or 16)
    rtt_ms: npt.NDArray[np.float32]

    def take(self, chosen: npt.NDArray[np.bool_]) -> "RowBatch":
        """The chosen rows with their measurements."""
        if chosen.all():
            return self
        measurements = np.repeat(chosen, self.counts)
        return RowBatch(
            family=self.family,
            sources=self.sources[chosen],
            counts=self.counts[chosen],
            time_us=self.time_us[measurements],
            destinations=self.destinations[measurements],
            rtt_ms=self.rtt_ms[measurements],
        )


def varint_length(value: Any) -> Any:
    """Bytes of a base-128 number (of each, for an array)."""
    return 1 + sum((value >= 1 << bits) * 1 for bits in (7, 14, 21, 28, 35))


def record_prefix(size: Any) -> Any:
    """Bytes of the chunk that come before the record's own `size` bytes."""
    length = varint_length(size)
    return _CHUNK_HEADER + 1 + varint_length(length) + length


def physical(logical: Any) -> Any:
    """The offset in the file of a logical offset."""
    return logical + BLOCK_HEADER * (logical // BLOCK_PAYLOAD + 1)


def without_block_headers(file: Bytes, begin: int, end: int) -> bytes:
    """The bytes of records in a range of the file (physical offsets)."""
    stored = file[begin:end]
    is_in_one_block = begin % BLOCK + len(stored) <= BLOCK
    return (stored if is_in_one_block else stored[np.arange(begin, end) % BLOCK >= BLOCK_HEADER]).tobytes()


def capacity(family: int, record_bytes: int) -> tuple[int, int]:
    """Measurements that fit a record, with times of 4 and of 8 bytes."""
    room = record_bytes - HEADER.itemsize - 32  # alignment of the columns and of the record takes at most 32 bytes
    return max(1, room // (4 + ADDRESS_BYTES[family] + 4)), max(1, room // (8 + ADDRESS_BYTES[family] + 4))


def record_shape(body: Ints) -> tuple[Ints, Ints]:
    """Size of the record and offset of its columns in it, for `body` bytes of columns.

    A record's chunk must take a multiple of 8 logical bytes, with the columns on a multiple of 8. Then every number of
    every column is aligned in the mapped shard and never divided by a block header. The part of the chunk before the
    record contains the record's size as a varint, of unknown length, hence the search over that length.
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


def encode_rows(rows: RowBatch) -> tuple[list[bytes], dict[str, npt.NDArray[Any]]]:
    """The record of each row, and its index entries by column; `offset` counts from the first chunk of this batch.

    All records are built in one vectorised pass, spaced as they will be in the shard; only checksums go row by row.
    """
    counts, address_bytes = rows.counts, ADDRESS_BYTES[rows.family]
    starts = np.cumsum(counts) - counts
    row_of = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(row_of)) - starts[row_of]
    first, last = rows.time_us[starts], rows.time_us[starts + counts - 1]
    since_first = rows.time_us - first[row_of]

    units = np.ones(len(counts), dtype=np.int64)
    for unit in reversed(TIME_UNITS_US):
        units[np.bitwise_and.reduceat(since_first % unit == 0, starts)] = unit
    widths = np.where((last - first) // units < 2**32, 4, 8)

    sizes, columns_at = record_shape(counts * (widths + address_bytes + 4))
    chunk_ends = np.cumsum(record_prefix(sizes) + sizes)
    record_starts = chunk_ends - sizes
    columns = record_starts + columns_at

    buffer = np.zeros(int(chunk_ends[-1]), dtype=np.uint8)
    words = buffer.view("<u4")
    ticks, wide = since_first // units[row_of], (widths == 8)[row_of]
    time_at = (columns // 4)[row_of] + within * np.where(wide, 2, 1)
    words[time_at] = (ticks & 0xFFFFFFFF).astype(np.uint32)
    words[time_at[wide] + 1] = (ticks[wide] >> 32).astype(np.uint32)
    destination_at = ((columns + counts * widths) // 4)[row_of] + within * (address_bytes // 4)
    for i, word in enumerate(np.ascontiguousarray(rows.destinations).view("<u4").T):
        words[destination_at + i] = word
    words[((columns + counts * (widths + address_bytes)) // 4)[row_of] + within] = rows.rtt_ms.view("<u4")

    headers = np.zeros(len(counts), dtype=HEADER)
    headers["magic"], headers["version"], headers["family"] = MAGIC, FORMAT_VERSION, rows.family
    headers["columns_at"], headers["time_width"] = columns_at, widths
    headers["count"], headers["time_unit_us"], headers["first_time_us"] = counts, units, first
    headers["source"] = source = np.ascontiguousarray(rows.sources).view("V16")[:, 0]
    header_at = record_starts[:, None] + np.arange(HEADER.itemsize)
    buffer[header_at] = headers.view(np.uint8).reshape(-1, HEADER.itemsize)
    bounds = list(zip(record_starts.tolist(), chunk_ends.tolist(), strict=True))
    checksums = np.array([_checksum(buffer.data[start:end]) for start, end in bounds], dtype="<u4")
    buffer[header_at[:, _CRC_AT:]] = checksums.view(np.uint8).reshape(-1, 4)

    is_long_gap = np.diff(rows.time_us // 1_000_000, prepend=0) > LONG_GAP_S
    is_long_gap[starts] = False
    index = {
        "offset": record_starts,
        "size": sizes,
        "count": counts,
        "failed": np.add.reduceat(np.isnan(rows.rtt_ms), starts, dtype=np.int64),
        "long_gaps": np.add.reduceat(is_long_gap, starts, dtype=np.int64),
        "family": np.full(len(counts), rows.family),
        "time_unit_us": units,
        "first_time_us": first,
        "last_time_us": last,
        "source": source,
    }
    return [buffer[start:end].tobytes() for start, end in bounds], index


def _checksum(record: memoryview | bytes) -> int:
    return zlib.crc32(record[_CRC_AT + 4 :], zlib.crc32(record[:_CRC_AT]))


def decode_row(record: bytes) -> ProbeRow:
    """Decode one record, after checking everything that could be wrong with it."""
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
    if family not in ADDRESS_BYTES or width not in (4, 8) or header["time_unit_us"] not in TIME_UNITS_US:
        raise CorruptRecordError(f"record has family {family}, time width {width}, unit {header['time_unit_us']} µs")
    if at < HEADER.itemsize or at + count * (width + ADDRESS_BYTES[family] + 4) > len(record):
        raise CorruptRecordError(f"record of {len(record)} bytes is too short for {count} measurements")
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
