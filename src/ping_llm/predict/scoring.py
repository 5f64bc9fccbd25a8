"""Measurements of one source as the tokens that the language model reads, and what the model says of tokens.

Either every measurement of a sequence carries its time, or none does: the two are how most training contexts look. With
times, the first measurement has an absolute one and the others say how many seconds they come later. Of a history that
does not fit the context, the most recent measurements are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.addresses import ADDRESS_BYTES, UNPARSABLE, parse_addresses
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_RTT_MS, MAX_TIME_US
from ping_llm.predict.kv_cache import Cache
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import RESULT_LAST
from ping_llm.rows.format import LONG_GAP_S, ProbeRow
from ping_llm.tokens import FIELD_ORDERS, FIRST_BYTE, TimeKind, token_counts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.uint16]

DESTINATION_LAST: Final = FIELD_ORDERS.index(("time", "source", "result", "destination"))


def spell(row: ProbeRow, chosen: Ints, starts: Ints, *, timed: bool, order: npt.ArrayLike) -> tuple[Tokens, Ints]:
    """Tokens of measurements of a row, in order of time, and how many each takes.

    `starts` are the places in `chosen` at which a new context begins.
    """
    from ping_llm.tokens.encode import encode_history

    seconds = row.time_us[chosen] // 1_000_000 if timed else None
    return encode_history(
        row.family, row.source, row.destinations[chosen], row.rtt_ms[chosen], seconds, starts=starts, order=order
    )


@dataclass(frozen=True, kw_only=True)
class Room:
    """Which consecutive measurements of a row fit a context: `first` to `stop` take `ends[stop] - begins[first]`."""

    ends: Ints
    begins: Ints
    """Earlier than where the measurement before ends: the first of a context has a longer time field."""

    @classmethod
    def of(cls, row: ProbeRow, *, timed: bool) -> Self:
        failed = np.isnan(row.rtt_ms)
        gap = np.diff(row.time_us // 1_000_000, prepend=0)
        later = np.where(gap <= LONG_GAP_S, TimeKind.DELTA1, TimeKind.DELTA4) if timed else TimeKind.NONE
        counts = token_counts(row.family, failed, later)
        as_first = token_counts(row.family, failed, TimeKind.ABSOLUTE if timed else TimeKind.NONE)
        ends = np.append(0, np.cumsum(counts))
        return cls(ends=ends, begins=ends[1:] - as_first)

    def first(self, stop: int, length: int) -> int:
        """The first measurement of a context that holds as many as fit and ends before `stop`."""
        return int(np.searchsorted(self.begins[:stop], self.ends[stop] - length))

    def stop(self, first: int, length: int) -> int:
        """Where a context that begins with `first` is full."""
        return int(np.searchsorted(self.ends, self.begins[first] + length, side="right")) - 1

    def last_before(self, stop: int, least: int) -> int:
        """The last measurement from which on at least so many tokens come before `stop`; 0 if there are fewer."""
        return max(0, int(np.searchsorted(self.begins[:stop], self.ends[stop] - least, side="right")) - 1)


def log_probabilities(
    model: LanguageModel, before: list[Cache], tokens: npt.NDArray[np.int32], *, only_bytes: bool = False
) -> Floats:
    """What each token but the first of [..., length] was given: [..., length - 1], natural logarithms.

    `only_bytes`: where nothing else can follow, as probabilities among bytes.
    """
    sizes = np.full(tokens.shape[:-1], tokens.shape[-1], dtype=np.int32)
    places = np.broadcast_to(np.arange(tokens.shape[-1] - 1, dtype=np.int32), tokens[..., 1:].shape)
    logs, _ = model._follow(model.weights, before, tokens, sizes, places)
    wanted = tokens[..., 1:, None]
    if only_bytes:
        logs, wanted = among_bytes(logs), wanted - FIRST_BYTE
    return np.asarray(jnp.take_along_axis(logs, wanted, axis=-1)[..., 0], dtype=np.float64)


def among_bytes(logs: jax.Array) -> jax.Array:
    """Log-probabilities of the 256 bytes, given that a byte comes."""
    return jax.nn.log_softmax(logs[..., FIRST_BYTE:])


def read_history(model: LanguageModel, history: Tokens) -> Cache:
    """One history, which may be empty, as what its continuations need of it."""
    size = np.array([len(history)], dtype=np.int32)
    tokens = padded([history], model.config.max_target_length)
    if model.steady:
        tokens = np.pad(tokens, ((0, 0), (0, model.history_length(len(history)) - tokens.shape[1])))
    return model._read(model.weights, tokens, size)


def padded(sequences: Sequence[Tokens], most: int, count: int | None = None) -> npt.NDArray[np.int32]:
    """Sequences as rows of a table with `count` rows, and of one of few lengths: each length is compiled anew."""
    table = np.zeros((count or len(sequences), table_length(max(map(len, sequences)), most)), dtype=np.int32)
    for row, sequence in zip(table, sequences, strict=False):
        row[: len(sequence)] = sequence
    return table


def table_length(size: int, most: int) -> int:
    """64, 96, 128, 192, 256, …: a power of two, or three quarters of one."""
    length = power_of_two(max(size, 64))
    return min(most, length * 3 // 4 if 64 < size <= length * 3 // 4 else length)


def power_of_two(count: int) -> int:
    """The next one."""
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Question:
    """What does a source measure, at a time or at any, that gives this result? `rtt_ms`: None for any, NaN for failed.

    With a time, what the history has from then on is not used. Without, the context has no times at all.
    """

    source: str
    rtt_ms: float | None = None
    history: ProbeRow | None = None
    time_s: float | None = None

    def __post_init__(self) -> None:
        source = self.packed_source
        if self.history is not None and self.history.source != source:
            raise PingLlmError(f"the history is of {self.history.source_address}, the question of {self.source}")
        if self.rtt_ms is not None and not np.isnan(self.rtt_ms) and not 0 < self.rtt_ms <= MAX_RTT_MS:
            raise PingLlmError(f"an RTT of {self.rtt_ms} ms is not above 0 and at most {MAX_RTT_MS:.0f}")
        if self.time_s is not None and not 0 <= self.time_s * 1_000_000 <= MAX_TIME_US:
            raise PingLlmError(f"{self.time_s} is not a time in Unix seconds between 1970 and 2100")

    @property
    def packed_source(self) -> bytes:
        return pack([self.source])[0].tobytes()

    @property
    def family(self) -> int:
        return 6 if ":" in self.source else 4

    def spelled(self, length: int) -> tuple[Tokens, Tokens]:
        """The history that fits, and the question up to where the bytes of the destination come."""
        row, timed = self._row(length), self.time_s is not None
        chosen = np.arange(Room.of(row, timed=timed).first(len(row), length), len(row))
        order = RESULT_LAST if self.rtt_ms is None else DESTINATION_LAST
        tokens, counts = spell(row, chosen, np.array([0]), timed=timed, order=order)
        begin = len(tokens) - int(counts[-1])
        unread = ADDRESS_BYTES[self.family] + (self.rtt_ms is None)
        return tokens[:begin], tokens[begin:-unread]

    def _row(self, most: int) -> ProbeRow:
        """The newest measurements of the history, and one more: the question, to a destination that is not read."""
        now = 0 if self.time_s is None else round(self.time_s * 1_000_000)
        width = ADDRESS_BYTES[self.family]
        times, destinations, rtt = np.zeros(0, np.int64), np.zeros((0, width), np.uint8), np.zeros(0, np.float32)
        if self.history is not None:
            times, destinations, rtt = self.history.time_us, self.history.destinations, self.history.rtt_ms
        stop = len(times) if self.time_s is None else int(np.searchsorted(times, now))
        known = slice(max(0, stop - most), stop)
        return ProbeRow(
            family=self.family,
            source=self.packed_source,
            time_us=np.append(times[known], now),
            destinations=np.append(destinations[known], np.zeros((1, width), np.uint8), axis=0),
            # A result that may be any is not read either: it stands after the destination, a single FAILED.
            rtt_ms=np.append(rtt[known], np.float32(np.nan if self.rtt_ms is None else self.rtt_ms)),
        )


def pack(addresses: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Bytes of addresses, all of the family of the first, (addresses, 4 or 16)."""
    families, packed = parse_addresses(addresses)
    bad = np.flatnonzero((families == UNPARSABLE) | (families != families[:1]))
    if len(bad):
        which = addresses[int(bad[0])]
        if families[bad[0]] == UNPARSABLE:
            raise PingLlmError(f"{which!r} is not an IPv4 or IPv6 address")
        raise PingLlmError(f"{which} is of another family than {addresses[0]}")
    return packed[:, : ADDRESS_BYTES[int(families[0])]] if len(families) else packed


# How surprising measurements are to the language model, and how likely each order of their fields is.
#
# A measurement is written as time, source, destination, result, so the bits of its result are those given all that is
# known before an answer comes: anomalies are results of many bits. A history that does not fit one context is read in
# windows that overlap by half: a measurement is scored where at least half a context of history stands before it.

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
