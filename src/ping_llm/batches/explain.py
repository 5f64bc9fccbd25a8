"""Any batch of any run, explained: its digest, and which measurements of which rows made it."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ping_llm.batches.batch import Batch, BatchBuilder, expand
from ping_llm.batches.contexts import Mode
from ping_llm.batches.loader import Loader, LoaderSettings
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import DataSpec, DataState
from ping_llm.core.addresses import format_address
from ping_llm.tokens.decode import as_json, decode
from ping_llm.tokens.decode import render as render_tokens
from ping_llm.tokens.encode import FIELD_ORDERS


def digest(batch: Batch) -> str:
    """A digest of all arrays of a batch: equal if and only if every number in them is."""
    result = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        result.update(f"{name} {array.dtype} {array.shape} ".encode())
        result.update(array.tobytes())
    return result.hexdigest()


def global_batches(spec: DataSpec, first: int, last: int, *, hosts: int, workers: int) -> Iterator[Batch]:
    """Global batches of steps `first` to `last`, put together from what each host's own loader delivers."""
    start = replace(DataState.start(spec), next_step=first)
    loaders = [
        Loader(spec, LoaderSettings(worker_count=workers, host=host, hosts=hosts), start, last_step=last - 1)
        for host in range(hosts)
    ]
    try:
        for parts in zip(*loaders, strict=True):
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    finally:
        for loader in loaders:
            loader.close()


def one_batch(spec: DataSpec, step: int) -> Batch:
    """A global batch by itself, without going through those before it."""
    packed = BatchSource(spec).packed(step, 0, spec.global_batch_size)
    return expand(packed, spec.global_batch_size, spec.contexts.length)


def rows_of_batch(spec: DataSpec, step: int) -> str:
    """Which rows a global batch was made from, in one line."""
    source = BatchSource(spec)
    first = step * spec.global_batch_size
    parts = []
    for number, (builder, rows) in enumerate(zip(source.builders, spec.rows, strict=True)):
        places = [source.locate(first + i) for i in range(spec.global_batch_size)]
        mine = [place[1] for place in places if place and place[0] == number]
        if mine:
            used = np.unique(builder.segments(mine).units.row)
            shown = ", ".join(str(row) for row in used[:8]) + (", …" if len(used) > 8 else "")
            parts.append(f"{len(used)} rows of {rows.folder} ({rows.split}: {shown})")
    return " and ".join(parts)


def explain_sequence(source: BatchSource, step: int, sequence: int) -> dict[str, Any]:
    """Where one sequence of a batch comes from: each segment with its row, window, mode and measurements, decoded."""
    place = source.locate(step * source.spec.global_batch_size + sequence)
    explained: dict[str, Any] = {"step": step, "sequence": sequence, "segments": []}
    if place is None:
        return explained
    number, local = place
    builder, rows = source.builders[number], source.spec.rows[number]
    epoch, block, slot = builder.plan.locate(local)
    explained |= {"rows": rows.folder, "split": rows.split, "epoch": epoch, "block": block, "place_in_block": slot}
    explained["segments"] = list(_segments(builder, local))
    explained["tokens"] = sum(segment["tokens"] for segment in explained["segments"])
    explained["padding"] = source.spec.contexts.length - explained["tokens"]
    return explained


def _segments(builder: BatchBuilder, sequence: int) -> Iterator[dict[str, Any]]:
    segments = builder.segments([sequence])
    packed, index, row_set = segments.packed, segments.units, builder.rows
    ends = np.cumsum(packed.sizes)
    for i in range(len(index)):
        row = int(index.row[i])
        mine = segments.unit == i
        tokens = packed.tokens[ends[i] - packed.sizes[i] : ends[i]]
        family = int(index.family[i])
        yield {
            "shard": row_set.info.shards[int(row_set.column("shard")[row])].file,
            "position": int(row_set.column("position")[row]),
            "row": row,
            "source": format_address(family, row_set.column("source")[row].tobytes()),
            "unit": int(index.number[i]),
            "mode": Mode(int(index.mode[i])).name.lower(),
            "window": [int(index.start[i]), int(index.start[i] + index.size[i])],
            "row_measurements": int(row_set.column("count")[row]),
            "whole_row": bool(index.whole[i]),
            "tokens": int(packed.sizes[i]),
            "measurement_indices": segments.position[mine].tolist(),
            "field_orders": ["".join(f[0] for f in FIELD_ORDERS[o]) for o in segments.field_order[mine].tolist()],
            "measurements": as_json(decode(tokens)),
            "token_ids": tokens.tolist(),
        }


def render(explained: dict[str, Any]) -> RenderableType:
    """A sequence for the eye: a heading for each segment, then its measurements in colour."""
    parts: list[RenderableType] = []
    where = f"epoch {explained['epoch']}, block {explained['block']}" if "epoch" in explained else "beyond the data"
    parts.append(Text(f"step {explained['step']}, sequence {explained['sequence']} ({where})", style="bold"))
    for number, segment in enumerate(explained["segments"], 1):
        begin, end = segment["window"]
        window = "whole row" if segment["whole_row"] else f"window {begin:,}–{end:,} of {segment['row_measurements']:,}"
        used = f"{len(segment['measurement_indices'])} measurements, {segment['tokens']} tokens"
        place = f"{segment['shard']} record {segment['position']}"
        heading = f"\nsegment {number}: {segment['source']}  {segment['mode']}  {window}, {used}  ({place})"
        parts.append(Text(heading, style="bold cyan"))
        parts.append(render_tokens(segment["token_ids"]))
    if "padding" in explained:
        parts.append(Text(f"\n{explained['tokens']} tokens, {explained['padding']} of padding"))
    return Group(*parts)
