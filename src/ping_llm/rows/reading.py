"""Rows for the pipeline: checked and picked from by compiled loops that touch nothing but what a batch uses."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.errors import PingLlmError
from ping_llm.rows.checks import ALL_SOUND, check_rows
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.mapped import CHECKED_BYTES, Ints, MappedRows, Picked
from ping_llm.rows.picking import pick_runs

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
