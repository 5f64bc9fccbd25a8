"""`dataset_type=hf`: documents streamed by Hugging Face `datasets`, from files or from the Hub."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, need
from ping_llm.core.randomness import Purpose, key, permute
from ping_llm.data.text.files import fingerprint, matching
from ping_llm.data.text.stream import EvalLoader, Position, StreamLoader, streamed_evaluation, streamed_training
from ping_llm.data.text.tokenizer import tokenizer_of

_FILE_TYPES: Final = {
    "json": "json",
    "parquet": "parquet",
    "arrow": "arrow",
    "csv": "csv",
    "text": "text",
    "txt": "text",
}

_log = logging.getLogger(__name__)


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> StreamLoader:
    data = _HfData.of(config, "train")
    stream = HfStream(
        data.load(),
        config.train_data_columns,
        seed=config.data_shuffle_seed,
        epochs=config.num_epoch,
        host=host,
        hosts=hosts,
    )
    if not data.files and state is not None:
        _log.warning("%s comes from the Hub: a run goes on exactly only if it has not changed there", config.hf_path)
    return streamed_training(config, stream, data=data.identity(), devices=devices, host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> EvalLoader:
    stream = HfStream(_HfData.of(config, "eval").load(), config.eval_data_columns, epochs=1, shuffle=False)
    return streamed_evaluation(config, stream, devices=devices, host=host, hosts=hosts)


def check(config: Config) -> None:
    """Are the files there, and is there a tokenizer?"""
    need("datasets", "hf", "dataset_type=hf")
    tokenizer_of(config)
    _HfData.of(config, "train")
    if config.eval_interval > 0:
        _HfData.of(config, "eval")


@dataclass(frozen=True, kw_only=True)
class _HfData:
    """What `datasets` is asked for."""

    path: str
    name: str
    folder: str
    split: str
    files: tuple[Path, ...]
    token: str

    @classmethod
    def of(cls, config: Config, split: str) -> "_HfData":
        pattern = config.hf_train_files if split == "train" else config.hf_eval_files
        wanted = config.hf_train_split if split == "train" else config.hf_eval_split
        if not config.hf_path:
            raise PingLlmError("hf_path is not set: parquet, json, arrow, csv or text for files, or a name on the Hub")
        is_files = config.hf_path in _FILE_TYPES
        if is_files and not pattern:
            raise PingLlmError(f"hf_{split}_files is not set: name the {config.hf_path} files")
        if not is_files and not wanted:
            raise PingLlmError(f"hf_{split}_split is not set: name a split of {config.hf_path}")
        local = bool(pattern) and "://" not in pattern
        return cls(
            path=_FILE_TYPES.get(config.hf_path, config.hf_path),
            name=config.hf_name,
            folder=config.hf_data_dir,
            split="train" if is_files else wanted,
            files=matching(pattern, f"hf_{split}_files") if local else ((Path(pattern),) if pattern else ()),
            token=config.hf_access_token,
        )

    def identity(self) -> dict[str, Any]:
        if self.files and all(file.exists() for file in self.files):
            return {"path": self.path, "files": fingerprint(self.files)}
        return {"path": self.path, "name": self.name, "folder": self.folder, "split": self.split}

    def load(self) -> Any:
        datasets = need("datasets", "hf", "dataset_type=hf")
        asked: dict[str, Any] = {"split": self.split, "streaming": True}
        if self.files:
            asked["data_files"] = {self.split: [str(file) for file in self.files]}
        optional = {"name": self.name, "data_dir": self.folder, "token": self.token}
        try:
            return datasets.load_dataset(self.path, **asked, **{k: v for k, v in optional.items() if v})
        except Exception as error:  # its own kinds, the network's, and those of the formats
            raise PingLlmError(f"hf_path={self.path}: {_one_line(error)}") from None


class HfStream:
    """This host's documents of a streamed dataset: whole files, or every k-th document where there are too few.

    One file is read after the other, in another order each epoch. Documents are shuffled later, in windows: the buffer
    that `datasets` itself shuffles in is lost when a run goes on.
    """

    def __init__(
        self,
        dataset: Any,
        column: str,
        *,
        seed: int = 0,
        epochs: int = -1,
        shuffle: bool = True,
        host: int = 0,
        hosts: int = 1,
    ) -> None:
        self._dataset, self._column = dataset, column
        self._seed, self._epochs, self._shuffle = seed, epochs, shuffle
        self._files, self._first, self._step = list(range(dataset.num_shards)), host, hosts
        if len(self._files) >= hosts:
            self._files, self._first, self._step = self._files[host::hosts], 0, 1
        self._epoch = self._file = self._number = 0  # `_number` counts this epoch's documents, of other hosts too
        self._reading: Any = None
        self._documents: Iterator[Any] | None = None

    def position(self) -> Position:
        state = self._reading.state_dict() if self._reading is not None else None
        return {"epoch": self._epoch, "file": self._file, "number": self._number, "state": state}

    def go_to(self, position: Position) -> None:
        self._epoch, self._file, self._number = (position[name] for name in ("epoch", "file", "number"))
        self._reading = self._documents = None
        if position["state"] is not None:
            self._open()
            self._reading.load_state_dict(position["state"])

    def read(self) -> Any | None:
        while self._epochs < 0 or self._epoch < self._epochs:
            if self._file == len(self._files):
                if not self._number:
                    return None  # there is nothing at all: do not search forever
                self._epoch, self._file, self._number = self._epoch + 1, 0, 0
                continue
            if self._reading is None:
                self._open()
            if self._documents is None:
                self._documents = iter(self._reading)
            while (document := self._next(self._documents)) is not None:
                self._number += 1
                if (self._number - 1) % self._step == self._first:
                    return self._text(document)
            self._file, self._reading, self._documents = self._file + 1, None, None
        return None

    def _open(self) -> None:
        order = np.arange(len(self._files))
        if self._shuffle:
            order = permute(key(self._seed, self._epoch, Purpose.EPOCH_ORDER), len(order), order)
        file = self._files[int(order[self._file])]
        self._reading = self._dataset.shard(self._dataset.num_shards, file)

    def _next(self, documents: Iterator[Any]) -> Any | None:
        try:
            return next(documents, None)
        except Exception as error:  # what a file that is not of the type makes the reader raise
            raise PingLlmError(f"hf_path: a file cannot be read: {_one_line(error)}") from None

    def _text(self, document: Any) -> str:
        if self._column not in document:
            raise PingLlmError(f"the dataset has no column {self._column!r}, only {', '.join(document)}")
        return str(document[self._column] or "")

    def close(self) -> None:
        self._documents = None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
