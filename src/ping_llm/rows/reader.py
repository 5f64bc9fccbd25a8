"""Picking single measurements out of mapped shards, for many rows at once.

A context needs a few dozen measurements of a history that may have hundreds of thousands. Shards are mapped, and since
every number of every column lies aligned in the file (`format.record_shape`), the wanted numbers are picked as 32-bit
words by index arithmetic: only the pages that hold them are touched, and nothing is parsed or copied but the result.

Mapped reads bypass the record's checksum, so a row is checked whole the first time this process uses it, up to
`CHECKED_BYTES`. A longer row costs milliseconds to check, more than all the rest of the work for a context; of those
the header is checked (unless it came from elsewhere just now), and `ping-llm inspect rows` checks everything.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.errors import PingLlmError
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import HEADER, MAGIC, CorruptRecordError, check_record, is_sound
from ping_llm.rows.kernels import ALL_SOUND, check_rows, pick_runs

CHECKED_BYTES: Final = 1 << 20

Ints = npt.NDArray[np.int64]


class CorruptRowError(PingLlmError):
    """A row of a shard is damaged. `row` is its number in the split."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[Any, ...]:  # it crosses process boundaries
        return type(self), (str(self), self.row)


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Measurements as columns, in the order in which they were asked for."""

    time_s: Ints
    """Whole Unix seconds: what tokens can say."""
    rtt_ms: npt.NDArray[np.float32]
    destination: npt.NDArray[np.uint8]
    """(measurements, 16), IPv4 in the first four bytes."""


class MappedRows:
    """Random access to the measurements of one split."""

    def __init__(self, rows: RowSet) -> None:
        self.rows = rows
        self._shard = rows.column("shard")
        self._offset = rows.column("offset")
        self._count = rows.column("count")
        self._family = rows.column("family")
        self._unit = rows.column("time_unit_us")
        self._first = rows.column("first_time_us")
        self._last = rows.column("last_time_us")
        self._source = rows.column("source")
        self._size = rows.column("size")
        self._checked = np.zeros(len(rows), dtype=np.uint8)
        self._wanted: Ints = np.zeros(0, dtype=np.int64)

    def _file(self, shard: int) -> Any:
        return self.rows.shards.array(shard)

    def sources(self, rows: Ints) -> npt.NDArray[np.uint8]:
        """(rows, 16): source address of each row."""
        return self._source[rows]

    def check(self, rows: Ints) -> None:
        """Have the rows here, and check those that this process has not used before."""
        self._fetch(rows)
        while len(unchecked := rows[self._checked[rows] == 0]):  # more than once, if a shard had to be fetched again
            for row in unchecked.tolist():
                self._check(row)
                self._checked[row] = 1

    def _fetch(self, rows: Ints) -> None:
        self._wanted = rows
        begin, end = self._place(rows)
        came = self.rows.shards.fetch(self._shard[rows].astype(np.int64), begin, end)
        self._checked[rows[came]] = 0

    def _place(self, rows: Ints) -> tuple[Ints, Ints]:
        """Where rows begin and end in their shards' files."""
        offset, size = self._offset[rows].astype(np.int64), self._size[rows].astype(np.int64)
        return layout.physical(offset), layout.physical(offset + size - 1) + 1

    def _check(self, row: int) -> None:
        try:
            self._check_here(row)
        except CorruptRowError:
            begin, end = self._place(np.array([row]))
            if not self.rows.shards.forget(int(self._shard[row]), int(begin[0]), int(end[0])):
                raise
            self._fetch(self._wanted)  # what was damaged may have been the copy, and others may have lain in it
            self._check_here(row)

    def _check_here(self, row: int) -> None:
        size, shard = int(self._size[row]), int(self._shard[row])
        try:
            if size <= CHECKED_BYTES or not self.rows.shards.is_verified(shard):
                record = _read_logical(self._file(shard), int(self._offset[row]), size)
                if not is_sound(record):
                    check_record(record)
                    raise CorruptRecordError("checksum mismatch")
            else:
                record = _read_logical(self._file(shard), int(self._offset[row]), HEADER.itemsize)
            header = np.frombuffer(record, dtype=HEADER, count=1)[0]
            if (header["magic"], header["count"]) != (MAGIC, self._count[row]):
                raise CorruptRecordError("the record is not the one that the index names")
        except CorruptRecordError as error:
            raise self.corrupt(row, str(error)) from error

    def corrupt(self, row: int, reason: str) -> CorruptRowError:
        """The error that says what is wrong with a row, and where it is."""
        file = self.rows.info.shards[int(self._shard[row])].file
        return CorruptRowError(f"{self.rows.folder / file}, row {self.rows.column('position')[row]}: {reason}", row)

    def pick(self, rows: Ints, positions: Ints) -> Picked:
        """Measurement `positions[i]` of row `rows[i]`, for all i."""
        count, family = self._count[rows].astype(np.int64), self._family[rows]
        unit, first = self._unit[rows].astype(np.int64), self._first[rows]
        wide = (self._last[rows] - first) // unit >= 2**32
        address = np.where(family == 6, 16, 4)
        width = np.where(wide, 8, 4)
        columns = self._columns(rows)
        shard = self._shard[rows].astype(np.int64)

        time_at = columns + positions * width
        rtt_at = columns + count * (width + address) + positions * 4
        address_at = columns + count * width + positions * address
        far, v6 = np.flatnonzero(wide), np.flatnonzero(family == 6)
        rest_at = (address_at[v6, None] + (4, 8, 12)).ravel()
        words = self._words(
            np.concatenate([shard, shard, shard, shard[far], np.repeat(shard[v6], 3)]),
            np.concatenate([time_at, rtt_at, address_at, time_at[far] + 4, rest_at]),
        )
        n = len(rows)
        ticks = words[:n].astype(np.int64)
        ticks[far] += words[3 * n : 3 * n + len(far)].astype(np.int64) << 32
        destination = np.zeros((n, 4), dtype=np.uint32)
        destination[:, 0] = words[2 * n : 3 * n]
        destination[v6, 1:] = words[3 * n + len(far) :].reshape(-1, 3)
        return Picked(
            time_s=(first + ticks * unit) // 1_000_000,
            rtt_ms=words[n : 2 * n].view(np.float32),
            destination=destination.view(np.uint8),
        )

    def _columns(self, rows: Ints) -> Ints:
        """Logical place of each row's columns: the first multiple of 8 after its header."""
        after = self._offset[rows].astype(np.int64) + HEADER.itemsize
        return after + (-after) % 8

    def _words(self, shard: Ints, logical: Ints) -> npt.NDArray[np.uint32]:
        place = layout.physical(logical) >> 2
        if len(self.rows.info.shards) == 1:
            return self._file(0).view("<u4")[place]
        order = np.argsort(shard, kind="stable")
        bounds = np.flatnonzero(np.diff(shard[order], prepend=-1, append=-1))
        result = np.empty(len(place), dtype=np.uint32)
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            chosen = order[begin:end]
            result[chosen] = self._file(int(shard[chosen[0]])).view("<u4")[place[chosen]]
        return result


def _read_logical(file: Any, offset: int, size: int) -> bytes:
    """`size` bytes from a logical position, with the block headers in between left out."""
    begin, end = layout.physical(offset), layout.physical(offset + size - 1) + 1
    if end > len(file):
        raise CorruptRecordError("the index places it beyond the end of its shard")
    raw = file[begin:end]
    if len(raw) == size:
        return bytes(raw)
    keep = (np.arange(begin, end) % layout.BLOCK) >= layout.BLOCK_HEADER
    return raw[keep].tobytes()


# Rows for the pipeline: checked and picked from by compiled loops that touch nothing but what a batch uses.

_ANY_SIZE: Final = 1 << 62


class RowReader(MappedRows):
    """As `MappedRows`, twenty times as fast."""

    def __init__(self, rows: RowSet) -> None:
        super().__init__(rows)
        shards = len(rows.info.shards)
        if len(rows) and int(self._shard.max()) >= shards:
            raise PingLlmError(f"the index of {rows.folder} names shards that there are not: prepare the rows again")
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._address = np.zeros(shards, dtype=np.int64)
        self._bytes = np.zeros(shards, dtype=np.int64)
        self._read_whole = np.zeros(shards, dtype=np.int64)

    def check(self, rows: Ints) -> None:
        """Have the rows here, and check those that this process has not used before."""
        if self.rows.folder.is_remote:
            self._fetch(rows)
        self._map(rows)
        while (at := self._first_fault(rows)) != ALL_SOUND:
            row = int(rows[at])
            self._check(row)  # an error, unless what was damaged could be fetched again
            self._map(rows)
            if self._first_fault(rows[at : at + 1]) != ALL_SOUND:
                raise self.corrupt(row, "the record is not the one that the index names")

    def _first_fault(self, rows: Ints) -> int:
        return check_rows(
            rows,
            self._checked,
            self._shard,
            self._offset,
            self._size,
            self._count,
            self._family,
            self._unit,
            self._first,
            self._last,
            self._address,
            self._bytes,
            self._read_whole,
        )

    def _map(self, rows: Ints) -> None:
        """Note where the shards of these rows are mapped."""
        shards = self._shard[rows]
        if self.rows.folder.is_remote:  # then any of them may have come and gone
            self._address[:] = 0
            self._maps.clear()
        for shard in np.unique(shards[self._address[shards] == 0]).tolist():
            self._maps[shard] = file = self._file(shard)
            self._address[shard], self._bytes[shard] = file.ctypes.data, len(file)
            self._read_whole[shard] = CHECKED_BYTES if self.rows.shards.is_verified(shard) else _ANY_SIZE

    def pick_runs(self, rows: Ints, first: Ints, positions: Ints, wants_times: npt.NDArray[np.bool_]) -> Picked:
        """Measurements `positions[first[i]:first[i + 1]]` of row `rows[i]`, for all i, after these rows were checked.

        Times are picked where they are wanted.
        """
        count = len(positions)
        time_s, rtt_ms = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        destination = np.zeros((count, 4), dtype=np.uint32)
        pick_runs(
            rows,
            first,
            positions,
            wants_times,
            self._shard,
            self._offset,
            self._count,
            self._family,
            self._unit,
            self._first,
            self._last,
            self._address,
            self._bytes,
            time_s,
            rtt_ms,
            destination,
        )
        return Picked(time_s=time_s, rtt_ms=rtt_ms, destination=destination.view(np.uint8))
