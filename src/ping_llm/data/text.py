"""ArrayRecord text: tokenised when it is needed, and packed as documents whose tokens are stored.

Which documents share a sequence follows from their lengths in tokens. So all documents are tokenised once, by all
cores, and the lengths are kept: four bytes per document, in a file named by a digest of the text and the tokenizer.
Batches are then those of token files (`batches/documents.py`): every token of an epoch once, and any sequence by
itself. A process tokenises only the documents of its own sequences, and keeps the rest of those that are cut for the
sequences that follow.
"""

import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import Stages
from ping_llm.batches.documents import DocumentsSpec, fingerprint
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_file
from ping_llm.core.randomness import Ints
from ping_llm.data.documents import Documents, count_records
from ping_llm.data.registry import Part
from ping_llm.data.tokenizer import Tokens, tokenization, tokenizer_of
from ping_llm.storage.cache import cache_folder
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool

Lengths = npt.NDArray[np.uint32]

_KEPT_TOKENS: Final = 1 << 22
_MEASURED_TOGETHER: Final = 4096
_SAID_EVERY_S: Final = 30

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSpec(DocumentsSpec):
    """ArrayRecord files of one source of text."""

    config: Config
    measured: tuple[Path, ...]  # for each file, where the lengths of its documents are

    def documents(self, stages: Stages) -> "TextDocuments":
        return TextDocuments(self, stages)


class TextDocuments:
    """Documents that are tokenised when they are read."""

    def __init__(self, source: TextSpec, stages: Stages) -> None:
        self._documents = Documents(source.files, source.column)
        self.numbers, self._measured, self._stages = self._documents.numbers, source.measured, stages
        counts = np.diff(self.numbers.first).tolist()
        lengths = [_stored(file, count) for file, count in zip(source.measured, counts, strict=True)]
        if any(found is None for found in lengths):
            raise PingLlmError(f"{source.measured[0].parent} has changed while it was used: start again")
        self.lengths: Lengths = np.concatenate([found for found in lengths if found is not None])
        self._encode = tokenizer_of(source.config).encode
        self._kept = OrderedDict[int, Tokens]()

    def read(self, documents: Ints, begins: Ints, sizes: Ints) -> Tokens:
        tokens = self._tokens_of(np.unique(documents).tolist())
        with self._stages("arrange"):
            pieces = list(zip(documents.tolist(), begins.tolist(), sizes.tolist(), strict=True))
            result = np.concatenate([np.zeros(0, np.uint32), *(tokens[d][b : b + size] for d, b, size in pieces)])
            for document, _, size in pieces:
                if size < len(tokens[document]):  # its other pieces are in sequences nearby
                    if document not in self._kept:
                        self._kept[document] = tokens[document].copy()  # not a part of all that were just made
                    self._kept.move_to_end(document)
            while sum(map(len, self._kept.values())) > _KEPT_TOKENS:
                self._kept.popitem(last=False)
        return result

    def _tokens_of(self, wanted: Sequence[int]) -> Mapping[int, Tokens]:
        new = [document for document in wanted if document not in self._kept]
        with self._stages("read"):
            texts = self._documents.texts(np.array(new, dtype=np.int64))
        with self._stages("encode"):
            tokens, sizes = self._encode(texts)
        for document in np.array(new, dtype=np.int64)[sizes != self.lengths[new]].tolist():
            file, number = self.numbers.locate(document)
            measured = self._measured[int(np.searchsorted(self.numbers.first, document, side="right")) - 1]
            raise PingLlmError(f"document {number} of {file} is not as long as it was before: delete {measured}")
        made = dict(zip(new, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True)) if new else {}
        return {document: made[document] if document in made else self._kept[document] for document in wanted}


# How many tokens documents have.


class _Task(NamedTuple):
    config: Config
    column: str
    file: Path
    documents: range
    target: Path


def measured(config: Config, files: Sequence[Path], column: str, part: Part) -> dict[Path, Path]:
    """Where the lengths of the documents of each file are stored, after computing those that are missing.

    Hosts that share the folder begin with different files, and skip what another one has done meanwhile.
    """
    folder = Path(config.data_cache_dir).expanduser() if config.data_cache_dir else cache_folder()
    how = {**tokenization(config), "column": column}
    targets = {file: folder / "lengths" / _name(file, how) for file in files}
    first = part.host * len(files) // part.hosts
    missing = {
        file: count
        for file in (*files[first:], *files[:first])
        if _stored(targets[file], count := count_records(file)) is None
    }
    if missing:
        with explained(f"{folder} cannot be written to: set data_cache_dir", OSError):
            (folder / "lengths").mkdir(parents=True, exist_ok=True)
            _measure(config, column, missing, targets)
    return targets


def _name(file: Path, how: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps([fingerprint([file]), how]).encode()).hexdigest()[:32] + ".npy"


def _stored(target: Path, count: int) -> Lengths | None:
    if not count:
        return np.zeros(0, np.uint32)
    try:
        lengths = np.load(target, mmap_mode="r")
    except Exception:  # missing or damaged in any way: computed again
        return None
    return lengths if lengths.dtype == np.uint32 and lengths.shape == (count,) else None


def _measure(config: Config, column: str, missing: Mapping[Path, int], targets: Mapping[Path, Path]) -> None:
    said, documents = time.monotonic(), sum(missing.values())
    where = next(iter(targets.values())).parent
    _log.info("%s documents are tokenised once, to know how long they are; kept in %s", f"{documents:,}", where)

    def tasks() -> Iterator[_Task]:
        for file, count in missing.items():
            if _stored(targets[file], count) is None:
                for begin in range(0, count, _MEASURED_TOGETHER):
                    yield _Task(config, column, file, range(count)[begin : begin + _MEASURED_TOGETHER], targets[file])

    # grain_worker_count=0 means no worker processes here, either: a script may lack the `__main__` guard they need.
    workers = available_cores() if config.grain_worker_count and documents > _MEASURED_TOGETHER else 1
    parts, done = list[Lengths](), 0
    with worker_pool(workers) as pool:
        for task, lengths in map_in_order(pool, _lengths_of, tasks(), window=4 * workers):
            parts.append(lengths)
            done += len(lengths)
            if task.documents.stop == missing[task.file]:
                with atomic_file(task.target) as unfinished, unfinished.open("wb") as opened:
                    np.save(opened, np.concatenate(parts))
                parts = []
            if time.monotonic() - said > _SAID_EVERY_S:
                said = time.monotonic()
                _log.info("%s of %s documents", f"{done:,}", f"{documents:,}")


def _lengths_of(task: _Task) -> tuple[_Task, Lengths]:
    texts = Documents([task.file], task.column).texts(np.array(task.documents))
    _, sizes = tokenizer_of(task.config).encode(texts)
    return task, sizes.astype(np.uint32)
