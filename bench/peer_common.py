"""What all peers share: rows, contexts and the layout of a batch, written as one would for one row at a time.

The product draws and encodes the contexts of a whole batch in compiled loops that read mapped shards, which is not
something that can be called for a row. `draw_context` below follows the same rules (window, mode, sample, order) in a
form made for one row, with the NumPy encoder that the product has for this.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from array_record.python.array_record_module import ArrayRecordReader

from ping_llm.contexts.plan import MODE_SHARES
from ping_llm.contexts.segments import UNTIMED_SHARES
from ping_llm.contexts.spec import ContextSettings
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import LONG_GAP_S, ProbeRow, decode_row
from ping_llm.tokens import FIELD_ORDERS, TimeKind, token_counts
from ping_llm.tokens.encode import encode

Tokens = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int64]
Batch = dict[str, Any]
"""Six int32 arrays (or tensors) of shape (sequences, length), as the product's loader gives them."""

PREFETCH: Final = 4
"""Batches that each worker makes ahead, for every loader."""
BINS: Final = 256
"""Sequences that are packed together: first-fit over four batches leaves half the padding that it leaves over one."""
FILL: Final = 0.96
"""Where a batch is packed from a fixed number of contexts: the share of its tokens that these have on average."""

_BARE: Final = {family: int(token_counts(family, False, TimeKind.NONE)) for family in (4, 6)}
_TIME_TOKENS: Final = np.array([int(token_counts(4, False, kind)) - _BARE[4] for kind in TimeKind])
_DELTA1, _DELTA4 = np.uint8(TimeKind.DELTA1), np.uint8(TimeKind.DELTA4)
_FAILED_SAVES: Final = _BARE[4] - int(token_counts(4, True, TimeKind.NONE))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every loader is asked for."""

    rows: str
    scratch: str
    """Folder that is removed in the end, for what a loader needs beside the rows."""
    sequences: int = 64
    length: int = 1024
    seed: int = 0


class Loader(Protocol):
    """Endless batches. `state` is what the library offers to go on from after the last batch given."""

    def __next__(self) -> Batch: ...
    def state(self) -> Any: ...
    def close(self) -> None: ...


class SampleRecords:
    """The record of the row of each sample, by number. Readers are opened in the process that uses them."""

    def __init__(self, task: Task) -> None:
        with RowSet(Path(task.rows), "train") as rows:
            self._paths = [str(rows.folder / shard.file) for shard in rows.info.shards]
            samples = ContextSettings(length=task.length).per_row(rows.column("count"))
            self._shard = np.repeat(rows.column("shard"), samples)
            self._position = np.repeat(rows.column("position"), samples)
        self._readers: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._position)

    def __getitem__(self, sample: int) -> bytes:
        shard = int(self._shard[sample])
        if shard not in self._readers:
            # Without read-ahead, as the product reads single rows: the default reads far more than is wanted.
            self._readers[shard] = ArrayRecordReader(self._paths[shard], "readahead_buffer_size:0,max_parallelism:0")
        return self._readers[shard].read([int(self._position[sample])])[0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": {}}


def draw_context(record: bytes, rng: np.random.Generator, length: int) -> Tokens:
    """A context of a row, as tokens."""
    row = decode_row(record)
    lost = _share_without_time(rng)
    most = length // (_BARE[row.family] - _FAILED_SAVES)
    tokens = length + 1
    if len(row) <= most:
        position = np.arange(len(row))
        kind, value, tokens = _times(row, position, lost, rng)
    if tokens > length:  # the row does not fit whole: a window, and what fits of it
        size = min(len(row), int(math.exp(rng.random() * math.log(len(row) + 1))))
        position = int(rng.integers(len(row) - size + 1)) + _sample(size, min(size, most), rng)
        kind, value, tokens = _times(row, position, lost, rng)
        while tokens > length:
            fitting = min(len(position) - 1, len(position) * length // tokens)
            position = position[_sample(len(position), fitting, rng)]
            kind, value, tokens = _times(row, position, lost, rng)

    # Random places; those that fall to timed measurements are given to them in time order.
    timed = kind != TimeKind.NONE
    order = rng.permutation(len(position))
    order[timed[order]] = np.flatnonzero(timed)
    position = position[order]
    destination = np.zeros((len(position), 16), dtype=np.uint8)
    destination[:, : row.destinations.shape[1]] = row.destinations[position]
    return encode(
        family=np.full(len(position), row.family, dtype=np.uint8),
        source=np.tile(np.frombuffer(row.source.ljust(16, b"\0"), dtype=np.uint8), (len(position), 1)),
        destination=destination,
        rtt_ms=row.rtt_ms[position],
        time_kind=kind[order],
        time_value=value[order],
        order=rng.integers(len(FIELD_ORDERS), size=len(position), dtype=np.uint8),
    )[0]


def _share_without_time(rng: np.random.Generator) -> float:
    draw = rng.random()
    if draw < MODE_SHARES[0]:
        return 0.0
    return rng.uniform(*UNTIMED_SHARES) if draw < MODE_SHARES[0] + MODE_SHARES[1] else 1.0


def _sample(size: int, count: int, rng: np.random.Generator) -> Ints:
    if count == size:
        return np.arange(size)
    chosen = rng.choice(size, count, replace=False, shuffle=False)
    chosen.sort()
    return chosen


def _times(
    row: ProbeRow, position: Ints, lost: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], Ints, int]:
    """Kind and value of the time of each measurement, and the tokens of all."""
    kind = np.zeros(len(position), dtype=np.uint8)
    value = np.zeros(len(position), dtype=np.int64)
    which = (rng.random(len(position)) >= lost).nonzero()[0]
    if len(which):
        time_s = row.time_us[position[which]] // 1_000_000
        since = time_s.copy()
        since[1:] -= time_s[:-1]
        value[which] = since
        kind[which] = np.where(since <= LONG_GAP_S, _DELTA1, _DELTA4)
        kind[which[0]] = TimeKind.ABSOLUTE
    failed = int(np.count_nonzero(np.isnan(row.rtt_ms[position])))
    return kind, value, _BARE[row.family] * len(position) + int(_TIME_TOKENS[kind].sum()) - _FAILED_SAVES * failed


def generator(*key: int) -> np.random.Generator:
    """Random numbers for one context: by its key alone, so that a peer's data does not depend on who makes it."""
    return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))


class FirstFit:
    """Sequences being packed: each context goes to the first that has room."""

    def __init__(self, sequences: int, length: int) -> None:
        self._room = [length] * sequences
        self._packed: list[list[Tokens]] = [[] for _ in range(sequences)]
        self._length = length

    def add(self, tokens: Tokens) -> bool:
        """Whether there was room."""
        size = len(tokens)
        for sequence, room in enumerate(self._room):
            if size <= room:
                self._room[sequence] -= size
                self._packed[sequence].append(tokens)
                return True
        return False

    def batches(self, sequences: int) -> Iterable[Batch]:
        for begin in range(0, len(self._packed), sequences):
            yield lay_out(self._packed[begin : begin + sequences], self._length)


def contexts_per_batch(task: Task) -> int:
    """How many contexts to pack into a batch when the number is fixed."""
    records = SampleRecords(task)
    sampled = np.random.default_rng(task.seed).integers(len(records), size=2000).tolist()
    sizes = [len(draw_context(records[sample], generator(task.seed, sample), task.length)) for sample in sampled]
    return max(1, int(FILL * task.sequences * task.length / np.mean(sizes)))


def pack_fixed(contexts: Sequence[Tokens], sequences: int, length: int) -> Batch:
    """A batch from these contexts alone, the largest first; one that finds no room is left out."""
    packing = FirstFit(sequences, length)
    for tokens in sorted(contexts, key=len, reverse=True):
        packing.add(tokens)
    return next(iter(packing.batches(sequences)))


def lay_out(packed: Sequence[Sequence[Tokens]], length: int) -> Batch:
    """The arrays of sequences that are given as lists of contexts."""
    inputs = np.zeros((len(packed), length), dtype=np.int32)
    segment = np.zeros_like(inputs)
    position = np.zeros_like(inputs)
    counting = np.arange(length, dtype=np.int32)
    for sequence, contexts in enumerate(packed):
        begin = 0
        for number, tokens in enumerate(contexts, start=1):
            end = begin + len(tokens)
            inputs[sequence, begin:end] = tokens
            segment[sequence, begin:end] = number
            position[sequence, begin:end] = counting[: end - begin]
            begin = end
    return complete(inputs, segment, position)


def complete(inputs: npt.NDArray[np.int32], segment: npt.NDArray[np.int32], position: npt.NDArray[np.int32]) -> Batch:
    """Add the targets: inputs shifted by one inside each segment, whose last token has nothing to predict."""
    predicts = np.zeros_like(inputs)
    predicts[:, :-1] = (segment[:, 1:] == segment[:, :-1]) & (segment[:, :-1] > 0)
    targets = np.zeros_like(inputs)
    np.multiply(inputs[:, 1:], predicts[:, :-1], out=targets[:, :-1])
    return {
        "inputs": inputs,
        "inputs_position": position,
        "inputs_segmentation": segment,
        "targets": targets,
        "targets_position": position * predicts,
        "targets_segmentation": segment * predicts,
    }


def real_tokens(batch: Batch) -> int:
    return int(np.count_nonzero(np.asarray(batch["inputs_segmentation"])))


def digest(batch: Batch) -> str:
    """Equal for equal batches."""
    content = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(array.tobytes())
    return content.hexdigest()
