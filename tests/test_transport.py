"""From worker processes to the training process: what arrives is what was sent, in order, through one memory."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ping_llm.batches.batch import PackedTokens
from ping_llm.batches.transport import Made, Ring, join, split


@pytest.fixture
def ring() -> Iterator[Ring]:
    created = Ring.create(3, 1000)
    if created is None:
        pytest.skip("no shared memory here")
    yield created
    created.close()


def element(number: int, size: int = 40) -> list[Any]:
    return [np.full(size, number, dtype=np.uint8), np.arange(8, dtype=np.uint8)]


def made(tokens: list[int], sizes: list[int], dtype: Any, corrupt_rows: int) -> Made:
    packed = PackedTokens(
        tokens=np.array(tokens, dtype=dtype),
        sizes=np.array(sizes, dtype=np.int32),
        sequence=np.arange(len(sizes), dtype=np.int32),
    )
    return Made(packed=packed, stage_s=np.array([0.25, 1.5]), corrupt_rows=corrupt_rows)


class TestElements:
    @given(
        st.lists(
            st.builds(
                made,
                st.lists(st.integers(0, 2**16 - 1), max_size=30),
                st.lists(st.integers(1, 1000), max_size=9),
                st.sampled_from([np.uint16, np.uint32]),
                st.integers(0, 2**40),
            ),
            max_size=6,
        )
    )
    def test_give_back_the_batches_that_were_put_in(self, batches: list[Made]) -> None:
        found = list(split(np.concatenate(join(batches))))
        assert len(found) == len(batches)
        for one, other in zip(found, batches, strict=True):
            for name in ("tokens", "sizes", "sequence"):
                column, expected = getattr(one.packed, name), getattr(other.packed, name)
                assert column.dtype == expected.dtype
                assert np.array_equal(column, expected)
            assert one.stage_s.tolist() == other.stage_s.tolist()
            assert one.corrupt_rows == other.corrupt_rows


class TestRing:
    def test_another_process_sees_what_was_put(self, ring: Ring) -> None:
        assert ring.put(0, element(7))
        other = pickle.loads(pickle.dumps(ring))
        assert other.get(0)[:48].tolist() == [7] * 40 + list(range(8))

    def test_an_element_that_is_too_large_is_refused(self, ring: Ring) -> None:
        assert ring.put(0, element(1, 992))
        assert not ring.put(1, element(1, 993))

    def test_nothing_is_overwritten_before_it_was_taken(self, ring: Ring) -> None:
        for number in range(3):
            ring.put(number, element(number))
        waiting = threading.Thread(target=ring.put, args=(3, element(3)))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert ring.get(0)[0] == 0
        ring.take(0)
        waiting.join(5)
        assert not waiting.is_alive()
        assert [int(ring.get(number)[0]) for number in (1, 2, 3)] == [1, 2, 3]

    def test_no_one_waits_when_it_is_closed_and_nothing_is_left(self) -> None:
        ring = Ring.create(1, 1000)
        if ring is None:
            pytest.skip("no shared memory here")
        ring.put(0, element(0))
        waiting = threading.Thread(target=ring.put, args=(1, element(1)))
        waiting.start()
        ring.close()
        waiting.join(5)
        assert not waiting.is_alive()
        inode = ring._inode
        del ring, waiting
        opened = [file.stat().st_ino for file in Path("/proc/self/fd").iterdir() if file.exists()]
        assert inode not in opened

    def test_one_who_comes_too_late_does_not_write_to_the_file_that_took_its_place(self, tmp_path: Path) -> None:
        ring = Ring.create(1, 1000)
        if ring is None:
            pytest.skip("no shared memory here")
        sent, number = pickle.dumps(ring), ring._descriptor
        ring.get(0)  # a mapping has a number of its own
        ring.close()
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(bytes(10_000))
        taken = [path.open("r+b") for _ in range(20)]  # one of them has the number of the ring
        assert sum(file.fileno() == number for file in taken) == 1
        with pytest.raises(FileNotFoundError):
            pickle.loads(sent).put(0, element(1))
        for file in taken:
            file.close()
        assert path.read_bytes() == bytes(10_000)

    def test_there_is_none_where_memory_is_short(self) -> None:
        assert Ring.create(1, 1 << 60) is None
