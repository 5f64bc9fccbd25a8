"""`dataset_type=hf`: documents streamed by Hugging Face `datasets`, from files or from the Hub."""

import logging
from collections.abc import Iterator
from typing import Any, Final

from ping_llm.batches.documents import fingerprint
from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained, need
from ping_llm.data.documents import EpochStream, Files, Position, matching, share, shuffled
from ping_llm.data.registry import ONE_HOST, Part
from ping_llm.data.stream import StreamEvalLoader, StreamLoader
from ping_llm.data.tokenizer import tokenizer_of

_FILE_TYPES: Final = {name: name for name in ("json", "parquet", "arrow", "csv", "text")} | {"txt": "text"}

_log = logging.getLogger(__name__)


def train_loader(config: Config, part: Part, state: DataState | None) -> StreamLoader:
    arguments, files = _arguments(config, "train")
    seed, epochs = config.shuffle_seed, config.num_epoch
    documents = HfStream(arguments, config.train_data_columns, part, seed=seed, epochs=epochs)
    urls = "" if files else config.hf_train_files
    if state is not None and not files:
        where = urls or f"{config.hf_path} on the Hub"
        _log.warning("%s is not on this machine: a run resumes exactly only if it has not changed there", where)
    named = {"name": config.hf_name, "folder": config.hf_data_dir, "split": arguments["split"]}
    named |= {"urls": urls} if urls else {}
    data = {"path": arguments["path"], **({"files": fingerprint(files)} if files else named)}
    return StreamLoader(config, part, documents, data=data, state=state)


def eval_loader(config: Config, part: Part) -> StreamEvalLoader:
    return StreamEvalLoader(config, part, HfStream(_arguments(config, "eval")[0], config.eval_data_columns))


def check(config: Config) -> None:
    """An error if a file, the column of text, or the tokenizer is missing."""
    need("datasets", "hf", "dataset_type=hf")
    tokenizer_of(config)
    looked_at = [(_arguments(config, "train")[0], config.train_data_columns)]
    if config.eval_interval > 0:
        looked_at.append((_arguments(config, "eval")[0], config.eval_data_columns))
    for arguments, column in looked_at:
        HfStream(arguments, column).read()


def _arguments(config: Config, split: str) -> tuple[dict[str, Any], Files]:
    """The arguments of `datasets.load_dataset`, and the local files that it is to read."""
    pattern, named = getattr(config, f"hf_{split}_files"), getattr(config, f"hf_{split}_split")
    if not config.hf_path:
        raise PingLlmError("hf_path is not set: parquet, json, arrow, csv or text for files, or a name on the Hub")
    is_files = config.hf_path in _FILE_TYPES
    if is_files and not pattern:
        raise PingLlmError(f"hf_{split}_files is not set: name the {config.hf_path} files")
    if not is_files and not named:
        raise PingLlmError(f"hf_{split}_split is not set: name a split of {config.hf_path}")
    files = matching(pattern, f"hf_{split}_files") if pattern and "://" not in pattern else ()
    name = "train" if is_files else named
    optional = {
        "data_files": {name: [str(file) for file in files] or [pattern]} if pattern else None,
        "name": config.hf_name,
        "data_dir": config.hf_data_dir,
        "token": config.hf_access_token,
    }
    path = _FILE_TYPES.get(config.hf_path, config.hf_path)
    return {"path": path, "split": name} | {k: v for k, v in optional.items() if v}, files


class HfStream(EpochStream):
    """This host's documents of a streamed dataset: whole files, or every k-th document if there are too few files.

    Files are read one after the other, in another order each epoch if there is a seed. Documents are shuffled later, in
    windows, because the shuffle buffer of `datasets` is lost when a run resumes. The state that `datasets` has of the
    current file is part of the position, so that resuming reads no file twice.
    """

    def __init__(
        self, arguments: dict[str, Any], column: str, part: Part = ONE_HOST, *, seed: int | None = None, epochs: int = 1
    ) -> None:
        super().__init__(self._read_files, epochs)
        datasets = need("datasets", "hf", "dataset_type=hf")
        with explained(f"hf_path={arguments['path']}"):  # its own kinds, the network's, and those of the formats
            self._dataset = datasets.load_dataset(**arguments, streaming=True)
        [self._names] = arguments.get("data_files", {"": [arguments["path"]]}).values()
        self._column, self._seed = column, seed
        self._files, self._first, self._step = share(range(self._dataset.num_shards), part)
        self._file = self._number = 0  # in this epoch: files, and documents including those of other hosts
        self._reading: Any = None

    def position(self) -> Position:
        state = self._reading.state_dict() if self._reading is not None else None
        return {"epoch": self._epoch, "file": self._file, "number": self._number, "state": state}

    def seek(self, position: Position) -> None:
        super().seek({"epoch": position["epoch"], "document": position["number"]})
        self._file, self._number = position["file"], position["number"]
        self._reading = None
        if position["state"] is not None:
            self._reading = self._open()
            self._reading.load_state_dict(position["state"])

    @property
    def _shard(self) -> int:
        return shuffled(self._files, self._seed, self._epoch)[self._file]

    def _open(self) -> Any:
        return self._dataset.shard(self._dataset.num_shards, self._shard)

    def _read_files(self, epoch: int, skip: int) -> Iterator[str]:
        """Documents from `_file` and `_reading` on."""
        while self._file < len(self._files):
            self._reading = self._open() if self._reading is None else self._reading
            name = f"file {self._shard + 1} of {self._names[0]}"
            if len(self._names) == self._dataset.num_shards:
                name = self._names[self._shard]
            for document in _readable(self._reading, name):
                self._number += 1
                if (self._number - 1) % self._step == self._first:
                    yield self._text(document)
            self._file, self._reading = self._file + 1, None
        self._file = self._number = 0

    def _text(self, document: Any) -> str:
        if self._column not in document:
            raise PingLlmError(f"the dataset has no column {self._column!r}, only {', '.join(document)}")
        return str(document[self._column] or "")


def _readable(documents: Any, file: str) -> Iterator[Any]:
    with explained(f"hf_path: {file} cannot be read"):  # for instance because it is of another type
        yield from documents
