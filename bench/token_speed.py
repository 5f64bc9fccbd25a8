"""Packed batches of tokenised documents, per second of CPU time: ours, Grain's packing as MaxText sets it up, and
`datasets` with the usual concatenation.

    ping-llm tokenize --config configs/text_arrayrecord.yml --output data/tokens
    python bench/token_speed.py 'data/tokens/*.bin'
    python bench/token_speed.py --open 100_000_000

All read the same documents, repeated `--copies` times under other numbers, in one process, in turn, three times; the
best of each counts. CPU time is that of the process and its threads. Grain and `datasets` get the documents from the
same mapped files; what they do not do (segments that tell documents apart, for `datasets`) is left out in their favour.
"""

import argparse
import glob
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grain
import numpy as np

from ping_llm.batches.batch import Stages
from ping_llm.batches.documents import DocumentsSpec, TokenDocuments, documents_spec, write_token_file
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import DataSpec
from ping_llm.core.console import out

BATCH, LENGTH = 64, 1024
HEADER = struct.Struct("<9sQBQQ")  # of an index in Megatron-LM's layout
Segments = np.ndarray[Any, Any]
"""Of a batch: 0 is padding."""


class Copies:
    """A random access source of documents."""

    def __init__(self, file: Path) -> None:
        self.documents = TokenDocuments([file])

    def __len__(self) -> int:
        return len(self.documents.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        size = self.documents.lengths[number : number + 1].astype(np.int64)
        return {"inputs": self.documents.read(np.array([number]), np.zeros(1, np.int64), size).astype(np.int32)}


def ours(file: Path) -> Iterator[Segments]:
    source = BatchSource(documents_spec([DocumentsSpec.of([file])], length=LENGTH, global_batch_size=BATCH))
    return (source[step]["inputs_segmentation"] for step in range(source.batches_per_epoch))


def packed_by_grain(file: Path) -> Iterator[np.ndarray[Any, Any]]:
    """As MaxText 0.2.5 does: documents cut at the sequence length, first-fit packing, batches, shifted targets."""
    dataset = grain.MapDataset.source(Copies(file)).shuffle(seed=0).map(lambda d: {"inputs": d["inputs"][:LENGTH]})
    packing = grain.experimental.FirstFitPackIterDataset(
        dataset.to_iter_dataset(grain.ReadOptions(0, 0)), length_struct={"inputs": LENGTH}, num_packing_bins=BATCH
    )
    shifted = packing.batch(BATCH, drop_remainder=True).map(
        lambda b: {**b, "targets": np.pad(b["inputs"][:, 1:], ((0, 0), (0, 1)))}
    )
    return (batch["inputs_segment_ids"] for batch in shifted)


def packed_by_datasets(file: Path) -> Iterator[np.ndarray[Any, Any]]:
    """Concatenated and cut, as in the examples of `transformers` (run_clm), read at random from an Arrow table."""
    import datasets

    copies = Copies(file)
    lists = {"input_ids": [copies[i]["inputs"] for i in range(len(copies))]}
    dataset = datasets.Dataset.from_dict(lists).shuffle(seed=0).with_format("numpy")
    sequences = _cut(dataset.iter(1000))
    while batch := list(islice(sequences, BATCH)):
        inputs = np.stack(batch)
        yield np.ones_like(inputs)


def _cut(chunks: Iterator[dict[str, Any]]) -> Iterator[np.ndarray[Any, Any]]:
    for chunk in chunks:
        tokens = np.fromiter(chain.from_iterable(chunk["input_ids"]), np.int32)
        yield from tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def tokens_per_cpu_second(
    batches: Callable[[Path], Iterator[np.ndarray[Any, Any]]], file: Path, seconds: float
) -> float:
    made = batches(file)
    next(made)
    began, until, tokens = time.process_time(), time.monotonic() + seconds, 0
    for segments in made:
        tokens += int((segments > 0).sum())
        if time.monotonic() > until:
            break
    return tokens / (time.process_time() - began)


def open_many(documents: int) -> None:
    """Opens an index of so many documents of simulated lengths, without any tokens, and plans the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        file, random = Path(folder, "many.bin"), np.random.default_rng(0)
        with file.with_suffix(".idx").open("wb") as index:
            index.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
            for begin in range(0, documents, 1_000_000):
                sizes = random.lognormal(6, 1.2, min(1_000_000, documents - begin)) + 1
                index.write(np.minimum(sizes, 200_000).astype("<u4").tobytes())
            index.truncate(HEADER.size + 20 * documents)  # where documents begin is not asked for
        with file.open("wb") as tokens:
            tokens.truncate(2 * 200_000 * documents)  # more than enough; nothing is written
        before, began, cpu = _memory(), time.monotonic(), time.process_time()
        source = DocumentsSpec.of([file]).open(DataSpec(sources=(), length=2048), Stages())
        opened_s = time.monotonic() - began
        source.pieces_of(range(1_000_000, 1_000_064))
        cpu_s, memory = time.process_time() - cpu, _memory() - before
        out.print(
            f"{documents:,} documents, {source.plan.tokens / 1e9:.0f} billion tokens, {memory:.2f} GB at the most"
        )
        out.print(f"opened in {opened_s:.2f} s, first batch planned after {cpu_s:.1f} s of CPU time")


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="?", help="pattern of token files")
    parser.add_argument("--open", type=int, metavar="DOCUMENTS", help="open an index of so many documents instead")
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    if options.open:
        return open_many(options.open)
    found = TokenDocuments([Path(file) for file in sorted(glob.glob(options.files))])  # noqa: PTH207
    sizes = found.lengths.astype(np.int64)
    tokens = found.read(np.arange(len(sizes)), np.zeros(len(sizes), np.int64), sizes)
    contenders = {"ours": ours, "Grain, first-fit": packed_by_grain, "datasets, cut": packed_by_datasets}
    best = dict.fromkeys(contenders, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "copies.bin")
        write_token_file(copied, np.split(tokens, np.cumsum(sizes)[:-1]) * options.copies, 1 << 20)
        for name, batches in [*contenders.items()] * 3:
            best[name] = max(best[name], tokens_per_cpu_second(batches, copied, options.seconds))
    for name, rate in best.items():
        out.print(
            f"{name:18} {rate / 1e6:8.2f} M tokens per CPU second   ours is {best['ours'] / rate:.1f} times as fast"
        )


if __name__ == "__main__":
    main()
