"""A simulated Internet: built from its settings, asked for its measurements, and for the truth about any of them."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ping_llm import __version__
from ping_llm.core.cells import time_microseconds
from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import staged_files
from ping_llm.core.measurements import SCHEMA, UNPARSABLE, format_address, parse_addresses
from ping_llm.core.rtt import Ints
from ping_llm.sources import WORLD_FILE
from ping_llm.sources.simulator.delays import DelayDistribution, DelayModel, load_at
from ping_llm.sources.simulator.geography import SimulatorSettings, build_geography, generator
from ping_llm.sources.simulator.hosts import build_endpoints, build_streams, source_sizes

WORLD_FORMAT = 1  # raised whenever the same settings would give another world: old measurements never meet a new truth

_STREAMS_TO_CALIBRATE = 200_000


class World:
    """Everything about a simulated Internet that is decided before the first measurement."""

    def __init__(self, settings: SimulatorSettings) -> None:
        sizes = source_sizes(settings)
        self.settings = settings
        self.geography = build_geography(settings)
        self.endpoints = build_endpoints(settings, self.geography, sizes)
        self.streams = build_streams(settings, self.geography, self.endpoints, sizes)
        self.delays = DelayModel(settings, self.geography, self.endpoints)
        self.loss_scale = self._calibrated_loss()

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """The world whose measurements are in `folder`."""
        path = Path(folder) / WORLD_FILE
        try:
            content = json.loads(path.read_bytes())
            found, settings, fingerprint = content["format"], content["settings"], content["fingerprint"]
        except (FileNotFoundError, NotADirectoryError):
            raise PingLlmError(f"{folder} holds no {WORLD_FILE}: it was not written by the simulator") from None
        except (ValueError, KeyError, TypeError) as error:
            raise PingLlmError(f"{path} is not the description of a simulated world ({error})") from None
        if found != WORLD_FORMAT:
            raise PingLlmError(
                f"{path} describes a world of format {found} (written by ping-llm {content.get('ping_llm_version')}), "
                f"this version makes format {WORLD_FORMAT}: simulate again"
            )
        world = cls(SimulatorSettings(**settings))
        if world.fingerprint() != fingerprint:
            raise PingLlmError(f"{path}: another world grows from these settings here (another numpy?): simulate again")
        return world

    def describe(self) -> dict[str, Any]:
        """What `load` needs, as plain values for JSON."""
        return {
            "format": WORLD_FORMAT,
            "ping_llm_version": __version__,
            "fingerprint": self.fingerprint(),
            "settings": self.settings.model_dump(),
        }

    def fingerprint(self) -> str:
        """Of all addresses and the whole schedule: a world that agrees in them is the same world."""
        digest = hashlib.blake2b(digest_size=16)
        for buffer in self.endpoints.address.buffers()[1:]:
            digest.update(buffer)
        for field in fields(self.streams):
            digest.update(np.ascontiguousarray(getattr(self.streams, field.name)).data)
        return digest.hexdigest()

    def distribution(self, src_addr: Any, dst_addr: Any, event_time: Any) -> DelayDistribution:
        """The true distribution of measurements from `src_addr` to `dst_addr` at `event_time`.

        Addresses are text; times are Unix seconds, `datetime64`, `datetime` or Arrow timestamps. Each argument is a
        list (or an array) or a single value that holds for all.
        """
        time_us, _, _ = time_microseconds(_column(event_time))
        source, target, time_s = np.broadcast_arrays(
            self._endpoints_of(src_addr), self._endpoints_of(dst_addr), time_us / 1e6
        )
        different = np.flatnonzero(self.endpoints.family[source] != self.endpoints.family[target])
        if len(different):
            one, other = (self.endpoints.address[int(ends[different[0]])] for ends in (source, target))
            raise PingLlmError(f"{one} and {other} are of different families: no measurement joins them")
        return self.delays.distribution(self.delays.paths(source, target), time_s, self.loss_scale)

    def _endpoints_of(self, addresses: Any) -> Ints:
        given = _column(addresses).cast(pa.string()).dictionary_encode()
        families, packed = parse_addresses(given.dictionary.to_pylist())  # they may be spelt differently
        both = zip(families.tolist(), packed, strict=True)
        spelt = [format_address(family, one.tobytes()) if family != UNPARSABLE else None for family, one in both]
        index = pc.index_in(pa.array(spelt, pa.string()), value_set=self.endpoints.address)
        if index.null_count:
            missing = given.dictionary[index.is_valid().to_pylist().index(False)].as_py()
            raise PingLlmError(f"{missing!r} is no address of this simulated world")
        return np.asarray(index.take(given.indices), np.int64)

    @cached_property
    def slice_bounds(self) -> Ints:
        """Seconds since the start between which slices lie; each has about `MEASUREMENTS_PER_SLICE` measurements."""
        span_s, streams = self.settings.span_s, self.streams
        step = -(-span_s // 2**20)
        begin, end = streams.start_ms / (1000 * step), (streams.last_ms + streams.interval_ms) / (1000 * step)
        cells = -(-span_s // step) + 2
        rate = streams.count / (end - begin)
        # Each stream is a box of its rate: differences at both ends, added up to the rate, added up to the count.
        change = np.bincount(begin.astype(np.int64), rate, cells)
        change -= np.bincount(np.minimum(end.astype(np.int64), cells - 1), rate, cells)
        made = np.cumsum(np.cumsum(change))
        slices = max(1, round(self.settings.measurements / MEASUREMENTS_PER_SLICE))
        by_count = np.searchsorted(made, np.arange(1, slices) * (made[-1] / slices)) * step
        by_time = np.arange(0, span_s, _LONGEST_SLICE_S)
        return np.unique(np.concatenate([[0], by_count[by_count < span_s], by_time, [span_s]]))

    def _calibrated_loss(self) -> float:
        """The factor that makes the share of failed measurements that of the settings: Newton's method, which for this
        concave function comes up from below and never overshoots."""
        step = -(-len(self.streams) // _STREAMS_TO_CALIBRATE)
        streams = self.streams
        paths = self.delays.paths(streams.source[::step].astype(np.int64), streams.target[::step].astype(np.int64))
        middle_s = self.settings.start_s + (streams.start_ms[::step] + streams.last_ms[::step]) / 2000.0
        hazard = paths.loss_hazard(load_at(middle_s, paths.source_day) + load_at(middle_s, paths.target_day))
        weight = streams.count[::step] / streams.count[::step].sum()
        scale = 0.0
        for _ in range(200):
            survival = weight * np.exp(-scale * hazard)
            missing = self.settings.failed_share - (1.0 - survival.sum())
            scale += missing / (survival * hazard).sum()
            if abs(missing) < 1e-9:
                break
        return float(scale)


def _column(values: Any) -> Any:
    """An Arrow array of a list, an array or a single value."""
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    return values if isinstance(values, pa.Array) else pa.array(np.atleast_1d(np.asarray(values)))


# From a world to its measurements: one slice of time after the other, each of which can be made on its own.

MEASUREMENTS_PER_SLICE = 250_000
_LONGEST_SLICE_S = 65_536  # so that a second within a slice fits 16 bits, which sort ten times as fast as 64


def generate(world: World) -> Iterator[pa.Table]:
    """All measurements in time order, as tables of `measurements.SCHEMA` of bounded size."""
    for index in range(len(world.slice_bounds) - 1):
        table = generate_slice(world, index)
        if len(table):
            yield table


def generate_slice(world: World, index: int) -> pa.Table:
    """The measurements between two of the world's `slice_bounds`."""
    start_s, (begin_s, end_s) = world.settings.start_s, world.slice_bounds[index : index + 2]
    begin_ms, end_ms = begin_s * 1000, end_s * 1000
    started = np.searchsorted(world.streams.start_ms, end_ms)
    streams = world.streams.take(np.flatnonzero(world.streams.last_ms[:started] >= begin_ms))
    source, target = streams.source.astype(np.int64), streams.target.astype(np.int64)
    start_ms, interval_ms = streams.start_ms, streams.interval_ms.astype(np.int64)
    first = np.maximum(0, -((start_ms - begin_ms) // interval_ms))
    count = np.minimum(streams.count, -((start_ms - end_ms) // interval_ms)) - first

    # Measurement by measurement, stream after stream.
    which = np.repeat(np.arange(len(streams)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count - first, count)
    second = (start_ms[which] + number * interval_ms[which]) // 1000
    paths = world.delays.paths(source, target).take(which)
    truth = world.delays.distribution(paths, start_s + second.astype(np.float64), world.loss_scale)
    rtt = truth.draw(generator(world.settings.seed, "measurements", index)).astype(np.float32)

    order = np.argsort((second - begin_s).astype(np.uint16), kind="stable")
    which = which[order]
    columns = [
        pa.array((start_s + second[order]) * 1_000_000).cast(SCHEMA.field("event_time").type),
        world.endpoints.address.take(pa.array(source[which])),
        world.endpoints.address.take(pa.array(target[which])),
        pa.array(world.endpoints.family[source[which]]),
        pa.array(rtt[order], from_pandas=True),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


# A world's measurements as a folder: Parquet files, and `world.json` to ask for the truth later.

ROWS_PER_FILE = 10_000_000
_PARQUET = {"compression": "zstd", "use_dictionary": ["src_addr", "dst_addr", "ip_version"]}


@dataclass(frozen=True, kw_only=True)
class SimulationSummary:
    measurements: int
    failed: int
    sources: int
    targets: int
    files: tuple[Path, ...]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes as they are."""
        return asdict(self) | {"files": [str(path) for path in self.files]}


def simulate(
    settings: SimulatorSettings,
    output_dir: Path | str,
    *,
    files: int | None = None,
    on_progress: Advance = no_progress,
    overwrite: bool = False,
) -> SimulationSummary:
    """Writes `measurements-00000-of-0000N.parquet`... and, when they are complete, `world.json`.

    The measurements are the same however many files they are cut into: by default, of 10 million each. `on_progress`
    gets how many were written.
    """
    folder, total = Path(output_dir), settings.measurements
    if files is not None and not 1 <= files <= total:
        raise PingLlmError(f"{total} measurements cannot be written to {files} files")
    bounds = [n * total // files for n in range(files + 1)] if files else [*range(0, total, ROWS_PER_FILE), total]
    world = World(settings)  # fails, if it has to, before anything is written
    count = len(bounds) - 1
    names = [f"measurements-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    failed, tables, left = 0, generate(world), SCHEMA.empty_table()
    with (
        explained(f"cannot write to {folder}", OSError),
        staged_files(folder, "measurements-*.parquet", WORLD_FILE, overwrite=overwrite) as staging,
    ):
        for name, (begin, end) in zip(names, itertools.pairwise(bounds), strict=True):
            with pq.ParquetWriter(staging / name, SCHEMA, **_PARQUET) as out:
                while begin < end:
                    table = left if len(left) else next(tables)
                    part, left = table.slice(0, end - begin), table.slice(end - begin)
                    out.write_table(part)
                    begin += len(part)
                    failed += part["rtt"].null_count
                    on_progress(len(part))
        (staging / WORLD_FILE).write_text(json.dumps(world.describe(), indent=2) + "\n")
    paths = tuple(folder / name for name in names)
    return SimulationSummary(
        measurements=total,
        failed=failed,
        sources=world.endpoints.sources,
        targets=len(world.endpoints.family) - world.endpoints.sources,
        files=paths,
        size_bytes=sum(path.stat().st_size for path in paths),
    )
