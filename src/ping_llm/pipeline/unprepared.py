"""`network_parquet`: training straight from measurement files, for data that fits in memory.

The files are prepared into a folder in shared memory, which every worker process maps and which is gone when the run
ends. So the batches are those that prepared rows would give, and there is no second implementation to keep in step.
"""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ping_llm.errors import PingLlmError
from ping_llm.rows.prepare import PIECE_ROWS, PrepareSettings, prepare
from ping_llm.sources import files

_BYTES_PER_MEASUREMENT: Final = 64
"""While preparing: the shuffle files and the rows at once."""
_BYTES_PER_TEXT_BYTE: Final = 1.0
"""A line of CSV or JSON is about as long as what it becomes."""


class PreparedInMemory:
    """Rows of some files in a temporary folder. The folder lives as long as this object."""

    def __init__(self, patterns: Sequence[str], ram_budget_mb: int) -> None:
        needed_mb = _needed_bytes(patterns) / 2**20
        if needed_mb > ram_budget_mb:
            raise PingLlmError(
                f"these files need about {needed_mb:,.0f} MB in memory, but grain_ram_budget_mb is {ram_budget_mb:,}: "
                f'prepare them once (ping-llm prepare --input "{patterns[0]}" --output data/probe_rows) and use '
                "network_data_format=probe_chunks, or raise the budget"
            )
        shared_memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="ping-llm-", dir=shared_memory if shared_memory.is_dir() else None))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        try:
            prepare(PrepareSettings(inputs=tuple(patterns), output=self.folder / "rows", train_ratio=1.0))
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    def close(self) -> None:
        self._finalizer()


def _needed_bytes(patterns: Sequence[str]) -> float:
    total = 0.0
    for path in files.expand(patterns):
        file, _ = files.describe(path, {}, PIECE_ROWS)
        if file.measurements is not None:
            total += file.measurements * _BYTES_PER_MEASUREMENT
        else:
            total += file.bytes * _BYTES_PER_TEXT_BYTE
    return total
