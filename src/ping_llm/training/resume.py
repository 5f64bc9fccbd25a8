"""What may not change when a run goes on: what its checkpoints were made with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from ping_llm.batches.spec import DataState
from ping_llm.config import Config, load_config
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import TrainLoader
from ping_llm.data.stream import POSITIONS, StreamLoader
from ping_llm.runs.task import vocabulary

_SHAPE: Final = (
    "base_num_decoder_layers",
    "base_emb_dim",
    "base_num_query_heads",
    "head_dim",
    "base_mlp_dim",
    "rope_max_timescale",
    "final_logits_soft_cap",
    "weight_dtype",
    "init_weights_seed",
    "opt_type",
    "completer_identity",
)
"""The weights and the optimizer's memory mean nothing with other values. (Data is checked by its own state.)"""

_TELLING: Final = (
    "learning_rate",
    "learning_rate_schedule",
    "steps",
    "dtype",
    "quantization",
    "adam_weight_decay",
    "z_loss_multiplier",
)
"""May change, but the run is then not the one it would have been."""


def check_unchanged(stored: Path, config: Config) -> None:
    """Compare with the configuration that the run was started with, if there is one."""
    if not stored.exists():
        return
    before = load_config(stored)

    def differences(names: tuple[str, ...]) -> str:
        return "; ".join(
            f"{name}: {getattr(before, name)} then, {getattr(config, name)} now"
            for name in names
            if getattr(before, name) != getattr(config, name)
        )

    # A run keeps an average of its weights or not; how slow it is may change.
    kinds = {f"{bool(c.average_decay)} {c.dataset_type == 'worlds'}" for c in (before, config)}
    different = differences(_SHAPE) or (differences(("average_decay", "dataset_type")) if len(kinds) > 1 else "")
    if different:
        raise PingLlmError(
            f"the run {stored.parent} was started with another model or optimizer: {different}. "
            "Use the same settings to go on with it, or another run_name"
        )
    if different := differences(_TELLING):
        err.print(f"[bold yellow]note:[/] other settings than before: {different}", soft_wrap=True)


# What a run stores about its data, beside the step: of text that is read in order, where each host is.


def data_state(loader: TrainLoader, begun_with: DataState, step: int) -> DataState:
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
