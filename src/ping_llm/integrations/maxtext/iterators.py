"""The iterator that MaxText gets: checked global batches, whose position its checkpoints store and restore.

MaxText's global array has `global_batch_size_to_load` rows, laid out over all devices of the mesh in order. It trains
on the first `global_batch_size_to_train_on` of them, which are fewer with `expansion_factor_real_data`, or with less
than one sequence per device.
"""

import json
import logging
import weakref
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

import jax
import numpy as np
from grain.experimental import ElasticIterator
from jax.sharding import NamedSharding, PartitionSpec

from ping_llm.batches.loader import Loader
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import make_eval_loader, make_train_loader
from ping_llm.integrations.maxtext.launch import NETWORK_KEYS, SHARED_KEYS, SHARED_TEXT_KEYS

ARRAYS: Final = (
    "inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation",
)  # fmt: skip

_STATE: Final = "ping_llm_data_state"
_log = logging.getLogger(__name__)
_open: "weakref.WeakSet[NetworkIterator]" = weakref.WeakSet()


class Share(NamedTuple):
    """This process's share of the global batch: part `host` of `hosts` equal ones."""

    host: int
    hosts: int
    sequences: int
    """Sequences of the batch in that part."""
    rows: int
    """Rows that this process contributes to the global array. Those beyond `sequences` are never trained on."""
    sharding: NamedSharding
    global_rows: int


def share_of(mesh: Any, *, to_load: int, to_use: int) -> Share:
    """This process's share, or an error if the batch cannot be shared evenly.

    Where a process's devices do not lie side by side in the mesh, its rows of the batch are spread likewise: the batch
    then has the same sequences in another order.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    first: dict[int, int] = {}
    indices: Any = sharding.devices_indices_map((to_load, 1))
    for device, (rows, *_) in indices.items():
        first[device.process_index] = min(first.get(device.process_index, to_load), rows.start or 0)
    order = sorted(first, key=first.__getitem__)
    rows_each = to_load // len(order)
    hosts = max(1, to_use // rows_each)
    if to_use % hosts or to_use // hosts > rows_each:
        raise PingLlmError(f"a batch of {to_use} sequences cannot be shared evenly by {len(order)} processes")
    host = order.index(jax.process_index())
    if host >= hosts or 0 not in order[:hosts]:
        raise PingLlmError(
            "with these parallelism settings expansion_factor_real_data makes process 0, which stores where the data "
            "is, load none; use -1"
        )
    return Share(
        host=host, hosts=hosts, sequences=to_use // hosts, rows=rows_each, sharding=sharding, global_rows=to_load
    )


# -- checks of batches. MaxText itself trains on anything: wrong lengths, positions, numbers


def check_batch(batch: Mapping[str, Any], *, sequences: int, length: int, vocabulary: int) -> None:
    """An error that names the first broken rule of the batch contract (docs/pipeline.md) and where it is broken."""
    if set(batch) != set(ARRAYS):
        raise _broken(f"its arrays are {', '.join(sorted(batch))}, not {', '.join(sorted(ARRAYS))}")
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.shape != (sequences, length):
            found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
            raise _broken(f"{name} is {found.strip()}, not int32 ({sequences}, {length})")
    inputs, position, segment = (batch[f"inputs{part}"] for part in ("", "_position", "_segmentation"))
    real = segment > 0
    _require((inputs >= 0) & (inputs < vocabulary), f"inputs holds a token that is not in 0…{vocabulary - 1}")
    _require((segment[:, :1] == 0) | (segment[:, :1] == 1), "the first segment is neither 1 nor padding")
    step = np.diff(segment, axis=1)
    follows = (step == 0) | ((step == 1) & real[:, :-1]) | (segment[:, 1:] == 0)
    _require(follows, "segments are not numbered 1, 2, … with padding only at the end", 1)
    predicts = np.pad((step == 0) & real[:, :-1], ((0, 0), (0, 1)))
    expected = np.where(np.roll(predicts, 1, axis=1), np.roll(position, 1, axis=1) + 1, 0)
    _require(position == expected, "positions do not count from 0 within each segment")
    shifted = np.roll(inputs, -1, axis=1) * predicts
    _require(batch["targets"] == shifted, "targets are not the inputs shifted by one within each segment")
    for part, array in (("position", position), ("segmentation", segment)):
        _require(batch[f"targets_{part}"] == array * predicts, f"targets_{part} marks what has no target")


def check_segments(batch: Mapping[str, Any], limit: int | None) -> None:
    """Raise an error if a sequence has more segments than the attention was compiled for. None = any number."""
    found = int(batch["inputs_segmentation"].max(initial=0))
    if limit is not None and found > limit:
        raise PingLlmError(
            f"a sequence has {found} segments, but attention=cudnn_flash_te was told of max_segments_per_seq={limit}: "
            "raise it, or choose another attention"
        )


def _require(holds: Any, rule: str, shift: int = 0) -> None:
    if not holds.all():
        sequence, position = np.argwhere(~holds)[0].tolist()
        raise _broken(f"{rule} (sequence {sequence}, position {position + shift})")


def _broken(what: str) -> PingLlmError:
    return PingLlmError(f"a batch was refused before it reached MaxText: {what}")


class LocalBatches(ElasticIterator):  # type: ignore[misc]
    """This process's part of each batch, with a state that fits any number of processes and workers.

    It is a subclass of Grain's elastic iterator in name only, because MaxText stores the state of such an iterator once
    for all processes, and gives it to however many there are at the next start.
    """

    def __init__(self, loader: Loader, *, steps: int | None = None, allow_data_change: bool = False) -> None:
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
        _log.info("data resumes with batch %d", found.next_step)

    def reset(self) -> None:
        if self.loader.state() != self._start:
            self.loader.restore(self._start)


class NetworkIterator:
    """Global batches, checked. MaxText saves and restores `local_iterator`."""

    def __init__(self, local: LocalBatches, share: Share, config: Any, *, pads_at_the_end: bool) -> None:
        self.local_iterator = local
        self._share = share
        self._length = config.max_target_length
        self._vocabulary = config.vocab_size
        self._max_segments = config.max_segments_per_seq if config.attention == "cudnn_flash_te" else None
        self._pads_at_the_end = pads_at_the_end
        self.failure: Exception | None = None
        """The error that ended the data: MaxText takes any error for the end of the data, and ends successfully."""
        _open.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        try:
            batch = next(self.local_iterator)
            check_batch(batch, sequences=self._share.sequences, length=self._length, vocabulary=self._vocabulary)
            check_segments(batch, self._max_segments)
        except StopIteration:
            if not self._pads_at_the_end:
                raise
            batch = dict.fromkeys(ARRAYS, np.zeros((0, self._length), dtype=np.int32))
        except Exception as error:
            self.failure = error
            raise
        shape = (self._share.global_rows, self._length)
        missing = ((0, self._share.rows - len(batch["inputs"])), (0, 0))  # padding that is never trained on
        return {
            name: jax.make_array_from_process_local_data(self._share.sharding, np.pad(batch[name], missing), shape)
            for name in ARRAYS
        }

    def reset(self) -> None:
        """From the beginning: MaxText does it before each evaluation."""
        self.local_iterator.reset()

    def close(self) -> None:
        self.local_iterator.loader.close()


def make_train_iterator(config: Any, global_mesh: Any) -> NetworkIterator:
    """`num_epoch` above 0 ends the data, as it does in MaxText."""
    batch = config.global_batch_size_to_train_on
    share = share_of(global_mesh, to_load=config.global_batch_size_to_load, to_use=batch)
    loader = make_train_loader(_keys(config, batch), host=share.host, hosts=share.hosts)
    assert isinstance(loader, Loader)
    steps = None
    if config.num_epoch > 0:
        steps = max(1, config.num_epoch * BatchSource(loader.spec).sequences_per_epoch // batch)
    local = LocalBatches(loader, steps=steps, allow_data_change=config.allow_data_change)
    return NetworkIterator(local, share, config, pads_at_the_end=config.generate_padding_batch_train)


def make_eval_iterator(config: Any, global_mesh: Any) -> NetworkIterator:
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
    return NetworkIterator(LocalBatches(loader), share, config, pads_at_the_end=config.generate_padding_batch_eval)


def close_all() -> None:
    """End the workers of all iterators, and raise the error of the first that failed, if any did."""
    failures = [iterator.failure for iterator in _open if iterator.failure]
    for iterator in _open:
        iterator.close()
    _open.clear()
    if failures:
        raise failures[0]


def _keys(config: Any, batch: int) -> Config:
    """Our configuration of the pipeline, made from MaxText's."""
    values = {name: getattr(config, name) for name in (*NETWORK_KEYS, *SHARED_KEYS)}
    if config.ping_llm_backend == "grain":
        values |= {name: getattr(config, name) for name in SHARED_TEXT_KEYS}
        values |= {name: getattr(config, name)[0] for name in ("train_data_columns", "eval_data_columns")}
        values |= {"tokenizer_type": config.tokenizer_type.value, "tokenizer_path": config.tokenizer_path or ""}
    return Config(dataset_type=config.ping_llm_backend, per_device_batch_size=float(batch)).replace(**values)
