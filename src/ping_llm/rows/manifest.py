"""Writing one shard: an ArrayRecord file of probe rows, and the index entries that say where each row lies."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.rows import format as layout
from ping_llm.rows.format import FORMAT_VERSION, MAGIC, SourceRuns, encode_rows
from ping_llm.storage import Location, MissingError, locate

INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("shard", pa.uint32(), nullable=False),
        pa.field("position", pa.uint32(), nullable=False),
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("size", pa.uint32(), nullable=False),
        pa.field("count", pa.uint32(), nullable=False),
        pa.field("failed", pa.uint32(), nullable=False),
        pa.field("long_gaps", pa.uint32(), nullable=False),
        pa.field("family", pa.uint8(), nullable=False),
        pa.field("time_unit_us", pa.uint32(), nullable=False),
        pa.field("first_time_us", pa.int64(), nullable=False),
        pa.field("last_time_us", pa.int64(), nullable=False),
        pa.field("source", pa.binary(16), nullable=False),
    ]
)
"""One entry per row: the shard's number, the record's position in it, the logical offset of its first byte and its
size, then what the row holds. A row is of one family, so `count` and `family` give the IPv4/IPv6 counts."""


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the manifest says about a shard."""

    file: str
    rows: int
    measurements: int
    failed: int
    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)


class ShardWriter:
    """Appends rows to a new shard file. `close` checks the file and returns its description and index entries."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = ArrayRecordWriter(str(path), layout.WRITER_OPTIONS)
        self._next_chunk = layout.FIRST_CHUNK
        self._entries: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, runs: SourceRuns) -> None:
        if not len(runs.counts):
            return
        encoded = encode_rows(runs)
        with self._write_errors():
            for row in range(len(encoded)):
                self._writer.write(encoded.record(row))
        packed = np.zeros((len(encoded), 16), dtype=np.uint8)
        packed[:, : runs.sources.shape[1]] = runs.sources
        columns: dict[str, npt.NDArray[Any]] = {
            "shard": np.zeros(len(encoded), dtype=np.uint32),  # numbered when all shards are known
            "position": self._rows + np.arange(len(encoded), dtype=np.uint32),
            "offset": self._next_chunk + encoded.starts,
            "size": encoded.sizes,
            "count": runs.counts,
            "failed": encoded.failed,
            "long_gaps": encoded.long_gaps,
            "family": np.full(len(encoded), runs.family),
            "time_unit_us": encoded.time_units_us,
            "first_time_us": encoded.first_times_us,
            "last_time_us": encoded.last_times_us,
        }
        numbers = [
            pa.array(columns[f.name].astype(f.type.to_pandas_dtype())) for f in INDEX_SCHEMA if f.name in columns
        ]
        sources = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(encoded), [None, pa.py_buffer(packed)])
        self._entries.append(pa.RecordBatch.from_arrays([*numbers, sources], schema=INDEX_SCHEMA))
        self._next_chunk += encoded.chunk_bytes
        self._rows += len(encoded)

    def close(self) -> tuple[ShardInfo, pa.Table]:
        with self._write_errors():
            self._writer.close()
        index = pa.Table.from_batches(self._entries, schema=INDEX_SCHEMA).combine_chunks()
        self._check(index)
        info = ShardInfo(
            file=self._path.name,
            rows=self._rows,
            measurements=int(np.sum(index["count"].to_numpy(), dtype=np.int64)),
            failed=int(np.sum(index["failed"].to_numpy(), dtype=np.int64)),
            bytes=self._path.stat().st_size,
            sha256=file_sha256(self._path),
        )
        return info, index

    def _check(self, index: pa.Table) -> None:
        """See that each record begins where the index says: mapped reads rely on what ArrayRecord does not promise."""
        file = np.memmap(self._path, dtype=np.uint8, mode="r")
        found = layout.gather_bytes(file, index["offset"].to_numpy().astype(np.int64), len(MAGIC))
        if not (found == np.frombuffer(MAGIC, dtype=np.uint8)).all():
            raise PingLlmError(
                f"{self._path}: this array_record release lays records out in a way this version of ping-llm does not "
                "know; install the array_record version named in the lock file"
            )

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """ArrayRecord raises plain `RuntimeError`s; a full disk is the one that happens."""
        try:
            yield
        except RuntimeError as error:
            code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
            raise OSError(code, os.strerror(code), str(self._path)) from error


# The manifest: what a prepared dataset consists of. It is written last, so a folder without one is not a dataset.

MANIFEST: Final = "manifest.json"
_KIND: Final = "ping-llm probe rows"


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split (train or eval): its shards, and its index with size and checksum."""

    shards: tuple[ShardInfo, ...]
    index_file: str
    index_bytes: int
    index_sha256: str

    @property
    def fingerprint(self) -> str:
        """Of the content: equal for equal rows, wherever they came from and whatever made them."""
        content = [FORMAT_VERSION, self.index_sha256, [s.sha256 for s in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)

    @property
    def measurements(self) -> int:
        return sum(s.measurements for s in self.shards)

    @property
    def failed(self) -> int:
        return sum(s.failed for s in self.shards)

    @property
    def files(self) -> list[str]:
        return [*(s.file for s in self.shards), self.index_file]

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "measurements": self.measurements,
            "failed": self.failed,
            "fingerprint": self.fingerprint,
            "index_file": self.index_file,
            "index_bytes": self.index_bytes,
            "index_sha256": self.index_sha256,
            "shards": [s.to_json() for s in self.shards],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(
            shards=tuple(ShardInfo.from_json(s) for s in value["shards"]),
            index_file=value["index_file"],
            index_bytes=value["index_bytes"],
            index_sha256=value["index_sha256"],
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`read` is `written` plus all of `dropped`: every input measurement is in the rows or in this report."""

    splits: dict[str, SplitInfo]
    options: dict[str, Any]
    inputs: tuple[dict[str, Any], ...]
    read: int
    written: int
    dropped: dict[str, int]
    plan: str
    """Digest of inputs and options: tells whether the same command made this."""

    @property
    def fingerprint(self) -> str:
        content = {name: split.fingerprint for name, split in sorted(self.splits.items())}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def files(self) -> dict[str, tuple[int, str]]:
        """Size and checksum of each file of the dataset."""
        found = {shard.file: (shard.bytes, shard.sha256) for split in self.splits.values() for shard in split.shards}
        return found | {s.index_file: (s.index_bytes, s.index_sha256) for s in self.splits.values()}

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            **asdict(self),
            "splits": {name: split.to_json() for name, split in self.splits.items()},
        }

    @classmethod
    def load(cls, folder: Path | str | Location) -> Self:
        path = locate(folder) / MANIFEST
        try:
            value = json.loads(path.read_text())
        except MissingError:
            raise PingLlmError(_why_no_manifest(locate(folder))) from None
        except ValueError as error:
            raise PingLlmError(f"cannot read {path}: {error}") from error
        if not isinstance(value, dict) or value.get("kind") != _KIND:
            raise PingLlmError(f"{path} is not a manifest of probe rows")
        if value["format_version"] != FORMAT_VERSION:
            raise PingLlmError(
                f"{path} has format version {value['format_version']}; this program reads {FORMAT_VERSION}. "
                "Prepare the rows again"
            )
        try:
            manifest = cls(
                splits={name: SplitInfo.from_json(split) for name, split in value["splits"].items()},
                **{name: value[name] for name in ("options", "inputs", "read", "written", "dropped", "plan")},
            )
        except (KeyError, TypeError) as error:
            raise PingLlmError(f"{path} is damaged: {error!r}; prepare the rows again") from error
        if manifest.fingerprint != value["fingerprint"]:
            raise PingLlmError(f"{path} was changed by hand: its fingerprint does not match its content")
        return manifest


def _why_no_manifest(folder: Location) -> str:
    if not folder.exists():
        return f"no such folder: {folder}"
    if not folder.is_dir():
        return f"{folder} is a file; give the folder that `ping-llm prepare` wrote"
    if (folder / ".work").exists():
        return f"{folder} holds an unfinished preparation: run the same `ping-llm prepare` command again to finish it"
    return f"{folder} has no {MANIFEST}: it is not a folder that `ping-llm prepare` wrote"
