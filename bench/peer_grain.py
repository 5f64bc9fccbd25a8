"""Plain Grain, one element for each context, in two forms.

`packing` packs with Grain's own first-fit inside the workers, which is the fast way. `elastic` packs a fixed number of
contexts into each batch, so that a batch is an element of a `MapDataset` and Grain's `ElasticIterator` can be used; its
state is one number.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from grain import experimental

from peer_common import (
    BINS,
    PREFETCH,
    Batch,
    SampleRecords,
    Task,
    Tokens,
    complete,
    contexts_per_batch,
    draw_context,
    pack_fixed,
)

# The default (16 threads, a buffer of 500) costs more than it saves: the work holds Python's lock.
_READ_OPTIONS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class GrainLoader:
    def __init__(self, iterator: Any, state: Any) -> None:
        self._iterator = iterator
        if state is not None:
            iterator.set_state(state)

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        if batch["inputs"].ndim == 3:  # elastic: a batch of one batch
            batch = {name: array[0] for name, array in batch.items()}
        return batch

    def state(self) -> Any:
        return self._iterator.get_state()

    def close(self) -> None:
        self._iterator.close()


def _contexts(task: Task) -> grain.MapDataset[Any]:
    if not flags.FLAGS.is_parsed():  # Grain's worker processes ask for absl flags
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.source(SampleRecords(task)).seed(task.seed).shuffle().repeat()
    return dataset.random_map(Draw(task))


class Draw:
    def __init__(self, task: Task) -> None:
        self._length = task.length

    def __call__(self, record: bytes, rng: np.random.Generator) -> dict[str, Tokens]:
        return {"inputs": draw_context(record, rng, self._length)}


def finish(packed: Batch) -> Batch:
    """Grain's names and types to those of the batch contract."""
    return complete(packed["inputs"].astype(np.int32), packed["inputs_segment_ids"], packed["inputs_positions"])


def packing(task: Task, workers: int, state: Any, *, resumable: bool) -> GrainLoader:
    dataset = experimental.FirstFitPackIterDataset(
        _contexts(task).to_iter_dataset(_READ_OPTIONS),
        length_struct={"inputs": task.length},
        num_packing_bins=BINS,
        shuffle_bins=False,
    )
    dataset = dataset.batch(task.sequences, drop_remainder=True).map(finish)
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCH)
    return GrainLoader(iter(dataset.mp_prefetch(options)), state)


class Pack:
    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, elements: Sequence[dict[str, Tokens]]) -> Batch:
        return pack_fixed([element["inputs"] for element in elements], self._task.sequences, self._task.length)


def elastic(task: Task, workers: int, state: Any, *, resumable: bool) -> GrainLoader:
    batches = _contexts(task).batch(contexts_per_batch(task), batch_fn=Pack(task))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCH) if workers else None
    iterator = experimental.ElasticIterator(
        batches,
        global_batch_size=1,
        shard_options=grain.sharding.NoSharding(),
        read_options=_READ_OPTIONS,
        multiprocessing_options=options,
    )
    return GrainLoader(iter(iterator), state)
