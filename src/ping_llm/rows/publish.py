"""The last two steps of preparation: put the dataset together in the work folder, then move it into place."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ping_llm.errors import PingLlmError
from ping_llm.rows.manifest import MANIFEST, Manifest, SplitInfo
from ping_llm.rows.shard import INDEX_SCHEMA, ShardInfo, file_sha256
from ping_llm.rows.tasks import SPLITS, write_index, write_json

DATASET_SUFFIXES = frozenset({".arrayrecord", ".index"})


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the measurements came from and what became of them."""

    inputs: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    plan: str
    read: int
    dropped: dict[str, int]


def assemble(work: Path, shards: list[dict[str, Any]], account: Account) -> None:
    """Name the shards, join their indexes and write the manifest, all still inside the work folder."""
    dataset = work / "dataset"
    shutil.rmtree(dataset, ignore_errors=True)
    dataset.mkdir()
    splits = {split: _assemble_split(split, [s[split] for s in shards], work / "shards", dataset) for split in SPLITS}
    written = sum(split.measurements for split in splits.values())
    dropped = sum(account.dropped.values())
    if written + dropped != account.read:
        raise PingLlmError(
            f"internal error: {account.read} measurements were read, but {written} written and {dropped} dropped; "
            "nothing was published"
        )
    manifest = Manifest(
        splits=splits,
        options=account.options,
        inputs=account.inputs,
        read=account.read,
        written=written,
        dropped=account.dropped,
        plan=account.plan,
    )
    write_json(dataset / MANIFEST, manifest.to_json())


def _assemble_split(split: str, values: list[dict[str, Any]], shards: Path, dataset: Path) -> SplitInfo:
    found = [ShardInfo.from_json(value) for value in values if value["rows"]]
    infos, tables = [], [INDEX_SCHEMA.empty_table()]
    for number, info in enumerate(found):
        name = f"{split}-{number:05d}-of-{len(found):05d}.arrayrecord"
        os.link(shards / info.file, dataset / name)
        with pa.memory_map(str((shards / info.file).with_suffix(".index"))) as file:
            entries = pa.ipc.open_file(file).read_all()
        numbers = pa.repeat(pa.scalar(number, pa.uint32()), len(entries))
        tables.append(entries.set_column(0, INDEX_SCHEMA.field("shard"), numbers))
        infos.append(ShardInfo.from_json({**info.to_json(), "file": name}))
    path = dataset / f"{split}.index"
    write_index(pa.concat_tables(tables).combine_chunks(), path)
    return SplitInfo(
        shards=tuple(infos), index_file=path.name, index_bytes=path.stat().st_size, index_sha256=file_sha256(path)
    )


def publish(work: Path, output: Path) -> None:
    """Move the finished dataset into place. Can be repeated after a kill at any point of it."""
    dataset = work / "dataset"
    new = Manifest.load(dataset)
    (output / MANIFEST).unlink(missing_ok=True)  # from here on the old dataset, if any, is no dataset
    wanted = {name for split in new.splits.values() for name in split.files}
    for path in output.iterdir():
        if path.suffix in DATASET_SUFFIXES and path.name not in wanted:
            path.unlink()
    for name in sorted(wanted):
        if (dataset / name).exists():
            (dataset / name).replace(output / name)
    (dataset / MANIFEST).replace(output / MANIFEST)
    shutil.rmtree(work, ignore_errors=True)
