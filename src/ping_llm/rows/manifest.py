"""The manifest: what a prepared dataset consists of. It is written last, so a folder without one is not a dataset."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from ping_llm.errors import PingLlmError
from ping_llm.rows.format import FORMAT_VERSION
from ping_llm.rows.shard import ShardInfo
from ping_llm.storage import Location, MissingError, locate

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
