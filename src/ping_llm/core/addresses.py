"""Internet addresses as fixed-width bytes, a whole column at a time.

A column of address strings has few distinct values, so it is dictionary-encoded first and only the distinct strings
are parsed. An `AddressColumn` keeps that shape: a table of distinct addresses and one code per measurement.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.core.randomness import GOLDEN, mix64

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


def parse_column(column: Any) -> AddressColumn:
    """Parse an Arrow string column (plain or dictionary-encoded); what is not an address gets family `UNPARSABLE`."""
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
    for level in range(len(numbers)):
        kept = np.zeros_like(bits)
        for family in lengths:
            mine = families == family
            kept[mine, : lengths[family][level]] = bits[mine, : lengths[family][level]]
        prefix = np.concatenate([families[:, None], np.packbits(kept, axis=1)], axis=1)
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
