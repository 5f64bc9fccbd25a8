"""What every engine promises: results in order, bounded, the first error in the order of the tasks, timings."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.tasks.engines import Engine, EngineChoice, Timing, summarise


def _square(number: int) -> int:
    return number * number


def _slow_first(number: int) -> int:
    time.sleep(0.1 if number == 0 else 0.001)
    return number


def _fail_at_multiples_of_seven(number: int) -> int:
    time.sleep(random.random() / 500)
    if number and number % 7 == 0:
        raise PingLlmError(f"task {number} failed")
    return number


class TestEngine:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_results_come_in_order_with_time_and_place(self, workers: int) -> None:
        with EngineChoice(workers=workers).open() as engine:
            done = list(engine.map(_square, range(20)))
        assert [one.value for one in done] == [n * n for n in range(20)]
        assert all(one.seconds >= 0 and one.node and one.started > 1.6e9 for one in done)

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
            engine = Engine(threads, window=lambda: window, memory_bytes=1)
            assert [done.value for done in engine.map(work, numbers())] == list(range(tasks))  # type: ignore[arg-type]
        assert most <= window

    def test_a_slow_task_does_not_hold_up_those_behind_it(self) -> None:
        finished: list[int] = []

        def work(number: int) -> None:
            _slow_first(number)
            finished.append(number)

        with ThreadPoolExecutor(2) as threads:
            engine = Engine(threads, window=lambda: 3, memory_bytes=1)
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
            engine = Engine(threads, window=lambda: 8, memory_bytes=1)
            results = engine.map(work, range(1000))
            assert [next(results).value for _ in range(7)] == list(range(7))
            with pytest.raises(PingLlmError, match="task 7 failed"):
                next(results)
        assert max(begun) < 40

    def test_memory_is_shared_by_the_workers_of_a_machine(self) -> None:
        with EngineChoice(workers=4, memory_limit_bytes=1 << 30).open() as engine:
            assert engine.memory_bytes == 1 << 28


class TestChoice:
    def test_unknown_engines_and_addresses_without_ray_are_refused(self) -> None:
        with pytest.raises(PingLlmError, match="--engine spark: there is local and ray"):
            EngineChoice(name="spark")
        with pytest.raises(PingLlmError, match="add --engine ray"):
            EngineChoice(address="head:6379")
        with pytest.raises(PingLlmError, match="at least one worker"):
            EngineChoice(workers=0)

    def test_without_ray_one_line_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "ray", None)
        with (
            pytest.raises(PingLlmError, match=r'--engine ray needs the package ray: pip install "ping-llm\[ray\]"'),
            EngineChoice(name="ray").open(),
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
