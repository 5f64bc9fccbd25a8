"""A pool of worker processes that never outlives its parent and never hangs when a worker dies.

`with worker_pool(workers) as pool:` gives an ordinary `concurrent.futures` executor. Three things are added to the
standard process pool: a worker that dies (killed for lack of memory, say) is a one-line error; an exception or Ctrl-C
in the parent stops the workers in the middle of their task; and the workers end when the parent is killed.
Tasks must be importable functions with picklable arguments, because workers are spawned, not forked; for the same
reason a script that uses the pool needs an `if __name__ == "__main__":` guard.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, TypeVar

from ping_llm.core.errors import PingLlmError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def available_cores() -> int:
    """Cores this process may use, which in a container or under `taskset` are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def free_memory_bytes() -> int:
    """Memory that is available without swapping; the page cache counts as available."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
    """An executor with `workers` processes; with one or none, tasks run in this process when they are submitted."""
    if workers <= 1:
        yield _InProcess()
        return
    spawn = multiprocessing.get_context("spawn")
    leash, hand = spawn.Pipe(duplex=False)  # workers hold the leash; when our end closes, they exit
    pool = futures.ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(leash,))
    with leash, hand:
        try:
            yield pool
            pool.shutdown()
        except BaseException as error:
            hand.close()
            if sys.version_info < (3, 11, 5):  # a pool that broke while feeding a large task could not be shut down
                pool._call_queue._reader.close()  # type: ignore[attr-defined] # as later versions do (gh-94777)
            pool.shutdown(cancel_futures=True)
            if isinstance(error, futures.BrokenExecutor):
                advice = "perhaps for lack of memory; run again with fewer workers"
                raise PingLlmError(f"a worker process died, {advice}") from error
            raise


def map_in_order(
    pool: Executor,
    task: Callable[[Item], Outcome],
    items: Iterable[Item],
    *,
    window: int | Callable[[], int],
    run_ahead: bool = False,
) -> Iterator[Outcome]:
    """Outcomes of `task` in the order of `items`, with at most `window` tasks in progress.

    Finished outcomes that wait for their turn count, so that memory stays bounded. With `run_ahead` they do not, which
    suits small outcomes: a slow task does not hold up those behind it. The error raised is the first in the order of
    the input, of a task or of `items` itself, whatever the number of workers; after it no further task is started.
    """
    source, failure = iter(items), None
    waiting: deque[Future[Outcome]] = deque()
    while True:
        under_way = sum(not future.done() for future in waiting) if run_ahead else len(waiting)
        if not any(future.done() and future.exception() for future in waiting):
            try:
                for item in islice(source, max(0, (window() if callable(window) else window) - under_way)):
                    waiting.append(pool.submit(task, item))
            except Exception as error:
                source, failure = iter(()), error
        if not waiting:
            break
        if run_ahead and not waiting[0].done():
            futures.wait([future for future in waiting if not future.done()], return_when=futures.FIRST_COMPLETED)
        else:
            yield waiting.popleft().result()
    if failure:
        raise failure


REQUESTS_AT_ONCE: Final = 16  # to an object store


def side_by_side(task: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
    """Outcomes in order. An object store answers one request in some 30 ms whatever its size, but many at a time."""
    with futures.ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        yield from map_in_order(threads, task, items, window=2 * REQUESTS_AT_ONCE)


class _InProcess(Executor):
    """Runs each task when it is submitted, in this process."""

    def submit(self, fn: Callable[..., Outcome], /, *args: Any, **kwargs: Any) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def exit_with_parent(*leash: Connection) -> None:
    """Make this worker process end when its parent process ends, in whatever way, or closes the leash."""
    parent = multiprocessing.parent_process()
    watched: list[Any] = [*leash, parent.sentinel] if parent else [*leash]
    if watched:  # not sys.exit: the main thread may be deep in a task
        threading.Thread(target=lambda: (wait(watched), os._exit(1)), daemon=True).start()


def _start_worker(leash: Connection) -> None:
    """Runs first in every worker: ignore Ctrl-C, which the parent handles, and watch the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(leash)
