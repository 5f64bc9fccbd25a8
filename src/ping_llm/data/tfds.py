"""`dataset_type=tfds`: TFRecord datasets through tensorflow-datasets; and `c4_mlperf`, C4 as MLPerf lays it out.

TensorFlow is imported here only, and sees no accelerator. Training of `c4_mlperf` is that of `tfds`; but an eval_split
named `…tokenized…` is TFRecord files of `ids`, without a description of the dataset beside them, which are used as
they are: every benchmark run must see the same sequences, whatever its tokenizer does.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained, need
from ping_llm.data.documents import EpochStream, RecordError, file_stream, int_feature, matching, tfrecord_documents
from ping_llm.data.registry import ONE_HOST, Part
from ping_llm.data.stream import StreamEvalLoader, StreamLoader
from ping_llm.data.tokenizer import tokenizer_of


def train_loader(config: Config, part: Part, state: DataState | None) -> StreamLoader:
    builder, split = _builder(config, "train"), config.train_split
    texts = partial(_texts, builder, split, config.train_data_columns, part, config.shuffle_seed)
    shard_lengths = json.dumps(list(builder.info.splits[split].shard_lengths))
    data = {"name": builder.info.full_name, "split": split, "documents": shard_lengths}
    return StreamLoader(config, part, EpochStream(texts, config.num_epoch), data=data, state=state)


def eval_loader(config: Config, part: Part) -> StreamEvalLoader:
    return StreamEvalLoader(config, part, _eval_documents(config), is_tokenised=_is_tokenised(config))


def check(config: Config) -> None:
    """Are the datasets there, with the text where it should be, and is there a tokenizer?"""
    _builder(config, "train")
    tokenizer_of(config)
    if config.eval_interval > 0:
        _eval_documents(config).read()


def _eval_documents(config: Config) -> EpochStream:
    if not _is_tokenised(config):
        builder = _builder(config, "eval")
        return EpochStream(partial(_texts, builder, config.eval_split, config.eval_data_columns, ONE_HOST, None))
    pattern = f"{_folder(config, config.eval_dataset_name)}/*-{config.eval_split}.tfrecord*"
    files = matching(pattern, "eval_dataset_name, eval_split", "tfrecord")
    decode = partial(_token_ids, vocabulary=config.vocab_size or tokenizer_of(config).vocabulary)
    return file_stream(files, partial(tfrecord_documents, decode=decode))


def _tensorflow(dataset_type: str) -> tuple[Any, Any]:
    """`tensorflow` and `tensorflow_datasets`."""
    tensorflow = need("tensorflow", "tfds", f"dataset_type={dataset_type}")
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)
    return tensorflow, need("tensorflow_datasets", "tfds", f"dataset_type={dataset_type}")


def _builder(config: Config, split: str) -> Any:
    """The builder of a prepared dataset such as `c4/en:3.0.1` below dataset_path, which must have the split."""
    _, datasets = _tensorflow(config.dataset_type)
    name = config.dataset_name if split == "train" else config.eval_dataset_name
    folder = _folder(config, name)
    if not (folder / "dataset_info.json").exists():
        raise PingLlmError(
            f"dataset_path, dataset_name: there is no prepared dataset {name} ({folder}/dataset_info.json)"
        )
    with explained(f"{folder} cannot be read"):  # what tensorflow-datasets says about its own files
        builder = datasets.builder_from_directory(str(folder))
    info = builder.info
    if (wanted := getattr(config, f"{split}_split")) not in info.splits:
        raise PingLlmError(f"{split}_split={wanted}: {info.full_name} has only {', '.join(info.splits)}")
    if (column := getattr(config, f"{split}_data_columns")) not in info.features:
        raise PingLlmError(f"{info.full_name} has no feature {column!r}, only {', '.join(info.features)}")
    return builder


def _folder(config: Config, name: str) -> Path:
    if not config.dataset_path:
        raise PingLlmError("dataset_path is not set: give the folder that holds the datasets")
    return Path(config.dataset_path, *name.replace(":", "/").split("/"))


def _texts(builder: Any, split: str, column: str, part: Part, seed: int | None, epoch: int, skip: int) -> Iterator[str]:
    """This host's documents: files in random order if there is a seed, interleaved by tensorflow-datasets itself.

    Each host has the same number of files, and what is left over is skipped; with fewer files than hosts, each host
    takes every k-th document of all of them.
    """
    tf, tfds = _tensorflow("tfds")
    files, hosts = builder.info.splits[split].num_shards, part.hosts
    read = tfds.ReadConfig(shuffle_seed=(seed or 0) + epoch, try_autocache=False)
    if files >= hosts > 1:
        read.input_context = tf.distribute.InputContext(
            num_input_pipelines=hosts, input_pipeline_id=part.host, num_replicas_in_sync=hosts
        )
        split = f"{split}[:{files - files % hosts}shard]"
    options = tf.data.Options()
    options.deterministic = True
    dataset = builder.as_dataset(split=split, shuffle_files=seed is not None, read_config=read).with_options(options)
    if files < hosts:
        dataset = dataset.shard(hosts, part.host)
    for document in dataset.skip(skip).as_numpy_iterator():
        yield document[column].decode("utf-8", "replace")


def _is_tokenised(config: Config) -> bool:
    return config.dataset_type == "c4_mlperf" and "tokenized" in config.eval_split


def _token_ids(record: bytes, vocabulary: int) -> list[int]:
    tokens = int_feature(record, "ids")
    for token in (max(tokens, default=0), min(tokens, default=0)):
        if not 0 <= token < vocabulary:
            raise RecordError(f"it has token {token}, but the vocabulary has {vocabulary}: vocab_size")
    return tokens
