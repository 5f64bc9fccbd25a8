"""Documents in files: which files a pattern matches, whether they are of the right kind, and how each kind is read.

ArrayRecord files give any document by its number. Parquet and TFRecord files are read from beginning to end, as
iterators of *unread* documents: functions that read and decode one when called. So documents that a host does not need,
because it resumes behind them or they belong to another host, are skipped without being read.

Grain has readers for Parquet and TFRecord, too. They are not used: at 64 to 131 µs per document (ours take 7 to 17,
tokenising takes 200) they would cost a third of the speed; interleaving mixes epochs; and errors name no file.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader
from google.protobuf import descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

from ping_llm.batches.documents import DocumentNumbers
from ping_llm.core.errors import PingLlmError, explained, one_line
from ping_llm.core.randomness import Ints, Purpose, key, permute
from ping_llm.data.registry import ONE_HOST, Part

Unread = Callable[[], Any]  # reads a document: text, or a list of tokens where it was tokenised before
Files = tuple[Path, ...]
Reader = Callable[[Path], Iterator[Unread]]
Position = Any  # where a stream is, as JSON values

T = TypeVar("T")

OPEN_FILES: Final = 16
_READ_TOGETHER: Final = 256
_READERS: Final = 16

_KINDS: Final = {
    "arrayrecord": "an ArrayRecord",
    "parquet": "a Parquet",
    "tfrecord": "a TFRecord",
    "tokens": "a tokens",
}
_RIEGELI: Final = bytes.fromhex("83af70d10d884a3f0000000000000000")  # with which every ArrayRecord file begins
_LONGEST_RECORD: Final = 1 << 31


# Files.


def matching(pattern: str, key: str, kind: str | None = None) -> Files:
    """The files that match a pattern, sorted by name. If a `kind` is given, all must be of it."""
    if "://" in pattern:
        raise PingLlmError(f"{key}: {pattern} is not a local path; documents are read from this machine's disks only")
    path = Path(pattern).expanduser()
    found = tuple(sorted(p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()))
    if not found:
        raise PingLlmError(f"{key}: no file matches {pattern}")
    for file in found if kind else ():
        actual = _kind(file)
        if actual != kind:
            what = f"is {_KINDS[actual]} file" if actual else "is not"
            if not file.stat().st_size:
                raise PingLlmError(f"{key}: {file} is empty")
            advice = f"; set grain_file_type={actual}" if actual and key.startswith("grain") else ""
            expected = _KINDS[kind or ""].split()[1]
            raise PingLlmError(f"{key}: {expected} files are expected, but {file} {what}{advice}")
    return found


def _kind(file: Path) -> str | None:
    """The kind of a file, from how it begins and ends; of token files, from their names."""
    if file.suffix == ".arrow" or (file.suffix == ".bin" and file.with_suffix(".idx").exists()):
        return "tokens"
    size = file.stat().st_size
    with file.open("rb") as data:
        head = data.read(16)
        data.seek(max(0, size - 4))
        tail = data.read()
    if head[:4] == b"PAR1" and tail == b"PAR1":
        return "parquet"
    if head.startswith(_RIEGELI):
        return "arrayrecord"
    length = int.from_bytes(head[:8], "little")
    return "tfrecord" if size == 0 or (len(head) > 12 and length + 16 <= size) else None


# Records: `tf.train.Example` messages, read without TensorFlow.

# TensorFlow's message, without the fields that are not used here.
_EXAMPLE: Final = """
name: "example" package: "e" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".e.BytesList" label: LABEL_OPTIONAL }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".e.Int64List" label: LABEL_OPTIONAL } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".e.Feature" label: LABEL_OPTIONAL } }
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".e.Features.FeatureEntry" label: LABEL_REPEATED } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".e.Features" label: LABEL_OPTIONAL } }
"""


@cache
def _example() -> Any:
    pool = descriptor_pool.DescriptorPool()  # not the common one: TensorFlow may have put its own there
    pool.AddSerializedFile(text_format.Parse(_EXAMPLE, FileDescriptorProto()).SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("e.Example"))


Feature = Callable[[bytes, str], Any]  # gets the value of the named feature of a record


class RecordError(ValueError):
    """What is wrong with a record; the reader adds which record it is."""


def text_feature(record: bytes, name: str) -> str:
    """The first value of a feature of bytes."""
    feature = _feature(record, name)
    if not feature.HasField("bytes_list"):
        raise RecordError(f"its feature {name!r} holds no text")
    values = feature.bytes_list.value
    return values[0].decode("utf-8", "replace") if values else ""


def int_feature(record: bytes, name: str) -> list[int]:
    """All values of a feature of whole numbers."""
    return list(_feature(record, name).int64_list.value)


def _feature(record: bytes, name: str) -> Any:
    try:
        features = _example().FromString(record).features.feature
    except DecodeError as error:
        raise RecordError("it is not a tf.train.Example") from error
    if name in features:
        return features[name]
    has = f"only {', '.join(sorted(features)[:8])}" if features else "it is not a tf.train.Example"
    raise RecordError(f"it has no feature {name!r}, {has}")


# ArrayRecord: any document by its number.


class Documents:
    """The documents of some ArrayRecord files by number: text, or the value of another kind of feature."""

    def __init__(self, files: Sequence[Path], column: str, feature: Feature = text_feature) -> None:
        self._column, self._feature = column, feature
        counts = list(map(count_records, files))
        self.numbers = DocumentNumbers(files, counts)
        if not len(self):
            raise PingLlmError(f"{files[0].parent}: the files hold no document")
        self._records: Any = ArrayRecordDataSource([f"{file}[0:{n}]" for file, n in zip(files, counts, strict=True)])

    def __len__(self) -> int:
        return int(self.numbers.first[-1])

    def texts(self, numbers: Ints) -> list[Any]:
        records, texts = [b""] * len(numbers), []
        shares = [numbers[first::_READERS] for first in range(_READERS)]
        for first, share in enumerate(_threads().map(self._records_of, shares)):
            records[first::_READERS] = share
        for record, number in zip(records, numbers.tolist(), strict=True):
            try:
                texts.append(self._feature(record, self._column))
            except RecordError as error:
                file, position = self.numbers.locate(number)
                where = f"record {position} of {file}"
                raise PingLlmError(f"{where} cannot be used: {error}; train_data_columns names the text") from None
        return texts

    def check(self) -> None:
        """Read the first document of each file."""
        first = self.numbers.first
        self.texts(first[:-1][np.diff(first) > 0])

    def _records_of(self, numbers: Ints) -> list[bytes]:
        records = []
        for number in numbers.tolist():
            try:
                records.append(self._records[number])
            except Exception as error:  # of any kind, without the file
                file, _ = self.numbers.locate(number)
                raise PingLlmError(f"{file} is damaged: {one_line(error)}") from error
        return records


def _threads() -> ThreadPoolExecutor:
    """Threads to read with: a mounted bucket answers slowly. ArrayRecord's own cost 30 µs per record, not 8."""
    process, threads = _readers()
    if process != os.getpid():  # ArrayRecord's own threads are not there, either, and it crashes
        raise PingLlmError(
            "ArrayRecord files were opened before this process was forked, and cannot be read here: start it otherwise "
            '(PyTorch: DataLoader(…, multiprocessing_context="spawn"))'
        )
    return threads


@cache
def _readers() -> tuple[int, ThreadPoolExecutor]:
    return os.getpid(), ThreadPoolExecutor(_READERS)


def count_records(file: Path) -> int:
    _threads()  # an error if this process cannot read ArrayRecord files
    with explained(f"{file} is damaged"):
        reader: Any = ArrayRecordReader(str(file))
        count = int(reader.num_records())
    if not reader.ok():  # a file that is cut off counts as empty
        raise PingLlmError(f"{file} is damaged: it is cut off")
    return count


# Parquet and TFRecord: one document after the other.


def reader_of(kind: str, column: str, feature: Feature = text_feature) -> Reader:
    if kind == "parquet":
        return partial(_parquet_documents, column=column, is_text=feature is text_feature)
    return partial(tfrecord_documents, decode=lambda record: feature(record, column))


def in_order(files: Sequence[Path], kind: str, column: str, feature: Feature = text_feature) -> "EpochStream":
    """All documents of these files, once and in their order."""
    if kind != "arrayrecord":
        return file_stream(files, reader_of(kind, column, feature))
    documents = Documents(files, column, feature)

    def read(epoch: int, skip: int) -> Iterator[Any]:
        for begin in range(skip, len(documents), _READ_TOGETHER):
            yield from documents.texts(np.arange(begin, min(begin + _READ_TOGETHER, len(documents))))

    return EpochStream(read)


def check_documents(files: Sequence[Path], kind: str, column: str) -> None:
    """An error if a file has no text in this column: of a Parquet file from its schema, of others from a document."""
    if kind == "arrayrecord":
        return Documents(files, column).check()
    for documents in map(reader_of(kind, column), files):
        first = next(documents, None)
        if first and kind != "parquet":
            first()


def _parquet_documents(path: Path, column: str, *, is_text: bool = True) -> Iterator[Unread]:
    with explained(f"{path} cannot be read", pa.ArrowInvalid, OSError):
        file = pq.ParquetFile(path)
    with file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise PingLlmError(f"{path} has no column {column!r}, only {', '.join(schema.names)}")
        kind = schema.field(column).type
        texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        tokens = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)
        if not (texts if is_text else tokens):
            raise PingLlmError(f"column {column!r} of {path} holds no {'text' if is_text else 'tokens'}, but {kind}")

        def text_at(group: int, row: int) -> Any:
            return texts_of(group)[row] or ("" if is_text else [])

        @lru_cache(maxsize=1)
        def texts_of(group: int) -> list[Any]:  # a row group is read with the first of its documents
            with explained(f"{path} is damaged", pa.ArrowInvalid, OSError):
                return list(file.read_row_group(group, columns=[column])[0].to_pylist())

        for group in range(file.num_row_groups):
            yield from (partial(text_at, group, row) for row in range(file.metadata.row_group(group).num_rows))


def tfrecord_documents(path: Path, decode: Callable[[bytes], Any]) -> Iterator[Unread]:
    """The records of a file: each is its length (8 bytes), a checksum of that (4), its content, and a checksum (4)."""
    with path.open("rb") as file:

        def read(begin: int, size: int) -> Any:
            file.seek(begin)
            data = file.read(size + 4)
            if len(data) < size + 4:
                raise PingLlmError(f"{path} is cut off in the middle of a record")
            try:
                return decode(data[:size])
            except RecordError as error:
                raise PingLlmError(f"a record of {path} cannot be used: {error}") from None

        while head := file.read(12):
            begin, size = file.tell(), int.from_bytes(head[:8], "little")
            if len(head) < 12 or size > _LONGEST_RECORD:
                raise PingLlmError(f"{path} is not a TFRecord file, or is damaged")
            yield partial(read, begin, size)
            file.seek(begin + size + 4)


# Streams of documents, epoch after epoch.


class EpochStream:
    """The documents of one host, epoch after epoch (-1: without end): texts, or tokens if tokenised before.

    `documents_of(epoch, skip)` gives this host's documents of an epoch without the first `skip`. The position of the
    stream is an epoch and a number of documents in it.
    """

    def __init__(self, documents_of: Callable[[int, int], Iterator[Any]], epochs: int = 1) -> None:
        self._documents_of, self._epochs = documents_of, epochs
        self._documents: Iterator[Any] | None = None
        self._epoch = self._given = 0

    def position(self) -> Position:
        return {"epoch": self._epoch, "document": self._given}

    def seek(self, position: Position) -> None:
        self.close()
        self._epoch, self._given = position["epoch"], position["document"]

    def read(self) -> Any | None:
        """The next document; None when there is no more."""
        while self._epochs < 0 or self._epoch < self._epochs:
            if self._documents is None:
                self._documents = self._documents_of(self._epoch, self._given)
            document = next(self._documents, None)
            if document is not None:
                self._given += 1
                return document
            if not self._given:
                return None  # an epoch without documents: do not search forever
            self._documents, self._given = None, 0
            self._epoch += 1
        return None

    def close(self) -> None:
        self._documents = None


def file_stream(
    files: Sequence[Path], reader: Reader, part: Part = ONE_HOST, *, seed: int | None = None, epochs: int = 1
) -> EpochStream:
    """The documents of a host's files, interleaved; with a seed, files come in another order each epoch."""
    mine, first, step = share(files, part)

    def documents_of(epoch: int, skip: int) -> Iterator[Any]:
        documents = interleaved(map(reader, shuffled(mine, seed, epoch)))
        return (read() for read in islice(documents, first + skip * step, None, step))

    return EpochStream(documents_of, epochs)


def share(files: Sequence[T], part: Part) -> tuple[Sequence[T], int, int]:
    """A host's files, the first of their documents that it takes, and the step to the next.

    Whole files, as evenly as possible; with fewer files than hosts, every host reads all and takes every k-th document.
    """
    host, hosts = part.host, part.hosts
    return (files[host::hosts], 0, 1) if len(files) >= hosts else (files, host, hosts)


def shuffled(files: Sequence[T], seed: int | None, epoch: int) -> list[T]:
    if seed is None:
        return list(files)
    order = permute(key(seed, epoch, Purpose.EPOCH_ORDER), len(files), np.arange(len(files)))
    return [files[i] for i in order.tolist()]


def interleaved(files: Iterator[Iterator[T]]) -> Iterator[T]:
    """One document of each open file in turn; a file that ends is replaced by the next one."""
    opened = deque(islice(files, OPEN_FILES))
    while opened:
        document = next(opened[0], None)
        if document is not None:
            yield document
            opened.rotate(-1)
        else:
            opened.popleft()
            opened.extendleft(islice(files, 1))
