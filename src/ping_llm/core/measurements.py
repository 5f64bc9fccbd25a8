"""The measurement schema, the parsing of addresses, and the validation that every measurement passes.

A *measurement* states that at `event_time` the host `src_addr` probed `dst_addr`, and that the answer took `rtt`
milliseconds, or that there was none (`rtt` is null: the probe *failed*).

Columns of many types and spellings are accepted (`cells.py`) and become one type. A row that cannot be used is dropped
and counted by reason; it is never repaired into something that was not measured. Only a column of a wrong *type* raises
an error (`TypeError`).

Nodes are addresses or names. They become fixed-width bytes, a whole column at a time: a column has few distinct values,
so it is dictionary-encoded first and only the distinct strings are parsed. An `AddressColumn` keeps that shape: a table
of distinct nodes and one code per measurement.
"""

import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.cells import MISSING_TEXT, PLAIN, Spelling, is_text, rtt_milliseconds, time_microseconds
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import GOLDEN, mix64

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
"""Ten minutes. No ping tool waits that long, so a larger value has another unit or is garbage; the row is dropped."""

MAX_TIME_US: Final = 4_102_444_800_000_000
"""The year 2100. A later time, like one before 1970, is in another unit or garbage."""

DROP_REASONS: Final = {
    "malformed_row": "the line does not have the columns its header promises, or is not a JSON object",
    "missing_time": "no event time",
    "bad_time": "an event time that cannot be parsed, or is not between 1970 and 2100",
    "bad_src_addr": "no source, or one that is neither an address nor a name",
    "bad_dst_addr": "no destination, or one that is neither an address nor a name",
    "family_mismatch": "source, destination and ip_version are not all of one family",
    "bad_rtt": "an RTT that is NaN or not a number",
    "zero_rtt": "an RTT of 0, which nothing has: a timeout is an empty cell",
    "absurd_rtt": "an RTT above ten minutes, or infinite",
    "duplicate": "an exact copy of another measurement, its time included",
}
"""Why a row can be dropped. A row with several faults is counted under the first one in this order."""

ADDRESS_BYTES: Final = {4: 4, 6: 16}
"""Bytes of an address, by family."""

UNPARSABLE: Final = 0
"""The family given to a string that is neither an address nor a name."""

NAMED: Final = 7
"""The family of names: of hosts, sites or probes. A name may be measured with nodes of either family."""

STAND_IN_PREFIX: Final = bytes.fromhex("20010db8")  # 2001:db8::/32 is reserved for documentation
"""Where a model needs an address, a name has one of these: its other 12 bytes are a hash of the name."""


@dataclass(frozen=True, kw_only=True)
class AddressColumn:
    """The nodes of many measurements: `packed[codes[i]]` are the bytes of the i-th, `families[codes[i]]` its family.

    IPv4 addresses fill the first 4 of the 16 bytes. A name has the address that stands in for it. A missing node counts
    as an unusable one.
    """

    families: npt.NDArray[np.uint8]
    packed: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.int32]
    names: Mapping[bytes, str] = field(default_factory=dict)
    """Names, by the bytes of the addresses that stand in for them."""

    @property
    def family_of_each(self) -> npt.NDArray[np.uint8]:
        return self.families[self.codes]


def parse_column(column: Any, name: str) -> AddressColumn:
    """Parse an Arrow column of text (plain or dictionary-encoded) or whole numbers (as the ids of Atlas probes are)."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_integer(kind):
        column = column.cast(pa.string())
    elif not is_text(kind) and not pa.types.is_null(kind):
        raise TypeError(f"column {name} has type {column.type}; expected text, such as 192.0.2.1")
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    families, packed, names = parse_nodes([text or "" for text in encoded.dictionary.to_pylist()])
    missing = len(families)  # one more entry stands for a missing node
    return AddressColumn(
        families=np.append(families, np.uint8(UNPARSABLE)),
        packed=np.vstack([packed, np.zeros((1, 16), dtype=np.uint8)]),
        codes=encoded.indices.cast(pa.int32()).fill_null(missing).to_numpy(zero_copy_only=False),
        names=names,
    )


_WITH_PORT: Final = re.compile(r"^(?:\[([0-9A-Fa-f:.]+)(?:%\w+)?\](?::\d+)?|([0-9.]+):\d+|([0-9A-Fa-f:]+)%\w+)$")
_LIKE_AN_ADDRESS: Final = re.compile(r"^[0-9.]*\.[0-9.]*$|^[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*$|::|/\d+$")
"""Digits and points, colons between hexadecimal digits, or a prefix: a slip rather than a name."""
_MAX_NAME: Final = 255


def parse_nodes(strings: Sequence[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], dict[bytes, str]]:
    """Parse addresses (also with a port) and names: family (4, 6, `NAMED` or `UNPARSABLE`), 16 bytes, and the names."""
    families, packed = parse_addresses(strings)
    names: dict[bytes, str] = {}
    for i in np.flatnonzero(families == UNPARSABLE).tolist():
        text = strings[i].strip()
        if found := _WITH_PORT.match(text):
            family, address = parse_addresses([found[1] or found[2] or found[3]])
            families[i], packed[i] = family[0], address[0]
        elif _is_name(text):
            stand_in = STAND_IN_PREFIX + blake2b(text.encode(), digest_size=12).digest()
            families[i], packed[i] = NAMED, np.frombuffer(stand_in, dtype=np.uint8)
            names[stand_in] = text
    return families, packed, names


def node_text(text: str) -> str:
    """An address in its usual spelling, or a name; an error if it is neither."""
    families, packed, names = parse_nodes([text])
    if families[0] == UNPARSABLE:
        raise PingLlmError(f"{text[:60]!r} is neither an address nor a name")
    return next(iter(names.values()), None) or format_address(int(families[0]), packed[0].tobytes())


def spelled_addresses(nodes: Sequence[str]) -> list[str]:
    """The address of each node, or the one that stands in for its name."""
    families, packed, _ = parse_nodes(nodes)
    return [
        format_address(4 if family == 4 else 6, one.tobytes())
        for family, one in zip(families.tolist(), packed, strict=True)
    ]


def can_measure(nodes: Sequence[str], other: str) -> npt.NDArray[np.bool_]:
    """Which nodes can measure `other`: those without an address of the other family."""
    families, _, _ = parse_nodes([*nodes, other])
    return ~of_two_families(families[:-1], families[-1:])


def _is_name(text: str) -> bool:
    says_nothing = text.lower() in MISSING_TEXT or not any(map(str.isalnum, text))
    return not says_nothing and text.isprintable() and len(text) <= _MAX_NAME and not _LIKE_AN_ADDRESS.search(text)


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
    """[levels, strings]: equal numbers where addresses share a prefix. `lengths`: bits of each level, by family.

    A name shares no prefix.
    """
    families, packed, _ = parse_nodes(strings)
    bits = np.unpackbits(packed, axis=1)
    numbers = np.empty((len(lengths[4]), len(strings)), dtype=np.int64)
    for level, (bits_4, bits_6) in enumerate(zip(lengths[4], lengths[6], strict=True)):
        kept_bits = np.select([families == 4, families == 6], [bits_4, bits_6], bits.shape[1])
        kept = np.arange(bits.shape[1]) < kept_bits[:, None]
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
    first_dropped: Mapping[str, int] = field(default_factory=dict)
    """For each reason, the position in the batch of the first row that was dropped."""

    def __len__(self) -> int:
        return len(self.time_us)

    @property
    def stand_ins(self) -> dict[str, str]:
        """The address that stands in for each name that has none."""
        named = {**self.src.names, **self.dst.names}
        return {name: format_address(6, stand_in) for stand_in, name in named.items()}

    def with_addresses(self, known: Mapping[str, str]) -> "ValidMeasurements":
        """The same with an address for every name: the known one, or else an IPv6 address that stands in for it.

        An IPv4 address measured with an IPv6 address becomes an IPv4-mapped one.
        """
        if not self.src.names and not self.dst.names:
            return self
        src, dst = (_addressed(column, known) for column in (self.src, self.dst))
        family = np.maximum(src.family_of_each, dst.family_of_each)
        src, dst = (_mapped(column, (family == 6) & (column.family_of_each == 4)) for column in (src, dst))
        return replace(self, src=src, dst=dst, family=family)


def _addressed(column: AddressColumn, known: Mapping[str, str]) -> AddressColumn:
    """The column with known addresses for names. `names` keeps those that have only a stand-in."""
    families, packed = np.where(column.families == NAMED, np.uint8(6), column.families), column.packed.copy()
    for i in np.flatnonzero(column.families == NAMED).tolist():
        if address := known.get(column.names[packed[i].tobytes()]):
            (families[i],), (packed[i],) = parse_addresses([address])
    names = {stand_in: name for stand_in, name in column.names.items() if name not in known}
    return replace(column, families=families, packed=packed, names=names)


def _mapped(column: AddressColumn, where: npt.NDArray[np.bool_]) -> AddressColumn:
    """The column with IPv4-mapped addresses for some measurements: the table gets a second entry for each address."""
    if not where.any():
        return column
    families = np.concatenate([column.families, np.full_like(column.families, 6)])
    packed = np.vstack([column.packed, ipv4_mapped(column.families, column.packed)])
    return replace(
        column, families=families, packed=packed, codes=column.codes + (where * len(column.families)).astype(np.int32)
    )


def ipv4_mapped(families: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """IPv4 addresses as IPv4-mapped IPv6 addresses (`::ffff:192.0.2.1`), all others unchanged."""
    mapped = np.pad(packed[:, :4], ((0, 0), (12, 0)))
    mapped[:, 10:12] = 255
    return np.where(families[:, None] == 4, mapped, packed)


def of_two_families(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where one node has an IPv4 address and the other an IPv6 address, so that neither can ping the other."""
    return (one != other) & (one != NAMED) & (other != NAMED)


def validate(batch: pa.RecordBatch, spelling: Spelling = PLAIN) -> ValidMeasurements:
    """Check every row of a batch that has the schema's column names (of any accepted type; `ip_version` optional)."""
    time_us, time_missing, time_bad = time_microseconds(batch.column("event_time"), spelling)
    rtt, rtt_bad = rtt_milliseconds(batch.column("rtt"), spelling)
    src, dst = (parse_column(batch.column(name), name) for name in ("src_addr", "dst_addr"))
    family, dst_family = src.family_of_each, dst.family_of_each
    mismatch = of_two_families(family, dst_family)
    if "ip_version" in batch.schema.names:
        stated, _ = rtt_milliseconds(batch.column("ip_version"))  # the same lenient reading of numbers
        says = ~np.isnan(stated) & (stated != 0)
        mismatch |= says & ((family != stated) & (family != NAMED) | (dst_family != stated) & (dst_family != NAMED))

    faults = {
        "missing_time": time_missing,
        "bad_time": time_bad | (time_us < 0) | (time_us >= MAX_TIME_US),
        "bad_src_addr": family == UNPARSABLE,
        "bad_dst_addr": dst_family == UNPARSABLE,
        "family_mismatch": mismatch,
        "bad_rtt": rtt_bad,
        "zero_rtt": (rtt >= 0) & (rtt < 1e-6),  # a float32 would have 0, or nearly
        "absurd_rtt": rtt > MAX_RTT_MS,
    }
    masks, reasons = np.stack(list(faults.values())), list(faults)
    unusable = masks.any(axis=0)
    keep: Any = ~unusable if unusable.any() else slice(None)
    fault, positions = masks[:, unusable].argmax(axis=0), np.flatnonzero(unusable)
    found, first, counts = np.unique(fault, return_index=True, return_counts=True)
    found_reasons = [reasons[number] for number in found.tolist()]
    return ValidMeasurements(
        time_us=time_us[keep],
        src=replace(src, codes=src.codes[keep]),
        dst=replace(dst, codes=dst.codes[keep]),
        family=family[keep],
        rtt_ms=np.where(rtt > 0, rtt, np.nan)[keep].astype(np.float32),  # negative means failed
        dropped=Counter(dict(zip(found_reasons, counts.tolist(), strict=True))),
        first_dropped=dict(zip(found_reasons, positions[first].tolist(), strict=True)),
    )
