"""MosaicML Streaming: MDS shards made from the same rows, packed in the collate function.

A streaming dataset knows of a sample only its number, so each context is a sample of its own, with its row beside it. A
batch is packed from a fixed number of contexts: so it is a function of its samples alone, which is what the library's
resuming needs.
"""

from pathlib import Path
from typing import Any

import torch

from peer_common import (
    Batch,
    SampleRecords,
    Task,
    Tokens,
    contexts_per_batch,
    draw_context,
    generator,
    pack_fixed,
)
from peer_torch import TorchLoader, tensors, worker_options


def _import_streaming() -> Any:
    """Streaming imports torchvision, whose ordinary build cannot be imported beside a CPU-only torch: it describes
    operators of a library that it could not load. Declaring them is enough; nothing here calls them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _import_streaming.declared = declared  # type: ignore[attr-defined]  # it undoes its work when it is dropped
    import streaming

    return streaming


streaming = _import_streaming()


def shards(task: Task) -> Path:
    return Path(task.scratch) / "mds"


def prepare(task: Task) -> None:
    """Write the shards, uncompressed."""
    records = SampleRecords(task)
    with streaming.MDSWriter(out=str(shards(task)), columns={"row": "bytes"}) as writer:
        for sample in range(len(records)):
            writer.write({"row": records[sample]})


class Contexts(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
    def __init__(self, task: Task, batch_size: int) -> None:
        super().__init__(local=str(shards(task)), shuffle=True, shuffle_seed=task.seed, batch_size=batch_size)
        self._task = task

    def __getitem__(self, sample: int) -> Tokens:
        rng = generator(self._task.seed + self.next_epoch, int(sample))
        return draw_context(super().__getitem__(sample)["row"], rng, self._task.length)


class Pack:
    """Collate: pack, and keep to the shape."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, contexts: list[Tokens]) -> Batch:
        return tensors(pack_fixed(contexts, self._task.sequences, self._task.length))


class CountingLoader(streaming.StreamingDataLoader):  # type: ignore[misc, name-defined]
    def _get_batch_size(self, batch: Batch) -> int:
        """Samples in a batch. As it is, the library counts packed sequences, and would resume at the wrong position."""
        return self.batch_size


def packing(task: Task, workers: int, state: Any, *, resumable: bool) -> TorchLoader:
    batch_size = contexts_per_batch(task)
    loader = CountingLoader(
        Contexts(task, batch_size),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=Pack(task),
        drop_last=True,
        **worker_options(workers),
    )
    return TorchLoader(loader, state)
