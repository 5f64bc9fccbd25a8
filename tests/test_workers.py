"""The process pool: in order, bounded, without hangs and without orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.pool import map_in_order, worker_pool


def _double(number: int) -> int:
    return 2 * number


def _die_at_three(item: tuple[int, bytes]) -> int:
    if item[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item[0]


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


POOL_SCRIPT = r"""
import os, sys, time
from ping_llm.tasks.pool import map_in_order, worker_pool

def nap(seconds):
    os.write(1, b"%d\n" % os.getpid())  # in one piece: both workers write to the same pipe
    time.sleep(seconds)

if __name__ == "__main__":
    with worker_pool(2) as pool:
        list(map_in_order(pool, nap, [60, 0], window=2))  # one worker is busy, one idle
"""


class TestWorkerPool:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_outcomes_come_in_order(self, workers: int) -> None:
        with worker_pool(workers) as pool:
            assert list(map_in_order(pool, _double, range(20), window=3)) == [2 * i for i in range(20)]

    def test_one_worker_is_this_process(self) -> None:
        with worker_pool(1) as pool:
            assert pool.submit(os.getpid).result() == os.getpid()

    def test_ctrl_c_is_left_to_the_parent(self) -> None:
        with worker_pool(2) as pool:
            assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN

    def test_no_more_than_the_window_is_under_way(self) -> None:
        begun: list[int] = []
        with worker_pool(1) as pool:
            outcomes = map_in_order(pool, begun.append, range(100), window=4)
            next(outcomes)
            assert len(begun) == 4

    def test_a_failing_source_fails_after_the_outcomes_before_it(self) -> None:
        def items() -> Any:
            yield from range(3)
            raise PingLlmError("the file is damaged")

        with worker_pool(1) as pool:
            outcomes = map_in_order(pool, _double, items(), window=10)
            assert [next(outcomes) for _ in range(3)] == [0, 2, 4]
            with pytest.raises(PingLlmError, match="damaged"):
                next(outcomes)

    @pytest.mark.timeout(60)
    def test_a_killed_worker_is_one_line_not_a_hang(self) -> None:
        items = ((number, bytes(1 << 22)) for number in range(20))  # more than a pipe holds
        with pytest.raises(PingLlmError, match="a worker process died") as error, worker_pool(2) as pool:
            list(map_in_order(pool, _die_at_three, items, window=4))
        assert "\n" not in str(error.value)

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_workers_go_when_the_parent_goes(self, tmp_path: Path, sent: signal.Signals) -> None:
        script = tmp_path / "script.py"
        script.write_text(POOL_SCRIPT)
        with subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as parent:
            assert parent.stdout is not None
            workers = [int(parent.stdout.readline()) for _ in range(2)]
            if sent == signal.SIGINT:
                os.killpg(parent.pid, sent)  # as a terminal does for Ctrl-C
            else:
                parent.send_signal(sent)
            assert parent.wait(timeout=20) != 0
        deadline = time.monotonic() + 20
        while any(map(_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_running, workers))
