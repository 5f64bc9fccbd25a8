"""From the loader onto the accelerator: a thread keeps a few batches there ahead of the training step.

Every host puts only its own part of the global batch on its own devices; together they are one global array.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from ping_llm.batches.spec import Batch

DeviceBatch = dict[str, jax.Array]
_END = object()


@contextmanager
def on_device(batches: Iterable[Batch], sharding: Any, *, ahead: int = 2) -> Iterator[Iterator[DeviceBatch]]:
    """Global arrays of host-local batches, `ahead` of them made before they are asked for.

    >>> with Loader(spec, settings) as loader, on_device(loader, sharding) as batches:
    ...     for batch in batches: ...

    An error of the loader is raised where the batch would have been. Leaving the `with` stops the thread.
    """
    ready: queue.Queue[Any] = queue.Queue(ahead)
    stop = threading.Event()

    def offer(item: Any) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def fill() -> None:
        try:
            for batch in batches:
                offer({name: jax.make_array_from_process_local_data(sharding, a) for name, a in batch.items()})
                if stop.is_set():
                    return
            offer(_END)
        except BaseException as error:  # handed over to whoever asks for the next batch
            offer(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield _taken(ready)
    finally:
        stop.set()
        thread.join()


def _taken(ready: queue.Queue[Any]) -> Iterator[DeviceBatch]:
    while (item := ready.get()) is not _END:
        if isinstance(item, BaseException):
            raise item
        yield item
