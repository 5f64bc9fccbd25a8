"""What a run stores about its data, beside the step: of text that is read in order, where each host is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ping_llm.backends.registry import AnyLoader
from ping_llm.backends.text.stream import POSITIONS, StreamLoader
from ping_llm.config import Config, load_config
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.spec import DataState
from ping_llm.train.task import vocabulary


def data_state(loader: AnyLoader, begun_with: DataState, step: int) -> DataState:
    """Where to go on after so many steps. Where the loader itself is does not matter: it makes batches ahead."""
    state = replace(begun_with, next_step=step)
    if not isinstance(loader, StreamLoader):
        return state
    positions = [json.loads(text) for text in _of_all_processes(loader.position(step))]
    return replace(state, identity={**state.identity, POSITIONS: positions})


def _of_all_processes(text: str) -> list[str]:
    """The texts of all processes, in their order; each must call this."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(data)]))).reshape(-1)
    padded = np.zeros(int(sizes.max()), dtype=np.uint8)
    padded[: len(data)] = data
    rows: Any = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes.tolist())]


def check_vocabulary(stored: Path, config: Config) -> None:
    """The embedding of a run has a size: said here, because its checkpoints would seem damaged."""
    if not stored.exists():
        return
    before = load_config(stored)
    if before.vocab_size != config.vocab_size and vocabulary(before) != vocabulary(config):
        raise PingLlmError(
            f"the run {stored.parent} was started with vocab_size={before.vocab_size}, not {config.vocab_size}: "
            "use the same to go on with it, or another run_name"
        )
