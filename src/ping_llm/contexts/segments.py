"""The measurements of samples: drawn from their windows, cut to fit their sequences, and written as tokens.

Importing this loads (or compiles) the kernels.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.contexts.plan import (
    ABSOLUTE,
    DELTA1,
    DELTA4,
    FAILED_SAVES,
    SAMPLES,
    Mode,
    Samples,
    bare_tokens,
)
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.compiled import kernel, part_of_kernels, types
from ping_llm.core.draws import extend, permutation_width, permute_run, uniform
from ping_llm.core.randomness import Ints, Purpose
from ping_llm.core.rtt import TOO_LONG_US
from ping_llm.rows.reader import Picked, RowReader
from ping_llm.tokens import FIELD_ORDERS, LONGEST_DELTA1_S, RESULT_LAST, TimeKind
from ping_llm.tokens.encode import write_measurement

UNTIMED_SHARES: Final = (0.1, 0.9)
"""In partial mode each measurement loses its time with a probability that is uniform in this range."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """What was chosen, its tokens, and what `inspect batch` explains."""

    samples: Samples
    counts: Ints
    """Measurements of each sample that are used."""
    position: Ints
    """Of each measurement, in the order in which it is written: its position in the sample's row."""
    field_order: npt.NDArray[np.uint8]
    packed: PackedTokens

    @property
    def sample(self) -> Ints:
        """The sample of each measurement."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def write_segments(
    samples: Samples, sequence: npt.NDArray[np.int32], reader: RowReader, settings: ContextSettings, stages: Stages
) -> Segments:
    """Segments of at most `settings.length` tokens in each sequence. Rows that are damaged are an error."""
    rows, length = samples.row, settings.length
    with stages("read"):
        reader.check(rows)
    with stages("sample"):
        drawn = _draw_measurements(samples, length)
        first, position, *_ = drawn
    with stages("read"):
        read = reader.pick(rows, first, position, samples.mode != Mode.NONE)
    with stages("fill"):
        counts, sizes = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int32)
        fault = _fill(sequence, samples, drawn, read, length, counts, sizes)
        if fault != _SOUND:
            raise reader.rows.corrupt(int(rows[fault]), "its measurements are not as the index says")
    with stages("encode"):
        source = reader.rows.column("source")[rows]
        tokens, written, field_order = _write(samples, source, drawn, read, counts, sizes, settings.result_last)
    packed = PackedTokens(tokens=tokens, sizes=sizes, sequence=sequence)
    return Segments(samples=samples, counts=counts, position=written, field_order=field_order, packed=packed)


# Kernels: which measurements of their windows samples may use, and what is drawn for each of them.

_LEAST_UNTIMED: Final = UNTIMED_SHARES[0]
_UNTIMED_RANGE: Final = UNTIMED_SHARES[1] - UNTIMED_SHARES[0]

_U16: Final = np.uint64(16)
_U48: Final = np.uint64(48)
_LOW_16: Final = np.uint64(0xFFFF)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_INDEX: Final = (1 << 20) - 1
"""Keys that are sorted end in the index of the measurement among those of its sample."""

_FEW: Final = 12
"""So many keys are sorted faster without buckets."""

_I64, _I32, _U8 = types.int64[::1], types.int32[::1], types.uint8[::1]
_DRAWN: Final = types.Tuple((_I64, _I64, types.int32[::1], types.uint64[::1], types.bool_[::1]))
"""What `_draw_measurements` gives."""
_READ: Final = types.NamedTuple([_I64, types.float32[::1], types.uint8[:, ::1]], Picked)


@part_of_kernels
def sort_random(keys: Any, spare: Any, ends: Any, count: Any, bits: Any) -> None:
    """Sort `keys[:count]`, numbers that are about equally likely anywhere below 2^bits.

    By the first bits into buckets, which leaves little to do. `spare` has space for as many keys, and `ends` for
    twice as many buckets as there are keys.
    """
    if count > _FEW:
        width = 4
        while 1 << width < count:
            width += 1
        shift = max(bits - width, 0)
        ends[: (1 << width) + 1] = 0
        for i in range(count):
            spare[i] = keys[i]
            ends[(keys[i] >> shift) + 1] += 1
        for bucket in range(1 << width):
            ends[bucket + 1] += ends[bucket]
        for i in range(count):
            bucket = spare[i] >> shift
            keys[ends[bucket]] = spare[i]
            ends[bucket] += 1
    for i in range(1, count):
        key, at = keys[i], i
        while at > 0 and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            at -= 1
        keys[at] = key


@part_of_kernels
def _untimed_bound(key: Any, mode: Any) -> Any:
    """A measurement whose first 16 random bits are below this loses its time: 0 keeps all times, 2^16 keeps none."""
    if mode == Mode.FULL:
        return np.uint64(0)
    if mode == Mode.PARTIAL:
        share = _LEAST_UNTIMED + _UNTIMED_RANGE * uniform(extend(key, Purpose.UNTIMED_SHARE))
        return np.uint64(share * 2.0**16)
    return np.uint64(1 << 16)


@kernel(SAMPLES, types.int64, returns=_DRAWN)
def _draw_measurements(samples: Any, length: Any) -> Any:
    """Candidates of each sample: as many measurements of its window as fit a sequence if all failed.

    Gives where each sample's candidates begin and, by sample and in time order, their positions in the row, ranks,
    random words and whether they keep their time. The first k ranks are k measurements drawn without replacement. Of a
    sample that is not shrinkable all are used, and all have rank 0.
    """
    key, family, start, size, shrinkable = samples.key, samples.family, samples.start, samples.size, samples.shrinkable
    first = np.zeros(len(key) + 1, dtype=np.int64)
    largest = 0
    for s in range(len(key)):
        count = min(size[s], length // (bare_tokens(family[s]) - FAILED_SAVES))
        first[s + 1] = first[s] + count
        largest = max(largest, count)
    position = np.empty(first[-1], dtype=np.int64)
    rank = np.zeros(first[-1], dtype=np.int32)
    words = np.empty(first[-1], dtype=np.uint64)
    timed = np.empty(first[-1], dtype=np.bool_)
    keys, spare = np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int64)
    ends = np.empty(2 * largest + 17, dtype=np.int64)

    for s in range(len(key)):
        begin, count = first[s], first[s + 1] - first[s]
        if shrinkable[s] and count < size[s]:
            permute_run(extend(key[s], Purpose.SAMPLE), size[s], 0, keys[:count])
            for i in range(count):
                keys[i] = keys[i] << 20 | i
            sort_random(keys, spare, ends, count, 20 + np.int64(permutation_width(size[s])))
            for i in range(count):
                position[begin + i] = start[s] + (keys[i] >> 20)
                rank[begin + i] = keys[i] & _INDEX
        else:
            for i in range(count):
                position[begin + i] = start[s] + i
            if shrinkable[s]:  # here only the ranks are drawn: a plain shuffle
                word = extend(key[s], Purpose.SAMPLE)
                for i in range(count):
                    keys[i] = np.int64(extend(word, i) & _LOW_32) << 20 | i
                sort_random(keys, spare, ends, count, 52)
                for i in range(count):
                    rank[begin + (keys[i] & _INDEX)] = i
        word, bound = extend(key[s], Purpose.MEASUREMENT), _untimed_bound(key[s], samples.mode[s])
        for i in range(begin, begin + count):
            words[i] = extend(word, position[i])
            timed[i] = (words[i] & _LOW_16) >= bound
    return first, position, rank, words, timed


# Kernels: how many measurements each sample uses, so that sequences are as full as can be and never too full.

_GROWTH_ROUNDS: Final = 3
"""Each round fills all but a fifth of what is still free (a long delta is that much longer than a usual one)."""

_SOUND: Final = -1


@part_of_kernels
def _count_tokens(used: Any, s: Any, samples: Any, drawn: Any, read: Any) -> Any:
    """Tokens of sample `s` if it uses the candidates of rank below `used`."""
    first, _, all_ranks, _, all_timed = drawn
    a, b = first[s], first[s + 1]
    rank, timed, time_s, rtt_ms = all_ranks[a:b], all_timed[a:b], read.time_s[a:b], read.rtt_ms[a:b]
    tokens, bare = 0, bare_tokens(samples.family[s])
    if samples.mode[s] == Mode.NONE:
        for i in range(len(rank)):
            tokens += np.int64(rank[i] < used) * (bare - np.int64(np.isnan(rtt_ms[i])) * FAILED_SAVES)
        return tokens
    previous, with_time = np.int64(0), 0
    for i in range(len(rank)):  # without branches that depend on random numbers: they would cost more than all the rest
        is_used = rank[i] < used
        has_time = is_used & timed[i]
        delta = DELTA1 if time_s[i] - previous <= LONGEST_DELTA1_S else DELTA4
        tokens += np.int64(is_used) * (bare - np.int64(np.isnan(rtt_ms[i])) * FAILED_SAVES)
        tokens += np.int64(has_time) * (ABSOLUTE if with_time == 0 else delta)
        previous = time_s[i] if has_time else previous
        with_time += has_time
    return tokens


@part_of_kernels
def _largest_increase(family: Any, mode: Any) -> Any:
    """The most tokens that each measurement after the first adds to a sample.

    Its own, with a long delta. Its successor's delta only gets shorter. If it becomes the first one, it takes over the
    absolute time, and the one that had it gets a delta instead.
    """
    return bare_tokens(family) + (0 if mode == Mode.NONE else DELTA4)


@part_of_kernels
def _late_absolute_time(mode: Any) -> Any:
    """Tokens that the first timed measurement of a partial context can add on top of the largest increase."""
    return ABSOLUTE - DELTA4 if mode == Mode.PARTIAL else 0


@kernel(_I32, SAMPLES, _DRAWN, _READ, types.int64, _I64, _I32, returns=types.int64)
def _fill(sequence: Any, samples: Any, drawn: Any, read: Any, length: Any, counts: Any, tokens: Any) -> Any:
    """Measurements and tokens of each sample: all of its window, or for a shrinkable one as many as still fit.

    Shrinkable samples first share what the others leave free in proportion to what was planned for them. Then one in
    each sequence grows while another measurement of any length fits; at last one that may just fit is tried.

    Gives the number of a sample whose data cannot be what the index says, or `_SOUND`.
    """
    family, mode, target_tokens, shrinkable = samples.family, samples.mode, samples.target_tokens, samples.shrinkable
    first = drawn[0]
    for i in range(len(read.rtt_ms)):
        if np.float64(read.rtt_ms[i]) * 1000.0 >= TOO_LONG_US:
            return np.searchsorted(first, i, side="right") - 1
    begin = 0
    while begin < len(sequence):
        end = begin + 1
        while end < len(sequence) and sequence[end] == sequence[begin]:
            end += 1

        spare, free, all_targets = length, length, 0
        for s in range(begin, end):
            counts[s], tokens[s] = first[s + 1] - first[s], 0
            if shrinkable[s]:
                spare -= samples.min_tokens[s]
                all_targets += target_tokens[s]
            else:
                tokens[s] = _count_tokens(1, s, samples, drawn, read)
                if tokens[s] > samples.max_tokens[s]:
                    return s
                free -= tokens[s]
                spare -= tokens[s]
        for s in range(begin, end):
            if shrinkable[s]:
                share = np.int64(spare * (target_tokens[s] / all_targets)) // _largest_increase(family[s], mode[s])
                counts[s] = min(max(1 + share, 1), counts[s])
                tokens[s] = _count_tokens(counts[s], s, samples, drawn, read)
                free -= tokens[s]

        for turn in range(_GROWTH_ROUNDS + 1):
            growing, room = -1, 0
            for s in range(begin, end):
                left = first[s + 1] - first[s] - counts[s]
                if shrinkable[s] and left > room:
                    growing, room = s, left
            if growing < 0:
                break
            s = growing
            more = max(free - _late_absolute_time(mode[s]), 0) // _largest_increase(family[s], mode[s])
            more = min(max(more, 1) if turn == _GROWTH_ROUNDS else more, room)
            if more > 0:
                new = _count_tokens(counts[s] + more, s, samples, drawn, read)
                if new - tokens[s] <= free:
                    free -= new - tokens[s]
                    counts[s] += more
                    tokens[s] = new
        if free < 0:
            return begin
        begin = end
    return _SOUND


# Kernel: the chosen measurements in their order, as tokens.

_ORDERS: Final = len(FIELD_ORDERS)


@kernel(
    *(SAMPLES, types.uint8[:, ::1], _DRAWN, _READ, _I64, _I32, types.float64),
    returns=types.Tuple((types.uint16[::1], _I64, _U8)),
)
def _write(samples: Any, source: Any, drawn: Any, read: Any, counts: Any, sizes: Any, result_last: Any) -> Any:
    """Tokens of the candidates of rank below `counts[s]` of each sample s; the position and field order of each.

    A random position is drawn for each measurement. The positions that fall to timed ones are then given to the timed
    ones in time order. With all timed that is time order, with none timed a plain shuffle: one rule for all modes.
    """
    mode = samples.mode
    first, position, rank, words, timed = drawn
    time_s, rtt_ms, destination = read
    largest = counts.max() + 1 if len(counts) else 0
    used, in_time = np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int64)
    keys, spare = np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int64)
    ends = np.empty(2 * largest + 17, dtype=np.int64)
    tokens = np.empty(sizes.sum(), dtype=np.uint16)
    written, field_orders = np.empty(counts.sum(), dtype=np.int64), np.empty(counts.sum(), dtype=np.uint8)
    at = number = 0
    for s in range(len(counts)):
        is_v6 = samples.family[s] == 6
        is_result_last = uniform(extend(samples.key[s], Purpose.FIELD_ORDER)) < result_last
        count = with_time = 0
        for i in range(first[s], first[s + 1]):
            used[count] = in_time[with_time] = i  # overwritten if it is not used: cheaper than a branch
            keys[count] = np.int64(words[i] >> _U16 & _LOW_32) << 20 | count
            is_used = rank[i] < counts[s]
            count += is_used
            with_time += is_used & timed[i]
        if mode[s] != Mode.FULL:
            sort_random(keys, spare, ends, count, 52)
        next_timed, previous = 0, np.int64(0)
        for k in range(count):
            i = used[k] if mode[s] == Mode.FULL else used[keys[k] & _INDEX]
            kind, value = TimeKind.NONE, np.int64(0)
            if timed[i]:
                i = in_time[next_timed]
                value = time_s[i] - previous
                kind = TimeKind.DELTA1 if value <= LONGEST_DELTA1_S else TimeKind.DELTA4
                kind = TimeKind.ABSOLUTE if next_timed == 0 else kind
                previous = time_s[i]
                next_timed += 1
            i &= _INDEX
            order = RESULT_LAST if is_result_last else np.int64((words[i] >> _U48) * np.uint64(_ORDERS) >> _U16)
            at = write_measurement(tokens, at, is_v6, source, s, destination, i, rtt_ms[i], kind, value, order)
            written[number], field_orders[number] = position[i], order
            number += 1
    return tokens, written, field_orders
