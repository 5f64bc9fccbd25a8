"""Tasks in worker processes: in order, bounded, without hangs and without orphans; and what every engine promises."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.engines import Engine, EngineChoice, Timing, summarise
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


def _fail_at_multiples_of_seven(number: int) -> int:
    time.sleep(random.random() / 500)
    if number and number % 7 == 0:
        raise PingLlmError(f"task {number} failed")
    return number


class TestEngine:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_results_come_in_order_with_time_and_node(self, workers: int) -> None:
        with EngineChoice(workers=workers).open() as engine:
            done = list(engine.map(_double, range(20)))
        assert [value for value, _ in done] == [2 * n for n in range(20)]
        assert all(timing.seconds >= 0 and timing.node and timing.started > 1.6e9 for _, timing in done)

    @settings(max_examples=20, deadline=None)
    @given(tasks=st.integers(0, 40), window=st.integers(1, 9))
    def test_no_more_than_the_window_is_begun_before_earlier_tasks_end(self, tasks: int, window: int) -> None:
        made: list[int] = []
        ended: list[int] = []
        most = 0

        def numbers() -> object:
            nonlocal most
            for number in range(tasks):
                made.append(number)
                most = max(most, len(made) - len(ended))
                yield number

        def work(number: int) -> int:
            ended.append(number)
            return number

        with ThreadPoolExecutor(3) as threads:
            engine = Engine(executor=threads, window=lambda: window, memory_bytes=1)
            assert [value for value, _ in engine.map(work, numbers())] == list(range(tasks))  # type: ignore[arg-type]
        assert most <= window

    def test_a_slow_task_does_not_hold_up_those_behind_it(self) -> None:
        finished: list[int] = []

        def work(number: int) -> None:
            time.sleep(0.1 if number == 0 else 0.001)
            finished.append(number)

        with ThreadPoolExecutor(2) as threads:
            engine = Engine(executor=threads, window=lambda: 3, memory_bytes=1)
            list(engine.map(work, range(30)))
        assert finished.index(0) > 20

    def test_the_error_is_the_first_in_the_order_of_the_tasks_and_nothing_is_begun_after_it(self) -> None:
        begun: list[int] = []
        lock = threading.Lock()

        def work(number: int) -> int:
            with lock:
                begun.append(number)
            return _fail_at_multiples_of_seven(number)

        with ThreadPoolExecutor(4) as threads:
            engine = Engine(executor=threads, window=lambda: 8, memory_bytes=1)
            results = engine.map(work, range(1000))
            assert [next(results)[0] for _ in range(7)] == list(range(7))
            with pytest.raises(PingLlmError, match="task 7 failed"):
                next(results)
        assert max(begun) < 40

    def test_memory_is_shared_by_the_workers_of_a_machine(self) -> None:
        with EngineChoice(workers=4, memory_limit_bytes=1 << 30).open() as engine:
            assert engine.memory_bytes == 1 << 28


class TestChoice:
    def test_unknown_engines_and_addresses_without_ray_are_refused(self) -> None:
        with pytest.raises(PingLlmError, match="--engine spark: there is local and ray"):
            EngineChoice(engine="spark")
        with pytest.raises(PingLlmError, match="add --engine ray"):
            EngineChoice(address="head:6379")
        with pytest.raises(PingLlmError, match="at least one worker"):
            EngineChoice(workers=0)

    def test_without_ray_one_line_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "ray", None)
        with (
            pytest.raises(PingLlmError, match=r'--engine ray needs the package ray: pip install "ping-llm\[ray\]"'),
            EngineChoice(engine="ray").open(),
        ):
            pass


def test_timings_are_summed_up_by_stage() -> None:
    timings = [
        Timing(stage="a", task=0, node="x", started=10.0, seconds=2.0, bytes_in=5, bytes_out=1),
        Timing(stage="a", task=1, node="y", started=11.0, seconds=4.0, bytes_in=5, bytes_out=1),
        Timing(stage="b", task=0, node="x", started=20.0, seconds=1.0, bytes_in=2, bytes_out=2),
    ]
    first, second = summarise(timings)
    assert (first["stage"], first["tasks"], first["nodes"], first["wall_s"]) == ("a", 2, 2, 5.0)
    assert (first["task_s"], first["bytes_in"], first["bytes_out"]) == (6.0, 10, 2)
    assert first["slowest"] == {"task": 1, "node": "y", "seconds": 4.0}
    assert second["stage"] == "b"
