"""Tokenised documents as a source of batches: best-fit packed, every token of an epoch exactly once.

Two kinds of files are read where they lie, mapped to memory: Arrow files (as `datasets` saves them) and token files in
the layout of Megatron-LM (`NAME.bin`, the tokens of all documents, and `NAME.idx`, where each begins). Parquet files
cannot give a single document quickly: `ping-llm tokenize` copies them to token files once, as it does with text. Text
that is tokenised when it is needed (`data/text.py`) is packed here, too, once the lengths of its documents are known.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.batches.packing import PACKING_VERSION, PackingPlan, Pieces
from ping_llm.batches.spec import DataSpec
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import atomic_file
from ping_llm.core.randomness import Ints

STAGES: Final = {"plan": "which documents share a sequence", "read": "copy their tokens from mapped files"}

_FINGERPRINTED: Final = 1 << 16  # bytes at either end of a file
# An index begins with magic bytes, version, type of the tokens, number of sequences and number of documents + 1.
_HEADER: Final = struct.Struct("<9sQBQQ")
_MAGIC: Final = b"MMIDIDX\x00\x00"
_KINDS: Final[dict[int, np.dtype[Any]]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}


@dataclass(frozen=True)
class DocumentsSpec:
    """Files of tokenised documents: one source of sequences."""

    files: tuple[Path, ...]
    fingerprint: str
    column: str = "input_ids"  # of Arrow files
    epochs: int = -1  # padding follows after so many epochs; -1: endless
    vocabulary: int = 1 << 32  # a token that is not below this is an error
    shuffled: bool = True  # if not, documents keep the order of their files, the same in every epoch
    excluded: tuple[tuple[str, int], ...] = ()  # (file name, number in it) of documents that padding replaces

    @classmethod
    def of(cls, files: Sequence[Path], **settings: Any) -> Self:
        content = fingerprint([each for file in files for each in _with_index(file)])
        order = "" if settings.get("shuffled", True) else ", in order"
        return cls(tuple(files), f"{content} {settings.get('column', cls.column)}{order}", **settings)

    def documents(self, stages: Stages) -> "DocumentSource":
        return TokenDocuments(self.files, self.column, stages)

    def open(self, spec: DataSpec, stages: Stages) -> "PackedDocuments":
        return PackedDocuments(self, spec.length, spec.seed, stages)


def documents_spec(sources: Sequence[DocumentsSpec], **settings: Any) -> DataSpec:
    """What decides every batch of tokenised documents; `settings` are those of `DataSpec`.

    >>> source = DocumentsSpec.of([Path("wiki.bin")])
    >>> batch = BatchSource(documents_spec([source], length=2048, global_batch_size=64))[1000]
    """
    identity = {"packing_version": PACKING_VERSION, **settings.pop("settings", {})}
    return DataSpec(sources=tuple(sources), settings=identity, **{"stages": STAGES} | settings)


class DocumentSource(Protocol):
    """Documents by number, any part of which can be read."""

    @property
    def lengths(self) -> npt.NDArray[np.uint32]: ...

    def read(self, documents: Ints, begins: Ints, sizes: Ints) -> npt.NDArray[np.uint32]:
        """Piece after piece: `sizes[i]` tokens of document `documents[i]`, from its token `begins[i]` on."""

    @property
    def numbers(self) -> "DocumentNumbers": ...


class DocumentNumbers:
    """The documents of several files, numbered in the order of the files. File i begins at number `first[i]`."""

    def __init__(self, files: Sequence[Path], counts: Sequence[int]) -> None:
        self._files, self.first = files, np.cumsum([0, *counts])

    def locate(self, document: int) -> tuple[Path, int]:
        """The file of a document, and its number there."""
        file = int(np.searchsorted(self.first, document, side="right")) - 1
        return self._files[file], document - int(self.first[file])

    def of(self, name: str, document: int) -> int:
        """The number of a document that is known by the name of its file and its number there."""
        for file, first, end in zip(self._files, self.first, self.first[1:], strict=False):
            if file.name == name and document < end - first:
                return int(first) + document
        raise PingLlmError(f"there is no document {document:,} of a file {name} to leave out")


class PackedDocuments:
    """Sequences made of documents, any of them by its number."""

    def __init__(self, source: DocumentsSpec, length: int, seed: int, stages: Stages) -> None:
        self.documents = source.documents(stages)
        self.plan = PackingPlan(self.documents.lengths, length, seed if source.shuffled else None)
        self.left_out = ()  # a damaged file ends the run
        self._epochs, self._vocabulary, self._stages = source.epochs, source.vocabulary, stages
        self._excluded = [self.documents.numbers.of(*named) for named in source.excluded]

    @property
    def sequences_per_epoch(self) -> int:
        return self.plan.sequences_per_epoch

    def packed(self, sequences: range) -> PackedTokens:
        with self._stages("plan"):
            pieces = self.pieces_of(sequences)
        tokens = self.documents.read(pieces.document, pieces.begin, pieces.size)
        if len(tokens) and (largest := int(tokens.max())) >= self._vocabulary:
            file, _ = self.documents.numbers.locate(int(pieces.document[0]))
            raise PingLlmError(f"{file.parent} has token {largest}, but the vocabulary has {self._vocabulary}")
        return PackedTokens(
            tokens=tokens, sizes=pieces.size.astype(np.int32), sequence=pieces.sequence.astype(np.int32)
        )

    def pieces_of(self, sequences: range) -> Pieces:
        """The documents, and parts of them, that these sequences are made of."""
        there = len(sequences)
        if self._epochs >= 0:
            there = min(there, max(0, self._epochs * self.sequences_per_epoch - sequences.start))
        pieces = self.plan.pieces_of(sequences[:there])
        return pieces.take(~np.isin(pieces.document, self._excluded)) if self._excluded else pieces

    def explain(self, sequence: int) -> dict[str, Any]:
        epoch, block, index = self.plan.locate(sequence)
        segments = []
        for piece in np.transpose(self.pieces_of(range(sequence, sequence + 1))[1:]):
            document, begin, size = piece.tolist()
            file, number = self.documents.numbers.locate(document)
            ids = self.documents.read(*piece[:, None]).tolist()
            segments.append({"file": str(file), "document": number, "begin": begin, "tokens": size, "token_ids": ids})
        return {"epoch": epoch, "block": block, "index_in_block": index, "segments": segments}

    def max_segments(self, sequences: range) -> int:
        pieces = self.pieces_of(sequences)
        return int(np.bincount(pieces.sequence, minlength=1).max())


@dataclass(frozen=True, eq=False)
class Stored:
    """Documents whose tokens lie side by side: document i has `lengths[i]` tokens, from `begins[i]` on."""

    tokens: npt.NDArray[Any]
    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.uint32]
    bytes_each: int = 1  # size of a token in the unit of `begins`: 1 where that counts tokens, not bytes


class TokenDocuments:
    """The documents of some files, numbered in the order of the files."""

    def __init__(self, files: Sequence[Path], column: str = "input_ids", stages: Stages | None = None) -> None:
        self._parts, self._file, counts = list[Stored](), list[Path](), list[int]()
        for file in files:
            parts = _arrow(file, column) if file.suffix == ".arrow" else [_token_file(file)]
            self._parts += parts
            self._file += [file] * len(parts)
            counts.append(sum(len(part.lengths) for part in parts))
        self._first = np.cumsum([0, *(len(part.lengths) for part in self._parts)])
        if not self._first[-1]:
            raise PingLlmError(f"{', '.join(map(str, files)) or 'no file'}: there is no document")
        lengths = [part.lengths for part in self._parts]
        self.lengths = lengths[0] if len(lengths) == 1 else np.concatenate(lengths)
        self.numbers, self._stages = DocumentNumbers(files, counts), stages or Stages()

    def read(self, documents: Ints, begins: Ints, sizes: Ints) -> npt.NDArray[np.uint32]:
        with self._stages("read"):
            result, end = np.empty(int(sizes.sum()), dtype=np.uint32), 0
            part = np.searchsorted(self._first, documents, side="right") - 1
            columns = part, documents - self._first[part], begins, sizes
            for number, document, begin, size in zip(*(column.tolist() for column in columns), strict=True):
                stored = self._parts[number]
                first = int(stored.begins[document]) // stored.bytes_each + begin
                piece = stored.tokens[first : first + size] if first >= 0 else ()
                if len(piece) != size:
                    raise PingLlmError(f"{self._file[number]} is damaged: document {document} ends behind its tokens")
                result[end : end + size] = piece
                end += size
            return result


def _with_index(file: Path) -> list[Path]:
    return [file] if file.suffix == ".arrow" else [file.with_suffix(".bin"), file.with_suffix(".idx")]


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of names, sizes, and the first and last 64 KiB of each file, where tables of contents are."""
    hashed = hashlib.sha256()
    for file in files:
        with explained(f"{file} cannot be read", OSError), file.open("rb") as data:
            size = data.seek(0, os.SEEK_END)
            hashed.update(f"{file.name} {size}\n".encode())
            for begin in (0, max(0, size - _FINGERPRINTED)):
                data.seek(begin)
                hashed.update(data.read(_FINGERPRINTED))
    return hashed.hexdigest()[:16]


def _token_file(file: Path) -> Stored:
    """A token file, mapped; only the lengths in its index are read."""
    file, index = _with_index(file)
    with explained(f"{file} cannot be read", OSError, ValueError):
        with index.open("rb") as opened:
            header = opened.read(_HEADER.size)
        magic, version, kind, count, _ = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != 1 or kind not in _KINDS:
            raise PingLlmError(f"{index} is not the index of a token file of 16 or 32 bits")
        if index.stat().st_size < _HEADER.size + 12 * count:
            raise PingLlmError(f"{index} is cut off: it says that there are {count:,} documents")
        lengths = np.fromfile(index, "<u4", count, offset=_HEADER.size)
        begins = np.memmap(index, "<i8", "r", _HEADER.size + 4 * count, count) if count else np.zeros(0, np.int64)
        tokens = np.memmap(file, _KINDS[kind], "r") if file.stat().st_size else np.zeros(0, _KINDS[kind])
    if int(lengths.sum(dtype=np.int64)) > len(tokens):
        raise PingLlmError(f"{file} is damaged: it has {len(tokens):,} tokens, fewer than its index says")
    return Stored(tokens.view(np.ndarray), begins.view(np.ndarray), lengths, bytes_each=_KINDS[kind].itemsize)


def _arrow(file: Path, column: str) -> list[Stored]:
    """The record batches of an Arrow file, or of a stream as `datasets` writes them."""
    with explained(f"{file} cannot be read", OSError, pa.ArrowInvalid):
        mapped = pa.memory_map(str(file))
        try:
            table = pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            table = pa.ipc.open_stream(mapped).read_all()
    if column not in table.column_names:
        raise PingLlmError(f"{file} has no column {column!r}, only {', '.join(table.column_names)}")
    kind = table.schema.field(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise PingLlmError(f"column {column!r} of {file} holds {kind}; expected lists of token ids")
    parts = []
    for chunk in table[column].chunks:
        offsets = chunk.offsets.to_numpy().astype(np.int64)
        lengths = np.where(chunk.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
        parts.append(Stored(chunk.values.to_numpy(), offsets[:-1], lengths.astype(np.uint32)))
    return parts


def write_token_file(file: Path, documents: Iterable[npt.ArrayLike], vocabulary: int) -> None:
    """Write documents to `NAME.bin` and `NAME.idx`; tokens take 16 bits if the vocabulary allows it, otherwise 32."""
    kind = 8 if vocabulary <= 1 << 16 else 4
    lengths: list[int] = []
    with atomic_file(file.with_suffix(".idx")) as index, atomic_file(file.with_suffix(".bin")) as tokens:
        with tokens.open("wb") as opened:
            for document in documents:
                array = np.asarray(document)
                if len(array) and not 0 <= array.min() <= array.max() < vocabulary:
                    raise PingLlmError(f"document {len(lengths)} has a token outside of the {vocabulary:,} there are")
                lengths.append(len(array))
                opened.write(array.astype(_KINDS[kind]).tobytes())
        sizes = np.array(lengths, dtype="<u4")
        begins = (np.cumsum(sizes, dtype="<i8") - sizes) * _KINDS[kind].itemsize
        header = _HEADER.pack(_MAGIC, 1, kind, len(sizes), len(sizes) + 1)
        columns = sizes, begins, np.arange(len(sizes) + 1, dtype="<i8")
        index.write_bytes(header + b"".join(column.tobytes() for column in columns))
