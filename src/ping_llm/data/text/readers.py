"""Parquet and TFRecord files as streams: files in random order, several open at a time, a document of each in turn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Purpose, key, permute
from ping_llm.data.text.arrayrecord import Documents
from ping_llm.data.text.files import NotAnExampleError, RecordFile, int_feature, text_feature
from ping_llm.data.text.stream import Position

OPEN_FILES: Final = 16
_READ_TOGETHER: Final = 256


class Reader(Protocol):
    """A file of documents from its beginning to its end."""

    def read(self) -> Any | None:
        """The next document; None at the end."""

    def skip(self) -> bool:
        """Go past the next document; False at the end."""

    def close(self) -> None: ...


class ParquetReader:
    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise PingLlmError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
        names = self._file.schema_arrow.names
        if column not in names:
            raise PingLlmError(f"{path} has no column {column!r}, only {', '.join(names)}")
        if not pa.types.is_string(kind := self._file.schema_arrow.field(column).type) and not pa.types.is_large_string(
            kind
        ):
            raise PingLlmError(f"column {column!r} of {path} holds no text, but {kind}")
        self._group = -1
        self._left = 0
        self._texts: list[str] | None = None  # of the group that is being read, if any of it was asked for

    def read(self) -> str | None:
        if not self._step():
            return None
        if self._texts is None:
            try:
                self._texts = self._file.read_row_group(self._group, columns=[self._column])[0].to_pylist()
            except (pa.ArrowInvalid, OSError) as error:
                raise PingLlmError(f"{self._path} is damaged: {' '.join(str(error).split())[:200]}") from None
        return self._texts[-1 - self._left] or ""

    def skip(self) -> bool:
        return self._step()

    def _step(self) -> bool:
        while not self._left:
            if self._group + 1 >= self._file.metadata.num_row_groups:
                return False
            self._group += 1
            self._left = self._file.metadata.row_group(self._group).num_rows
            self._texts = None
        self._left -= 1
        return True

    def close(self) -> None:
        self._file.close()


class ExampleReader:
    """Of a TFRecord file: a feature of text, or of tokens."""

    def __init__(self, path: Path, column: str, *, tokenised: bool = False, below: int = 1 << 32) -> None:
        """`below`: all tokens must be."""
        self._path, self._column, self._tokenised, self._below = path, column, tokenised, below
        self._file = RecordFile(path)

    def read(self) -> Any | None:
        record = self._file.read()
        if record is None:
            return None
        try:
            if self._tokenised:
                return self._checked(int_feature(record, self._column))
            return text_feature(record, self._column).decode("utf-8", "replace")
        except NotAnExampleError as error:
            raise PingLlmError(f"a record of {self._path} cannot be used: {error}") from None

    def _checked(self, tokens: list[int]) -> list[int]:
        if tokens and not 0 <= max(tokens) < self._below:
            raise PingLlmError(
                f"{self._path} has token {max(tokens)}, but the vocabulary has {self._below}: vocab_size"
            )
        return tokens

    def skip(self) -> bool:
        return self._file.skip()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Share:
    """A host's share of the files: whole files; where there are too few, some of the documents of each."""

    files: tuple[Path, ...]
    first: int = 0
    step: int = 1
    """Of the documents: `first`, `first + step`, …"""

    @classmethod
    def of(cls, files: tuple[Path, ...], host: int, hosts: int) -> "Share":
        """As even as it can be: some hosts have one file more than others."""
        if len(files) >= hosts:
            return cls(files=files[host::hosts])
        return cls(files=files, first=host, step=hosts)


class InterleavedFiles:
    """Documents of a host's files, epoch after epoch: another order of the files each time."""

    def __init__(
        self,
        share: Share,
        open_file: Callable[[Path], Reader],
        *,
        seed: int = 0,
        epochs: int = -1,
        shuffle: bool = True,
    ) -> None:
        self._share = share
        self._open_file = open_file
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        self._epoch = 0
        self._given = 0  # in this epoch
        self._documents: Iterator[Any] | None = None
        self._open: list[Reader] = []

    def position(self) -> Position:
        return {"epoch": self._epoch, "document": self._given}

    def go_to(self, position: Position) -> None:
        self.close()
        self._epoch, self._given = position["epoch"], position["document"]

    def read(self) -> Any | None:
        while self._epochs < 0 or self._epoch < self._epochs:
            if self._documents is None:
                self._documents = self._all_of_epoch(skip=self._given)
            document = next(self._documents, None)
            if document is not None:
                self._given += 1
                return document
            if not self._given:
                return None  # there is nothing at all: do not search forever
            self._documents, self._given = None, 0
            self._epoch += 1
        return None

    def _all_of_epoch(self, skip: int) -> Iterator[Any]:
        """One document of each open file in turn; documents of other hosts and those that were given are skipped."""
        files = list(self._share.files)
        if self._shuffle:
            order = permute(key(self._seed, self._epoch, Purpose.EPOCH_ORDER), len(files), np.arange(len(files)))
            files = [files[i] for i in order.tolist()]
        waiting = iter(files)
        self._open = [self._open_file(file) for _, file in zip(range(OPEN_FILES), waiting, strict=False)]
        number = turn = 0
        while self._open:
            reader = self._open[turn % len(self._open)]
            is_mine = number % self._share.step == self._share.first
            if is_mine and skip == 0:
                document = reader.read()
                found = document is not None
            else:
                document, found = None, reader.skip()
            if not found:
                reader.close()
                place = turn % len(self._open)
                following = next(waiting, None)
                if following is None:
                    del self._open[place]
                else:
                    self._open[place] = self._open_file(following)
                turn = place
                continue
            if is_mine and skip:
                skip -= 1
            elif is_mine:
                yield document
            number += 1
            turn = (turn % len(self._open)) + 1

    def close(self) -> None:
        for reader in self._open:
            reader.close()
        self._open, self._documents = [], None


class ArrayRecordStream:
    """All documents of ArrayRecord files, once, in their order: for evaluation."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._next = 0
        self._texts: list[str] = []

    def position(self) -> Position:
        return self._next - len(self._texts)

    def go_to(self, position: Position) -> None:
        self._next, self._texts = position, []

    def read(self) -> Any | None:
        if not self._texts:
            end = min(self._next + _READ_TOGETHER, len(self._documents))
            self._texts = self._documents.texts(np.arange(self._next, end))[::-1]
            self._next = end
        return self._texts.pop() if self._texts else None

    def close(self) -> None:
        """Nothing to give back."""


def opener(kind: str, column: str) -> Callable[[Path], Reader]:
    """How files of a kind are opened."""
    return partial(ParquetReader if kind == "parquet" else ExampleReader, column=column)
