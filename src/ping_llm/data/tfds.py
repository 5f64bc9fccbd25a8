"""TensorFlow datasets as streams of documents. TensorFlow is imported here only, and sees no accelerator."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, need
from ping_llm.data.text.stream import EvalLoader, Position, StreamLoader, streamed_evaluation, streamed_training
from ping_llm.data.text.tokenizer import tokenizer_of


def builder(folder: str, name: str, extra_for: str) -> Any:
    """The builder of a dataset such as `c4/en:3.0.1` below a folder, prepared already."""
    module = _datasets(extra_for)
    if not folder:
        raise PingLlmError("dataset_path is not set: give the folder that holds the datasets")
    place = Path(folder, *name.replace(":", "/").split("/"))
    if not (place / "dataset_info.json").exists():
        raise PingLlmError(
            f"dataset_path, dataset_name: there is no prepared dataset {name} ({place}/dataset_info.json)"
        )
    try:
        return module.builder_from_directory(str(place))
    except Exception as error:  # what tensorflow-datasets says about its own files
        raise PingLlmError(f"{place} cannot be read: {' '.join(str(error).split())[:200]}") from None


def check_split(builder: Any, split: str, key: str) -> None:
    if split not in builder.info.splits:
        raise PingLlmError(f"{key}={split}: {builder.info.full_name} has only {', '.join(builder.info.splits)}")


def identity(builder: Any, split: str) -> dict[str, Any]:
    info = builder.info.splits[split]
    return {"name": builder.info.full_name, "split": split, "documents": json.dumps(list(info.shard_lengths))}


def _datasets(what: str) -> Any:
    tensorflow = need("tensorflow", "tfds", f"dataset_type={what}")
    tensorflow.config.set_visible_devices([], "GPU")
    tensorflow.config.set_visible_devices([], "TPU")
    return need("tensorflow_datasets", "tfds", f"dataset_type={what}")


class TfdsStream:
    """This host's documents: files in random order, interleaved by tensorflow-datasets itself.

    As the guide says: each host has the same number of files, and what is left over is skipped; with fewer files than
    hosts, each host takes every k-th document of all of them.
    """

    def __init__(
        self,
        builder: Any,
        split: str,
        column: str,
        *,
        seed: int = 0,
        epochs: int = -1,
        shuffle: bool = True,
        host: int = 0,
        hosts: int = 1,
    ) -> None:
        self._builder, self._split, self._column = builder, split, column
        self._seed, self._epochs, self._shuffle = seed, epochs, shuffle
        self._host, self._hosts = host, hosts
        self._epoch = self._given = 0
        self._documents: Iterator[Any] | None = None
        features = builder.info.features
        if column not in features:
            raise PingLlmError(f"{builder.info.full_name} has no feature {column!r}, only {', '.join(features)}")

    def position(self) -> Position:
        return {"epoch": self._epoch, "document": self._given}

    def go_to(self, position: Position) -> None:
        self._epoch, self._given, self._documents = position["epoch"], position["document"], None

    def read(self) -> Any | None:
        while self._epochs < 0 or self._epoch < self._epochs:
            if self._documents is None:
                self._documents = iter(self._of_epoch().skip(self._given).as_numpy_iterator())
            document = next(self._documents, None)
            if document is not None:
                self._given += 1
                return document[self._column].decode("utf-8", "replace")
            if not self._given:
                return None
            self._documents, self._given = None, 0
            self._epoch += 1
        return None

    def _of_epoch(self) -> Any:
        tfds, tf = _datasets("tfds"), need("tensorflow", "tfds", "dataset_type=tfds")
        files = self._builder.info.splits[self._split].num_shards
        options: dict[str, Any] = {"shuffle_seed": self._seed + self._epoch, "try_autocache": False}
        if files >= self._hosts > 1:
            options["input_context"] = tf.distribute.InputContext(
                num_input_pipelines=self._hosts, input_pipeline_id=self._host, num_replicas_in_sync=self._hosts
            )
            split: Any = f"{self._split}[:{files - files % self._hosts}shard]"
        else:
            split = self._split
        read = tfds.ReadConfig(**options)
        dataset = self._builder.as_dataset(split=split, shuffle_files=self._shuffle, read_config=read)
        deterministic = tf.data.Options()
        deterministic.deterministic = True
        dataset = dataset.with_options(deterministic)
        return dataset.shard(self._hosts, self._host) if files < self._hosts else dataset

    def close(self) -> None:
        self._documents = None


# `dataset_type=tfds`: documents of TFRecord datasets through tensorflow-datasets.


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> StreamLoader:
    made = builder(config.dataset_path, config.dataset_name, config.dataset_type)
    check_split(made, config.train_split, "train_split")
    stream = TfdsStream(
        made,
        config.train_split,
        config.train_data_columns,
        seed=config.data_shuffle_seed,
        epochs=config.num_epoch,
        host=host,
        hosts=hosts,
    )
    data = identity(made, config.train_split)
    return streamed_training(config, stream, data=data, devices=devices, host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> EvalLoader:
    made = builder(config.dataset_path, config.eval_dataset_name, config.dataset_type)
    check_split(made, config.eval_split, "eval_split")
    stream = TfdsStream(made, config.eval_split, config.eval_data_columns, epochs=1, shuffle=False)
    return streamed_evaluation(config, stream, devices=devices, host=host, hosts=hosts)


def check(config: Config) -> None:
    """Are the datasets there, and is there a tokenizer?"""
    check_split(builder(config.dataset_path, config.dataset_name, "tfds"), config.train_split, "train_split")
    tokenizer_of(config)
    if config.eval_interval > 0:
        check_split(builder(config.dataset_path, config.eval_dataset_name, "tfds"), config.eval_split, "eval_split")
