"""How surprising measurements are to the language model, and how likely each order of their fields is.

A measurement is written as time, source, destination, result, so the bits of its result are those given all that is
known before an answer comes: anomalies are results of many bits. A history that does not fit one context is read in
windows that overlap by half: a measurement is scored where at least half a context of history stands before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from ping_llm.errors import PingLlmError
from ping_llm.predict.contexts import RESULT_LAST
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.sequences import (
    Floats,
    Ints,
    Room,
    Tokens,
    log_probabilities,
    padded,
    power_of_two,
    read_history,
    spell,
    table_length,
)
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens.encode import FIELD_ORDERS
from ping_llm.tokens.vocabulary import FIRST_BYTE

_TOKENS_AT_ONCE: Final = 4096

_FIELDS: Final = ("start", "time", "source", "destination", "result")
_FIELD_OF_ROLE: Final = np.array([0, 2, 2, 3, 3, 1, 1, 1, 4, 4, 4])
"""Place in `_FIELDS` of what each role begins."""


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """Bits of each measurement, by field: the less likely it was, the more. A field includes the token of its role."""

    time: Floats
    source: Floats
    destination: Floats
    """Given time and source."""
    result: Floats
    """Given time, source and destination."""
    start: Floats
    """That another measurement comes; 0 for the first, which is not foretold."""

    def __len__(self) -> int:
        return len(self.result)

    @property
    def total(self) -> Floats:
        return self.start + self.time + self.source + self.destination + self.result


@dataclass(frozen=True, kw_only=True)
class FieldOrders:
    """Log-likelihoods of one measurement, written in each order of its fields."""

    orders: tuple[tuple[str, ...], ...]
    log_likelihood: Floats
    """Of all tokens: that the fields come in this order, and what they say."""

    @property
    def marginal(self) -> float:
        """Of the measurement in whichever order: orders exclude each other, so their likelihoods add up."""
        return float(np.logaddexp.reduce(self.log_likelihood))

    @property
    def mean(self) -> float:
        """Logarithm of the mean likelihood: that of an order taken at random."""
        return self.marginal - float(np.log(len(self.orders)))


def surprise(model: LanguageModel, row: ProbeRow, *, timed: bool = True) -> Surprise:
    """Bits of each measurement of a row, given those before it; untimed, neither see nor foretell times."""
    return surprises(model, [row], timed=timed)[0]


def surprises(model: LanguageModel, rows: Sequence[ProbeRow], *, timed: bool = True) -> list[Surprise]:
    """As `surprise`, of many rows. They are read together, but know nothing of each other."""
    spelled = [_Windows.of(row, model.config.max_target_length, timed=timed) for row in rows]
    logs = _log_probabilities(model, [tokens for windows in spelled for tokens in windows.sequences])
    return [windows.bits([next(logs) for _ in windows.sequences]) for windows in spelled]


def field_order_likelihoods(model: LanguageModel, row: ProbeRow, index: int, *, timed: bool = True) -> FieldOrders:
    """Of measurement `index` of a row, given those before it, which are written with their results last.

    That a measurement begins at all is given. Without times there are 6 orders, else 24.
    """
    if not 0 <= index < len(row):
        raise PingLlmError(f"there is no measurement {index} in a row of {len(row)}")
    chosen = np.arange(Room.of(row, timed=timed).first(index + 1, model.config.max_target_length), index + 1)
    orders = {tuple(f for f in fields if timed or f != "time"): order for order, fields in enumerate(FIELD_ORDERS)}
    written = [
        spell(row, chosen, np.array([0]), timed=timed, order=np.append(np.full(len(chosen) - 1, RESULT_LAST), order))
        for order in orders.values()
    ]
    tokens, counts = written[0]
    size = int(counts[-1])
    known = read_history(model, tokens[:-size])
    questions = padded([tokens[-size:] for tokens, _ in written], 64, power_of_two(len(written)))
    logs = log_probabilities(model, [known], questions[None])[0, : len(written), : size - 1]
    return FieldOrders(orders=tuple(orders), log_likelihood=logs.sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """A row as sequences that overlap."""

    sequences: list[Tokens]
    measurement: Ints
    """Of each token of all sequences: number in the row of the measurement it belongs to, or -1 if not scored here."""
    count: int

    @classmethod
    def of(cls, row: ProbeRow, length: int, *, timed: bool) -> Self:
        edges = np.array(list(_edges(Room.of(row, timed=timed), length)), dtype=np.int64).reshape(-1, 3)
        first, scored, stop = edges.T
        sizes = stop - first
        starts = np.cumsum(sizes) - sizes
        chosen = np.arange(sizes.sum()) + np.repeat(first - starts, sizes)
        tokens, counts = spell(row, chosen, starts, timed=timed, order=RESULT_LAST)
        is_scored = chosen >= np.repeat(scored, sizes)
        begins = (np.cumsum(counts) - counts)[starts]
        return cls(
            sequences=np.split(tokens, begins[1:]) if len(begins) else [],
            measurement=np.repeat(np.where(is_scored, chosen, -1), counts),
            count=len(row),
        )

    def bits(self, logs: list[Floats]) -> Surprise:
        """From log-probabilities of the tokens of each sequence."""
        tokens = np.concatenate([np.zeros(0, np.uint16), *self.sequences])
        # A token belongs to the field that the last role began.
        role = tokens[np.maximum.accumulate(np.where(tokens < FIRST_BYTE, np.arange(len(tokens)), 0))]
        place = self.measurement * len(_FIELDS) + _FIELD_OF_ROLE[role]
        here = self.measurement >= 0
        nats = np.concatenate([np.zeros(0), *logs])
        shape = self.count, len(_FIELDS)
        bits = np.bincount(place[here], -nats[here] / np.log(2), shape[0] * shape[1]).astype(np.float64).reshape(shape)
        return Surprise(**dict(zip(_FIELDS, bits.T, strict=True)))


def _edges(room: Room, length: int) -> Iterator[tuple[int, int, int]]:
    """For each window: its first measurement, the first one that is scored in it, and where it stops."""
    scored = 0
    while scored < len(room.begins):
        first = max(room.last_before(scored, length // 2), room.first(scored + 1, length))
        stop = room.stop(first, length)
        yield first, scored, stop
        scored = stop


def _log_probabilities(model: LanguageModel, sequences: Sequence[Tokens]) -> Iterator[Floats]:
    """Of the tokens of each sequence, 0 for its first. Sequences of similar length are read together."""
    found = [np.zeros(len(tokens)) for tokens in sequences]
    most = model.config.max_target_length
    lengths = np.array([most if model.steady else table_length(len(tokens), most) for tokens in sequences])
    for length in np.unique(lengths).tolist():
        members, at_once = np.flatnonzero(lengths == length), max(1, _TOKENS_AT_ONCE // length)
        for begin in range(0, len(members), at_once):
            some = members[begin : begin + at_once].tolist()
            tokens = padded([sequences[i] for i in some], most, at_once if model.steady else power_of_two(len(some)))
            tokens = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))
            logs = log_probabilities(model, [], tokens)
            for i, of_sequence in zip(some, logs, strict=False):
                found[i][1:] = of_sequence[: len(found[i]) - 1]
    return iter(found)
