"""From a world to its measurements: one slice of time after the other, each of which can be made on its own."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ping_llm.measurements import SCHEMA
from ping_llm.sources.simulator.randomness import Ints, generator
from ping_llm.sources.simulator.world import World

MEASUREMENTS_PER_SLICE = 250_000
_LONGEST_SLICE_S = 65_536
"""So that a second within a slice fits 16 bits, which sort ten times as fast as 64."""


def generate(world: World) -> Iterator[pa.Table]:
    """All measurements in time order, as tables of `measurements.SCHEMA` of bounded size."""
    bounds = slice_bounds(world)
    first_at_or_after = np.searchsorted(world.streams.start_ms, bounds * 1000)
    running = np.empty(0, np.int64)
    for index in range(len(bounds) - 1):
        started = np.arange(first_at_or_after[index], first_at_or_after[index + 1])
        running = np.concatenate([running, started])
        table = _measure(world, index, bounds, running)
        if len(table):
            yield table
        running = running[world.streams.take(running).last_ms >= bounds[index + 1] * 1000]


def generate_slice(world: World, index: int) -> pa.Table:
    """Slice `index` alone: the same measurements that `generate` yields for it."""
    bounds = slice_bounds(world)
    begin_ms, end_ms = bounds[index : index + 2] * 1000
    running = np.flatnonzero((world.streams.start_ms < end_ms) & (world.streams.last_ms >= begin_ms))
    return _measure(world, index, bounds, running)


def slice_bounds(world: World) -> Ints:
    """Seconds since the start at which slices begin and end; each holds about `MEASUREMENTS_PER_SLICE` measurements."""
    span_s = world.settings.span_s
    step = -(-span_s // 2**20)
    streams = world.streams
    begin, end = streams.start_ms / (1000 * step), (streams.last_ms + streams.interval_ms) / (1000 * step)
    cells = -(-span_s // step) + 2
    rate = streams.count / (end - begin)
    # Each stream is a box of its rate: differences at both ends, added up to the rate, added up to the count.
    change = np.bincount(begin.astype(np.int64), rate, cells)
    change -= np.bincount(np.minimum(end.astype(np.int64), cells - 1), rate, cells)
    made = np.cumsum(np.cumsum(change))
    slices = max(1, round(world.settings.measurements / MEASUREMENTS_PER_SLICE))
    by_count = np.searchsorted(made, np.arange(1, slices) * (made[-1] / slices)) * step
    by_time = np.arange(0, span_s, _LONGEST_SLICE_S)
    return np.unique(np.concatenate([[0], by_count[by_count < span_s], by_time, [span_s]]))


def _measure(world: World, index: int, bounds: Ints, running: Ints) -> pa.Table:
    """The measurements of the `running` streams within slice `index`."""
    streams = world.streams.take(running)
    source, target = streams.source.astype(np.int64), streams.target.astype(np.int64)
    start_ms, interval_ms = streams.start_ms, streams.interval_ms.astype(np.int64)
    begin_ms, end_ms = bounds[index : index + 2] * 1000
    first = np.maximum(0, -((start_ms - begin_ms) // interval_ms))
    count = np.minimum(streams.count, -((start_ms - end_ms) // interval_ms)) - first

    # Measurement by measurement, stream after stream.
    which = np.repeat(np.arange(len(running)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count - first, count)
    second = (start_ms[which] + number * interval_ms[which]) // 1000
    truth = world.delays.distribution(
        world.delays.paths(source, target).take(which),
        world.settings.start_s + second.astype(np.float64),
        world.loss_scale,
    )
    rtt = truth.draw(generator(world.settings.seed, "measurements", index)).astype(np.float32)

    order = np.argsort((second - bounds[index]).astype(np.uint16), kind="stable")
    which = which[order]
    event_time = (world.settings.start_s + second[order]) * 1_000_000
    columns = [
        pa.array(event_time).cast(SCHEMA.field("event_time").type),
        world.endpoints.address.take(pa.array(source[which])),
        world.endpoints.address.take(pa.array(target[which])),
        pa.array(world.endpoints.family[source[which]]),
        pa.array(rtt[order], from_pandas=True),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)
