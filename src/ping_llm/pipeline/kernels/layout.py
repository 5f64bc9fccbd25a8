"""Segments side by side in the arrays of the batch contract."""

from typing import Any, Final

import numpy as np

from ping_llm.compiled import Array, column, kernel, part_of_kernels, types

NAMES: Final = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)
INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_POSITION, TARGETS_SEGMENTATION = range(len(NAMES))
_ARRAYS: Final = len(NAMES)


@part_of_kernels
def _write(place: Any, tokens: Any) -> None:
    for i in range(len(place)):
        place[i] = tokens[i]


@part_of_kernels
def _count_up(place: Any) -> None:
    for i in range(len(place)):
        place[i] = i


@part_of_kernels
def _lay_out(tokens: Any, sizes: Any, sequence: Any, arrays: Any) -> None:
    """One loop for each array: this is how they become wide stores, at the speed of memory."""
    segments, length = len(sizes), arrays.shape[2]
    read = segment = 0
    for s in range(arrays.shape[1]):
        at = number = 0
        while segment < segments and sequence[segment] == s:
            size = min(np.int64(sizes[segment]), length - at)
            number += 1
            _write(arrays[INPUTS, s, at : at + size], tokens[read : read + size])
            _count_up(arrays[INPUTS_POSITION, s, at : at + size])
            arrays[INPUTS_SEGMENTATION, s, at : at + size] = number
            # A segment's last token has nothing to predict within it: that place carries no loss.
            last = at + max(size - 1, 0)
            _write(arrays[TARGETS, s, at:last], tokens[read + 1 : read + size])
            _count_up(arrays[TARGETS_POSITION, s, at:last])
            arrays[TARGETS_SEGMENTATION, s, at:last] = number
            at += size
            for name in range(TARGETS, TARGETS_SEGMENTATION + 1):
                arrays[name, s, last:at] = 0
            read += size
            segment += 1
        for name in range(_ARRAYS):
            arrays[name, s, at:] = 0


@kernel(column(types.uint16), column(types.int32), column(types.int32), types.Array(types.int32, 3, "C"))
def lay_out_16(tokens: Array, sizes: Array, sequence: Array, arrays: Array) -> None:
    _lay_out(tokens, sizes, sequence, arrays)


@kernel(column(types.uint32), column(types.int32), column(types.int32), types.Array(types.int32, 3, "C"))
def lay_out_32(tokens: Array, sizes: Array, sequence: Array, arrays: Array) -> None:
    _lay_out(tokens, sizes, sequence, arrays)
