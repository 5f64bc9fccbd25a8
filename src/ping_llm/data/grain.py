"""`dataset_type=grain`: text in ArrayRecord (any batch by itself), Parquet or TFRecord files (read in order)."""

from functools import partial
from pathlib import Path

from ping_llm.batches.spec import DataState
from ping_llm.config import Config, parse_blend
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import AnyEvalLoader, AnyLoader, batch_size, loader_settings
from ping_llm.data.text.arrayrecord import Documents, TextFiles
from ping_llm.data.text.files import blend_of, check_kind, fingerprint, matching
from ping_llm.data.text.readers import ArrayRecordStream, InterleavedFiles, Share, opener
from ping_llm.data.text.spec import TextLoader, TextSpec, go_on
from ping_llm.data.text.stream import pack_settings, streamed_evaluation, streamed_training
from ping_llm.data.text.tokenizer import TokenizerSpec, tokenizer_of


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> AnyLoader:
    if config.grain_file_type == "arrayrecord":
        spec = text_spec(config, devices)
        if state is not None:
            spec, state = go_on(state, spec, allow_change=config.allow_data_change)
        return TextLoader(spec, loader_settings(config, host, hosts), state)
    files = _train_files(config)
    stream = InterleavedFiles(
        Share.of(files, host, hosts),
        opener(config.grain_file_type, config.train_data_columns),
        seed=config.data_shuffle_seed,
        epochs=config.num_epoch,
    )
    data = {"files": fingerprint(files)}
    return streamed_training(config, stream, data=data, devices=devices, host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> AnyEvalLoader:
    files = _eval_files(config)
    stream: ArrayRecordStream | InterleavedFiles
    if config.grain_file_type == "arrayrecord":
        found = TextFiles(pattern=config.grain_eval_files, files=tuple(map(str, files)), fingerprint="")
        stream = ArrayRecordStream(Documents(found, config.eval_data_columns))
    else:
        open_file = opener(config.grain_file_type, config.eval_data_columns)
        stream = InterleavedFiles(Share(files=files), open_file, epochs=1, shuffle=False)
    return streamed_evaluation(config, stream, devices=devices, host=host, hosts=hosts)


def check(config: Config) -> None:
    """Are the files there, of the right kind, and is there a tokenizer?"""
    tokenizer_of(config)
    if config.grain_file_type == "arrayrecord":
        for pattern, _ in blend_of(config):
            TextFiles.find(pattern, "grain_train_files")
    else:
        _train_files(config)
    if config.eval_interval > 0:
        _eval_files(config)


def text_spec(config: Config, devices: int = 1) -> TextSpec:
    """What decides every batch of a run on ArrayRecord files."""
    blend = blend_of(config)
    return TextSpec(
        sources=tuple(TextFiles.find(pattern, "grain_train_files") for pattern, _ in blend),
        weights=tuple(weight for _, weight in blend),
        tokenizer=TokenizerSpec.of(config),
        tokenizer_digest=tokenizer_of(config).digest,
        packing=pack_settings(config),
        column=config.train_data_columns,
        seed=config.data_shuffle_seed,
        global_batch_size=batch_size(config, devices),
        epochs=config.num_epoch,
    )


def _train_files(config: Config) -> tuple[Path, ...]:
    blend = blend_of(config)
    if len(blend) > 1:
        raise PingLlmError(f"grain_file_type={config.grain_file_type} cannot blend: only ArrayRecord files can")
    return _files(blend[0][0], config.grain_file_type, "grain_train_files")


def _eval_files(config: Config) -> tuple[Path, ...]:
    if not config.grain_eval_files:
        raise PingLlmError("grain_eval_files is not set: name the evaluation files, or set eval_interval to -1")
    parts = (pattern for pattern, _ in parse_blend(config.grain_eval_files))
    found = map(partial(_files, kind=config.grain_file_type, key="grain_eval_files"), parts)
    return tuple(file for files in found for file in files)


def _files(pattern: str, kind: str, key: str) -> tuple[Path, ...]:
    files = matching(pattern, key)
    check_kind(files, kind, key)
    return files
