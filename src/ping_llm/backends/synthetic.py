"""`dataset_type=synthetic`: random tokens."""

from ping_llm.backends.sizes import batch_size
from ping_llm.config import Config
from ping_llm.pipeline.spec import DataState
from ping_llm.pipeline.synthetic import SyntheticLoader, SyntheticSettings


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> SyntheticLoader:
    return SyntheticLoader(_settings(config, devices), host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> SyntheticLoader:
    last = max(1, config.eval_steps) - 1
    return SyntheticLoader(_settings(config, devices), host=host, hosts=hosts, last_step=last)


def _settings(config: Config, devices: int) -> SyntheticSettings:
    return SyntheticSettings(
        global_batch_size=batch_size(config, devices), length=config.max_target_length, seed=config.data_shuffle_seed
    )
