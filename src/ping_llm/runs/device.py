"""Batches on the accelerator: a thread copies a few of them there ahead of the training step.

Every host copies its own part of the global batch to its own devices; together the parts are one global array.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from ping_llm.batches.spec import Batch

DeviceBatch = dict[str, jax.Array]


@contextmanager
def on_device(batches: Iterable[Batch], sharding: Any, *, ahead: int = 2) -> Iterator[Iterator[DeviceBatch]]:
    """Global arrays of host-local batches. `ahead` of them are kept ready, and one more is being made.

    >>> with Loader(spec, settings) as loader, on_device(loader, sharding) as batches:
    ...     for batch in batches: ...

    An error of the loader is raised when its batch is due. Leaving the `with` stops the thread.
    """
    source = iter(batches)

    def put() -> DeviceBatch | None:
        batch = next(source, None)
        put_one = jax.make_array_from_process_local_data
        return None if batch is None else {name: put_one(sharding, array) for name, array in batch.items()}

    def taken() -> Iterator[DeviceBatch]:
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(put))
            yield batch

    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(put) for _ in range(ahead + 1))
        try:
            yield taken()
        finally:
            thread.shutdown(cancel_futures=True)
