"""The measurements of samples: drawn from their windows, cut to fit their sequences, and written as tokens.

Importing this module loads (or compiles) the kernels.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.contexts.plan import ABSOLUTE, DELTA1, DELTA4, FAILED_SAVES, SAMPLES, Mode, Samples, bare_tokens
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.compiled import kernel, part_of_kernels, types
from ping_llm.core.draws import extend, permutation_width, permute_run, uniform
from ping_llm.core.randomness import Ints, Purpose
from ping_llm.core.rtt import TOO_LONG_US
from ping_llm.rows.reader import Picked, RowReader
from ping_llm.tokens import FIELD_ORDERS, LONGEST_DELTA1_S, RESULT_LAST, TimeKind
from ping_llm.tokens.encode import write_measurement

UNTIMED_SHARES: Final = (0.1, 0.9)  # in partial mode a time is lost with a probability that is uniform in this range


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The tokens of some samples, and which measurements they stand for (what `inspect batch` explains)."""

    samples: Samples
    counts: Ints  # measurements of each sample that are used
    position: Ints  # of each measurement, in the order in which they are written: its position in the sample's row
    field_order: npt.NDArray[np.uint8]
    packed: PackedTokens

    @property
    def sample(self) -> Ints:
        """The sample of each measurement."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def write_segments(
    samples: Samples, sequence: npt.NDArray[np.int32], reader: RowReader, settings: ContextSettings, stages: Stages
) -> Segments:
    """Write segments of at most `settings.length` tokens per sequence. A damaged row is an error."""
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

_U16, _U48 = np.uint64(16), np.uint64(48)
_LOW_16, _LOW_32 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
_INDEX: Final = (1 << 20) - 1  # the low bits of a sort key: the index of the measurement among those of its sample
_FEW: Final = 12  # up to so many keys, insertion sort alone is faster than buckets

_I64, _I32, _U8 = types.int64[::1], types.int32[::1], types.uint8[::1]
# What `_draw_measurements` returns: first, position, rank, words, timed.
_DRAWN: Final = types.Tuple((_I64, _I64, types.int32[::1], types.uint64[::1], types.bool_[::1]))
_READ: Final = types.NamedTuple([_I64, types.float32[::1], types.uint8[:, ::1]], Picked)


@part_of_kernels
def sort_random(keys: Any, spare: Any, ends: Any, count: Any, bits: Any) -> None:
    """Sort `keys[:count]`, numbers that are uniformly distributed below 2^bits.

    A bucket sort by the high bits, then an insertion sort of what is nearly in order. `spare` has space for as many
    keys, and `ends` for twice as many buckets as there are keys.
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
    """Draw each sample's candidates: as many measurements of its window as fit a sequence if none was answered.

    Returns where each sample's candidates begin and, by sample and in time order, their positions in the row, ranks,
    random words, and whether they keep their time. The first k ranks are k measurements drawn without replacement. A
    sample that is not shrinkable uses all of its candidates; they all have rank 0.
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

_GROWTH_ROUNDS: Final = 3  # each fills four fifths of what is still free: it counts on long time deltas
_SOUND: Final = -1


@part_of_kernels
def _count_tokens(used: Any, s: Any, samples: Any, drawn: Any, read: Any) -> Any:
    """The tokens of sample `s` if it uses its candidates of rank below `used`."""
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
    """Extra tokens, on top of the largest increase, if a partial context gets its first timed measurement."""
    return ABSOLUTE - DELTA4 if mode == Mode.PARTIAL else 0


@kernel(_I32, SAMPLES, _DRAWN, _READ, types.int64, _I64, _I32, returns=types.int64)
def _fill(sequence: Any, samples: Any, drawn: Any, read: Any, length: Any, counts: Any, tokens: Any) -> Any:
    """Fill in the measurements and tokens of each sample: its whole window or, if it is shrinkable, what still fits.

    Shrinkable samples first share what the others leave free, in proportion to what was planned for them. Then one in
    each sequence grows while another measurement of any length fits; finally one more is added if it happens to fit.

    Returns a sample whose data contradicts the row index, or `_SOUND`.
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
    """Write the used candidates (rank below `counts[s]`) of each sample s as tokens; also returns their positions in
    the row and their field orders.

    Measurements are shuffled; the slots that fall to timed ones are then given to the timed ones in time order. One
    rule for all modes: if all are timed the result is time order, if none is, a plain shuffle.
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
