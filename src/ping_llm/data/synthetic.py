"""`dataset_type=synthetic`: random tokens, to measure training alone and to try it without data."""

from typing import Any, Final

import numpy as np

from ping_llm.batches.batch import PackedTokens, expand
from ping_llm.batches.spec import Batch, DataState
from ping_llm.config import Config
from ping_llm.data.registry import Part, StepLoader
from ping_llm.tokens import VOCABULARY_SIZE

_DIFFERENT_BATCHES: Final = 8
_SEGMENTS: Final = 4
_PADDING: Final = 0.015


def train_loader(config: Config, part: Part, state: DataState | None) -> StepLoader:
    return _loader(config, part, state=state)


def eval_loader(config: Config, part: Part) -> StepLoader:
    return _loader(config, part, last_step=max(1, config.eval_steps) - 1)


def _loader(config: Config, part: Part, **range_of_steps: Any) -> StepLoader:
    """Eight different batches, over and over."""
    rows, size = part.rows(config), part.batch_size(config)
    length, seed = config.max_target_length, config.data_shuffle_seed
    batches = [
        {name: values[rows] for name, values in random_batch(size, length, seed, number).items()}
        for number in range(_DIFFERENT_BATCHES)
    ]
    identity = {"dataset_type": "synthetic", "seed": seed, "global_batch_size": size, "contexts.length": length}
    return StepLoader(lambda step: batches[step % _DIFFERENT_BATCHES], identity, segments=_SEGMENTS, **range_of_steps)


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
