"""A simulated Internet: built from its settings, asked for the truth about any measurement."""

import hashlib
import ipaddress
import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm import __version__
from ping_llm.errors import PingLlmError
from ping_llm.sources import WORLD_FILE
from ping_llm.sources.simulator.delay import DelayModel
from ping_llm.sources.simulator.distribution import Distribution
from ping_llm.sources.simulator.endpoints import build_endpoints
from ping_llm.sources.simulator.geography import build_geography
from ping_llm.sources.simulator.randomness import Floats, Ints
from ping_llm.sources.simulator.schedule import build_streams, source_sizes
from ping_llm.sources.simulator.settings import SimulatorSettings

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
        world = cls(SimulatorSettings.from_json(settings))
        if world.fingerprint() != fingerprint:
            raise PingLlmError(f"{path}: another world grows from these settings here (another numpy?): simulate again")
        return world

    def describe(self) -> dict[str, Any]:
        """What `load` needs, as plain values for JSON."""
        return {
            "format": WORLD_FORMAT,
            "ping_llm_version": __version__,
            "fingerprint": self.fingerprint(),
            "settings": self.settings.to_json(),
        }

    def fingerprint(self) -> str:
        """Of all addresses and the whole schedule: a world that agrees in them is the same world."""
        digest = hashlib.blake2b(digest_size=16)
        for buffer in self.endpoints.address.buffers()[1:]:
            digest.update(buffer)
        streams = self.streams
        for column in (streams.source, streams.target, streams.count, streams.interval_ms, streams.start_ms):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def distribution(self, src_addr: Any, dst_addr: Any, event_time: Any) -> Distribution:
        """The true distribution of measurements from `src_addr` to `dst_addr` at `event_time`.

        Addresses are text; times are Unix seconds, `datetime64`, `datetime` or Arrow timestamps. Each argument is a
        list (or an array) or a single value that holds for all.
        """
        source, target, time_s = np.broadcast_arrays(
            self._endpoints_of(src_addr), self._endpoints_of(dst_addr), _unix_seconds(event_time)
        )
        different = np.flatnonzero(self.endpoints.family[source] != self.endpoints.family[target])
        if len(different):
            one, other = (self.endpoints.address[int(ends[different[0]])] for ends in (source, target))
            raise PingLlmError(f"{one} and {other} are of different families: no measurement joins them")
        return self.delays.distribution(self.delays.paths(source, target), time_s, self.loss_scale)

    def _endpoints_of(self, addresses: Any) -> Ints:
        texts = _column([addresses] if isinstance(addresses, str) else addresses, pa.string())
        index = pc.index_in(texts, value_set=self.endpoints.address)
        if index.null_count:  # perhaps only spelt differently
            canonical = [
                text if known else _canonical(text)
                for text, known in zip(texts.to_pylist(), index.is_valid().to_pylist(), strict=True)
            ]
            index = pc.index_in(pa.array(canonical, pa.string()), value_set=self.endpoints.address)
            if index.null_count:
                missing = canonical[index.is_valid().to_pylist().index(False)]
                raise PingLlmError(f"{missing!r} is no address of this simulated world")
        return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)

    def _calibrated_loss(self) -> float:
        """The factor that makes the share of failed measurements what was asked for: Newton's method, which for this
        concave function comes up from below and never overshoots."""
        wanted = self.settings.failed_share
        step = -(-len(self.streams) // _STREAMS_TO_CALIBRATE)
        streams = self.streams
        paths = self.delays.paths(streams.source[::step].astype(np.int64), streams.target[::step].astype(np.int64))
        middle_s = self.settings.start_s + (streams.start_ms[::step] + streams.last_ms[::step]) / 2000.0
        hazard = self.delays.hazard(paths, middle_s)
        weight = streams.count[::step] / streams.count[::step].sum()
        scale = 0.0
        for _ in range(200):
            survival = weight * np.exp(-scale * hazard)
            missing = wanted - (1.0 - survival.sum())
            scale += missing / (survival * hazard).sum()
            if abs(missing) < 1e-9:
                break
        return float(scale)


def _column(values: Any, kind: pa.DataType | None = None) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return column.cast(kind) if kind is not None else column


def _canonical(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


def _unix_seconds(times: Any) -> Floats:
    if isinstance(times, pa.Array | pa.ChunkedArray):
        column = _column(times)
    else:
        column = _column(np.atleast_1d(np.asarray(times)))
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_numpy() / 1e6
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
