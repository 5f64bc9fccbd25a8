"""Single measurements out of mapped shards, compiled: the loop in which the pipeline touches its data.

Nothing is checked here. What is asked for must lie within rows that `checks.py` has found sound.
"""

from typing import Any, Final

import numpy as np

from ping_llm.compiled import Array, carray, column, kernel, mapped, part_of_kernels, pointer, prefetch, table, types
from ping_llm.rows.arrayrecord_layout import BLOCK_HEADER, BLOCK_PAYLOAD
from ping_llm.rows.format import HEADER

_SECOND_US: Final = 1_000_000
_AHEAD: Final = 3
"""Rows whose measurements are asked for before they are picked."""
_OF_A_RUN: Final = 4
"""Of measurements that lie side by side so many come with one load, at least."""
_HEADER_BYTES: Final = HEADER.itemsize


@part_of_kernels
def physical(logical: Any) -> Any:
    """The position in the file of a logical position, as `arrayrecord_layout.physical`."""
    return logical + BLOCK_HEADER * (logical // BLOCK_PAYLOAD + 1)


@part_of_kernels
def first_column(offset: Any) -> Any:
    """Logical place of a row's columns: the first multiple of 8 after its header."""
    return (offset + (_HEADER_BYTES + 7)) & ~7


@part_of_kernels
def time_width(first_us: Any, last_us: Any, unit_us: Any) -> Any:
    """Bytes of each time of a row, whose ticks take 32 bits if they can."""
    return 8 if last_us - first_us >= unit_us << 32 else 4


@part_of_kernels
def _ask_for(address: Any, positions: Any, times: Any, width: Any, destinations: Any, step: Any, rtts: Any) -> None:
    """Begin to load the numbers of a row's measurements: a hundred loads at once take little longer than one."""
    last = len(positions) - 1
    is_run = last >= 0 and positions[last] - positions[0] == last
    for i in range(0, len(positions), _OF_A_RUN if is_run else 1):
        prefetch(address + physical(rtts + positions[i] * 4))
        prefetch(address + physical(destinations + positions[i] * step))
        if width > 0:
            prefetch(address + physical(times + positions[i] * width))


@kernel(
    column(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.bool_),
    mapped(types.uint32),
    mapped(types.uint64),
    mapped(types.uint32),
    mapped(types.uint8),
    mapped(types.uint32),
    mapped(types.int64),
    mapped(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.int64),
    column(types.float32),
    table(types.uint32),
)
def pick_runs(
    rows: Array,
    first: Array,
    positions: Array,
    wants_times: Array,
    shard: Array,
    offset: Array,
    row_count: Array,
    family: Array,
    unit_us: Array,
    first_us: Array,
    last_us: Array,
    shard_at: Array,
    shard_bytes: Array,
    time_s: Array,
    rtt_ms: Array,
    destination: Array,
) -> None:
    """Measurements `positions[first[i]:first[i + 1]]` of row `rows[i]`, for all i: fills the columns from `time_s` on.

    `shard_at` and `shard_bytes` say where each shard is mapped. Times are whole Unix seconds, and picked where they are
    wanted. An IPv4 destination fills the first of its four words.
    """
    count = len(rows)
    addresses, widths, steps = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    times, destinations, rtts = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        row = rows[i]
        addresses[i] = shard_at[shard[row]]
        widths[i] = time_width(first_us[row], last_us[row], np.int64(unit_us[row]))
        steps[i] = 16 if family[row] == 6 else 4
        times[i] = first_column(np.int64(offset[row]))
        destinations[i] = times[i] + row_count[row] * widths[i]
        rtts[i] = destinations[i] + row_count[row] * steps[i]

    for ahead in range(count + _AHEAD):
        if ahead < count:
            i = ahead
            width = widths[i] if wants_times[i] else 0
            wanted = positions[first[i] : first[i + 1]]
            _ask_for(addresses[i], wanted, times[i], width, destinations[i], steps[i], rtts[i])
        if ahead < _AHEAD:
            continue
        i = ahead - _AHEAD
        row, begin, end = rows[i], first[i], first[i + 1]
        words = carray(pointer(addresses[i]), (shard_bytes[shard[row]] // 4,), np.uint32)
        for j in range(begin, end):
            rtt_ms[j] = np.uint32(words[physical(rtts[i] + positions[j] * 4) >> 2]).view(np.float32)
        if wants_times[i]:
            unit, since, width = np.int64(unit_us[row]), first_us[row], widths[i]
            for j in range(begin, end):
                at = times[i] + positions[j] * width
                ticks = np.int64(words[physical(at) >> 2])
                if width == 8:
                    ticks += np.int64(words[physical(at + 4) >> 2]) << 32
                time_s[j] = (since + ticks * unit) // _SECOND_US
        if steps[i] == 4:
            for j in range(begin, end):
                destination[j, 0] = words[physical(destinations[i] + positions[j] * 4) >> 2]
        else:
            for j in range(begin, end):
                at = destinations[i] + positions[j] * 16
                for k in range(4):
                    destination[j, k] = words[physical(at + 4 * k) >> 2]
