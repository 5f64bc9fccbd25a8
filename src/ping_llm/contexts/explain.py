"""Batches for people: which rows made one, what is in a sequence, and the same batches from any number of hosts."""

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
from ping_llm.contexts.source import RowSequences
from ping_llm.tokens.decode import render as render_tokens


def global_batches(spec: DataSpec, first: int, last: int, *, hosts: int, workers: int) -> Iterator[Batch]:
    """The global batches from step `first` up to `last`, put together from each host's own loader."""
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
        opened = cast(RowSequences, source.sources[number])
        used = np.unique(opened.segments(sequences).samples.row)
        shown = ", ".join(str(row) for row in used[:8]) + (", …" if len(used) > 8 else "")
        parts.append(f"{len(used)} rows of {opened.rows.folder} ({opened.rows.split}: {shown})")
    return " and ".join(parts)


def render(explained: dict[str, Any]) -> RenderableType:
    """A sequence for the terminal: a heading for each segment, then its measurements in colour."""
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
