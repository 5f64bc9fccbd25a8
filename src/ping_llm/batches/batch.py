"""A batch: segments of tokens laid out as the six int32 arrays [sequences, length] that a model trains on."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.spec import Batch
from ping_llm.core.compiled import kernel, part_of_kernels, types

ARRAYS: Final = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)
_INPUTS, _INPUTS_POSITION, _INPUTS_SEGMENTATION, _TARGETS, _TARGETS_POSITION, _TARGETS_SEGMENTATION = range(6)


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """The content of a batch, at a twelfth of its size: what worker processes send. `expand` lays it out."""

    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # 16 bits for measurements, 32 for text
    sizes: npt.NDArray[np.int32]  # tokens of each segment
    sequence: npt.NDArray[np.int32]  # the sequence that each segment is in


class Stages:
    """A stopwatch: adds up the seconds of named stages, one of which runs at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def expand(packed: PackedTokens, sequences: int, length: int) -> Batch:
    """Lay segments side by side in the arrays of the batch contract."""
    arrays = np.empty((len(ARRAYS), sequences, length), dtype=np.int32)
    _LAY_OUT[packed.tokens.dtype](packed.tokens, packed.sizes, packed.sequence, arrays)
    return dict(zip(ARRAYS, arrays, strict=True))


def digest(batch: Batch) -> str:
    """A digest of all arrays of a batch: equal exactly when every number in them is equal."""
    result = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        result.update(f"{name} {array.dtype} {array.shape} ".encode())
        result.update(array.tobytes())
    return result.hexdigest()


@part_of_kernels
def _write(target: Any, tokens: Any) -> None:
    for i in range(len(target)):
        target[i] = tokens[i]


@part_of_kernels
def _count_up(target: Any) -> None:
    for i in range(len(target)):
        target[i] = i


def _lay_out(tokens: Any, sizes: Any, sequence: Any, arrays: Any) -> None:
    """One loop per array, so that each is compiled to wide stores and runs at the speed of memory."""
    segments, length = len(sizes), arrays.shape[2]
    read = segment = 0
    for s in range(arrays.shape[1]):
        at = number = 0
        while segment < segments and sequence[segment] == s:
            size = min(np.int64(sizes[segment]), length - at)
            number += 1
            _write(arrays[_INPUTS, s, at : at + size], tokens[read : read + size])
            _count_up(arrays[_INPUTS_POSITION, s, at : at + size])
            arrays[_INPUTS_SEGMENTATION, s, at : at + size] = number
            # A segment's last token has nothing to predict within it: that position carries no loss.
            last = at + max(size - 1, 0)
            _write(arrays[_TARGETS, s, at:last], tokens[read + 1 : read + size])
            _count_up(arrays[_TARGETS_POSITION, s, at:last])
            arrays[_TARGETS_SEGMENTATION, s, at:last] = number
            at += size
            for name in range(_TARGETS, _TARGETS_SEGMENTATION + 1):
                arrays[name, s, last:at] = 0
            read += size
            segment += 1
        for name in range(6):
            arrays[name, s, at:] = 0


_I32, _BATCH = types.int32[::1], types.Array(types.int32, 3, "C")
_LAY_OUT: Final = {
    np.dtype(kind.name): kernel(kind[::1], _I32, _I32, _BATCH)(_lay_out) for kind in (types.uint16, types.uint32)
}
