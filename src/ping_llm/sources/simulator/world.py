"""A simulated Internet: built from its settings, asked for its measurements, and for the truth about any of them."""

import hashlib
import ipaddress
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ping_llm import __version__
from ping_llm.core.console import Advance
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import atomic_file, write_atomically
from ping_llm.core.measurements import SCHEMA, time_microseconds
from ping_llm.sources import WORLD_FILE
from ping_llm.sources.simulator.delays import DelayDistribution, DelayModel, load_at
from ping_llm.sources.simulator.schedule import build_streams, source_sizes
from ping_llm.sources.simulator.settings import SimulatorSettings
from ping_llm.sources.simulator.topology import Ints, build_endpoints, build_geography, generator

WORLD_FORMAT = 1
"""Raised whenever the same settings would give another world, so that old measurements never meet a new truth."""

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
        if not isinstance(event_time, pa.Array | pa.ChunkedArray):
            event_time = np.atleast_1d(np.asarray(event_time))
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
        texts = _column([addresses] if isinstance(addresses, str) else addresses).cast(pa.string())
        index = pc.index_in(texts, value_set=self.endpoints.address)
        if index.null_count:  # perhaps only spelt differently
            texts = pa.array([_canonical(text) for text in texts.to_pylist()], pa.string())
            index = pc.index_in(texts, value_set=self.endpoints.address)
        if index.null_count:
            missing = texts[index.is_valid().to_pylist().index(False)].as_py()
            raise PingLlmError(f"{missing!r} is no address of this simulated world")
        return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)

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
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    return values if isinstance(values, pa.Array) else pa.array(values)


def _canonical(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


# From a world to its measurements: one slice of time after the other, each of which can be made on its own.

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


# A world's measurements as a folder: Parquet files, and `world.json` to ask for the truth later.

DEFAULT_ROWS_PER_FILE = 10_000_000
_FILES = ("measurements-*.parquet", WORLD_FILE)
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
    rows_per_file: int | None = None,
    on_progress: Advance | None = None,
    overwrite: bool = False,
) -> SimulationSummary:
    """Writes `measurements-00000-of-0000N.parquet`... and, when they are complete, `world.json`.

    The measurements are the same however many files they are cut into. `on_progress` gets how many were written.
    """
    bounds = _file_bounds(settings.measurements, files, rows_per_file)
    folder = Path(output_dir)
    existing = [path for pattern in _FILES for path in sorted(folder.glob(pattern))]
    if existing and not overwrite:
        raise PingLlmError(f"{folder} already holds simulated measurements: choose another folder, or overwrite them")
    world = World(settings)  # fails, if it has to, before anything is deleted
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in existing:
            path.unlink()
    except OSError as error:
        raise PingLlmError(f"cannot write to {folder}: {error.strerror}") from None
    count = len(bounds) - 1
    paths = [folder / f"measurements-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    failed = 0
    tables = generate(world)
    left = SCHEMA.empty_table()
    for path, (begin, end) in zip(paths, itertools.pairwise(bounds), strict=True):
        with atomic_file(path) as unfinished, pq.ParquetWriter(unfinished, SCHEMA, **_PARQUET) as out:
            while begin < end:
                table = left if len(left) else next(tables)
                part, left = table.slice(0, end - begin), table.slice(end - begin)
                out.write_table(part)
                begin += len(part)
                failed += part["rtt"].null_count
                if on_progress is not None:
                    on_progress(len(part))
    write_atomically(folder / WORLD_FILE, json.dumps(world.describe(), indent=2) + "\n")
    return SimulationSummary(
        measurements=settings.measurements,
        failed=failed,
        sources=world.endpoints.sources,
        targets=len(world.endpoints.family) - world.endpoints.sources,
        files=tuple(paths),
        size_bytes=sum(path.stat().st_size for path in paths),
    )


def _file_bounds(measurements: int, files: int | None, rows_per_file: int | None) -> list[int]:
    """The number of the first measurement of every file, and the end."""
    if files is not None and rows_per_file is not None:
        raise PingLlmError("give the number of files or the rows per file, not both")
    if files is not None:
        if not 1 <= files <= measurements:
            raise PingLlmError(f"{measurements} measurements cannot be written to {files} files")
        return [number * measurements // files for number in range(files + 1)]
    if rows_per_file is not None and rows_per_file < 1:
        raise PingLlmError("a file needs at least one row")
    return [*range(0, measurements, rows_per_file or DEFAULT_ROWS_PER_FILE), measurements]
