"""The measurement schema, and what every measurement passes on its way in: parsing of addresses, and validation.

A *measurement* says that at `event_time` the host `src_addr` probed `dst_addr` and an answer came after `rtt`
milliseconds, or none came (`rtt` is null: the probe *failed*).

What people really have in these columns is read leniently and becomes one type. Times may be timestamps of any unit,
naive (taken as UTC) or with a zone, epoch numbers, or text of either kind; RTTs may be text. A row that still cannot be
used is dropped and counted by reason; it is never repaired into something that was not measured. Only a column of a
wrong *type* raises (`TypeError`).

Addresses become fixed-width bytes, a whole column at a time. A column of address strings has few distinct values, so it
is dictionary-encoded first and only the distinct strings are parsed. An `AddressColumn` keeps that shape: a table of
distinct addresses and one code per measurement.
"""

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.randomness import GOLDEN, mix64

Flags = npt.NDArray[np.bool_]

SCHEMA: Final = pa.schema(
    [
        pa.field("event_time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("src_addr", pa.string(), nullable=False),
        pa.field("dst_addr", pa.string(), nullable=False),
        pa.field("ip_version", pa.int8(), nullable=False),
        pa.field("rtt", pa.float32()),
    ]
)

MAX_RTT_MS: Final = 600_000.0
"""Ten minutes. No ping tool waits that long, so a larger value is a unit error or garbage and the row is dropped."""

MAX_TIME_US: Final = 4_102_444_800_000_000
"""The year 2100. A later time, like one before 1970, is a unit error or garbage."""

DROP_REASONS: Final = {
    "malformed_row": "the line does not have the columns its header promises, or is not a JSON object",
    "missing_time": "no event time",
    "bad_time": "an event time that cannot be parsed, or is not between 1970 and 2100",
    "bad_src_addr": "no source address, or not an address",
    "bad_dst_addr": "no destination address, or not an address",
    "family_mismatch": "source, destination and ip_version are not all of one family",
    "bad_rtt": "an RTT that is NaN or not a number",
    "absurd_rtt": "an RTT above ten minutes, or infinite",
}
"""Why a row can be dropped. A row with several faults is counted under the first one in this order."""

ADDRESS_BYTES: Final = {4: 4, 6: 16}
"""Bytes of an address, by family."""

UNPARSABLE: Final = 0
"""The family given to a string that is not an address."""


@dataclass(frozen=True, kw_only=True)
class AddressColumn:
    """Addresses of many measurements: `packed[codes[i]]` are the bytes of the i-th, `families[codes[i]]` its family.

    IPv4 addresses fill the first 4 of the 16 bytes. A missing address has the code of an unparsable one.
    """

    families: npt.NDArray[np.uint8]
    packed: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.int32]

    @property
    def family_of_each(self) -> npt.NDArray[np.uint8]:
        return self.families[self.codes]


def parse_column(column: Any, name: str) -> AddressColumn:
    """Parse an Arrow string column (plain or dictionary-encoded); what is not an address gets family `UNPARSABLE`."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not is_text(kind) and not pa.types.is_null(kind):
        raise TypeError(f"column {name} has type {column.type}; expected text, such as 192.0.2.1")
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    families, packed = parse_addresses([text or "" for text in encoded.dictionary.to_pylist()])
    missing = len(families)  # one more entry stands for a missing address
    return AddressColumn(
        families=np.append(families, np.uint8(UNPARSABLE)),
        packed=np.vstack([packed, np.zeros((1, 16), dtype=np.uint8)]),
        codes=encoded.indices.cast(pa.int32()).fill_null(missing).to_numpy(zero_copy_only=False),
    )


def parse_addresses(strings: Sequence[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Family (4, 6 or `UNPARSABLE`) and 16 packed bytes of each string."""
    families = np.fromiter((6 if ":" in s else 4 for s in strings), dtype=np.uint8, count=len(strings))
    packed = np.zeros((len(strings), 16), dtype=np.uint8)
    for family, kind in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        where = np.flatnonzero(families == family)
        width = ADDRESS_BYTES[family]
        chosen = [strings[i] for i in where.tolist()]
        try:  # all of them are addresses, nearly always, and this is four times as fast
            joined = b"".join([socket.inet_pton(kind, s) for s in chosen])
        except (OSError, ValueError):
            parsed = [_pton_or_none(kind, s) for s in chosen]
            families[where[[p is None for p in parsed]]] = UNPARSABLE
            joined = b"".join([p or bytes(width) for p in parsed])
        packed[where, :width] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, width)
    return families, packed


def _pton_or_none(kind: socket.AddressFamily, string: str) -> bytes | None:
    try:
        return socket.inet_pton(kind, string.strip())
    except (OSError, ValueError):
        return None


def prefix_numbers(strings: Sequence[str], lengths: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int64]:
    """[levels, strings]: equal numbers where addresses share a prefix. `lengths` are bits, a level each, by family."""
    families, packed = parse_addresses(strings)
    bits = np.unpackbits(packed, axis=1)
    numbers = np.empty((len(lengths[4]), len(strings)), dtype=np.int64)
    for level, (bits_4, bits_6) in enumerate(zip(lengths[4], lengths[6], strict=True)):
        kept = np.arange(bits.shape[1]) < np.where(families == 6, bits_6, bits_4)[:, None]
        prefix = np.column_stack([families, np.packbits(bits * kept, axis=1)])
        numbers[level] = np.unique(prefix, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def format_address(family: int, packed: bytes) -> str:
    """The usual spelling of a packed address; `packed` may carry the unused bytes of an IPv4 address."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    return socket.inet_ntop(kind, packed[: ADDRESS_BYTES[family]])


def source_hash(families: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """A stable 64-bit hash of each address: splitmix64's mixer over the two halves and the family.

    Partitions and the train/eval split are cut by it, so it is part of the on-disk contract: it must never change
    within a format version, nor depend on platform, Python's hash seed or library versions.
    """
    halves = np.ascontiguousarray(packed).view(">u8").astype(np.uint64)
    with np.errstate(over="ignore"):
        return mix64(halves[:, 0] ^ mix64(halves[:, 1] + families.astype(np.uint64) * GOLDEN))


@dataclass(frozen=True, kw_only=True)
class ValidMeasurements:
    """The usable measurements of one batch, as columns. A failed probe has the RTT NaN (one bit pattern only)."""

    time_us: npt.NDArray[np.int64]
    src: AddressColumn
    dst: AddressColumn
    family: npt.NDArray[np.uint8]
    rtt_ms: npt.NDArray[np.float32]
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: tuple[int, str] | None = None
    """Position in the batch and reason of the first row that was dropped."""

    def __len__(self) -> int:
        return len(self.time_us)


def validate(batch: pa.RecordBatch) -> ValidMeasurements:
    """Check every row of a batch that has the schema's column names (of any accepted type; `ip_version` optional)."""
    time_us, time_missing, time_bad = time_microseconds(batch.column("event_time"))
    rtt, rtt_bad = rtt_milliseconds(batch.column("rtt"))
    src, dst = (parse_column(batch.column(name), name) for name in ("src_addr", "dst_addr"))
    family, dst_family = src.family_of_each, dst.family_of_each
    mismatch = family != dst_family
    if "ip_version" in batch.schema.names:
        stated, _ = rtt_milliseconds(batch.column("ip_version"))  # the same lenient reading of numbers
        mismatch |= ~(np.isnan(stated) | (stated == 0) | (stated == family))

    faults = {
        "missing_time": time_missing,
        "bad_time": time_bad | (time_us < 0) | (time_us >= MAX_TIME_US),
        "bad_src_addr": family == UNPARSABLE,
        "bad_dst_addr": dst_family == UNPARSABLE,
        "family_mismatch": mismatch,
        "bad_rtt": rtt_bad,
        "absurd_rtt": rtt > MAX_RTT_MS,
    }
    masks, reasons = np.stack(list(faults.values())), list(faults)
    unusable = masks.any(axis=0)
    keep: Any = ~unusable if unusable.any() else slice(None)
    first_fault = masks[:, unusable].argmax(axis=0)
    counts = np.bincount(first_fault, minlength=len(reasons)).tolist()
    return ValidMeasurements(
        time_us=time_us[keep],
        src=replace(src, codes=src.codes[keep]),
        dst=replace(dst, codes=dst.codes[keep]),
        family=family[keep],
        # Negative means failed. Adding 0.0 turns -0.0 into 0.0: equal measurements must have equal bytes.
        rtt_ms=np.where(rtt >= 0, rtt, np.nan).astype(np.float32)[keep] + np.float32(0.0),
        dropped=Counter({reason: count for reason, count in zip(reasons, counts, strict=True) if count}),
        first_dropped=(int(unusable.argmax()), reasons[first_fault[0]]) if len(first_fault) else None,
    )


MISSING_TEXT: Final = frozenset({"", "*", "-", "null", "none", "na", "n/a", "timeout"})
"""What an empty cell is spelled as in text columns. For an RTT it means that the probe failed."""

_EPOCH_TICKS: Final = {1e11: 1, 1e14: 10**3, 1e17: 10**6, np.inf: 10**9}
"""Ticks per second of epoch numbers below a bound: seconds up to the year 5138, then milli-, micro-, nanoseconds."""

_TICKS_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def time_microseconds(column: Any, name: str = "event_time") -> tuple[npt.NDArray[np.int64], Flags, Flags]:
    """Microseconds since 1970 of each value, with flags for the missing and for the unusable ones."""
    column, missing = _cells(column)
    kind, bad = column.type, np.zeros(len(column), dtype=bool)
    if pa.types.is_timestamp(kind):
        micros = _rescaled(_integers(column), _TICKS_PER_SECOND[kind.unit])
    elif pa.types.is_integer(kind):  # integers stay integers: a float has 53 bits, nanoseconds need 61
        numbers = _integers(column)
        scaled = [_rescaled(numbers, ticks) for ticks in _EPOCH_TICKS.values()]
        micros = np.select([numbers < bound for bound in _EPOCH_TICKS], scaled)
    elif is_text(kind) or is_number(kind):
        try:  # the common case, in one pass: every cell a number, or none
            micros, bad = _epoch_floats(_floats(column))
        except pa.ArrowInvalid:
            micros, bad = _parse_each(column, _time_from_text, np.int64)
    else:
        raise TypeError(f"column {name} has type {kind}; expected a timestamp, epoch seconds or ISO 8601 text")
    return micros, missing, bad & ~missing


def rtt_milliseconds(column: Any, name: str = "rtt") -> tuple[npt.NDArray[np.float64], Flags]:
    """The number in each cell; NaN where there is none, with a flag for NaN and for text that is no number."""
    column, missing = _cells(column)
    if not is_text(column.type) and not is_number(column.type):
        raise TypeError(f"column {name} has type {column.type}; expected numbers (milliseconds)")
    try:
        values = _floats(column)
    except pa.ArrowInvalid:
        values, _ = _parse_each(column, float, np.float64)
    return values, np.isnan(values) & ~missing


def _rescaled(ticks: npt.NDArray[np.int64], per_second: int) -> npt.NDArray[np.int64]:
    """Microseconds, cutting nanoseconds; what overflows becomes negative, which no valid time is."""
    if per_second >= 10**6:
        return ticks // (per_second // 10**6)
    factor = 10**6 // per_second
    return np.where((ticks >= 0) & (ticks <= np.iinfo(np.int64).max // factor), ticks, -1) * factor


def _epoch_floats(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], Flags]:
    bad = ~np.isfinite(values)
    usable = np.where(bad, 0.0, values)
    scale = np.select([usable < bound for bound in _EPOCH_TICKS], [1e6 / ticks for ticks in _EPOCH_TICKS.values()])
    with np.errstate(over="ignore"):  # infinity is clipped like any other time too far away
        return np.round(np.clip(usable * scale, -1, 9e18)).astype(np.int64), bad


def _time_from_text(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return int(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond
    micros, bad = _epoch_floats(np.array([number]))
    if bad[0]:
        raise ValueError(text)
    return int(micros[0])


def _cells(column: Any) -> tuple[Any, Flags]:
    """A column without dictionary encoding, its text trimmed and null where nothing is said; and where it is null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        text = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        absent = pc.is_in(pc.utf8_lower(text), pa.array(sorted(MISSING_TEXT)))
        column = pc.if_else(absent, pa.scalar(None, text.type), text)
    elif pa.types.is_null(column.type):  # in a file where every probe failed, for instance
        column = column.cast(pa.float64())
    return column, column.is_null().to_numpy(zero_copy_only=False)


def _parse_each(cells: Any, parse: Callable[[str], float], kind: Any) -> tuple[npt.NDArray[Any], Flags]:
    """Cell by cell, where Arrow's cast, which does a clean column at full speed, refuses all for one bad cell.

    What cannot be parsed is flagged and, as a float, NaN.
    """
    values = np.full(len(cells), np.nan if kind is np.float64 else 0, dtype=kind)
    bad = np.zeros(len(cells), dtype=bool)
    for i, cell in enumerate(cells.to_pylist()):
        if cell is not None:
            try:
                values[i] = parse(cell)
            except (ValueError, OverflowError):
                bad[i] = True
    return values, bad


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _floats(column: Any) -> npt.NDArray[np.float64]:
    return column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)


def _integers(column: Any) -> npt.NDArray[np.int64]:
    return column.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
