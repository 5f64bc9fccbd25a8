"""Packed batches of documents, per second of CPU time: ours, Grain's packing as MaxText sets it up, and `datasets`
with the usual concatenation; of text, ours, MaxText's own Grain pipeline, and the tokenizer alone.

    ping-llm tokenize --config configs/text_arrayrecord.yml --output data/tokens
    python bench/token_speed.py 'data/tokens/*.bin'
    python bench/token_speed.py --text '../shared/data/c4-minimal/c4/en/3.0.1/c4-train*' --tokenizer tokenizer.model
    python bench/token_speed.py --open 100_000_000

All read the same documents, repeated `--copies` times under other numbers, in one process, in turn, three times; the
best of each counts. CPU time is that of the process and its threads. Grain and `datasets` get tokenised documents from
the same mapped files; what they do not do (segments that tell documents apart, for `datasets`) is left out in their
favour. `--text` needs the environment of `make test-maxtext`; without MaxText, only the others are measured.
"""

import argparse
import glob
import importlib
import importlib.util
import logging
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import grain
import numpy as np

from ping_llm.batches.batch import Stages
from ping_llm.batches.documents import DocumentsSpec, TokenDocuments, documents_spec, write_token_file
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import DataSpec
from ping_llm.config import Config
from ping_llm.core.console import out
from ping_llm.data.documents import Documents
from ping_llm.data.registry import make_train_loader
from ping_llm.data.tokenizer import tokenizer_of

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


# Text.


def ours_of_text(config: Config) -> Iterator[Segments]:
    with make_train_loader(config) as loader:
        for batch in loader:
            yield batch["inputs_segmentation"]


def alone(config: Config, *, together: int) -> Iterator[Segments]:
    """So many documents at a time through the tokenizer, and nothing else. The texts are there already."""
    documents = Documents(sorted(Path(config.grain_train_files).parent.glob("0-*")), "text")
    texts, tokenizer = documents.texts(np.arange(len(documents))), tokenizer_of(config)
    for first in cycle(range(0, len(texts), together)):
        tokens, _ = tokenizer.encode(texts[first : first + together])
        yield np.ones(len(tokens), np.int8)


def packed_by_maxtext(config: Config, *, truncates: bool) -> Iterator[Segments]:
    """MaxText's pipeline as its trainer makes it, without worker processes, up to the arrays in memory.

    By default it truncates: what is behind the sequence length is tokenised and thrown away.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    modules = ("maxtext.configs.pyconfig", "maxtext.input_pipeline.grain_data_processing", "maxtext.utils.globals")
    pyconfig, pipeline, paths = map(importlib.import_module, modules)
    keys = {
        "hardware": "cpu", "skip_jax_distributed_system": True, "log_config": False, "run_name": "bench",
        "dataset_type": "grain", "grain_file_type": "arrayrecord", "grain_train_files": config.grain_train_files,
        "tokenizer_path": config.tokenizer_path, "tokenizer_type": "sentencepiece", "vocab_size": 32768,
        "per_device_batch_size": BATCH, "max_target_length": LENGTH, "num_epoch": 10, "grain_worker_count": 0,
        "use_truncation": truncates,
    }  # fmt: skip
    base = Path(paths.MAXTEXT_CONFIGS_DIR, "base.yml")
    theirs = pyconfig.initialize(["", str(base), *(f"{name}={value}" for name, value in keys.items())])
    dataset = pipeline.get_datasets(
        theirs.grain_train_files, "arrayrecord", theirs.enable_data_shuffling, theirs.data_shuffle_seed,
        theirs.grain_shuffle_buffer_size, theirs.num_epoch, 0, 1, theirs.grain_worker_count, theirs.grain_num_threads,
        theirs.grain_prefetch_buffer_size, theirs.grain_data_source_max_workers,
    )  # fmt: skip
    batches = pipeline.pretrain_preprocessing_pipeline(dataset, theirs, theirs.train_data_columns, True, 0, 1)
    return (batch["inputs_segmentation"] for batch in batches)


def tokens_per_cpu_second(batches: Callable[[], Iterator[Segments]], seconds: float) -> float:
    made = batches()
    next(made)
    began, until, tokens = time.process_time(), time.monotonic() + seconds, 0
    for segments in made:
        tokens += int((segments > 0).sum())
        if time.monotonic() > until:
            break
    return tokens / (time.process_time() - began)


def compare(contenders: Mapping[str, Callable[[], Iterator[Segments]]], seconds: float) -> None:
    best = dict.fromkeys(contenders, 0.0)
    for name, batches in [*contenders.items()] * 3:
        best[name] = max(best[name], tokens_per_cpu_second(batches, seconds))
    for name, rate in best.items():
        out.print(f"{name:22} {rate / 1e6:7.2f} M tokens per CPU second, ours {best['ours'] / rate:.2f} times")


def open_many(documents: int) -> None:
    """Opens an index of so many documents of simulated lengths, without any tokens, and plans the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        file, random, tokens = Path(folder, "many.bin"), np.random.default_rng(0), 0
        with file.with_suffix(".idx").open("wb") as index:
            index.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
            for begin in range(0, documents, 1_000_000):
                sizes = random.lognormal(6, 1.2, min(1_000_000, documents - begin)) + 1
                lengths = np.minimum(sizes, 200_000).astype("<u4")
                tokens += int(lengths.sum())
                index.write(lengths.tobytes())
            index.truncate(HEADER.size + 20 * documents)  # where documents begin is not asked for
        with file.open("wb") as opened:
            opened.truncate(2 * tokens)  # nothing is written
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
    parser.add_argument("--text", metavar="PATTERN", help="ArrayRecord files of text")
    parser.add_argument("--tokenizer", metavar="FILE", help="the SentencePiece model for --text")
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    if options.open:
        return open_many(options.open)
    with tempfile.TemporaryDirectory() as folder:
        if options.text:
            return compare_text(Path(folder), options)
        found = TokenDocuments([Path(file) for file in sorted(glob.glob(options.files))])  # noqa: PTH207
        sizes = found.lengths.astype(np.int64)
        tokens = found.read(np.arange(len(sizes)), np.zeros(len(sizes), np.int64), sizes)
        copied = Path(folder, "copies.bin")
        write_token_file(copied, np.split(tokens, np.cumsum(sizes)[:-1]) * options.copies, 1 << 20)
        contenders = {"ours": ours, "Grain, first-fit": packed_by_grain, "datasets, cut": packed_by_datasets}
        compare({name: partial(batches, copied) for name, batches in contenders.items()}, options.seconds)


def compare_text(folder: Path, options: argparse.Namespace) -> None:
    (folder / "files").mkdir()
    for file in map(Path, glob.glob(options.text)):  # noqa: PTH207
        for copy in range(options.copies):
            (folder / "files" / f"{copy}-{file.name}").symlink_to(file.resolve())
    config = Config(
        dataset_type="grain",
        grain_train_files=f"{folder}/files/*",
        tokenizer_path=options.tokenizer,
        per_device_batch_size=float(BATCH),
        max_target_length=LENGTH,
        grain_worker_count=0,
        data_cache_dir=f"{folder}/cache",
    )
    began, cpu = time.monotonic(), time.process_time()
    with make_train_loader(config.replace(grain_worker_count=1)):
        pass
    out.print(f"lengths found out in {time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of them here")
    contenders = {
        "ours": partial(ours_of_text, config),
        "tokenizer alone": partial(alone, config, together=1),
        "tokenizer alone, 256": partial(alone, config, together=256),
    }
    if importlib.util.find_spec("maxtext"):
        logging.disable(logging.INFO)
        contenders |= {
            "MaxText": partial(packed_by_maxtext, config, truncates=True),
            "MaxText, no truncation": partial(packed_by_maxtext, config, truncates=False),
        }
    compare(contenders, options.seconds)


if __name__ == "__main__":
    main()
