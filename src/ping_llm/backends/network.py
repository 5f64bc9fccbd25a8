"""`dataset_type=network`: probe rows."""

from ping_llm.backends.sizes import batch_size, loader_settings
from ping_llm.config import Config, parse_blend
from ping_llm.config.blend import Blend
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.contexts import ContextSettings
from ping_llm.pipeline.loader import Loader
from ping_llm.pipeline.source import BatchSource
from ping_llm.pipeline.spec import DataSpec, DataState, RowsSpec
from ping_llm.pipeline.unprepared import PreparedInMemory
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.shard_files import fetch_ahead
from ping_llm.storage import locate
from ping_llm.storage.cache import Cache, configure


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> Loader:
    configure(config.data_cache_dir, config.data_cache_gb)
    spec, kept = spec_of(config, "train", devices)
    _fetch_ahead(spec)
    resumed = state.resume(spec, allow_change=config.allow_data_change) if state else None
    return Loader(spec, loader_settings(config, host, hosts), resumed, keep_alive=kept)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> Loader:
    configure(config.data_cache_dir, config.data_cache_gb)
    spec, kept = spec_of(config, "eval", devices)
    _fetch_ahead(spec)
    batches = BatchSource(spec).batches_per_epoch
    if config.eval_steps > 0:
        batches = min(batches, config.eval_steps)
    return Loader(spec, loader_settings(config, host, hosts), last_step=batches - 1, keep_alive=kept)


def _fetch_ahead(spec: DataSpec) -> None:
    """Remote rows that fit the cache are copied there before the first batch."""
    remote = [rows for rows in spec.rows if locate(rows.folder).is_remote]
    if remote:
        splits = [(locate(rows.folder), Manifest.load(rows.folder).splits[rows.split]) for rows in remote]
        fetch_ahead(splits, Cache.from_environment())


def check(config: Config) -> None:
    """Are there rows to train and to evaluate on?"""
    configure(config.data_cache_dir, config.data_cache_gb)
    if config.network_data_format == "probe_chunks":
        for split in ("train", "eval")[: 2 if config.eval_interval > 0 else 1]:
            for pattern, _ in _blend(config, split):
                RowsSpec.find(pattern, split)


def spec_of(config: Config, split: str, devices: int) -> tuple[DataSpec, PreparedInMemory | None]:
    """What decides every batch, and what must be kept alive for it."""
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
        global_batch_size=batch_size(config, devices),
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
