"""`dataset_type=synthetic`: random tokens; what training costs when data costs nothing, and a check without data."""

from typing import Final

import numpy as np

from ping_llm.batches.batch import Batch, PackedTokens, expand
from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.data.registry import StepLoader, batch_size, host_rows
from ping_llm.tokens.encode import VOCABULARY_SIZE

_DIFFERENT_BATCHES: Final = 8
_SEGMENTS: Final = 4
_PADDING: Final = 0.015


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> StepLoader:
    return _loader(config, devices, host, hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> StepLoader:
    return _loader(config, devices, host, hosts, last_step=max(1, config.eval_steps) - 1)


def _loader(
    config: Config,
    devices: int,
    host: int,
    hosts: int,
    *,
    state: DataState | None = None,
    last_step: int | None = None,
) -> StepLoader:
    """Eight different batches, over and over."""
    sequences, length, seed = batch_size(config, devices), config.max_target_length, config.data_shuffle_seed
    part = host_rows(sequences, host, hosts)
    batches = [
        {name: values[part] for name, values in random_batch(sequences, length, seed, number).items()}
        for number in range(_DIFFERENT_BATCHES)
    ]
    identity = {
        "dataset_type": "synthetic",
        "seed": seed,
        "global_batch_size": sequences,
        "contexts.length": length,
    }
    return StepLoader(
        lambda step: batches[step % _DIFFERENT_BATCHES],
        identity,
        segments=_SEGMENTS,
        state=state,
        last_step=last_step,
    )


def random_batch(sequences: int, length: int, seed: int = 0, number: int = 0) -> Batch:
    """Up to four segments per sequence, of random sizes, and 1.5 % padding."""
    random = np.random.default_rng([seed, number])
    used = length - int(length * _PADDING)
    cuts = np.sort(random.integers(1, used, (sequences, _SEGMENTS - 1)), axis=1)
    edges = np.concatenate([np.zeros((sequences, 1), int), cuts, np.full((sequences, 1), used)], axis=1)
    sizes = np.diff(edges, axis=1).reshape(-1)
    packed = PackedTokens(
        tokens=random.integers(1, VOCABULARY_SIZE, sequences * used, dtype=np.uint16),
        sizes=sizes[sizes > 0].astype(np.int32),
        sequence=np.repeat(np.arange(sequences), _SEGMENTS)[sizes > 0].astype(np.int32),
    )
    return expand(packed, sequences, length)
