"""A world's measurements as a folder: Parquet files, and `world.json` to ask for the truth later."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.console import Advance
from ping_llm.errors import PingLlmError
from ping_llm.measurements import SCHEMA
from ping_llm.sources import WORLD_FILE
from ping_llm.sources.simulator.generate import generate
from ping_llm.sources.simulator.settings import SimulatorSettings
from ping_llm.sources.simulator.world import World

DEFAULT_ROWS_PER_FILE = 10_000_000
_FILES = ("measurements-*.parquet", WORLD_FILE)
_PARQUET = {"compression": "zstd", "use_dictionary": ["src_addr", "dst_addr", "ip_version"]}


@dataclass(frozen=True, kw_only=True)
class SimulationSummary:
    measurements: int
    failed: int
    sources: int
    targets: int
    files: tuple[Path, ...]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes as they are."""
        return dataclasses.asdict(self) | {"files": [str(path) for path in self.files]}


def simulate(
    settings: SimulatorSettings,
    output_dir: Path | str,
    *,
    files: int | None = None,
    rows_per_file: int | None = None,
    on_progress: Advance | None = None,
    overwrite: bool = False,
) -> SimulationSummary:
    """Writes `measurements-00000-of-0000N.parquet`... and, when they are complete, `world.json`.

    The measurements are the same however many files they are cut into. `on_progress` is told how many were written.
    """
    bounds = _file_bounds(settings.measurements, files, rows_per_file)
    folder = Path(output_dir)
    existing = [path for pattern in _FILES for path in sorted(folder.glob(pattern))]
    if existing and not overwrite:
        raise PingLlmError(f"{folder} already holds simulated measurements: choose another folder, or overwrite them")
    world = World(settings)  # fails, if it has to, before anything is deleted
    _clear(folder, existing)
    paths = []
    failed = 0
    rows = _Rows(generate(world))
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        paths.append(folder / f"measurements-{number:05d}-of-{len(bounds) - 1:05d}.parquet")
        with _finished_or_absent(paths[-1]) as unfinished, pq.ParquetWriter(unfinished, SCHEMA, **_PARQUET) as out:
            for table in rows.take(end - begin):
                out.write_table(table)
                failed += table["rtt"].null_count
                if on_progress is not None:
                    on_progress(len(table))
    with _finished_or_absent(folder / WORLD_FILE) as unfinished:
        unfinished.write_text(json.dumps(world.describe(), indent=2) + "\n")
    return SimulationSummary(
        measurements=settings.measurements,
        failed=failed,
        sources=world.endpoints.sources,
        targets=len(world.endpoints.family) - world.endpoints.sources,
        files=tuple(paths),
        size_bytes=sum(path.stat().st_size for path in paths),
    )


class _Rows:
    """Tables of any size, handed out in any other sizes."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._left = SCHEMA.empty_table()

    def take(self, count: int) -> Iterator[pa.Table]:
        while count:
            table = self._left if len(self._left) else next(self._tables)
            part, self._left = table.slice(0, count), table.slice(count)
            count -= len(part)
            yield part


def _file_bounds(measurements: int, files: int | None, rows_per_file: int | None) -> list[int]:
    """The number of the first measurement of every file, and the end."""
    if files is not None and rows_per_file is not None:
        raise PingLlmError("give the number of files or the rows per file, not both")
    if files is None:
        rows_per_file = DEFAULT_ROWS_PER_FILE if rows_per_file is None else rows_per_file
        if rows_per_file < 1:
            raise PingLlmError("a file needs at least one row")
        return [*range(0, measurements, rows_per_file), measurements]
    if not 1 <= files <= measurements:
        raise PingLlmError(f"{measurements} measurements cannot be written to {files} files")
    return [number * measurements // files for number in range(files + 1)]


def _clear(folder: Path, existing: list[Path]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in existing:
            path.unlink()
    except OSError as error:
        raise PingLlmError(f"cannot write to {folder}: {error.strerror}") from None


@contextmanager
def _finished_or_absent(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` if all goes well: nobody ever sees half a file."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
