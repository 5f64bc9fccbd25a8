"""The last step of preparation: the shards get their names, their indexes are joined, and the manifest is written last.

It can be repeated after a kill at any point. Until the indexes are joined, a dataset that will be replaced stays.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ping_llm.console import progress
from ping_llm.errors import PingLlmError
from ping_llm.rows.manifest import MANIFEST, Manifest, SplitInfo
from ping_llm.rows.shard import INDEX_SCHEMA, ShardInfo, file_sha256
from ping_llm.rows.tasks import SPLITS, temporary_folder, write_index
from ping_llm.rows.work import REQUESTS_AT_ONCE, copy, deliver, write_json
from ping_llm.storage import Location
from ping_llm.storage.ledger import Ledger
from ping_llm.workers import map_in_order

DATASET_SUFFIXES: Final = frozenset({".arrayrecord", ".index"})


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the measurements came from and what became of them."""

    inputs: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    plan: str
    read: int
    dropped: dict[str, int]


def publish(
    shards: Location, output: Location, results: list[dict[str, Any]], account: Account, scratch: str | None
) -> Manifest:
    """Make the dataset in `output` of the shards that the tasks left, of which `results` tells."""
    with temporary_folder(scratch) as name:
        splits = {}
        sources: dict[str, Location] = {}
        """Of each file of the dataset."""
        for split in SPLITS:
            found = [ShardInfo.from_json(result[split]) for result in results if result[split]["rows"]]
            named = [replace(i, file=f"{split}-{n:05d}-of-{len(found):05d}.arrayrecord") for n, i in enumerate(found)]
            sources |= {new.file: shards / old.file for new, old in zip(named, found, strict=True)}
            path = Path(name) / f"{split}.index"
            join_indexes(_indexes(shards, found), sum(info.rows for info in found), path)
            splits[split] = SplitInfo(
                shards=tuple(named),
                index_file=path.name,
                index_bytes=path.stat().st_size,
                index_sha256=file_sha256(path),
            )
            sources[path.name] = shards / path.name
            deliver(path, sources[path.name])
        manifest = _manifest(splits, account)
    with _ledger(output) as ledger:
        (output / MANIFEST).delete()  # from here on the old dataset, if any, is no dataset
        for file in output.list():
            if file.suffix in DATASET_SUFFIXES and file.name not in sources:
                file.delete()
        _place(sources, output, manifest, ledger)
        write_json(output / MANIFEST, manifest.to_json())
    return manifest


def _ledger(output: Location) -> AbstractContextManager[Ledger | None]:
    """What need not be uploaded again: after a kill, or where an older dataset had the same shards."""
    if output.is_local:
        return nullcontext()
    known: dict[str, str] = {}
    with suppress(PingLlmError):  # there is none, or it is of another version
        known = {name: sha256 for name, (_, sha256) in Manifest.load(output).files.items()}
    return Ledger(output, known)


def _manifest(splits: dict[str, SplitInfo], account: Account) -> Manifest:
    written = sum(split.measurements for split in splits.values())
    dropped = sum(account.dropped.values())
    if written + dropped != account.read:
        raise PingLlmError(
            f"internal error: {account.read} measurements were read, but {written} written and {dropped} dropped; "
            "nothing was published"
        )
    return Manifest(
        splits=splits,
        options=account.options,
        inputs=account.inputs,
        read=account.read,
        written=written,
        dropped=account.dropped,
        plan=account.plan,
    )


def _place(sources: dict[str, Location], output: Location, manifest: Manifest, ledger: Ledger | None) -> None:
    def place(name: str) -> None:
        size, sha256 = manifest.files[name]
        if ledger is None:
            copy(sources[name], output / name)
        elif not ledger.has(name, size=size, sha256=sha256):
            copy(sources[name], output / name)
            ledger.add(name, sha256)

    with (
        progress("publishing", total=len(sources)) as advance,
        ThreadPoolExecutor(REQUESTS_AT_ONCE if output.is_remote else 1) as threads,
    ):
        for _ in map_in_order(threads, place, sorted(sources), window=2 * REQUESTS_AT_ONCE):
            advance()


def _indexes(shards: Location, infos: list[ShardInfo]) -> Iterator[pa.Table]:
    def read(info: ShardInfo) -> pa.Table:
        with (shards / info.file.replace(".arrayrecord", ".index")).open_input() as file:
            return pa.ipc.open_file(pa.BufferReader(file.readall())).read_all()

    with ThreadPoolExecutor(REQUESTS_AT_ONCE if shards.is_remote else 1) as threads:
        yield from map_in_order(threads, read, infos, window=2 * REQUESTS_AT_ONCE)


def join_indexes(parts: Iterable[pa.Table], rows: int, path: Path) -> None:
    """One index of all shards. Columns are gathered on disk: a large dataset's index may be larger than the memory."""
    if not rows:
        write_index(INDEX_SCHEMA.empty_table(), path)
        return
    columns = []
    for field in INDEX_SCHEMA:
        kind = np.dtype("V16") if field.name == "source" else np.dtype(field.type.to_pandas_dtype())
        columns.append(np.memmap(path.with_suffix(f".{field.name}"), dtype=kind, mode="w+", shape=rows))
    begin = 0
    for number, part in enumerate(parts):
        end = begin + len(part)
        for field, column in zip(INDEX_SCHEMA, columns, strict=True):
            for chunk in part[field.name].chunks[:1]:
                column[begin:end] = np.frombuffer(chunk.buffers()[1], dtype=column.dtype, count=len(part))
        columns[0][begin:end] = number
        begin = end
    arrays = [
        pa.Array.from_buffers(field.type, rows, [None, pa.py_buffer(column)])
        for field, column in zip(INDEX_SCHEMA, columns, strict=True)
    ]
    write_index(pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA), path)
