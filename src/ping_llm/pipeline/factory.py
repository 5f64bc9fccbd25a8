"""Loaders from a configuration: the two functions that training asks for its data."""

from typing import Final

from ping_llm.config import Config, parse_blend
from ping_llm.config.blend import Blend
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.contexts import ContextSettings
from ping_llm.pipeline.loader import Loader, LoaderSettings
from ping_llm.pipeline.measured import measurements_of
from ping_llm.pipeline.source import BatchSource
from ping_llm.pipeline.spec import DataSpec, DataState, RowsSpec
from ping_llm.pipeline.synthetic import SyntheticLoader, SyntheticSettings
from ping_llm.pipeline.unprepared import PreparedInMemory
from ping_llm.pipeline.worlds import COMPLETER_DATA, WorldsLoader, world_settings

AnyLoader = Loader | SyntheticLoader | WorldsLoader

_UNSEEN_WORLDS: Final = 0x5EED
"""Added to the seed for evaluation."""


def make_train_loader(
    config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1, state: DataState | None = None
) -> AnyLoader:
    """Endless batches for training, from the beginning or from a state of any run with the same data."""
    if config.dataset_type == "synthetic":
        return SyntheticLoader(_synthetic(config, devices), host=host, hosts=hosts, state=state)
    if config.dataset_type in COMPLETER_DATA:
        return WorldsLoader(
            world_settings(config),
            batch_size=_batch_size(config, devices),
            seed=config.data_shuffle_seed,
            host=host,
            hosts=hosts,
            state=state,
            measurements=measurements_of(config).digest if config.dataset_type == "measured" else "",
        )
    spec, kept = _spec(config, "train", devices)
    resumed = state.resume(spec, allow_change=config.allow_data_change) if state else None
    return Loader(spec, _settings(config, host, hosts), resumed, keep_alive=kept)


def make_eval_loader(config: Config, *, devices: int = 1, host: int = 0, hosts: int = 1) -> AnyLoader:
    """Batches for evaluation: finite, and the same every time. The last one is filled up with empty sequences."""
    if config.dataset_type == "synthetic":
        last = max(1, config.eval_steps) - 1
        return SyntheticLoader(_synthetic(config, devices), host=host, hosts=hosts, last_step=last)
    if config.dataset_type in COMPLETER_DATA:
        return WorldsLoader(
            world_settings(config),
            batch_size=_batch_size(config, devices),
            seed=config.data_shuffle_seed + _UNSEEN_WORLDS,
            host=host,
            hosts=hosts,
            last_step=max(1, config.eval_steps) - 1,
        )
    spec, kept = _spec(config, "eval", devices)
    batches = BatchSource(spec).batches_per_epoch
    if config.eval_steps > 0:
        batches = min(batches, config.eval_steps)
    return Loader(spec, _settings(config, host, hosts), last_step=batches - 1, keep_alive=kept)


def check_files(config: Config) -> None:
    """Are there rows to train and to evaluate on? Said before a model is made, not at the first evaluation."""
    if config.dataset_type == "network" and config.network_data_format == "probe_chunks":
        for split in ("train", "eval")[: 2 if config.eval_interval > 0 else 1]:
            for pattern, _ in _blend(config, split):
                RowsSpec.find(pattern, split)


def spec_from_config(config: Config, split: str = "train", devices: int = 1) -> DataSpec:
    """What decides every batch of a run with this configuration (of prepared rows)."""
    if config.network_data_format != "probe_chunks":
        raise PingLlmError("only prepared rows can be looked at: set network_data_format=probe_chunks")
    return _spec(config, split, devices)[0]


def _synthetic(config: Config, devices: int) -> SyntheticSettings:
    return SyntheticSettings(
        global_batch_size=_batch_size(config, devices), length=config.max_target_length, seed=config.data_shuffle_seed
    )


def _settings(config: Config, host: int, hosts: int) -> LoaderSettings:
    return LoaderSettings(
        worker_count=config.grain_worker_count,
        buffer_size=config.grain_per_worker_buffer_size,
        ram_budget_mb=config.grain_ram_budget_mb,
        debug=config.grain_debug_mode,
        visualization_dir=config.grain_visualization_dir,
        host=host,
        hosts=hosts,
    )


def _spec(config: Config, split: str, devices: int) -> tuple[DataSpec, PreparedInMemory | None]:
    if config.dataset_type != "network":
        raise PingLlmError(f"dataset_type={config.dataset_type} is not available here; use dataset_type=network")
    blend = _blend(config, split)
    kept = None
    rows: tuple[RowsSpec, ...]
    if config.network_data_format == "network_parquet":
        if len(blend) > 1:
            raise PingLlmError("network_parquet cannot blend; prepare the files and use probe_chunks")
        kept = PreparedInMemory([blend[0][0]], config.grain_ram_budget_mb)
        rows = (RowsSpec.find(str(kept.rows), "train"),)
    else:
        rows = tuple(RowsSpec.find(pattern, split) for pattern, _ in blend)
    spec = DataSpec(
        rows=rows,
        weights=tuple(weight for _, weight in blend),
        seed=config.data_shuffle_seed,
        global_batch_size=_batch_size(config, devices),
        contexts=ContextSettings(
            measurements_per_context=config.network_context_measurements,
            max_contexts=config.network_max_contexts,
            length=config.max_target_length,
        ),
        skip_corrupt_rows=config.network_skip_corrupt_rows,
        finite=split == "eval",
    )
    return spec, kept


def _blend(config: Config, split: str) -> Blend:
    name = f"network_{split}_files"
    text = getattr(config, name)
    if not text:
        raise PingLlmError(f"{name} is not set: give a folder that `ping-llm prepare` wrote")
    return parse_blend(text)


def _batch_size(config: Config, devices: int) -> int:
    batch = config.per_device_batch_size * devices
    if batch != int(batch) or batch < 1:
        raise PingLlmError(
            f"per_device_batch_size × {devices} device(s) = {batch:g} is not a whole number of sequences"
        )
    return int(batch)
