"""Tasks on this machine, in worker processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from ping_llm.engines.tasks import Engine
from ping_llm.workers import available_cores, worker_pool


@contextmanager
def local_engine(workers: int | None = None, memory_limit_bytes: int | None = None) -> Iterator[Engine]:
    """By default one worker for each core, and half of the free memory for all of them."""
    workers = workers or available_cores()
    limit = memory_limit_bytes or psutil.virtual_memory().available // 2
    window = 1 if workers == 1 else 4 * workers
    with worker_pool(workers) as pool:
        yield Engine(pool, window=lambda: window, memory_bytes=limit // workers)
