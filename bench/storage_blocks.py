"""What training fetches for a batch when its rows do not fit the cache, by the size of the pieces that are cached.

    python bench/storage_blocks.py ROWS [--copies 100] [--cache-share 0.1] [--batches 600]

Takes the rows that real batches ask for, spreads them over `--copies` copies of the dataset, and counts requests and
bytes of a cache with least-recently-used eviction. Nothing is fetched: the counts do not depend on the machine.
"""

import argparse
from collections import OrderedDict

import numpy as np

from ping_llm.contexts.plan import RowFacts, SequencePlan
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.console import out
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import RowSet

BATCH = 64
SIZES = {"whole shard": 0, "1 MiB": 1 << 20, "256 KiB": 1 << 18, "64 KiB": 1 << 16, "16 KiB": 1 << 14}
LATENCY_S, AT_ONCE, BYTES_PER_S = 0.03, 32, 1e9

Piece = tuple[int, int]


def asked_rows(plan: SequencePlan, step: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Distinct rows of a batch."""
    parts = []
    for sequence in range(step * BATCH, (step + 1) * BATCH):
        epoch, number, index = plan.locate(sequence)
        block = plan.block(epoch, number)
        parts.append(block.samples.row[int(block.first[index]) : int(block.first[index + 1])])
    return np.unique(np.concatenate(parts)).astype(np.int64)


def simulate(wanted: list[set[Piece]], size_of: dict[int, int], block: int, limit: float) -> tuple[float, float]:
    """Requests and bytes a batch, of the later half of the batches. Neighbouring blocks come in one request."""
    cached: OrderedDict[Piece, int] = OrderedDict()
    used, counts = 0, []
    for pieces in wanted:
        missing = sorted(pieces - cached.keys())
        requests = sum((shard, number - 1) not in pieces for shard, number in missing) if block else len(missing)
        for piece in pieces:
            if piece not in cached:
                cached[piece] = block or size_of[piece[0]]
                used += cached[piece]
            cached.move_to_end(piece)
        counts.append((requests, sum(cached[piece] for piece in missing)))
        while used > limit:
            used -= cached.popitem(last=False)[1]
    requests_mean, bytes_mean = np.mean(counts[len(counts) // 2 :], axis=0)
    return float(requests_mean), float(bytes_mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--cache-share", type=float, default=0.1)
    parser.add_argument("--batches", type=int, default=600)
    options = parser.parse_args()
    rows = RowSet(options.rows)
    plan = SequencePlan(RowFacts.of(rows), 0, ContextSettings())
    offset, size = rows.column("offset").astype(np.int64), rows.column("size").astype(np.int64)
    begin, end, shard = layout.physical(offset), layout.physical(offset + size - 1) + 1, rows.column("shard")
    shards = len(rows.info.shards)
    size_of = {n: rows.info.shards[n % shards].bytes for n in range(shards * options.copies)}
    total = sum(size_of.values())
    random = np.random.default_rng(0)
    asked = [asked_rows(plan, step) for step in range(options.batches)]
    copies = [random.integers(0, options.copies, len(chosen)) for chosen in asked]
    out.print(f"{total / 1e9:.1f} GB, {np.mean([len(a) for a in asked]):.0f} rows a batch")
    for name, block in SIZES.items():
        wanted = []
        for chosen, copy in zip(asked, copies, strict=True):
            pieces: set[Piece] = set()
            for row, number in zip(chosen.tolist(), (shard[chosen] + shards * copy).tolist(), strict=True):
                blocks = range(begin[row] // block, (end[row] - 1) // block + 1) if block else (0,)
                pieces.update((number, at) for at in blocks)
            wanted.append(pieces)
        requests, data = simulate(wanted, size_of, block, total * options.cache_share)
        seconds = max(requests * LATENCY_S / AT_ONCE, data / BYTES_PER_S)
        out.print(f"{name:12s} {requests:6.0f} requests {data / 1e6:8.1f} MB a batch, at least {seconds * 1e3:5.0f} ms")


if __name__ == "__main__":
    main()
