"""Sequences of probe rows: any of a plan by its number, as tokens or explained measurement by measurement."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.batches.loader import Loader
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataSpec, DataState, LoaderSettings
from ping_llm.contexts.plan import Mode, RowFacts, SequencePlan
from ping_llm.contexts.segments import Segments, write_segments
from ping_llm.contexts.spec import RowsSpec
from ping_llm.core.measurements import format_address
from ping_llm.rows.dataset import CorruptRowError, RowSet
from ping_llm.rows.reader import RowReader
from ping_llm.tokens import FIELD_ORDERS
from ping_llm.tokens.decode import as_json, decode
from ping_llm.tokens.decode import render as render_tokens


class RowSequences:
    """The sequences of a plan, made from the rows that it was made for."""

    def __init__(
        self, rows: RowSet, plan: SequencePlan, stages: Stages | None = None, *, skip_corrupt_rows: bool = False
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.stages = stages or Stages()
        self.skip_corrupt_rows = skip_corrupt_rows
        self.left_out: dict[int, str] = {}  # damaged rows, with what is wrong with them
        self._reader = RowReader(rows)

    @classmethod
    def of(cls, spec: RowsSpec, seed: int, stages: Stages) -> Self:
        rows = RowSet(spec.folder, spec.split)
        plan = SequencePlan(RowFacts.of(rows), seed, spec.contexts)
        return cls(rows, plan, stages, skip_corrupt_rows=spec.skip_corrupt_rows)

    @property
    def sequences_per_epoch(self) -> int:
        return self.plan.sequences_per_epoch

    def packed(self, sequences: Sequence[int]) -> PackedTokens:
        return self.segments(sequences).packed

    def max_segments(self, sequences: range) -> int:
        stride = self.plan.sequences_per_block
        blocks = {self.plan.locate(sequence)[:2] for sequence in (*sequences[::stride], sequences[-1])}
        return int(max(np.diff(self.plan.block(*block).first).max() for block in blocks))

    def explain(self, sequence: int) -> dict[str, Any]:
        epoch, block, index = self.plan.locate(sequence)
        return {
            "rows": str(self.rows.folder),
            "split": self.rows.split,
            "epoch": epoch,
            "block": block,
            "index_in_block": index,
            "segments": list(self._explained(sequence)),
        }

    def _explained(self, sequence: int) -> Iterator[dict[str, Any]]:
        """The segments of a sequence, each with its row, window, mode and measurements, decoded."""
        segments, rows = self.segments([sequence]), self.rows
        samples, packed = segments.samples, segments.packed
        parts = np.split(packed.tokens, np.cumsum(packed.sizes)[:-1])
        for i, tokens in zip(range(len(samples.row)), parts, strict=False):  # without segments there is one empty part
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

    def segments(self, sequences: Sequence[int]) -> Segments:
        with self.stages("plan"):
            samples, sequence = self.plan.samples_of(sequences)
        while True:
            if self.left_out:
                sound = ~np.isin(samples.row, list(self.left_out))
                samples, sequence = samples.take(sound), sequence[sound]
            try:
                return write_segments(samples, sequence, self._reader, self.plan.settings, self.stages)
            except CorruptRowError as error:
                if not self.skip_corrupt_rows:
                    raise
                self.left_out[error.row] = str(error)


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
