"""`dataset_type=worlds` and `measured`: the numbers of contexts that the device makes for the completer."""

from typing import Final

from ping_llm.backends.sizes import batch_size
from ping_llm.config import Config
from ping_llm.pipeline.measured import measurements_of
from ping_llm.pipeline.spec import DataState
from ping_llm.pipeline.worlds import WorldsLoader, world_settings

_UNSEEN_WORLDS: Final = 0x5EED
"""Added to the seed for evaluation."""


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> WorldsLoader:
    return WorldsLoader(
        world_settings(config),
        batch_size=batch_size(config, devices),
        seed=config.data_shuffle_seed,
        host=host,
        hosts=hosts,
        state=state,
        measurements=measurements_of(config).digest if config.dataset_type == "measured" else "",
    )


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> WorldsLoader:
    return WorldsLoader(
        world_settings(config),
        batch_size=batch_size(config, devices),
        seed=config.data_shuffle_seed + _UNSEEN_WORLDS,
        host=host,
        hosts=hosts,
        last_step=max(1, config.eval_steps) - 1,
    )
