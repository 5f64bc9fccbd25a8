"""Shared fixtures: where the real data lies, small measurement tables, and configuration files."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from ping_llm.core.measurements import SCHEMA

# A shell starts background jobs with Ctrl-C ignored, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many tests compile the same small model, some in processes of their own: they and the next run share the result.
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "jax"),
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# The gate must not depend on luck: fixed examples by default, fresh ones with `make test-random`.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

LONGEST_FIRST = (
    "test_dist.py",
    "test_multihost_training.py",
    "test_training.py",
    "test_completer_model.py",
    "test_backend_training.py",
    "test_ray.py",
    "test_baselines_real.py",
    "test_serve_models.py",
    "test_serve_openapi.py",
    "test_predictor.py",
    "test_browser_page.py",
    "test_float8.py",
    "test_loader.py",
    "test_notebook.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin, then those with many tests: the processes shall end at the same time."""
    tests = Counter(item.path for item in items)
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: (rank.get(item.path.name, len(rank)), -tests[item.path], item.path))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real measurements, which is not part of the repository."""
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("PING_LLM_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip("the real data is not here; set PING_LLM_SHARED_DATA to its folder")
    return folder


def random_measurements(count: int, *, seed: int = 0, sources: int = 60, whole_seconds: bool = True) -> pa.Table:
    """Measurements of both families in random order, with failures and equal times; none is a copy of another."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, sources, count) ** 2 // sources  # a few sources have most of the measurements
    ipv6 = source % 3 == 0
    target = rng.integers(0, 40, count)
    unit = 1_000_000 if whole_seconds else 1
    time = 1_700_000_000_000_000 + rng.integers(0, 5_000, count) * unit
    rtt = np.round(rng.lognormal(3.5, 1.0, count), 1).astype(np.float32)
    same_time = rng.integers(0, count, count // 20)
    for column in (source, ipv6, time):
        column[: len(same_time)] = column[same_time]
    while len(copies := _copies(source, target, time)):
        target[copies] = rng.integers(0, 40, len(copies))
        time[copies] += unit

    def addresses(number: Any) -> pa.Array:
        """A text for each node, not for each measurement: a million of these takes seconds."""
        nodes, which = np.unique(2 * number + ipv6, return_inverse=True)
        texts = [
            str(IPv6Address((0x20010DB8 << 96) + node // 2) if node % 2 else IPv4Address((10 << 24) + node // 2))
            for node in nodes.tolist()
        ]
        return pa.array(texts).take(pa.array(which))

    return pa.table(
        {
            "event_time": pa.array(time, pa.timestamp("us", tz="UTC")),
            "src_addr": addresses(source),
            "dst_addr": addresses(1000 + target),
            "ip_version": pa.array(np.where(ipv6, 6, 4), pa.int8()),
            "rtt": pa.array(rtt, mask=rng.random(count) < 0.05),
        },
        schema=SCHEMA,
    )


def _copies(*columns: Any) -> Any:
    """Rows that are equal to an earlier one."""
    row = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        row = row * len(values) + code
    _, first = np.unique(row, return_index=True)
    return np.setdiff1d(np.arange(len(row)), first)


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    def write(table: pa.Table, name: str = "measurements.parquet", **options: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, **options)
        return path

    return write


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "run.yml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write
