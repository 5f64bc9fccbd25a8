"""`dataset_type=c4_mlperf`: C4 as MLPerf lays it out, with a validation set that was tokenised before.

Training is that of `tfds`. The validation set is a split named `…tokenized…`, TFRecord files of `ids` without a
description of the dataset beside them: every benchmark run must see the same sequences, whatever its tokenizer does.
"""

from functools import partial
from pathlib import Path

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data import tfds
from ping_llm.data.text.files import check_kind, matching
from ping_llm.data.text.readers import ExampleReader, InterleavedFiles, Share
from ping_llm.data.text.stream import EvalLoader, StreamLoader, streamed_evaluation
from ping_llm.data.text.tokenizer import tokenizer_of

_TOKENS = "ids"


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> StreamLoader:
    return tfds.train_loader(config, devices=devices, host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> EvalLoader:
    if not _is_tokenised(config):
        return tfds.eval_loader(config, devices=devices, host=host, hosts=hosts)
    open_file = partial(ExampleReader, column=_TOKENS, tokenised=True, below=_vocabulary(config))
    stream = InterleavedFiles(Share(files=_files(config)), open_file, epochs=1, shuffle=False)
    return streamed_evaluation(config, stream, devices=devices, host=host, hosts=hosts, tokenised=True)


def check(config: Config) -> None:
    """Are the datasets there, and is there a tokenizer?"""
    if config.eval_interval > 0 and _is_tokenised(config):
        _files(config)
        config = config.replace(eval_interval=-1)
    tfds.check(config)


def _is_tokenised(config: Config) -> bool:
    return "tokenized" in config.eval_split


def _vocabulary(config: Config) -> int:
    return config.vocab_size or tokenizer_of(config).vocabulary


def _files(config: Config) -> tuple[Path, ...]:
    if not config.dataset_path:
        raise PingLlmError("dataset_path is not set: give the folder that holds the datasets")
    folder = Path(config.dataset_path, *config.eval_dataset_name.replace(":", "/").split("/"))
    files = matching(f"{folder}/*-{config.eval_split}.tfrecord*", "eval_dataset_name, eval_split")
    check_kind(files, "tfrecord", "eval_split")
    return files
