"""Loaders from a configuration: the functions that training asks for its data. The backends themselves are apart."""

from ping_llm.backends import registry
from ping_llm.backends.registry import AnyEvalLoader, AnyLoader
from ping_llm.config import Config
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.spec import DataSpec, DataState

__all__ = ["AnyEvalLoader", "AnyLoader", "check_files", "make_eval_loader", "make_train_loader", "spec_from_config"]


def make_train_loader(
    config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1, state: DataState | None = None
) -> AnyLoader:
    """Endless batches for training, from the beginning or from a state of any run with the same data."""
    backend = registry.find(config.dataset_type)
    return backend.train_loader(config, devices=devices, host=host, hosts=hosts, state=state)


def make_eval_loader(config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1) -> AnyEvalLoader:
    """Batches for evaluation: finite, and the same every time. The last one is filled up with empty sequences."""
    backend = registry.find(config.dataset_type)
    return backend.eval_loader(config, devices=devices, host=host, hosts=hosts)


def check_files(config: Config) -> None:
    """Is there data to train and to evaluate on? Said before a model is made, not at the first evaluation."""
    registry.check(config)


def spec_from_config(config: Config, split: str = "train", devices: int = 1) -> DataSpec:
    """What decides every batch of a run with this configuration (of prepared rows)."""
    from ping_llm.backends.network import spec_of

    if config.dataset_type != "network":
        raise PingLlmError(f"dataset_type={config.dataset_type} has no rows to look at; use dataset_type=network")
    if config.network_data_format != "probe_chunks":
        raise PingLlmError("only prepared rows can be looked at: set network_data_format=probe_chunks")
    return spec_of(config, split, devices)[0]
