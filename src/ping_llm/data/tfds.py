"""`dataset_type=tfds`: TFRecord datasets through tensorflow-datasets; and `c4_mlperf`, C4 as MLPerf lays it out.

Only this module imports TensorFlow, which sees no accelerator. Documents of `c4_mlperf` become sequences as MaxText
makes them (`MlperfSequences`). An eval_split named `…tokenized…` is TFRecord files of `ids`, without a description of
the dataset beside them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.batches.batch import PackedTokens
from ping_llm.batches.spec import Batch, DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained, need
from ping_llm.data.documents import EpochStream, RecordError, file_stream, int_feature, matching, tfrecord_documents
from ping_llm.data.registry import ONE_HOST, Part
from ping_llm.data.stream import EMPTY, Encode, Packed, SequenceStream, StreamEvalLoader, StreamLoader
from ping_llm.data.tokenizer import tokenizer_of

MLPERF_VERSION: Final = 2  # of the batches of `c4_mlperf`; 1 had a segment for each document
_NOT_COUNTED: Final = 0, 1  # padding and end of document: tokens that MaxText's `c4_mlperf` does not learn to predict


def train_loader(config: Config, part: Part, state: DataState | None) -> StreamLoader:
    builder, split = _builder(config, "train"), config.train_split
    texts = partial(_texts, builder, split, config.train_data_columns, part, config.shuffle_seed)
    shard_lengths = json.dumps(list(builder.info.splits[split].shard_lengths))
    data = {"name": builder.info.full_name, "split": split, "documents": shard_lengths}
    sequences: Callable[..., SequenceStream] = SequenceStream
    if config.dataset_type == "c4_mlperf":
        sequences, data = MlperfSequences, data | {"mlperf_version": MLPERF_VERSION}
    documents = EpochStream(texts, config.num_epoch)
    return StreamLoader(config, part, documents, data=data, state=state, sequences=sequences)


def eval_loader(config: Config, part: Part) -> StreamEvalLoader:
    documents = _eval_documents(config)
    if config.dataset_type == "tfds":
        return StreamEvalLoader(config, part, documents)
    if not _is_tokenised(config):
        return StreamEvalLoader(config, part, documents, sequences=MlperfSequences)
    sequences = partial(MlperfSequences, separator=_separator(config))
    return StreamEvalLoader(config, part, documents, encode=_as_they_are, sequences=sequences)


def check(config: Config) -> None:
    """An error if a dataset, its text, or the tokenizer is missing."""
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
    vocabulary = config.vocab_size or tokenizer_of(config).vocabulary
    decode = partial(_token_ids, vocabulary=vocabulary, separator=_separator(config))
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

    All hosts have the same number of files, and files that are left over are skipped; with fewer files than hosts, each
    host takes every k-th document of all of them.
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


def _separator(config: Config) -> int:
    separator = tokenizer_of(config.replace(add_eos=True)).eos
    if separator is None:
        raise PingLlmError(f"{config.tokenizer_path} has no token for the end of a document, which c4_mlperf needs")
    return separator


def _token_ids(record: bytes, vocabulary: int, separator: int) -> list[int]:
    tokens = int_feature(record, "ids")
    for token in (max(tokens, default=0), min(tokens, default=0)):
        if not 0 <= token < vocabulary:
            raise RecordError(f"it has token {token}, but the vocabulary has {vocabulary}: vocab_size")
    return [*tokens, separator]


class MlperfSequences(SequenceStream):
    """Sequences as MaxText 0.2.5 makes them of `c4_mlperf` (its tfds_data_processing_c4_mlperf.py).

    A sequence is one segment, whatever documents it is cut from: attention and positions run across their borders. In
    text, tokens 0 are left out, and where the next token is 0 or 1 there is no loss and the position is marked as
    padding. In documents that were tokenised before, with a separator behind each, every position has a loss, and what
    does not fill a sequence is left out.
    """

    def __init__(
        self, config: Config, documents: EpochStream, encode: Encode, *, separator: int | None = None, **order: Any
    ) -> None:
        encode = partial(_without_zeros, encode) if separator is None else encode
        super().__init__(config, documents, encode, **order)
        self.max_segments = 1
        self._separator = separator

    def read(self) -> Packed:
        tokens = np.concatenate([EMPTY[0], *(tokens for tokens, _ in self._pieces())])
        if not len(tokens) or (self._separator is not None and len(tokens) < self.length):
            return EMPTY
        return tokens, np.array([len(tokens)])

    def lay_out(self, packed: PackedTokens, sequences: int) -> Batch:
        batch = super().lay_out(packed, sequences)
        counted = batch["inputs_segmentation"]
        last = _NOT_COUNTED[1] if self._separator is None else self._separator
        targets = np.pad(batch["inputs"][:, 1:], ((0, 0), (0, 1)), constant_values=last)
        if self._separator is None:
            counted = counted * ~np.isin(targets, _NOT_COUNTED)
        same = {"targets_position": batch["inputs_position"], "inputs_segmentation": counted}
        return batch | same | {"targets": targets, "targets_segmentation": counted}


def _as_they_are(documents: Sequence[list[int]]) -> Packed:
    tokens = np.concatenate([np.asarray(document, dtype=np.uint32) for document in documents])
    return tokens, np.array([len(document) for document in documents], dtype=np.int64)


def _without_zeros(encode: Encode, documents: Sequence[Any]) -> Packed:
    tokens, _ = encode(documents)
    tokens = tokens[tokens != 0]
    return tokens, np.array([len(tokens)])
