"""Measurements straight from RIPE Atlas JSON: one per result, its minimum RTT.

(`ping-llm import atlas` can also keep every packet.)
"""

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from ping_llm.sources.atlas.chunk import ParsedChunk, parse_chunk
from ping_llm.sources.atlas.report import Tally
from ping_llm.sources.atlas.stream import read_ahead, read_chunks
from ping_llm.sources.pieces import Piece, RawBatch


def read(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    tally = Tally(file=piece.path, strict=strict)
    waiting: list[ParsedChunk] = []
    first_row = 0
    for chunk in read_ahead(read_chunks(piece.path)):
        parsed = parse_chunk(chunk, each_packet=False)
        tally.add(parsed)
        waiting.append(parsed)
        if sum(p.batch.num_rows for p in waiting) >= batch_rows:
            yield _joined(waiting, first_row)
            first_row += sum(p.results for p in waiting)
            waiting = []
    tally.finish()
    if waiting:
        yield _joined(waiting, first_row)


def _joined(chunks: list[ParsedChunk], first_row: int) -> RawBatch:
    dropped: Counter[str] = Counter()
    for chunk in chunks:
        dropped.update(chunk.dropped)
    return RawBatch(batch=pa.concat_batches([c.batch for c in chunks]), first_row=first_row, dropped=dropped)
