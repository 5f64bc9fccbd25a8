"""Shuffle files between the two steps of preparation: measurements cut into buckets by the hash of their source.

Step one sorts each batch by bucket and writes it as one *run*; step two reads a range of buckets from every run. There
are always 4096 buckets, whatever the input: how many of them make a shard is decided when the total is known, so the
shards do not depend on how the input was cut into files.

A run file is: for each family, 4097 bucket offsets (int64); then for each family its columns, one after the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.addresses import AddressColumn, source_hash
from ping_llm.measurements import ValidMeasurements

BUCKETS: Final = 4096
_BUCKET_SHIFT: Final = np.uint64(64 - 12)
FAMILIES: Final = (4, 6)

COLUMNS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    4: (("src", "<u4"), ("time", "<i8"), ("dst", "<u4"), ("rtt", "<f4")),
    6: (("src", "<u8"), ("src_low", "<u8"), ("time", "<i8"), ("dst", "<u8"), ("dst_low", "<u8"), ("rtt", "<f4")),
}
"""Columns by family. Addresses are numbers here, because numbers are what sorts fast: one for IPv4, two for IPv6."""

_OFFSETS_BYTES: Final = (BUCKETS + 1) * 8


def write_run(path: Path, measurements: ValidMeasurements) -> int:
    """Write a batch as one run. Returns its size in bytes."""
    bucket_of_source = (source_hash(measurements.src.families, measurements.src.packed) >> _BUCKET_SHIFT).astype(
        np.uint16
    )
    buckets = bucket_of_source[measurements.src.codes]
    offsets, columns = [], []
    for family in FAMILIES:
        chosen = np.flatnonzero(measurements.family == family)
        order = chosen[np.argsort(buckets[chosen], kind="stable")]
        counts = np.bincount(buckets[chosen], minlength=BUCKETS)
        offsets.append(np.concatenate([[0], np.cumsum(counts)]).astype("<i8"))
        columns += [
            *_address_numbers(measurements.src, order, family),
            measurements.time_us[order].astype("<i8", copy=False),
            *_address_numbers(measurements.dst, order, family),
            measurements.rtt_ms[order].astype("<f4", copy=False),
        ]
    with path.open("wb") as file:
        for array in (*offsets, *columns):
            file.write(array.data)
        return file.tell()


def _address_numbers(column: AddressColumn, order: npt.NDArray[np.int64], family: int) -> list[npt.NDArray[Any]]:
    codes = column.codes[order]
    if family == 4:
        return [np.ascontiguousarray(column.packed[:, :4]).view(">u4")[:, 0].astype("<u4")[codes]]
    halves = np.ascontiguousarray(column.packed).view(">u8").astype("<u8")
    return [halves[:, 0][codes], halves[:, 1][codes]]


def address_bytes(numbers: list[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The inverse of the above: addresses in network byte order, shape (n, 4) or (n, 16)."""
    words = np.stack(numbers, axis=1)
    return words.astype(words.dtype.newbyteorder(">")).view(np.uint8)


def read_buckets(paths: list[Path], family: int, first: int, last: int) -> Iterator[pa.RecordBatch]:
    """Buckets `first` to `last` (exclusive) of one family from every run, a record batch per run."""
    for path in paths:
        with path.open("rb") as file:
            arrays = _read_slice(file, family, first, last)
        if len(arrays[0]):
            names = [name for name, _ in COLUMNS[family]]
            yield pa.RecordBatch.from_arrays([pa.array(a) for a in arrays], names=names)


def _read_slice(file: Any, family: int, first: int, last: int) -> list[npt.NDArray[Any]]:
    offsets = {f: np.fromfile(file, dtype="<i8", count=BUCKETS + 1) for f in FAMILIES}
    position = len(FAMILIES) * _OFFSETS_BYTES
    for earlier in FAMILIES[: FAMILIES.index(family)]:
        position += int(offsets[earlier][-1]) * _measurement_bytes(earlier)
    total = int(offsets[family][-1])
    begin, end = int(offsets[family][first]), int(offsets[family][last])
    arrays = []
    for _, kind in COLUMNS[family]:
        width = np.dtype(kind).itemsize
        file.seek(position + begin * width)
        arrays.append(np.fromfile(file, dtype=kind, count=end - begin))
        position += total * width
    return arrays


def _measurement_bytes(family: int) -> int:
    return sum(np.dtype(kind).itemsize for _, kind in COLUMNS[family])


def arrow_schema(family: int) -> pa.Schema:
    return pa.schema([(name, pa.from_numpy_dtype(np.dtype(kind))) for name, kind in COLUMNS[family]])
