"""The model's thread: jobs in turn, forecasts together, and nothing that hangs."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ping_llm.models.completer.inference import BinDistribution
from ping_llm.predict.prompts import Prompt
from ping_llm.serve.jobs import BusyError, Job, ModelThread


def prompt(number: int) -> Prompt:
    tokens = np.array([number], np.uint16)
    return Prompt(history=tokens, question=tokens, measurements=0)


class Forecasts:
    """ModelAnswers with the number of each prompt as its chance to fail, and remembers how many came at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, prompts: Sequence[Prompt]) -> Any:
        self.sizes.append(len(prompts))
        numbers = np.array([float(one.history[0]) for one in prompts])
        return BinDistribution(p_failed=numbers, probability=np.full((len(numbers), 4), 0.25))


def asking(numbers: Sequence[int]) -> Job:
    answers = yield [prompt(number) for number in numbers]
    assert answers is not None
    return answers.p_failed.tolist()


def holding(until: threading.Event) -> Job:
    yield None
    until.wait(10)
    yield None


def test_jobs_that_wait_for_forecasts_are_answered_together_and_each_with_its_own() -> None:
    forecasts, begin = Forecasts(), threading.Event()
    with ModelThread(forecasts, 64) as thread:
        held = thread.submit(holding(begin))
        futures = [thread.submit(asking(range(n, n + n % 3 + 1))) for n in range(20)]
        begin.set()
        assert [future.result(10) for future in futures] == [
            [float(k) for k in range(n, n + n % 3 + 1)] for n in range(20)
        ]
        held.result(10)
    assert len(forecasts.sizes) <= 3  # those that were there before the others, and the rest


def test_a_long_job_does_not_keep_a_short_one_waiting() -> None:
    steps = 0

    def long() -> Job:
        nonlocal steps
        for _ in range(1000):
            time.sleep(0.005)
            steps += 1
            yield None

    def short() -> Job:
        yield None
        return steps

    with ModelThread(Forecasts(), 64) as thread:
        slow = thread.submit(long())
        assert thread.submit(short()).result(10) < 50
        slow.cancel()


def test_a_cancelled_job_ends_at_its_next_turn() -> None:
    ended = threading.Event()

    def endless() -> Job:
        try:
            while True:
                time.sleep(0.002)
                yield None
        finally:
            ended.set()

    with ModelThread(Forecasts(), 64) as thread:
        future = thread.submit(endless())
        time.sleep(0.02)
        assert future.cancel()
        assert ended.wait(5)


def test_a_mistake_in_one_job_is_its_own() -> None:
    def broken() -> Job:
        yield None
        raise ValueError("oh")

    with ModelThread(Forecasts(), 64) as thread:
        bad, good = thread.submit(broken()), thread.submit(asking([3]))
        with pytest.raises(ValueError, match="oh"):
            bad.result(10)
        assert good.result(10) == [3.0]


def test_when_it_is_full_it_says_so_and_recovers() -> None:
    begin = threading.Event()
    with ModelThread(Forecasts(), 1) as thread:
        held = thread.submit(holding(begin))
        with pytest.raises(BusyError):
            thread.submit(asking([1]))
        begin.set()
        held.result(10)
        time.sleep(0.05)
        assert thread.submit(asking([4])).result(10) == [4.0]


def test_the_background_has_its_turn_when_nobody_waits() -> None:
    begin = threading.Event()
    done: list[str] = []

    def noting(what: str, pieces: int) -> Job:
        for _ in range(pieces):
            done.append(what)
            yield None

    with ModelThread(Forecasts(), 64) as thread:
        held = thread.submit(holding(begin))
        behind = thread.submit(noting("background", 2), background=True)
        before = thread.submit(noting("request", 3))
        begin.set()
        for future in (held, before, behind):
            future.result(10)
    assert done == ["request"] * 3 + ["background"] * 2


def test_what_still_waits_at_the_end_is_cancelled() -> None:
    with ModelThread(Forecasts(), 64) as thread:

        def endless() -> Job:
            while True:
                time.sleep(0.002)
                yield None

        future = thread.submit(endless())
    assert future.cancelled()
