"""`dataset_type=network`: probe rows that `ping-llm prepare` wrote, or measurement files that fit in memory.

The files of `network_data_format=network_parquet` are prepared into a folder in shared memory, which every worker
process maps and which is removed when the run ends. So batches are those of prepared rows, by the same code.
"""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from ping_llm.batches.loader import Loader
from ping_llm.batches.spec import DataSpec, DataState
from ping_llm.config import Blend, Config, parse_blend
from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import Part, changes_of, eval_loader_of, loader_of
from ping_llm.rows.dataset import fetch_ahead
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.prepare import DEFAULT_SIZES, PrepareSettings, prepare
from ping_llm.sources import files
from ping_llm.sources.columns import AS_FOUND
from ping_llm.storage import locate
from ping_llm.storage.cache import Cache, configure

_BYTES_PER_MEASUREMENT: Final = 64  # while preparing: the shuffle files and the rows at once


def train_loader(config: Config, part: Part, state: DataState | None) -> Loader:
    spec, kept = _fetched(config, "train", part)
    return loader_of(spec, config, part, state, keep_alive=kept)


def eval_loader(config: Config, part: Part) -> Loader:
    spec, kept = _fetched(config, "eval", part)
    return eval_loader_of(spec, config, part, keep_alive=kept)


def _fetched(config: Config, split: str, part: Part) -> "tuple[DataSpec, RowsInMemory | None]":
    """The result of `_spec_of`, after copying remote rows to the cache if they fit it."""
    configure(config.data_cache_dir, config.data_cache_gb)
    spec, kept = _spec_of(config, split, part)
    remote = [rows for rows in spec.sources if isinstance(rows, RowsSpec) and locate(rows.folder).is_remote]
    if remote:
        splits = [(locate(rows.folder), Manifest.load(rows.folder).splits[rows.split]) for rows in remote]
        fetch_ahead(splits, Cache.from_environment())
    return spec, kept


def check(config: Config) -> None:
    """An error if there are no rows to train or to evaluate on."""
    configure(config.data_cache_dir, config.data_cache_gb)
    if config.network_data_format == "probe_chunks":
        for split in ("train", "eval")[: 2 if config.eval_interval > 0 else 1]:
            for pattern, _ in _blend(config, split):
                RowsSpec.find(pattern, split)


def spec_from_config(config: Config, split: str, part: Part) -> DataSpec:
    if config.network_data_format != "probe_chunks":
        raise PingLlmError("only prepared rows can be looked at: set network_data_format=probe_chunks")
    return _spec_of(config, split, part)[0]


def _spec_of(config: Config, split: str, part: Part) -> "tuple[DataSpec, RowsInMemory | None]":
    """What decides every batch, and the object that owns its rows if they are in memory."""
    blend = _blend(config, split)
    kept = None
    contexts = ContextSettings(
        measurements_per_context=config.network_context_measurements,
        max_contexts=config.network_max_contexts,
        length=config.max_target_length,
        result_last=config.network_result_last,
    )
    drawn = {"contexts": contexts, "skip_corrupt_rows": config.network_skip_corrupt_rows}
    if config.network_data_format == "network_parquet":
        if len(blend) > 1:
            raise PingLlmError("network_parquet cannot blend; prepare the files and use probe_chunks")
        kept = RowsInMemory(blend[0][0], config.grain_ram_budget_mb)
        rows = [RowsSpec.find(str(kept.rows), "train", **drawn)]
    else:
        rows = [RowsSpec.find(pattern, split, **drawn) for pattern, _ in blend]
    spec = data_spec(
        rows,
        weights=tuple(weight for _, weight in blend),
        seed=config.data_shuffle_seed,
        global_batch_size=part.batch_size(config),
        **{"finite": True} if split == "eval" else changes_of(config),
    )
    return spec, kept


def _blend(config: Config, split: str) -> Blend:
    name = f"network_{split}_files"
    text = getattr(config, name)
    if not text:
        raise PingLlmError(f"{name} is not set: give a folder that `ping-llm prepare` wrote")
    return parse_blend(text)


class RowsInMemory:
    """Rows of measurement files in a temporary folder, which lives as long as this object."""

    def __init__(self, pattern: str, ram_budget_mb: int) -> None:
        needed_mb = _needed_bytes(pattern) / 2**20
        if needed_mb > ram_budget_mb:
            raise PingLlmError(
                f"these files need about {needed_mb:,.0f} MB in memory, but grain_ram_budget_mb is {ram_budget_mb:,}: "
                f'prepare them once (ping-llm prepare --input "{pattern}" --output data/probe_rows) and use '
                "network_data_format=probe_chunks, or raise the budget"
            )
        shared_memory = Path("/dev/shm")
        folder = tempfile.mkdtemp(prefix="ping-llm-", dir=shared_memory if shared_memory.is_dir() else None)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.rows = Path(folder, "rows")
        prepare(PrepareSettings(inputs=(pattern,), output=self.rows, train_ratio=1.0))


def _needed_bytes(pattern: str) -> int:
    """An estimate: a line of CSV or JSON is about as long as what it becomes."""
    described = [files.describe(path, AS_FOUND, DEFAULT_SIZES.piece_rows)[0] for path in files.expand([pattern])]
    return sum(f.bytes if f.measurements is None else f.measurements * _BYTES_PER_MEASUREMENT for f in described)
