"""What a prepared dataset consists of: shards of rows, an index of each split, and the manifest, which is written last.

A folder without a manifest is not a dataset.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.rows.format import FORMAT_VERSION
from ping_llm.storage import Location, MissingError, locate

MANIFEST: Final = "manifest.json"
SPLITS: Final = ("train", "eval")

_KIND: Final = "ping-llm probe rows"

INDEX_TYPES: Final = {
    "shard": "u4",
    "position": "u4",
    "offset": "u8",
    "size": "u4",
    "count": "u4",
    "failed": "u4",
    "long_gaps": "u4",
    "family": "u1",
    "time_unit_us": "u4",
    "first_time_us": "i8",
    "last_time_us": "i8",
    "source": "V16",
}
"""One entry per row: the shard's number, the record's position in it, the logical offset of its first byte and its
size, then what the row holds. A row is of one family, so `count` and `family` give the IPv4/IPv6 counts."""
INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field(name, pa.binary(16) if kind == "V16" else pa.from_numpy_dtype(kind), nullable=False)
        for name, kind in INDEX_TYPES.items()
    ]
)


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the manifest says about a shard."""

    file: str
    rows: int
    measurements: int
    failed: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split (train or eval): its shards, and its index with size and checksum."""

    index_file: str
    index_bytes: int
    index_sha256: str
    shards: tuple[ShardInfo, ...]

    @property
    def fingerprint(self) -> str:
        """Of the content: equal for equal rows, wherever they came from and whatever made them."""
        return _digest([FORMAT_VERSION, self.index_sha256, [s.sha256 for s in self.shards]])

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)

    @property
    def measurements(self) -> int:
        return sum(s.measurements for s in self.shards)

    @property
    def failed(self) -> int:
        return sum(s.failed for s in self.shards)

    @cached_property
    def files(self) -> dict[str, tuple[int, str]]:
        """Size and checksum of each file."""
        shards = {shard.file: (shard.bytes, shard.sha256) for shard in self.shards}
        return shards | {self.index_file: (self.index_bytes, self.index_sha256)}

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "measurements": self.measurements,
            "failed": self.failed,
            "fingerprint": self.fingerprint,
            **asdict(self),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        shards = tuple(ShardInfo(**shard) for shard in value["shards"])
        return cls(shards=shards, **{name: value[name] for name in ("index_file", "index_bytes", "index_sha256")})


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
        return _digest({name: split.fingerprint for name, split in sorted(self.splits.items())})

    @cached_property
    def files(self) -> dict[str, tuple[int, str]]:
        """Size and checksum of each file of the dataset."""
        return {name: facts for split in self.splits.values() for name, facts in split.files.items()}

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


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _why_no_manifest(folder: Location) -> str:
    if not folder.exists():
        return f"no such folder: {folder}"
    if not folder.is_dir():
        return f"{folder} is a file; give the folder that `ping-llm prepare` wrote"
    if (folder / ".work").exists():
        return f"{folder} holds an unfinished preparation: run the same `ping-llm prepare` command again to finish it"
    return f"{folder} has no {MANIFEST}: it is not a folder that `ping-llm prepare` wrote"
