"""Loaders of documents that are read in order, from a configuration: what the text backends share."""

from collections.abc import Mapping
from typing import Any

from ping_llm.backends.sizes import batch_size
from ping_llm.backends.text.packing import PackSettings
from ping_llm.backends.text.stream import DocumentStream, EvalLoader, StreamLoader, StreamSettings, Windows
from ping_llm.backends.text.tokenizer import Tokenizer, tokenizer_of
from ping_llm.config import Config
from ping_llm.pipeline.spec import DataState

STREAM_VERSION = 1
"""Raised whenever the same files would give other batches."""


def pack_settings(config: Config) -> PackSettings:
    return PackSettings.of(config.max_target_length, config.max_segments_per_seq)


def streamed_training(
    config: Config,
    stream: DocumentStream,
    *,
    data: Mapping[str, Any],
    devices: int,
    host: int,
    hosts: int,
    state: DataState | None,
) -> StreamLoader:
    """`data` says what is read, for the state of the run: going on with something else is refused."""
    tokenizer = tokenizer_of(config)
    settings = _settings(config, devices, shuffle=True)
    identity = {
        "dataset_type": config.dataset_type,
        **data,
        "column": config.train_data_columns,
        "tokenizer": tokenizer.digest,
        "add_bos": config.add_bos,
        "add_eos": config.add_eos,
        "seed": settings.seed,
        "shuffle_window": settings.window,
        "global_batch_size": settings.global_batch_size,
        "length": settings.packing.length,
        "most_segments": settings.packing.most_segments,
        "stream_version": STREAM_VERSION,
    }
    return StreamLoader(
        Windows(stream, tokenizer, settings),
        settings,
        identity=identity,
        host=host,
        hosts=hosts,
        state=state,
        allow_change=config.allow_data_change,
    )


def streamed_evaluation(
    config: Config, stream: DocumentStream, *, devices: int, host: int, hosts: int, tokenised: bool = False
) -> EvalLoader:
    """Of a stream that gives all documents once, the same on every host."""
    tokenizer: Tokenizer | None = None if tokenised else tokenizer_of(config)
    settings = _settings(config, devices, shuffle=False)
    windows = Windows(stream, tokenizer, settings)
    return EvalLoader(windows, settings, host=host, hosts=hosts, batches=config.eval_steps)


def _settings(config: Config, devices: int, *, shuffle: bool) -> StreamSettings:
    return StreamSettings(
        global_batch_size=batch_size(config, devices),
        packing=pack_settings(config),
        window=config.shuffle_window if shuffle else 256,
        seed=config.data_shuffle_seed,
        shuffle=shuffle,
    )
