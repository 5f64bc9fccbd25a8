"""What the server knows: the measurements named on its command line, found again by address.

A question needs only few of many millions: of the language model, the latest of the source; of the completer, the
latest of each pair, for earlier ones of the same pair count less and less.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Ints
from ping_llm.predict.predictor import load_history
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.rows.measurement_set import MeasurementSet, joined, read_observations, rows_observations
from ping_llm.sources.files import COLUMN_NAMES

_MOST_FOR_COMPLETER: Final = 50_000
"""Choosing a context among so many takes 15 ms."""

Role = Literal["source", "destination"]


@dataclass(frozen=True, kw_only=True)
class Address:
    address: str
    measurements: int


def read_known(inputs: Sequence[str]) -> "Known":
    """Folders of prepared rows (all of their splits), and measurement files of any kind."""
    folders = [Path(name) for name in inputs if (Path(name) / MANIFEST).is_file()]
    files = [name for name in inputs if Path(name) not in folders]
    parts = []
    with progress("reading what is known") as advance:
        for folder in folders:
            splits = Manifest.load(folder).splits
            parts += [rows_observations(folder, split, on_progress=advance) for split in splits]
        if files:
            parts.append(read_observations(files, on_progress=advance))
    return Known(joined(parts))


class Known:
    """Measurements, by the addresses of their ends."""

    def __init__(self, measured: MeasurementSet) -> None:
        self.measured = measured
        self.number = {node: place for place, node in enumerate(measured.nodes)}
        observations = measured.observations
        self._by_source = np.argsort(observations.source, kind="stable")
        self._starts = np.searchsorted(observations.source[self._by_source], np.arange(len(measured.nodes) + 1))
        self._counts = {
            "source": np.bincount(observations.source, minlength=len(measured.nodes)),
            "destination": np.bincount(observations.destination, minlength=len(measured.nodes)),
        }

    def __len__(self) -> int:
        return len(self.measured.observations)

    @property
    def is_timed(self) -> bool:
        return not len(self) or not np.isnan(self.measured.observations.time_s[0])

    def count(self, role: Role) -> int:
        """How many addresses have measured, or were measured."""
        return int((self._counts[role] > 0).sum())

    def of_source(self, source: str, destination: str | None = None) -> Ints:
        """Numbers of the measurements of a source, or of a pair, in time order."""
        if source not in self.number or (destination is not None and destination not in self.number):
            return np.zeros(0, np.int64)
        node = self.number[source]
        rows = self._by_source[self._starts[node] : self._starts[node + 1]]
        if destination is None:
            return rows
        return rows[self.measured.observations.destination[rows] == self.number[destination]]

    def search(self, text: str, role: Role, *, source: str | None = None, count: int = 20) -> list[Address]:
        """Addresses that begin with the text, then those that contain it; the most measured first.

        Of destinations of a source, those that it has measured come before all others of its family.
        """
        text = text.strip().lower()
        weight = self._counts[role].astype(np.float64)
        if role == "destination" and source is not None:
            of_source = np.bincount(
                self.measured.observations.destination[self.of_source(source)], minlength=len(weight)
            )
            weight = np.where(weight > 0, of_source + weight / (1 + weight.sum()), 0)
            is_ipv6 = np.array([":" in node for node in self.measured.nodes], dtype=bool)
            weight[is_ipv6 != (":" in source)] = 0
        found = [
            (not node.startswith(text), -weight[place], node)
            for place, node in enumerate(self.measured.nodes)
            if weight[place] and text in node
        ]
        return [Address(address=node, measurements=int(-negative)) for _, negative, node in sorted(found)[:count]]

    @cached_property
    def busiest(self) -> list[tuple[str, str]]:
        """Pairs to begin with: the most measured one of each of the busiest sources."""
        counts = self._counts["source"]
        pairs = []
        for node in np.argsort(-counts, kind="stable")[:4].tolist():
            destinations = self.measured.observations.destination[self.of_source(self.measured.nodes[node])]
            if len(destinations):
                pairs.append((self.measured.nodes[node], self.measured.nodes[int(np.bincount(destinations).argmax())]))
        return pairs

    def latest_of(self, sources: Sequence[str], time_s: float, most: int) -> MeasurementSet:
        """What each source measured last, before a time (NaN: ever)."""
        rows = [self.of_source(source) for source in dict.fromkeys(sources)]
        return self._some(np.concatenate([_before(self.measured, own, time_s)[-most:] for own in rows]))

    def latest_of_pairs(self, time_s: float) -> MeasurementSet:
        """Of every pair the latest measurements, as many of each as there may be in all; before a time (NaN: ever)."""
        if np.isnan(time_s):
            return self._latest_of_pairs
        return self._some(_thinned(self.measured, _before(self.measured, np.arange(len(self)), time_s)))

    @cached_property
    def _latest_of_pairs(self) -> MeasurementSet:
        return self._some(_thinned(self.measured, np.arange(len(self))))

    def _some(self, rows: Ints) -> MeasurementSet:
        """Some of the measurements, with only the nodes that occur in them."""
        chosen = self.measured.observations.take(np.sort(rows))
        nodes, numbers = np.unique(np.concatenate([chosen.source, chosen.destination]), return_inverse=True)
        source, destination = np.split(numbers, 2)
        observations = replace(chosen, source=source, destination=destination)
        return MeasurementSet(
            nodes=tuple(self.measured.nodes[node] for node in nodes.tolist()), observations=observations
        )


def _before(measured: MeasurementSet, rows: Ints, time_s: float) -> Ints:
    return rows if np.isnan(time_s) else rows[measured.observations.time_s[rows] < time_s]


def _thinned(measured: MeasurementSet, rows: Ints) -> Ints:
    if len(rows) <= _MOST_FOR_COMPLETER:
        return rows
    pair = measured.observations.take(rows).pair
    order = np.argsort(pair, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(pair[order]) != 0, True))
    sizes = np.diff(ends, prepend=-1)
    nth_from_last = np.empty(len(rows), np.int64)
    nth_from_last[order] = np.repeat(ends, sizes) - np.arange(len(rows))
    kept = np.searchsorted(np.cumsum(np.bincount(nth_from_last)), _MOST_FOR_COMPLETER, side="right")
    if kept == 0:  # more pairs than there is room for: the latest of all
        return rows[nth_from_last == 0][-_MOST_FOR_COMPLETER:]
    return rows[nth_from_last < kept]


# Measurements that came over the wire: files of the kinds that the readers know, JSON lines, and lists of objects.
#
# Nobody's file name is used. What a file is shows in its first bytes, and it is read from
# a folder that is gone afterwards.

_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"(\xb5/\xfd", b"PK\x03\x04", b"\xfd7zXZ")
_EXPANSION: Final = 20
"""Bytes that a byte of Parquet may become. Measurements stay far below."""
_ATLAS_FIELDS: Final = frozenset({"prb_id", "msm_id", "fw"})


def read_upload(content: bytes, most: int) -> MeasurementSet:
    """CSV, Parquet, JSON lines or RIPE Atlas JSON."""
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        raise PingLlmError("the file is empty")
    if start.startswith(_COMPRESSED):
        raise PingLlmError("the file is compressed: unpack it first")
    if content.startswith(b"PAR1"):
        _check_parquet(content, most)
        measured = _read(content, ".parquet")
    elif start[:1] in (b"{", b"["):
        measured = _read_json(content, most)
    else:
        _check_count(content.count(b"\n"), most)
        measured = _read(content, ".csv")
    _check_count(len(measured.observations), most)
    return measured


def measured_list(measurements: Sequence[Mapping[str, Any]]) -> MeasurementSet:
    """Objects with the names of the schema or its aliases. Times are given for all or for none."""
    columns: dict[str, list[Any]] = {}
    for column, names in COLUMN_NAMES.items():
        values = [next((one[name] for name in names if one.get(name) is not None), None) for one in measurements]
        if any(value is not None for value in values) or column == "rtt":
            columns[column] = values
    times = columns.get("event_time", [])
    if any(time is None for time in times):
        raise PingLlmError("some of the measurements have a time, others have not: give times for all or for none")
    if len({isinstance(time, str) for time in times}) > 1:
        columns["event_time"] = [str(time) for time in times]
    try:
        table = pa.table({name: _column(name, values) for name, values in columns.items()})
        return load_history(table)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise PingLlmError(f"the measurements cannot be read: {' '.join(str(error).split())[:200]}") from error


def _column(name: str, values: list[Any]) -> Any:
    kind = {"rtt": pa.float64(), "src_addr": pa.string(), "dst_addr": pa.string(), "ip_version": pa.int64()}.get(name)
    if name == "event_time" and not isinstance(values[0], str):
        kind = pa.float64()
    return pa.array(values, kind)


def _read_json(content: bytes, most: int) -> MeasurementSet:
    """Atlas results, or measurements as objects: one a line, or a list of them."""
    _check_count(content.count(b"{") // 60, most)  # far more objects than that is no list of measurements
    try:
        if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            found = orjson.loads(content)
        else:
            found = [orjson.loads(line) for line in content.splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise PingLlmError(f"this is not JSON, nor one JSON object a line: {error.msg}") from error
    if not all(isinstance(one, dict) for one in found):
        raise PingLlmError("every measurement must be a JSON object")
    if not found:
        raise PingLlmError("the file holds no measurement")
    if _ATLAS_FIELDS & found[0].keys():
        return _read(content, ".json")
    _check_count(len(found), most)
    return measured_list(found)


def _check_parquet(content: bytes, most: int) -> None:
    """Before anything of it is unpacked."""
    try:
        metadata = pq.ParquetFile(pa.BufferReader(content)).metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    except (OSError, pa.ArrowException) as error:
        raise PingLlmError(f"this Parquet file cannot be read: {' '.join(str(error).split())[:200]}") from error
    _check_count(metadata.num_rows, most)
    if size > _EXPANSION * max(len(content), 1_000_000):
        raise PingLlmError("this Parquet file becomes too large when it is unpacked")


def _read(content: bytes, suffix: str) -> MeasurementSet:
    with tempfile.TemporaryDirectory(prefix="ping-llm-upload-") as folder:
        path = Path(folder) / f"upload{suffix}"
        path.write_bytes(content)
        try:
            return read_observations([path])
        except PingLlmError as error:
            message = str(error).replace(str(path), "the file").partition("; name yours with --columns")[0]
            raise PingLlmError(message) from error


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise TooManyError(f"{count:,} measurements are more than the {most:,} that this server takes at once")


class TooManyError(PingLlmError):
    """More than a limit allows."""
