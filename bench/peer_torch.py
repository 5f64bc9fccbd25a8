"""PyTorch's DataLoader in its two usual forms: every context padded to the length, and greedy packing.

Speed is that of the plain `DataLoader`, which has no state. For resuming, the same datasets are given to torchdata's
`StatefulDataLoader`, which is made for that and is a little slower.
"""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from peer_common import BINS, PREFETCH, Batch, FirstFit, SampleRecords, Task, Tokens, draw_context, generator, lay_out


class TorchLoader:
    """Epoch after epoch of a `DataLoader`."""

    def __init__(self, loader: Any, state: Any) -> None:
        self._loader = loader
        if state is not None:
            loader.load_state_dict(state)
        self._batches = self._endless()

    def _endless(self) -> Generator[Batch, None, None]:
        while True:
            yield from self._loader

    def __next__(self) -> Batch:
        return next(self._batches)

    def state(self) -> Any:
        return self._loader.state_dict()

    def close(self) -> None:
        self._batches.close()
        del self._loader  # ends the workers


def _loader(dataset: Any, workers: int, resumable: bool, **options: Any) -> Any:
    kind = StatefulDataLoader if resumable else DataLoader
    return kind(dataset, num_workers=workers, **options, **worker_options(workers))


def worker_options(workers: int) -> dict[str, Any]:
    return {"persistent_workers": True, "prefetch_factor": PREFETCH} if workers else {}


def tensors(batch: Batch) -> Batch:
    """Tensors go from process to process through shared memory, arrays through a pipe."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


class Contexts(Dataset[Tokens]):
    """One context for each sample."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._records = SampleRecords(task)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, sample: int) -> Tokens:
        return draw_context(self._records[sample], generator(self._task.seed, sample), self._task.length)


class Pad:
    """Collate: a sequence for each context."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, contexts: list[Tokens]) -> Batch:
        return tensors(lay_out([[tokens] for tokens in contexts], self._task.length))


def padding(task: Task, workers: int, state: Any, *, resumable: bool) -> TorchLoader:
    loader = _loader(
        Contexts(task),
        workers,
        resumable,
        batch_size=task.sequences,
        shuffle=True,
        generator=torch.Generator().manual_seed(task.seed),
        collate_fn=Pad(task),
        drop_last=True,
    )
    return TorchLoader(loader, state)


class PackedBatches(IterableDataset[Batch]):
    """Batches of packed contexts. Each worker takes every n-th sample of the epoch's order and packs on its own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._records = SampleRecords(task)
        self._first = 0
        self._given = 0

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = np.random.default_rng(self._task.seed).permutation(len(self._records))[number::workers]
        skip, at = self._given, self._first
        packing = FirstFit(BINS, self._task.length)
        while at < len(mine):
            sample = int(mine[at])
            tokens = draw_context(self._records[sample], generator(self._task.seed, sample), self._task.length)
            at += 1
            if packing.add(tokens):
                continue
            for given, batch in enumerate(packing.batches(self._task.sequences)):
                if given < skip:
                    continue
                self._given = given + 1
                yield tensors(batch)
            skip = 0
            self._first, self._given = at - 1, 0  # the context that found no room opens the next group
            packing = FirstFit(BINS, self._task.length)
            packing.add(tokens)
        self._first = 0

    def state_dict(self) -> dict[str, int]:
        return {"first": self._first, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first, self._given = state["first"], state["given"]


def packing(task: Task, workers: int, state: Any, *, resumable: bool) -> TorchLoader:
    return TorchLoader(_loader(PackedBatches(task), workers, resumable, batch_size=None), state)
