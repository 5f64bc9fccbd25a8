"""Helpers of the pipeline's tests: small datasets of any shape, and bounds on what chance may do."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.batches.batch import expand
from ping_llm.batches.spec import Batch
from ping_llm.contexts.plan import RowFacts, SequencePlan
from ping_llm.contexts.source import RowSequences
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.measurements import SCHEMA
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.simulator import SimulatorSettings, simulate

START_S = 1_700_000_000


def facts_of(counts: npt.ArrayLike, *, family: Any = 4, failed: Any = 0, long_gaps: Any = 0) -> RowFacts:
    """Rows of these sizes as the index would describe them."""
    kinds = {"count": np.uint32, "failed": np.uint32, "long_gaps": np.uint32, "family": np.uint8}
    given = {"count": counts, "failed": failed, "long_gaps": long_gaps, "family": family}
    columns = {name: np.broadcast_to(given[name], np.shape(counts)).astype(kind) for name, kind in kinds.items()}
    for column in columns.values():
        column.flags.writeable = False
    return RowFacts(**columns)


def arrays_of(opened: RowSequences, sequences: Sequence[int]) -> Batch:
    """The arrays of these sequences, in this order."""
    return expand(opened.packed(sequences), len(sequences), opened.plan.settings.length)


@dataclass(frozen=True)
class Dataset:
    """A split of prepared rows, and plans and builders over it."""

    folder: Path

    @property
    def rows(self) -> RowSet:
        return RowSet(self.folder)

    def plan(self, seed: int = 1, **settings: Any) -> SequencePlan:
        return SequencePlan(RowFacts.of(self.rows), seed, ContextSettings(**settings))

    def builder(self, seed: int = 1, **settings: Any) -> RowSequences:
        return RowSequences(self.rows, self.plan(seed, **settings))


def prepare_table(table: pa.Table, **options: Any) -> Dataset:
    """All measurements of a table as one split."""
    folder = _temporary_folder()
    pq.write_table(table, folder / "measurements.parquet")
    return _prepare(folder, **options)


@cache
def simulated(measurements: int, **settings: Any) -> Dataset:
    """Rows of a simulated Internet: their sizes are heavy-tailed. Made once for all tests."""
    folder = _temporary_folder()
    simulate(SimulatorSettings(measurements=measurements, **settings), folder)
    return _prepare(folder)


def _prepare(folder: Path, **options: Any) -> Dataset:
    settings = {"train_ratio": 1.0, "workers": 1} | options
    prepare(PrepareSettings(inputs=(str(folder / "*.parquet"),), output=folder / "rows", **settings))
    return Dataset(folder / "rows")


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pipeline-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def histories(
    sizes: Sequence[int], *, family: int = 4, gap_us: int = 60_000_000, failed: float = 0.1, seed: int = 0
) -> pa.Table:
    """One source per size, its measurements at random gaps of `gap_us` on average, some of them failed."""
    rng = np.random.default_rng(seed)
    count = np.asarray(sizes)
    row = np.repeat(np.arange(len(count)), count)
    gaps = rng.integers(0, 2 * gap_us + 1, len(row))
    time_us = START_S * 1_000_000 + np.concatenate([np.cumsum(part) for part in np.split(gaps, np.cumsum(count)[:-1])])
    prefix = "10.{}.{}.{}" if family == 4 else "2001:db8:{}:{}::{}"
    names = [prefix.format(i >> 16, i >> 8 & 255, i & 255) for i in range(len(count))]
    target = "192.0.2.{}" if family == 4 else "2001:db8:ffff::{}"
    rtt = rng.lognormal(3.5, 1.0, len(row)).astype(np.float32)
    return pa.table(
        {
            "event_time": pa.array(time_us, pa.timestamp("us", tz="UTC")),
            "src_addr": pa.array(names).take(pa.array(row)),
            "dst_addr": pa.array([target.format(i) for i in range(200)]).take(pa.array(rng.integers(0, 200, len(row)))),
            "ip_version": pa.array(np.full(len(row), family), pa.int8()),
            "rtt": pa.array(rtt, mask=rng.random(len(row)) < failed),
        },
        schema=SCHEMA,
    )


def in_batches(sequences: int, size: int = 256) -> Iterator[range]:
    for begin in range(0, sequences, size):
        yield range(begin, min(begin + size, sequences))


def looks_uniform(counts: npt.ArrayLike) -> bool:
    """Whether these counts could be of equally likely outcomes: chi-square within five standard deviations or so.

    The share of sound streams that fail is about one in a million; all streams here are fixed, so none does by chance.
    """
    return looks_like(counts, np.ones(np.shape(counts)))


def looks_like(counts: npt.ArrayLike, weights: npt.ArrayLike) -> bool:
    """Whether these counts could be of outcomes with these relative probabilities."""
    found, expected = np.asarray(counts, dtype=float), np.asarray(weights, dtype=float)
    expected = expected * found.sum() / expected.sum()
    assert expected.min() >= 5, "too few for a chi-square test"
    chi_square, freedom = float(((found - expected) ** 2 / expected).sum()), found.size - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    spread = 2 / (9 * freedom)
    return bool(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 5)
