"""Batches on the accelerator (here: JAX's CPU devices) are the loader's, ahead of time, and end as they should."""

import os
import threading
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from ping_llm.batches.spec import Batch
from ping_llm.core.errors import PingLlmError
from ping_llm.runs.device import on_device


def sharding() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices("cpu")[0])


def batches(count: int, made: list[int] | None = None) -> Iterator[Batch]:
    for i in range(count):
        if made is not None:
            made.append(i)
        yield {"inputs": np.full((2, 8), i, dtype=np.int32)}


def test_batches_arrive_whole_in_order_and_end() -> None:
    with on_device(batches(5), sharding()) as arrays:
        taken = [batch["inputs"] for batch in arrays]
    assert [int(a[1, 7]) for a in taken] == [0, 1, 2, 3, 4]
    assert all(isinstance(a, jax.Array) and a.dtype == np.int32 for a in taken)


def test_a_few_are_made_ahead_but_not_more() -> None:
    made: list[int] = []
    with on_device(batches(100, made), sharding(), ahead=3) as arrays:
        next(arrays)
        deadline = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(made) == 5, "one taken, three ready, one in hand"


def test_an_error_of_the_loader_comes_out_where_its_batch_would_have() -> None:
    def failing() -> Iterator[Batch]:
        yield from batches(2)
        raise PingLlmError("row 7 is damaged")

    with on_device(failing(), sharding()) as arrays:
        assert [int(next(arrays)["inputs"][0, 0]) for _ in range(2)] == [0, 1]
        with pytest.raises(PingLlmError, match="row 7"):
            next(arrays)


def test_leaving_early_stops_the_thread() -> None:
    before = threading.active_count()
    with on_device(batches(10**9), sharding()) as arrays:
        next(arrays)
    assert threading.active_count() == before
