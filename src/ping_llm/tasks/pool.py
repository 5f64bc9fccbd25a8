"""A pool of worker processes that never outlives its parent and never hangs when a worker dies.

`with worker_pool(workers) as pool:` gives an ordinary `concurrent.futures` executor. Three things are added to the
standard process pool: a worker that dies (killed by the kernel for memory, say) becomes a one-line error; an exception
or Ctrl-C in the parent stops the workers in the middle of their task; and the workers follow a parent that is killed.
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
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import ParamSpec, TypeVar

from ping_llm.core.errors import PingLlmError

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def available_cores() -> int:
    """Cores this process may use, which in a container or under `taskset` are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
    """An executor with `workers` processes; with one worker or none, tasks run at once in this process."""
    if workers <= 1:
        yield _InProcess()
        return
    spawn = multiprocessing.get_context("spawn")
    leash, hand = spawn.Pipe(duplex=False)  # workers hold the leash; when our end closes, they exit
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(leash,))
    try:
        yield pool
    except BaseException as error:
        hand.close()
        _stop_feeding(pool)
        pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenExecutor):
            raise PingLlmError(
                "a worker process died, perhaps for lack of memory; run again with fewer workers"
            ) from error
        raise
    else:
        pool.shutdown(wait=True)
    finally:
        hand.close()
        leash.close()


def _stop_feeding(pool: ProcessPoolExecutor) -> None:
    """Close the reading end of the pool's task pipe, so that its feeder thread gets an error and not stuck.

    Python does so itself from 3.11.5 on (gh-94777); before, a pool that broke while a large task was on its way to a
    worker could never be shut down.
    """
    if sys.version_info >= (3, 11, 5):
        return
    reader = getattr(getattr(pool, "_call_queue", None), "_reader", None)
    if reader is not None:
        reader.close()


def map_in_order(
    pool: Executor, task: Callable[[Item], Outcome], items: Iterable[Item], *, window: int
) -> Iterator[Outcome]:
    """Outcomes of `task` in the order of `items`, with at most `window` tasks under way: memory stays bounded.

    When `items` itself fails, the outcomes of the items before it still come first. So the error a user sees is the
    first one in the order of the input, whatever the number of workers.
    """
    under_way: deque[Future[Outcome]] = deque()
    failure: Exception | None = None
    iterator = iter(items)
    while failure is None:
        try:
            item = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            failure = error
        else:
            under_way.append(pool.submit(task, item))
            if len(under_way) >= window:
                yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()
    if failure is not None:
        raise failure


class _InProcess(Executor):
    """Runs each task when it is submitted, in this process."""

    def submit(
        self, fn: Callable[Arguments, Outcome], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def exit_with_parent() -> None:
    """Make this worker process end when the process that started it does, however that ends."""
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _start_worker(leash: Connection) -> None:
    """Runs first in every worker: leave Ctrl-C to the parent, and watch for the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(leash,), daemon=True).start()


def _exit_with_parent(leash: Connection) -> None:
    parent = multiprocessing.parent_process()
    wait([leash] if parent is None else [leash, parent.sentinel])
    os._exit(1)  # not sys.exit: the main thread may be deep in a task
