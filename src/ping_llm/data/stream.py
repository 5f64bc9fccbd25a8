"""Text that is read in order: documents are shuffled within windows, tokenised a window at a time, cut into sequences.

Documents are concatenated and then split (Grain calls this concat-then-split): where a sequence ends, a document is
cut, and each piece is a segment of its own. So sequences are full except at the end of the data, and no text is lost.

A stream of documents knows its position. A loader's position is that of its stream at the beginning of the current
window, and how many tokens of that window were used. So a run resumes exactly, on as many hosts as before.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np

from ping_llm.batches.batch import PackedTokens, Stages, expand
from ping_llm.batches.report import LAY_OUT, PipelineReport
from ping_llm.batches.spec import Batch, DataState, EvalLoader, TrainLoader
from ping_llm.config import Config
from ping_llm.core.randomness import Ints, Purpose, key, permute
from ping_llm.data.documents import EpochStream, Position
from ping_llm.data.registry import TEXT_STAGES, Part, loader_settings
from ping_llm.data.tokenizer import Tokens, tokenization, tokenizer_of

POSITIONS: Final = "positions"  # entry of a data state's identity that holds the positions of all hosts
STREAM_VERSION: Final = 1  # raised whenever the same files would give other batches

_EVAL_WINDOW: Final = 256
_REMEMBERED: Final = 64  # batches whose position is kept: more than are ever made ahead of the training step

_log = logging.getLogger(__name__)


# Sequences.


def max_segments(config: Config) -> int:
    """The most segments of a sequence; text beyond them is dropped and replaced by padding."""
    limit = config.max_segments_per_seq
    return limit if limit > 0 else max(8, config.max_target_length // 32)


def text_identity(config: Config, part: Part) -> dict[str, Any]:
    """What decides the batches of a text backend, for the data state: all but the text itself."""
    return {
        "dataset_type": config.dataset_type,
        "column": config.train_data_columns,
        **tokenization(config),
        "seed": config.shuffle_seed,
        "global_batch_size": part.batch_size(config),
        "length": config.max_target_length,
        "most_segments": max_segments(config),
    }


Packed = tuple[Tokens, Ints]  # tokens of a sequence, and the sizes of its segments
Encode = Callable[[Sequence[Any]], Packed]  # documents to all of their tokens, and how many each has
EMPTY: Final[Packed] = np.zeros(0, np.uint32), np.zeros(0, np.int64)  # a sequence that is all padding


@dataclass(frozen=True)
class Concatenated:
    """Documents one after the other."""

    tokens: Tokens
    ends: Ints  # where each document ends; empty ones are left out

    @classmethod
    def of(cls, tokens: Tokens, lengths: Ints) -> "Concatenated":
        return cls(tokens, np.cumsum(lengths[lengths > 0]))

    def cut(self, begin: int, end: int) -> Packed:
        """The tokens of this range, or as many as there are; each piece of a document is a segment."""
        begin, end = min(begin, len(self.tokens)), min(end, len(self.tokens))
        inner = self.ends[np.searchsorted(self.ends, begin, side="right") : np.searchsorted(self.ends, end)]
        sizes = np.diff(inner, prepend=begin, append=end)
        return self.tokens[begin:end], sizes[sizes > 0]


def joined(pieces: Sequence[Packed], max_segments: int) -> Packed:
    """Pieces as one sequence, cut after `max_segments` segments."""
    if not pieces:
        return EMPTY
    sizes = np.concatenate([sizes for _, sizes in pieces])[:max_segments]
    return np.concatenate([tokens for tokens, _ in pieces])[: int(sizes.sum())], sizes


def pack(sequences: Sequence[Packed]) -> PackedTokens:
    """Sequences in the form of `PackedTokens`; an empty one has no segment."""
    return PackedTokens(
        tokens=np.concatenate([tokens for tokens, _ in sequences]),
        sizes=np.concatenate([sizes for _, sizes in sequences]).astype(np.int32),
        sequence=np.repeat(np.arange(len(sequences)), [len(sizes) for _, sizes in sequences]).astype(np.int32),
    )


class SequenceStream:
    """The sequences of a stream of documents, which are shuffled within windows if there is a seed."""

    def __init__(
        self, config: Config, documents: EpochStream, encode: Encode, *, window: int, seed: int | None = None
    ) -> None:
        self.stages = Stages()
        self.ended = False
        self.close = documents.close
        self._documents, self._encode, self._window, self._seed = documents, encode, window, seed
        self.length, self.max_segments = config.max_target_length, max_segments(config)
        self._number = self._used = 0
        self._start: Position = {"window": 0, "stream": documents.position()}
        self._tokens = Concatenated(*EMPTY)

    def position(self) -> Position:
        return {**self._start, "used": self._used}

    def seek(self, position: Position) -> None:
        self._documents.seek(position["stream"])
        self._number = position["window"]
        self.ended = False
        self._next_window()
        self._used = position["used"]

    def read(self) -> Packed:
        """The next sequence, full except at the end of the data."""
        return joined(self._pieces(), self.max_segments)

    def lay_out(self, packed: PackedTokens, sequences: int) -> Batch:
        return expand(packed, sequences, self.length)

    def _pieces(self) -> list[Packed]:
        """The next sequence, from one window or several."""
        pieces: list[Packed] = []
        missing = self.length
        while missing and not self.ended:
            piece = self._tokens.cut(self._used, self._used + missing)
            if not len(piece[0]):
                self._next_window()
                continue
            pieces.append(piece)
            missing -= len(piece[0])
            self._used += len(piece[0])
        return pieces

    def _next_window(self) -> None:
        self._start, self._used = {"window": self._number, "stream": self._documents.position()}, 0
        with self.stages("read"):
            documents = list(islice(iter(self._documents.read, None), self._window))
        if not documents:
            self.ended = True
            return
        self._number += 1
        if self._seed is not None:
            order = key(self._seed, self._number, Purpose.SEQUENCE_ORDER)
            documents = [documents[i] for i in permute(order, len(documents), np.arange(len(documents))).tolist()]
        with self.stages("encode"):
            self._tokens = Concatenated.of(*self._encode(documents))


# Loaders.


class StreamLoader(TrainLoader):
    """This host's sequences of each batch; batches of padding when its data has ended.

    `data` identifies what is read, for the data state: resuming with something else is refused.
    """

    stages: Final = {name: meaning for name, meaning in TEXT_STAGES.items() if name != "plan"}

    def __init__(
        self,
        config: Config,
        part: Part,
        documents: EpochStream,
        *,
        data: Mapping[str, Any],
        state: DataState | None,
        sequences: Callable[..., SequenceStream] = SequenceStream,
    ) -> None:
        encode, seed, window = tokenizer_of(config).encode, config.shuffle_seed, config.shuffle_window
        rows = part.rows(config)
        self._part, self._batch_size = part, rows.stop - rows.start
        self._sequences = sequences(config, documents, encode, window=window, seed=seed)
        identity = {**text_identity(config, part), **data, "shuffle_window": window, "stream_version": STREAM_VERSION}
        self._state = DataState(next_step=0, identity=identity)
        self._said_that_it_ended = False
        settings = replace(loader_settings(config, part), worker_count=0)
        self.report = PipelineReport(self.stages, settings, (self._batch_size, config.max_target_length))
        if state is not None:
            self._resume(state, allow_change=config.allow_data_change)
        self._positions = {self._state.next_step: self._sequences.position()}

    def _resume(self, state: DataState, *, allow_change: bool) -> None:
        stored = dict(state.identity)
        positions = stored.pop(POSITIONS, None)
        if not allow_change:
            replace(state, identity=stored).check(self._state.identity)
        self._state = replace(self._state, next_step=state.next_step)
        is_same = stored == self._state.identity
        then = len(positions) if isinstance(positions, list) else 0
        if is_same and then == self._part.hosts:
            self._sequences.seek(positions[self._part.host])
            return
        what = f"the data was read by {then} host(s) before and is now by {self._part.hosts}"
        what = what if is_same else "the data changed"
        _log.warning("%s: this backend cannot resume exactly, and reads from the start again", what)

    def state(self) -> DataState:
        """The next step. The position that belongs to a step comes from `position`."""
        return self._state

    def position(self, step: int) -> str:
        """Where in its data this host is before one of the latest steps, as JSON."""
        return json.dumps(self._positions[step])

    def max_segments(self, step: int) -> int:
        return self._sequences.max_segments

    def __next__(self) -> Batch:
        stages, asked = self._sequences.stages, time.perf_counter()
        stages.seconds = {}
        sequences = [self._sequences.read() for _ in range(self._batch_size)]
        waited = time.perf_counter() - asked
        with stages("arrange"):
            packed = pack(sequences)
        with stages(LAY_OUT):
            batch = self._sequences.lay_out(packed, self._batch_size)
        self.report.add(stages.seconds, wait_s=waited, tokens=len(packed.tokens))
        step = self._state.next_step + 1
        if self._sequences.ended and not self._said_that_it_ended:
            self._said_that_it_ended = True
            end = "host %d has no more training data after step %d: only padding follows"
            _log.warning(end, self._part.host, step - 1)
        self._state = replace(self._state, next_step=step)
        self._positions[step] = self._sequences.position()
        self._positions.pop(step - _REMEMBERED, None)
        return batch

    def close(self) -> None:
        self.report.show()
        self._sequences.close()


class StreamEvalLoader(EvalLoader):
    """Finite batches, the same every time. Every host reads all of the data and takes its part of each batch.

    So all hosts end at the same batch, whichever files have more text. `encode` defaults to the run's tokenizer.
    """

    def __init__(
        self,
        config: Config,
        part: Part,
        documents: EpochStream,
        *,
        encode: Encode | None = None,
        sequences: Callable[..., SequenceStream] = SequenceStream,
    ) -> None:
        self._size, self._rows = part.batch_size(config), part.rows(config)
        self._batches_left = config.eval_steps
        self._sequences = sequences(config, documents, encode or tokenizer_of(config).encode, window=_EVAL_WINDOW)

    def max_segments(self, step: int) -> int:
        return self._sequences.max_segments

    def __next__(self) -> Batch:
        if self._batches_left == 0:
            raise StopIteration
        self._batches_left -= 1
        sequences = [self._sequences.read() for _ in range(self._size)]
        if not len(sequences[0][0]):
            raise StopIteration
        batch = self._sequences.lay_out(pack(sequences), self._size)
        return {name: values[self._rows] for name, values in batch.items()}

    def close(self) -> None:
        self._sequences.close()
