"""`dataset_type=grain`: text in ArrayRecord, Parquet or TFRecord files, or documents that were tokenised before.

Parquet and TFRecord files are read in order (`stream.py`). Of tokenised documents, whose lengths are known, a batch is
a function of its step (`batches/documents.py`). So it is of ArrayRecord files, although nobody knows how many tokens a
document of text has:

epoch   a random permutation of all documents, another one each time
block   about a thousand consecutive documents of that permutation, tokenised together and concatenated; each block
        makes the same number of sequences, so the block and the offset of a sequence are plain arithmetic
lanes   16 neighbouring blocks are used side by side, some sequences of each in turn: so hosts and workers, which take
        different parts of the batches, work on different blocks most of the time

Without shuffling (`enable_data_shuffling=false`) the permutation is the order of the files, and there is one lane.

Documents differ in size, so what blocks hold differs by a few per cent. Sequences are counted such that a block has
three per cent too much on average: that is not seen in this epoch. Where a block has too little, padding stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.batches.documents import DocumentsSpec, TokenDocuments, documents_spec, fingerprint
from ping_llm.batches.spec import DataSpec, DataState, EvalLoader, TrainLoader
from ping_llm.config import Blend, Config, parse_blend
from ping_llm.config.keys import RANDOM_ACCESS_TYPES
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.randomness import Ints, Purpose, key, permute
from ping_llm.data.documents import (
    Documents,
    Files,
    check_documents,
    file_stream,
    in_order,
    matching,
    reader_of,
)
from ping_llm.data.registry import ONE_HOST, TEXT_STAGES, Part, changes_of, eval_loader_of, loader_of
from ping_llm.data.stream import (
    EMPTY,
    Concatenated,
    Packed,
    StreamEvalLoader,
    StreamLoader,
    joined,
    max_segments,
    pack,
    text_identity,
)
from ping_llm.data.tokenizer import tokenizer_of

TEXT_VERSION: Final = 1
"""Raised whenever the same files would give other batches."""

LANES: Final = 16
_OVERFILL_PERCENT: Final = 103
_BLOCKS_KEPT: Final = LANES + 4
_SAMPLED: Final = 8192
_SAMPLED_TOKENS: Final = 512
"""Documents whose size in bytes is looked at, and those of them that are tokenised, to estimate the size of a block."""


def train_loader(config: Config, part: Part, state: DataState | None) -> TrainLoader:
    if config.grain_file_type in RANDOM_ACCESS_TYPES:
        return loader_of(text_spec(config, part), config, part, state)
    [(files, _)] = _train_sources(config)
    reader = reader_of(config.grain_file_type, config.train_data_columns)
    documents = file_stream(files, reader, part, seed=config.shuffle_seed, epochs=config.num_epoch)
    return StreamLoader(config, part, documents, data={"files": fingerprint(files)}, state=state)


def eval_loader(config: Config, part: Part) -> EvalLoader:
    files, kind, column = _eval_files(config), config.grain_file_type, config.eval_data_columns
    if kind == "tokens":
        spec = _tokens_spec(config, part, [_tokens_source(config, files, column, 1)], finite=True)
        return eval_loader_of(spec, config, part)
    return StreamEvalLoader(config, part, in_order(files, kind, column))


def check(config: Config) -> None:
    """Are the files there, of the right kind, with the text where it should be, and is there a tokenizer?"""
    if config.grain_file_type != "tokens":
        tokenizer_of(config)
    found = [(files, config.train_data_columns) for files, _ in _train_sources(config)]
    if config.eval_interval > 0:
        found.append((_eval_files(config), config.eval_data_columns))
    for files, column in found:
        if config.grain_file_type == "tokens":
            TokenDocuments(files, column)
        else:
            check_documents(files, config.grain_file_type, column)


def train_files(config: Config) -> list[Files]:
    return [files for files, _ in _train_sources(config)]


def _train_sources(config: Config) -> list[tuple[Files, Fraction]]:
    """The files of each source of documents, with its share."""
    kind, blend = config.grain_file_type, _blend(config)
    if len(blend) > 1 and kind not in RANDOM_ACCESS_TYPES:
        raise PingLlmError(f"grain_file_type={kind} cannot blend: only {' and '.join(RANDOM_ACCESS_TYPES)} can")
    return [(matching(pattern, "grain_train_files", kind), weight) for pattern, weight in blend]


def _eval_files(config: Config) -> Files:
    if not config.grain_eval_files:
        raise PingLlmError("grain_eval_files is not set: name the evaluation files, or set eval_interval to -1")
    patterns = [pattern for pattern, _ in parse_blend(config.grain_eval_files)]
    return tuple(f for pattern in patterns for f in matching(pattern, "grain_eval_files", config.grain_file_type))


def _blend(config: Config) -> Blend:
    """The patterns to train on with their shares: from the key, or from the JSON file that it names."""
    if path := config.grain_train_mixture_config_path:
        if config.grain_train_files:
            raise PingLlmError("set grain_train_files or grain_train_mixture_config_path, not both")
        return _mixture_file(Path(path))
    if not config.grain_train_files:
        raise PingLlmError("grain_train_files is not set: give a pattern of the training files")
    return parse_blend(config.grain_train_files)


class _MixtureSource(BaseModel):
    path: str
    weight: Annotated[float, Field(ge=0, lt=1e15)]


def _mixture_file(file: Path) -> Blend:
    where = f"grain_train_mixture_config_path={file}"
    with explained(f"{where} cannot be read", OSError):
        text = file.read_bytes()
    try:
        sources = TypeAdapter(dict[str, _MixtureSource]).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        what = " ".join([*map(repr, first["loc"]), first["msg"]])
        raise PingLlmError(f'{where}: {what}; write {{"name": {{"path": pattern, "weight": number}}, …}}') from None
    with explained(where, PingLlmError):
        return parse_blend(";".join(f"{source.path},{source.weight}" for source in sources.values()))


# ArrayRecord and tokenised documents: what decides every batch.


def text_spec(config: Config, part: Part = ONE_HOST, block_documents: int = 1024) -> DataSpec:
    """`batch = f(spec, step)`."""
    found = _train_sources(config)
    if config.grain_file_type == "tokens":
        sources = [_tokens_source(config, files, config.train_data_columns, config.num_epoch) for files, _ in found]
        return _tokens_spec(config, part, sources, weights=tuple(weight for _, weight in found), **changes_of(config))
    return DataSpec(
        sources=tuple(TextSource(config, files, fingerprint(files), block_documents) for files, _ in found),
        weights=tuple(weight for _, weight in found),
        seed=config.data_shuffle_seed,
        global_batch_size=part.batch_size(config),
        length=config.max_target_length,
        settings=text_identity(config, part) | {"text_version": TEXT_VERSION},
        stages=TEXT_STAGES,
        **changes_of(config),
    )


def spec_from_config(config: Config, split: str, part: Part) -> DataSpec:
    if config.grain_file_type not in RANDOM_ACCESS_TYPES or split != "train":
        kinds = " and ".join(RANDOM_ACCESS_TYPES)
        raise PingLlmError(f"of dataset_type=grain, training batches of {kinds} files can be made by their step alone")
    return text_spec(config, part)


def _tokens_source(config: Config, files: Files, column: str, epochs: int) -> DocumentsSpec:
    if not config.vocab_size:
        raise PingLlmError("grain_file_type=tokens: set vocab_size, the tokens of the tokenizer that made the files")
    if not config.enable_data_shuffling or config.max_segments_per_seq > 0:
        raise PingLlmError(
            "grain_file_type=tokens shuffles documents and packs as many as fit: "
            "leave enable_data_shuffling and max_segments_per_seq at their defaults"
        )
    mine = {file.name for file in files}
    excluded = tuple(named for named in _excluded(config.skip_documents) if named[0] in mine)
    return DocumentsSpec.of(files, column=column, epochs=epochs, vocabulary=config.vocab_size, excluded=excluded)


def _excluded(path: str) -> list[tuple[str, int]]:
    with explained(f"skip_documents={path} cannot be read", OSError, UnicodeDecodeError):
        lines = Path(path).read_text(encoding="utf-8").splitlines() if path else []
    found = []
    for number, line in enumerate(lines, 1):
        file, _, document = line.strip().rpartition(" ")
        if not file or not document.isdecimal():
            raise PingLlmError(f"{path}, line {number}: write FILE NUMBER")
        found.append((Path(file).name, int(document)))
    return found


def _tokens_spec(config: Config, part: Part, sources: Sequence[DocumentsSpec], **settings: Any) -> DataSpec:
    shape = {"global_batch_size": part.batch_size(config), "length": config.max_target_length}
    return documents_spec(sources, seed=config.data_shuffle_seed, **shape, **settings)


@dataclass(frozen=True)
class TextSource:
    """ArrayRecord files of one source of documents."""

    config: Config
    files: Files
    fingerprint: str
    block_documents: int

    def open(self, spec: DataSpec, stages: Stages) -> "TextSequences":
        return TextSequences(self, spec, stages)


class TextSequences:
    """The sequences of one source, each by its number alone."""

    def __init__(self, source: TextSource, spec: DataSpec, stages: Stages) -> None:
        config = source.config
        self._documents = Documents(source.files, config.train_data_columns)
        self._tokenizer = tokenizer_of(config)
        self._seed, self._epochs, self._length = config.shuffle_seed, config.num_epoch, spec.length
        self._lanes = LANES if config.enable_data_shuffling else 1
        self._chunk = max(8, spec.global_batch_size // 4)  # sequences from a block in one go: four make a batch
        self._max_segments, self._stages = max_segments(config), stages
        self.left_out = ()  # a damaged file ends the run
        self.blocks = max(1, round(len(self._documents) / source.block_documents))
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._tokenised)

    @cached_property
    def sequences_per_block(self) -> int:
        """From a sample, in whole numbers: this must come out the same on every machine."""
        count = len(self._documents)
        sample = np.unique(np.arange(min(count, _SAMPLED)) * count // min(count, _SAMPLED))
        texts = self._documents.texts(sample)
        sizes = np.array([len(text.encode()) for text in texts], dtype=np.int64)
        some = np.arange(min(len(texts), _SAMPLED_TOKENS)) * len(texts) // min(len(texts), _SAMPLED_TOKENS)
        tokens, _ = self._tokenizer.encode([texts[i] for i in some.tolist()])
        if not len(tokens):
            raise PingLlmError("the documents are empty: there is no text to train on")
        in_all = len(tokens) * int(sizes.sum()) * count  # over bytes of the tokenised × documents looked at
        per_block = int(sizes[some].sum()) * len(sample) * self.blocks * self._length
        return max(1, in_all * 100 // (per_block * _OVERFILL_PERCENT))

    @property
    def sequences_per_epoch(self) -> int:
        return self.sequences_per_block * self.blocks

    def locate(self, sequence: int) -> tuple[int, int, int]:
        """Epoch, block and offset in the block of a sequence, counted from the beginning of all epochs."""
        chunk = self._chunk
        epoch, within = divmod(sequence, self.sequences_per_epoch)
        group, within = divmod(within, self.sequences_per_block * self._lanes)
        first = group * self._lanes
        lanes = min(self._lanes, self.blocks - first)
        rounds, rest = divmod(self.sequences_per_block, chunk)
        whole = rounds * chunk * lanes
        if within < whole:
            turn, offset = divmod(within, chunk)
            return epoch, first + turn % lanes, turn // lanes * chunk + offset
        lane, offset = divmod(within - whole, rest)  # what is left of each block after its last whole chunk
        return epoch, first + lane, rounds * chunk + offset

    def packed(self, sequences: range) -> PackedTokens:
        found = list(map(self._sequence, sequences))
        with self._stages("arrange"):
            return pack(found)

    def max_segments(self, sequences: range) -> int:
        return self._max_segments

    def explain(self, sequence: int) -> dict[str, Any]:
        epoch, block, offset = self.locate(sequence)
        tokens, sizes = self._sequence(sequence)
        whole, numbers = self._block(epoch, block)
        begins = offset * self._length + np.cumsum(sizes) - sizes
        at = np.searchsorted(whole.ends, begins, side="right")
        begins -= np.append(0, whole.ends)[at]
        segments = []
        for number, begin, size, end in zip(numbers[at], begins, sizes, np.cumsum(sizes), strict=True):
            file, document = self._documents.locate(int(number))
            ids = tokens[end - size : end].tolist()
            segments.append(
                {"file": str(file), "document": document, "begin": int(begin), "tokens": len(ids), "token_ids": ids}
            )
        return {"epoch": epoch, "block": block, "index_in_block": offset, "segments": segments}

    def _sequence(self, sequence: int) -> Packed:
        epoch, block, offset = self.locate(sequence)
        if 0 < self._epochs <= epoch:
            return EMPTY
        begin = offset * self._length
        return joined([self._block(epoch, block)[0].cut(begin, begin + self._length)], self._max_segments)

    def _tokenised(self, epoch: int, block: int) -> tuple[Concatenated, Ints]:
        """The tokens of a block, and the numbers of its documents that have any."""
        begin, end = (b * len(self._documents) // self.blocks for b in (block, block + 1))
        with self._stages("plan"):
            numbers = np.arange(begin, end)
            if self._seed is not None:
                numbers = permute(key(self._seed, epoch, Purpose.EPOCH_ORDER), len(self._documents), numbers)
        with self._stages("read"):
            texts = self._documents.texts(numbers)
        with self._stages("encode"):
            tokens, sizes = self._tokenizer.encode(texts)
            return Concatenated.of(tokens, sizes), numbers[sizes > 0]
