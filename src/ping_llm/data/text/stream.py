"""Documents that are read in order: shuffled within windows, tokenised a window at a time, cut into sequences.

A stream knows where it is, and a loader of streams knows where its stream was at the beginning of the window that a
batch ends in, and how much of that window was used. So a run goes on exactly, on as many hosts as before.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Protocol, Self

import numpy as np

from ping_llm.batches.batch import Stages, expand
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.spec import Batch, DataState
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints, Purpose, key, permute
from ping_llm.data.registry import batch_size
from ping_llm.data.text.arrayrecord import EMPTY, Laid, PackSettings, pack
from ping_llm.data.text.spec import TextReport
from ping_llm.data.text.tokenizer import Tokenizer, Tokens, tokenizer_of

Position = Any
"""Where a stream is, as JSON."""

POSITIONS: Final = "positions"
"""Where hosts are, within the identity of a data state: the one place in it that is theirs to use."""

_STAGES: Final = ("read", "encode", "arrange")
_REMEMBERED: Final = 64
"""Batches whose end is remembered: more than are ever made ahead of the training step."""

_log = logging.getLogger(__name__)


class DocumentStream(Protocol):
    """The documents of one host in one epoch after the other: texts, or tokens where they were tokenised before."""

    def position(self) -> Position:
        """Of the next document."""

    def go_to(self, position: Position) -> None: ...

    def read(self) -> Any | None:
        """The next document; None when there is no more."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    global_batch_size: int
    packing: PackSettings
    window: int = 4096
    """Documents that are shuffled and tokenised together; 1 document, if it is 1."""
    seed: int = 0
    shuffle: bool = True


class Windows:
    """Documents of a stream as tokens, laid out one after the other."""

    def __init__(self, stream: DocumentStream, tokenizer: Tokenizer | None, settings: StreamSettings) -> None:
        self.stages = Stages()
        self._stream = stream
        self._tokenizer = tokenizer
        self._settings = settings
        self._number = 0
        self._used = 0
        self._start: Position = {"window": 0, "stream": stream.position()}
        self._laid = Laid.of(*EMPTY, settings.packing)
        self.ended = False

    def position(self) -> Position:
        """Of the next token."""
        return {**self._start, "used": self._used}

    def go_to(self, position: Position) -> None:
        self._stream.go_to(position["stream"])
        self._number = position["window"]
        self.ended = False
        self._next_window()
        self._use(position["used"])

    def sequence(self) -> tuple[Tokens, Ints]:
        """The next one, full but at the end of the data."""
        parts: list[tuple[Tokens, Ints]] = []
        wanted = self._settings.packing.length
        while wanted and not self.ended:
            if not len(self._laid.tokens):
                self._next_window()
                continue
            tokens, sizes = _first(self._laid, wanted)
            parts.append((tokens, sizes))
            wanted -= len(tokens)
            self._use(len(tokens))
        if not parts:
            return EMPTY
        most = self._settings.packing.most_segments
        sizes = np.concatenate([sizes for _, sizes in parts])[:most]
        return np.concatenate([tokens for tokens, _ in parts])[: int(sizes.sum())], sizes

    def _use(self, tokens: int) -> None:
        self._laid = self._laid.without(tokens)
        self._used += tokens

    def _next_window(self) -> None:
        self._start, self._used = {"window": self._number, "stream": self._stream.position()}, 0
        with self.stages("read"):
            documents: list[Any] = []
            while len(documents) < self._settings.window and (document := self._stream.read()) is not None:
                documents.append(document)
        if not documents:
            self.ended = True
            return
        self._number += 1
        if self._settings.shuffle:
            order = key(self._settings.seed, self._number, Purpose.SEQUENCE_ORDER)
            documents = [documents[i] for i in permute(order, len(documents), np.arange(len(documents))).tolist()]
        with self.stages("encode"):
            if self._tokenizer is None:
                lengths = np.array([len(document) for document in documents], dtype=np.int64)
                tokens = np.concatenate([np.asarray(document, dtype=np.uint32) for document in documents])
            else:
                tokens, lengths = self._tokenizer.encode(documents)
            self._laid = Laid.of(tokens, lengths, self._settings.packing)

    def close(self) -> None:
        self._stream.close()


def _first(laid: Laid, tokens: int) -> tuple[Tokens, Ints]:
    """As many tokens as there are, at most so many, and the sizes of the documents' parts in them."""
    end = min(tokens, len(laid.tokens))
    inner = laid.ends[: np.searchsorted(laid.ends, end)]
    return laid.tokens[:end], np.diff(inner, prepend=0, append=end)


class StreamLoader:
    """As a `Loader`: this host's sequences of each batch. Where its data ends, it goes on with batches of padding."""

    def __init__(
        self,
        windows: Windows,
        settings: StreamSettings,
        *,
        identity: Mapping[str, Any],
        host: int = 0,
        hosts: int = 1,
        state: DataState | None = None,
        allow_change: bool = False,
    ) -> None:
        if settings.global_batch_size % hosts:
            raise PingLlmError(
                f"a global batch of {settings.global_batch_size} cannot be shared evenly by {hosts} hosts"
            )
        self._windows = windows
        self._settings = settings
        self._batch_size = settings.global_batch_size // hosts
        self._host, self._hosts = host, hosts
        self._state = DataState(next_step=0, identity=dict(identity), mixture=Mixture.of((Fraction(1),)))
        self._said_that_it_ended = False
        self.report = TextReport(stages=_STAGES, workers=0)
        if state is not None:
            self._resume(state, allow_change=allow_change)
        self._ends: OrderedDict[int, Position] = OrderedDict({self._state.next_step: windows.position()})

    def _resume(self, state: DataState, *, allow_change: bool) -> None:
        positions = state.identity.get(POSITIONS)
        stored = {name: value for name, value in state.identity.items() if name != POSITIONS}
        same = stored == self._state.identity
        if not allow_change:
            replace(state, identity=stored).check(self._state.identity)
        self._state = replace(self._state, next_step=state.next_step)
        if same and isinstance(positions, list) and len(positions) == self._hosts:
            self._windows.go_to(positions[self._host])
            return
        then = len(positions) if isinstance(positions, list) else 0
        what = f"the data was read by {then} host(s) before and is now by {self._hosts}" if same else "the data changed"
        _log.warning("%s: this backend cannot go on exactly, and begins to read from the start again", what)

    def state(self) -> DataState:
        """The next step; where the data is belongs to a step: see `position`."""
        return self._state

    def position(self, step: int) -> str:
        """Where this host's data is before a step that was reached a short time ago."""
        return json.dumps(self._ends[step])

    def most_segments(self, step: int) -> int:
        return self._settings.packing.most_segments

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        stages = self._windows.stages
        stages.seconds.clear()
        asked = time.perf_counter()
        parts = [self._windows.sequence() for _ in range(self._batch_size)]
        waited = time.perf_counter() - asked
        with stages("arrange"):
            packed = pack(parts)
            batch = expand(packed, self._batch_size, self._settings.packing.length)
        real = len(packed.tokens)
        self.report.add(
            wait_s=waited,
            stage_s=np.array([stages.seconds.get(name, 0.0) for name in _STAGES]),
            tokens=real,
            padding=batch["inputs"].size - real,
            corrupt_rows=0,
        )
        step = self._state.next_step + 1
        if self._windows.ended and not self._said_that_it_ended:
            self._said_that_it_ended = True
            _log.warning("host %d has no more training data after step %d: padding from there on", self._host, step - 1)
        self._state = replace(self._state, next_step=step)
        self._ends[step] = self._windows.position()
        if len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)
        return batch

    def close(self) -> None:
        self._windows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EvalLoader:
    """Finite batches, the same every time. Every host reads all of the data and takes its part of each batch.

    So all hosts end at the same batch, whatever is in which file.
    """

    def __init__(self, windows: Windows, settings: StreamSettings, *, host: int, hosts: int, batches: int = -1) -> None:
        size = settings.global_batch_size
        if size % hosts:
            raise PingLlmError(f"a global batch of {size} cannot be shared evenly by {hosts} hosts")
        self._windows = windows
        self._settings = settings
        self._part = slice(host * size // hosts, (host + 1) * size // hosts)
        self._left = batches

    def most_segments(self, step: int) -> int:
        return self._settings.packing.most_segments

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        parts = [self._windows.sequence() for _ in range(self._settings.global_batch_size)]
        if not len(parts[0][0]):
            raise StopIteration
        batch = expand(pack(parts), len(parts), self._settings.packing.length)
        return {name: value[self._part] for name, value in batch.items()}

    def close(self) -> None:
        self._windows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Loaders of documents that are read in order, from a configuration: what the text backends share.

STREAM_VERSION = 1
"""Raised whenever the same files would give other batches."""


def pack_settings(config: Config) -> PackSettings:
    return PackSettings.of(config.max_target_length, config.max_segments_per_seq)


def streamed_training(
    config: Config,
    stream: DocumentStream,
    *,
    data: Mapping[str, Any],
    devices: int,
    host: int,
    hosts: int,
    state: DataState | None,
) -> StreamLoader:
    """`data` says what is read, for the state of the run: going on with something else is refused."""
    tokenizer = tokenizer_of(config)
    settings = _settings(config, devices, shuffle=True)
    identity = {
        "dataset_type": config.dataset_type,
        **data,
        "column": config.train_data_columns,
        "tokenizer": tokenizer.digest,
        "add_bos": config.add_bos,
        "add_eos": config.add_eos,
        "seed": settings.seed,
        "shuffle_window": settings.window,
        "global_batch_size": settings.global_batch_size,
        "length": settings.packing.length,
        "most_segments": settings.packing.most_segments,
        "stream_version": STREAM_VERSION,
    }
    return StreamLoader(
        Windows(stream, tokenizer, settings),
        settings,
        identity=identity,
        host=host,
        hosts=hosts,
        state=state,
        allow_change=config.allow_data_change,
    )


def streamed_evaluation(
    config: Config, stream: DocumentStream, *, devices: int, host: int, hosts: int, tokenised: bool = False
) -> EvalLoader:
    """Of a stream that gives all documents once, the same on every host."""
    tokenizer: Tokenizer | None = None if tokenised else tokenizer_of(config)
    settings = _settings(config, devices, shuffle=False)
    windows = Windows(stream, tokenizer, settings)
    return EvalLoader(windows, settings, host=host, hosts=hosts, batches=config.eval_steps)


def _settings(config: Config, devices: int, *, shuffle: bool) -> StreamSettings:
    return StreamSettings(
        global_batch_size=batch_size(config, devices),
        packing=pack_settings(config),
        window=config.shuffle_window if shuffle else 256,
        seed=config.data_shuffle_seed,
        shuffle=shuffle,
    )
