"""What MaxText asks for: an iterator over global batches whose place in the data its checkpoints store and restore."""

import json
import logging
import weakref
from collections.abc import Sequence
from typing import Any, Final, Self

import jax
import numpy as np
from grain.experimental import ElasticIterator

from ping_llm.config import Config
from ping_llm.engines.maxtext.checks import ARRAYS, check_batch, check_segments
from ping_llm.engines.maxtext.keys import NETWORK_KEYS
from ping_llm.engines.maxtext.shares import Share, share_of
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.batch import Batch
from ping_llm.pipeline.factory import make_eval_loader, make_train_loader
from ping_llm.pipeline.loader import Loader
from ping_llm.pipeline.source import BatchSource
from ping_llm.pipeline.spec import DataState

_STATE: Final = "ping_llm_data_state"

_SAME_IN_MAXTEXT: Final = (
    "data_shuffle_seed",
    "max_target_length",
    "eval_steps",
    "grain_worker_count",
    "grain_per_worker_buffer_size",
    "grain_ram_budget_mb",
)
"""Keys that MaxText has too, with the same meaning."""

_log = logging.getLogger(__name__)
_open: "weakref.WeakSet[NetworkIterator]" = weakref.WeakSet()


class LocalBatches(ElasticIterator):  # type: ignore[misc]
    """This process's part of each batch, with a state that fits any number of processes and workers.

    It is one of Grain's elastic iterators by name only: MaxText stores the state of such an iterator once for all
    processes, and hands it to however many there are at the next start.
    """

    def __init__(self, loader: Loader, *, steps: int | None, allow_data_change: bool) -> None:
        super(ElasticIterator, self).__init__()
        self.loader = loader
        self._start = loader.state()
        self._steps = steps
        self._allow_data_change = allow_data_change

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._steps is not None and self.loader.state().next_step >= self._steps:
            raise StopIteration
        return next(self.loader)

    def get_state(self) -> dict[str, Any]:
        return {_STATE: json.loads(self.loader.state().to_json())}

    def set_state(self, state: dict[str, Any]) -> None:
        if _STATE not in state:
            raise PingLlmError(f"the checkpoint was written with another dataset_type: its data state is {state}")
        found = DataState.from_json(json.dumps(state[_STATE]))
        self.loader.restore(found, allow_change=self._allow_data_change)
        _log.info("network data goes on with batch %d", found.next_step)

    def rewind(self) -> None:
        if self.loader.state() != self._start:
            self.loader.restore(self._start)

    def close(self) -> None:
        self.loader.close()


class NetworkIterator:
    """Global batches, checked. MaxText saves and restores `local_iterator`."""

    def __init__(self, local: LocalBatches, share: Share, config: Any, *, pads_at_the_end: bool) -> None:
        self.local_iterator = local
        self._share = share
        self._vocabulary = config.vocab_size
        self._most_segments = config.max_segments_per_seq if config.attention == "cudnn_flash_te" else None
        self._pads_at_the_end = pads_at_the_end
        self.failure: Exception | None = None
        """What went wrong. MaxText takes any error of an iterator for the end of the data, and ends in peace."""
        _open.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        try:
            batch = self._whole(next(self.local_iterator))
        except StopIteration:
            if not self._pads_at_the_end:
                raise
            batch = self._padding(self._share.rows)
        except Exception as error:
            self.failure = error
            raise
        shape = (self._share.global_rows, self._length)
        sharding = self._share.sharding
        return {name: jax.make_array_from_process_local_data(sharding, batch[name], shape) for name in ARRAYS}

    @property
    def _length(self) -> int:
        return self.local_iterator.loader.spec.contexts.length

    def _whole(self, batch: Batch) -> Batch:
        """The rows this process must give: those of the batch, checked, and padding that is never trained on."""
        sequences = self.local_iterator.loader.batch_size
        check_batch(batch, sequences=sequences, length=self._length, vocabulary=self._vocabulary)
        check_segments(batch, self._most_segments)
        if self._share.rows == sequences:
            return batch
        missing = self._padding(self._share.rows - sequences)
        return {name: np.concatenate([array, missing[name]]) for name, array in batch.items()}

    def _padding(self, sequences: int) -> Batch:
        return {name: np.zeros((sequences, self._length), dtype=np.int32) for name in ARRAYS}

    def reset(self) -> None:
        """From the beginning: MaxText asks for it before each evaluation."""
        self.local_iterator.rewind()

    def close(self) -> None:
        self.local_iterator.close()


def make_train_iterator(config: Any, global_mesh: Any, process_indices: Sequence[int]) -> NetworkIterator:
    """As MaxText's own makers of iterators. `num_epoch` above 0 ends the data, as it does there."""
    batch = config.global_batch_size_to_train_on
    share = share_of(global_mesh, to_load=config.global_batch_size_to_load, to_use=batch)
    loader = make_train_loader(_keys(config, batch), host=share.host, hosts=share.hosts)
    assert isinstance(loader, Loader)
    steps = None
    if config.num_epoch > 0:
        steps = max(1, config.num_epoch * BatchSource(loader.spec).sequences_per_epoch // batch)
    local = LocalBatches(loader, steps=steps, allow_data_change=config.allow_data_change)
    return NetworkIterator(local, share, config, pads_at_the_end=config.generate_padding_batch_train)


def make_eval_iterator(config: Any, global_mesh: Any, process_indices: Sequence[int]) -> NetworkIterator:
    """Finite, and the same every time."""
    batch = config.global_batch_size_to_eval_on
    share = share_of(global_mesh, to_load=config.global_batch_size_to_load_eval, to_use=batch)
    keys = _keys(config, batch).replace(
        grain_worker_count=config.grain_worker_count_eval,
        grain_per_worker_buffer_size=config.grain_per_worker_buffer_size_eval,
        grain_debug_mode=False,
        grain_visualization_dir="",
    )
    loader = make_eval_loader(keys, host=share.host, hosts=share.hosts)
    assert isinstance(loader, Loader)
    local = LocalBatches(loader, steps=None, allow_data_change=False)
    return NetworkIterator(local, share, config, pads_at_the_end=config.generate_padding_batch_eval)


def close_all() -> None:
    """End the workers of all iterators; raise what went wrong in one, if anything did."""
    iterators = list(_open)
    for iterator in iterators:
        iterator.close()
    _open.clear()
    if failures := [iterator.failure for iterator in iterators if iterator.failure]:
        raise failures[0]


def _keys(config: Any, batch: int) -> Config:
    """Our configuration of the pipeline, from MaxText's."""
    values = {name: getattr(config, name) for name in (*NETWORK_KEYS, *_SAME_IN_MAXTEXT)}
    return Config(dataset_type="network", per_device_batch_size=float(batch)).replace(**values)
