"""A prepared dataset: shards of rows, an index of each split, and the manifest, which is written last.

A folder without a manifest is not a dataset.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import relative_name, sha256_digest
from ping_llm.core.measurements import ADDRESS_BYTES, MAX_TIME_US
from ping_llm.rows.format import FARTHEST, FIRST_CHUNK, FORMAT_VERSION, HEADER, TIME_UNITS_US, physical
from ping_llm.storage import Location, MissingError, locate

MANIFEST: Final = "manifest.json"
SPLITS: Final = ("train", "eval")

_CHECKED_AT_ONCE: Final = 1 << 20
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


# A manifest may come from a stranger: what is wrong with it is one line, and its names stay inside its folder.
FileName = Annotated[str, AfterValidator(lambda name, info: relative_name(name, info.context))]
Sha256 = Annotated[str, AfterValidator(lambda digest, info: sha256_digest(digest, info.context))]
SplitName = Annotated[str, Field(pattern=f"^({'|'.join(SPLITS)})$")]
Whole = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the manifest says about a shard."""

    file: FileName
    rows: Whole
    measurements: Whole
    failed: Whole
    bytes: Whole
    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split (train or eval): its shards, and its index with size and checksum."""

    index_file: FileName
    index_bytes: Whole
    index_sha256: Sha256
    shards: tuple[ShardInfo, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of the content: equal for equal rows, wherever they came from and whatever made them."""
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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`read` is `written` plus all of `dropped`: every input measurement is in the rows or in this report."""

    splits: dict[SplitName, SplitInfo]
    options: dict[str, Any]
    inputs: tuple[dict[str, Any], ...]
    read: Whole
    written: Whole
    dropped: dict[str, Whole]
    plan: str  # digest of inputs and options: tells whether the same command made this

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
            "splits": {
                name: {key: getattr(split, key) for key in ("rows", "measurements", "failed", "fingerprint")}
                | asdict(split)
                for name, split in self.splits.items()
            },
        }

    @classmethod
    def parse(cls, value: Any, where: object) -> Self:
        """The manifest in JSON that `where` holds, or an error in one line."""
        try:
            return TypeAdapter(cls).validate_python(value, context=where)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise PingLlmError(f"{where} is damaged: {at[:80]!r}: {first['msg']}; prepare the rows again") from error

    @classmethod
    def load(cls, folder: Path | str | Location) -> Self:
        path = locate(folder) / MANIFEST
        try:
            with explained(f"cannot read {path}", ValueError, RecursionError):
                value = json.loads(path.read_text())
        except MissingError:
            raise PingLlmError(_why_no_manifest(locate(folder))) from None
        if not isinstance(value, dict) or value.get("kind") != _KIND:
            raise PingLlmError(f"{path} is not a manifest of probe rows")
        if (version := value.get("format_version")) != FORMAT_VERSION:
            raise PingLlmError(
                f"{path} has format version {version!r}; this program reads {FORMAT_VERSION}. Prepare the rows again"
            )
        manifest = cls.parse(value, path)
        if manifest.fingerprint != value.get("fingerprint"):
            raise PingLlmError(f"{path} was changed by hand: its fingerprint does not match its content")
        return manifest


def index_fault(columns: Mapping[str, npt.NDArray[Any]], info: SplitInfo) -> str | None:
    """What is wrong with the index of these shards, if anything. Kernels read the shards where it says, unchecked."""
    shard_rows, shard_bytes = (np.array([vars(shard)[name] for shard in info.shards]) for name in ("rows", "bytes"))
    ends, totals = np.cumsum(shard_rows), np.zeros((2, len(info.shards)), dtype=np.int64)
    for begin in range(0, info.rows, _CHECKED_AT_ONCE):  # an index may be larger than the memory
        part = {name: column[begin : begin + _CHECKED_AT_ONCE] for name, column in columns.items()}
        row = np.arange(begin, begin + len(part["shard"]))
        shard = np.searchsorted(ends, row, side="right")
        count, offset, size, failed = (part[name].astype(np.int64) for name in ("count", "offset", "size", "failed"))
        unit, first, last = (part[name].astype(np.int64) for name in ("time_unit_us", "first_time_us", "last_time_us"))
        in_time = (first >= 0) & (first <= last) & (last < MAX_TIME_US) & np.isin(unit, TIME_UNITS_US)
        width = np.where((last - first) // np.maximum(unit, 1) < 2**32, 4, 8)
        body = count * (width + np.where(part["family"] == 6, 16, 4) + 4)
        is_near = (offset >= FIRST_CHUNK) & (offset < FARTHEST)
        sound = {
            "shard numbers": part["shard"] == shard,
            "positions": part["position"] == row - (ends - shard_rows)[shard],
            "families": np.isin(part["family"], list(ADDRESS_BYTES)),
            "times": in_time,
            "counts": (count > 0) & (failed <= count) & (part["long_gaps"] < part["count"]),
            "offsets": is_near & (physical(np.where(is_near, offset, 0) + size - 1) < shard_bytes[shard]),
            "sizes": size >= HEADER.itemsize + body,
        }
        for name, is_sound in sound.items():
            if not is_sound.all():
                return f"{name} that are out of range, first in row {begin + int(np.argmin(is_sound)):,}"
        for total, numbers in zip(totals, (count, failed), strict=True):
            np.add.at(total, shard, numbers)
    if totals.tolist() != [[vars(shard)[name] for shard in info.shards] for name in ("measurements", "failed")]:
        return "it counts other measurements than the manifest"
    return None


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
