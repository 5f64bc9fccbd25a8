"""From the loader onto the accelerator: a thread keeps a few batches there ahead of the training step.

Every host puts only its own part of the global batch on its own devices; together they are one global array.
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
    """Global arrays of host-local batches, `ahead` of them ready and one in the making before they are asked for.

    >>> with Loader(spec, settings) as loader, on_device(loader, sharding) as batches:
    ...     for batch in batches: ...

    An error of the loader is raised where the batch would have been. Leaving the `with` stops the thread.
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
