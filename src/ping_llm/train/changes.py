"""What may not change when a run goes on: what its checkpoints were made with."""

from pathlib import Path
from typing import Final

from ping_llm.config import Config, load_config
from ping_llm.console import err
from ping_llm.errors import PingLlmError

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
