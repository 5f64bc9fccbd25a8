"""Any batch of any run, explained: which measurements of which rows made it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ping_llm.batches.loader import Loader
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataSpec, DataState, LoaderSettings
from ping_llm.contexts.plan import Mode
from ping_llm.contexts.source import RowSequences
from ping_llm.contexts.spec import RowsSpec
from ping_llm.core.measurements import format_address
from ping_llm.tokens import FIELD_ORDERS
from ping_llm.tokens.decode import as_json, decode
from ping_llm.tokens.decode import render as render_tokens


def global_batches(spec: DataSpec, first: int, last: int, *, hosts: int, workers: int) -> Iterator[Batch]:
    """Global batches of steps `first` to `last`, put together from what each host's own loader delivers."""
    start = replace(DataState.start(spec), next_step=first)
    with ExitStack() as stack:
        settings = [LoaderSettings(worker_count=workers, host=host, hosts=hosts) for host in range(hosts)]
        loaders = [stack.enter_context(Loader(spec, each, start, last_step=last - 1)) for each in settings]
        for parts in zip(*loaders, strict=True):
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rows_of_batch(spec: DataSpec, step: int) -> str:
    """Which rows a global batch was made from, in one line."""
    source = BatchSource(spec)
    parts = []
    for number, sequences, _ in source.shares(step, 0, spec.global_batch_size):
        opened, rows = _rows_of(source, number)
        used = np.unique(opened.segments(sequences).samples.row)
        shown = ", ".join(str(row) for row in used[:8]) + (", …" if len(used) > 8 else "")
        parts.append(f"{len(used)} rows of {rows.folder} ({rows.split}: {shown})")
    return " and ".join(parts)


def _rows_of(source: BatchSource, number: int) -> tuple[RowSequences, RowsSpec]:
    return cast(RowSequences, source.sources[number]), cast(RowsSpec, source.spec.sources[number])


def segments_of(opened: RowSequences, sequence: int) -> Iterator[dict[str, Any]]:
    """The segments of a sequence, each with its row, window, mode and measurements, decoded."""
    segments, rows = opened.segments([sequence]), opened.rows
    samples, packed = segments.samples, segments.packed
    parts = np.split(packed.tokens, np.cumsum(packed.sizes)[:-1])
    for i, tokens in zip(range(len(samples.row)), parts, strict=False):  # of no segment there is one empty part
        row, start, family = int(samples.row[i]), int(samples.start[i]), int(samples.family[i])
        mine = segments.sample == i
        yield {
            "shard": rows.info.shards[int(rows.column("shard")[row])].file,
            "position": int(rows.column("position")[row]),
            "row": row,
            "source": format_address(family, rows.column("source")[row].tobytes()),
            "sample": int(samples.number[i]),
            "mode": Mode(int(samples.mode[i])).name.lower(),
            "window": [start, start + int(samples.size[i])],
            "row_measurements": int(rows.column("count")[row]),
            "whole_row": bool(samples.whole[i]),
            "tokens": len(tokens),
            "measurement_indices": segments.position[mine].tolist(),
            "field_orders": ["".join(f[0] for f in FIELD_ORDERS[o]) for o in segments.field_order[mine].tolist()],
            "measurements": as_json(decode(tokens)),
            "token_ids": tokens.tolist(),
        }


def render(explained: dict[str, Any]) -> RenderableType:
    """A sequence for the eye: a heading for each segment, then its measurements in colour."""
    where = f"epoch {explained['epoch']}, block {explained['block']}" if "epoch" in explained else "beyond the data"
    title = f"step {explained['step']}, sequence {explained['sequence']} ({where})"
    parts: list[RenderableType] = [Text(title, style="bold")]
    for number, segment in enumerate(explained["segments"], 1):
        if "measurements" not in segment:
            begin, record = segment["begin"], f"{segment['file']} document {segment['document']:,}"
            heading = f"\nsegment {number}: {record}, tokens {begin:,}–{begin + segment['tokens']:,}"
            ids = " ".join(map(str, segment["token_ids"]))
            parts += [Text(heading, style="bold cyan"), Text(ids)]
            continue
        begin, end = segment["window"]
        window = "whole row" if segment["whole_row"] else f"window {begin:,}–{end:,} of {segment['row_measurements']:,}"
        used = f"{len(segment['measurement_indices'])} measurements, {segment['tokens']} tokens"
        record = f"{segment['shard']} record {segment['position']}"
        heading = f"\nsegment {number}: {segment['source']}  {segment['mode']}  {window}, {used}  ({record})"
        parts += [Text(heading, style="bold cyan"), render_tokens(segment["token_ids"])]
    if "padding" in explained:
        parts.append(Text(f"\n{explained['tokens']} tokens, {explained['padding']} of padding"))
    return Group(*parts)
