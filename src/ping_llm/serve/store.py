"""Known measurements: the server's own, indexed by address, and those that a request brings along.

A query needs few of many millions. The language model gets the latest of the source. The completer gets the latest of
each pair, because older ones of the same pair tell it less and less.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.measurements import can_measure
from ping_llm.core.rtt import Floats, Ints
from ping_llm.predict.predictor import load_history
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.rows.measurement_set import MeasurementSet, joined, read_observations, rows_observations
from ping_llm.sources.columns import AS_FOUND, OPTIONAL_WITHOUT_TIME, InputOptions, find_columns
from ping_llm.sources.nodes import shown_names
from ping_llm.sources.objects import column_of

Role = Literal["source", "destination"]


class TooManyError(PingLlmError):
    """More than a limit allows."""


def check_count(count: int, limit: int, what: str = "measurements") -> None:
    if count > limit:
        raise TooManyError(f"{count:,} {what} are more than the {limit:,} that this server takes at once")


def read_store(inputs: Sequence[str], options: InputOptions = AS_FOUND) -> "MeasurementStore":
    """The measurements of folders of prepared rows (all splits) and of measurement files of any kind."""
    folders = [Path(name) for name in inputs if (Path(name) / MANIFEST).is_file()]
    files = [name for name in inputs if Path(name) not in folders]
    sets: list[MeasurementSet] = []
    with progress("reading the known measurements") as advance:
        for folder in folders:
            splits = Manifest.load(folder).splits
            sets += [rows_observations(folder, split, on_progress=advance) for split in splits]
        if files:
            sets.append(read_observations(files, options=options, on_progress=advance))
    return MeasurementStore(joined(sets))


class MeasurementStore:
    """Measurements, indexed by their sources.

    The completer gets all of them, as on the command line. If there are more than `max_for_completer`, it gets the
    latest of every pair: a request takes 0.2 s to look through a million.
    """

    def __init__(self, measured: MeasurementSet, max_for_completer: int = 1_000_000) -> None:
        self.measured, self._limit = measured, max_for_completer
        observations, count = measured.observations, len(measured.nodes)
        self._names = shown_names(measured.described)
        self._node = {address: node for node, address in enumerate(measured.nodes)}
        self._by_source = np.argsort(observations.source, kind="stable")
        self._starts = np.searchsorted(observations.source[self._by_source], np.arange(count + 1))
        self.is_timed = not np.isnan(observations.time_s[:1]).any()
        ends = {"source": observations.source, "destination": observations.destination}
        self.counts = {role: np.bincount(own, minlength=count) for role, own in ends.items()}  # of each node

    def __len__(self) -> int:
        return len(self.measured.observations)

    def name_of(self, address: str) -> str:
        """What the nodes file calls an address; without such a name, the address."""
        return self._names.get(address, address)

    def named(self, measured: MeasurementSet) -> MeasurementSet:
        """Other measurements, with the nodes' names that these have."""
        return replace(measured, nodes=tuple(map(self.name_of, measured.nodes)))

    def rows_of(self, source: str, destination: str | None = None) -> Ints:
        """Numbers of the measurements of a source, or of a pair, in time order."""
        if source not in self._node or (destination is not None and destination not in self._node):
            return np.zeros(0, np.int64)
        node = self._node[source]
        rows = self._by_source[self._starts[node] : self._starts[node + 1]]
        if destination is None:
            return rows
        return rows[self.measured.observations.destination[rows] == self._node[destination]]

    def extended(self, arrived: MeasurementSet, limit: int) -> "MeasurementStore":
        """With new measurements added, and the latest `limit` of all kept. A new one without a time counts as made now.
        If the known ones have no times, the times of new ones are dropped."""
        times = arrived.observations.time_s
        times = np.where(np.isnan(times), time.time(), times) if self.is_timed else np.full(len(times), np.nan)
        arrived = replace(arrived, observations=replace(arrived.observations, time_s=times))
        together = joined([self.measured, arrived]) if len(self) else arrived
        if len(together.observations) > limit:
            together = replace(together, observations=together.observations.take(slice(-limit, None)))
        return MeasurementStore(together, self._limit)

    def search(self, text: str, role: Role, *, source: str | None = None, count: int = 20) -> dict[str, int]:
        """Addresses that begin with the text, then those that contain it, with their numbers of measurements, most
        measured first. With a `source`, destinations that it has measured precede all others of its family.
        """
        text = text.strip().lower()
        weight = self.counts[role].astype(np.float64)
        if role == "destination" and source is not None:
            destinations = self.measured.observations.destination[self.rows_of(source)]
            of_source = np.bincount(destinations, minlength=len(weight))
            weight = np.where(weight > 0, of_source + weight / (1 + weight.sum()), 0)
            weight[~can_measure(self.measured.nodes, source)] = 0
        found = sorted(
            (not address.lower().startswith(text), -weight[node], address)
            for node, address in enumerate(self.measured.nodes)
            if weight[node] and text in address.lower()
        )
        return {address: int(-negative) for _, negative, address in found[:count]}

    def between(self, rows: Ints, begin_s: float, end_s: float) -> Ints:
        """The rows that were measured in a range of time; NaN leaves that end open."""
        times = self.measured.observations.time_s[rows]
        return rows[~(times < begin_s) & ~(times > end_s)]

    def matrix(self, count: int, begin_s: float, end_s: float) -> tuple[list[str], list[str], Floats, Ints]:
        """The busiest sources and destinations of a range of time, at most `count` of each, with the median RTT and the
        number of measurements of each pair."""
        known = self.measured.observations.take(self.between(np.arange(len(self)), begin_s, end_s))
        ends = []
        for end in (known.source, known.destination):
            busy = np.argsort(-np.bincount(end, minlength=len(self.measured.nodes)), kind="stable")[:count]
            ends.append(np.sort(busy[np.isin(busy, end)]))
        sources, destinations = ends
        shown = known.take(np.isin(known.source, sources) & np.isin(known.destination, destinations))
        row, column = np.searchsorted(sources, shown.source), np.searchsorted(destinations, shown.destination)
        cell = row * len(destinations) + column
        counts = np.bincount(cell, minlength=len(sources) * len(destinations))
        answered = np.bincount(cell[~np.isnan(shown.rtt_ms)], minlength=len(counts))
        order, starts = np.lexsort((shown.rtt_ms, cell)), np.cumsum(counts) - counts  # timeouts last
        sorted_ms = np.append(shown.rtt_ms[order].astype(np.float64), np.nan)
        middle = [sorted_ms[np.where(answered > 0, starts + (answered - odd) // 2, -1)] for odd in (0, 1)]
        medians = np.where(answered > 0, (middle[0] + middle[1]) / 2, np.nan)
        names = [[self.measured.nodes[node] for node in end.tolist()] for end in ends]
        shape = len(sources), len(destinations)
        return names[0], names[1], medians.reshape(shape), counts.reshape(shape)

    @cached_property
    def busiest(self) -> list[tuple[str, str]]:
        """Example pairs: the most measured one of each of the four busiest sources."""
        nodes, pairs = self.measured.nodes, []
        for node in np.argsort(-self.counts["source"], kind="stable")[:4].tolist():
            destinations = self.measured.observations.destination[self.rows_of(nodes[node])]
            if len(destinations):
                pairs.append((nodes[node], nodes[int(np.bincount(destinations).argmax())]))
        return pairs

    def latest(self, sources: Sequence[str] | None, time_s: float, max_each: int) -> MeasurementSet:
        """The latest before a time (NaN: of all) of each source or, for the completer (None), of each pair."""
        if sources is None:
            if len(self) <= self._limit:
                return self.measured  # the completer looks at nothing later than its question
            return self._latest_of_all_pairs if np.isnan(time_s) else self._latest_of_pairs(time_s)
        rows = [self._before(self.rows_of(source), time_s)[-max_each:] for source in dict.fromkeys(sources)]
        return self._subset(np.concatenate(rows))

    @cached_property
    def _latest_of_all_pairs(self) -> MeasurementSet:
        return self._latest_of_pairs(np.nan)

    def _latest_of_pairs(self, time_s: float) -> MeasurementSet:
        """Equally many of each pair, as far as the limit allows."""
        rows = self._before(np.arange(len(self)), time_s)
        pair = self.measured.observations.take(rows).pair
        order = np.argsort(pair, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(pair[order]) != 0, True))
        nth_from_last = np.empty(len(rows), np.int64)
        nth_from_last[order] = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(rows))
        kept = np.searchsorted(np.cumsum(np.bincount(nth_from_last, minlength=1)), self._limit, side="right")
        if kept == 0:  # more pairs than the limit: the latest of all
            return self._subset(rows[nth_from_last == 0][-self._limit :])
        return self._subset(rows[nth_from_last < kept])

    def _before(self, rows: Ints, time_s: float) -> Ints:
        return rows if np.isnan(time_s) else rows[self.measured.observations.time_s[rows] < time_s]

    def _subset(self, rows: Ints) -> MeasurementSet:
        """Some of the measurements, with only the nodes that occur in them."""
        chosen = self.measured.observations.take(np.sort(rows))
        nodes, numbers = np.unique(np.concatenate([chosen.source, chosen.destination]), return_inverse=True)
        source, destination = np.split(numbers, 2)
        addresses = tuple(self.measured.nodes[node] for node in nodes.tolist())
        observations = replace(chosen, source=source, destination=destination)
        return replace(self.measured, nodes=addresses, observations=observations)


@dataclass(frozen=True, kw_only=True)
class KnownMeasurements:
    """What an answer may be computed from: the server's measurements, those of the request, or both."""

    store: MeasurementStore | None = None
    history: MeasurementSet | None = None

    def __post_init__(self) -> None:
        if self.store is None or self.history is None or not len(self.store):
            return
        if self.store.is_timed and np.isnan(self.history.observations.time_s).any():
            raise PingLlmError("your measurements have no times, those of the server do: add times, or use yours only")

    def latest(self, sources: Sequence[str] | None, time_s: float, max_each: int) -> MeasurementSet:
        """The latest of the store, and the whole history."""
        sets = [] if self.store is None else [self.store.latest(sources, time_s, max_each)]
        if self.history is not None:
            sets.append(self.history if self.store is None else self.store.named(self.history))
        return joined(sets)


# Measurements that come over the network: files of all kinds that the readers know, and lists of objects. A file's name
# is never used: its first bytes say what it is, and it is read from a temporary folder.

_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"(\xb5/\xfd", b"PK\x03\x04", b"\xfd7zXZ")
_MAX_EXPANSION: Final = 20  # uncompressed bytes per byte of Parquet; measurements stay far below


def read_upload(content: bytes, limit: int, options: InputOptions = AS_FOUND) -> MeasurementSet:
    """At most `limit` measurements as CSV, Parquet, JSON lines or RIPE Atlas JSON."""
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(_COMPRESSED):
        raise PingLlmError("the file is compressed: unpack it first")
    if content.startswith(b"RRD\0"):  # no program is run over strangers' bytes
        raise PingLlmError("the file is a round-robin database: upload the output of `rrdtool dump` instead")
    if content.startswith((b"\x93NUMPY", b"MATLAB")):  # a byte of it may become a measurement
        raise PingLlmError("the file is an array: upload the matrix as a text table instead")
    if content.startswith(b"PAR1"):
        _check_parquet(content, limit)
    else:
        check_count(content.count(b"\n"), limit)
        check_count(content.count(b"{") // 60, limit)  # no result of one measurement has more than 60 objects
        if start.startswith((b"{", b"[")):  # each value may be one, of a matrix or of a list of RTTs
            check_count(content.count(b",") // 60, limit)
    measured = _read_file(content, options)
    check_count(len(measured.observations), limit)
    return measured


def measurements_of(objects: Sequence[Mapping[str, Any]]) -> MeasurementSet:
    """The measurements of JSON objects; RTTs are in milliseconds. Times are given for all or for none."""
    names = dict.fromkeys(name for one in objects for name, value in one.items() if value is not None or name == "rtt")
    table = pa.table({name: column_of(objects, name) for name in names})
    time = find_columns(list(names), {}, "the measurements", OPTIONAL_WITHOUT_TIME).get("event_time")
    if time is not None and table[time].null_count:
        raise PingLlmError("some of the measurements have a time, others have not: give times for all or for none")
    return load_history(table, InputOptions(rtt_unit="ms"))


def _check_parquet(content: bytes, limit: int) -> None:
    """Check its size before anything of it is unpacked."""
    with explained("this Parquet file cannot be read", OSError, pa.ArrowException):
        metadata = pq.ParquetFile(pa.BufferReader(content)).metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    check_count(metadata.num_rows, limit)
    if size > _MAX_EXPANSION * max(len(content), 1_000_000):
        raise PingLlmError("this Parquet file is too large when it is unpacked")


def _read_file(content: bytes, options: InputOptions) -> MeasurementSet:
    """Errors name neither the temporary file nor options of the command line."""
    with tempfile.TemporaryDirectory(prefix="ping-llm-upload-") as folder:
        path = Path(folder) / "upload"
        path.write_bytes(content)
        try:
            return read_observations([path], options=options)
        except PingLlmError as error:
            raise PingLlmError(str(error).replace(str(path), "the file").partition("; name yours with")[0]) from error
