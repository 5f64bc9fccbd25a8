"""What the language model finds likely: destinations, by beam search, and whole measurements, field by field.

A question for a destination is written up to the role of its destination, after the result if one is given. Only bytes
can follow there, so the probability of an address is the product of those of its bytes, each among all bytes and given
the ones before. The beam search keeps the likeliest prefixes of addresses, byte by byte.

Measurements are scored by their negative log-likelihood (NLL) in bits. A measurement is written as time, source,
destination, result, so the bits of its result are those given all that is known before an answer comes: its anomaly
score. A history that does not fit one context is read in windows that overlap by half: a measurement is scored where at
least half a context of history stands before it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import ADDRESS_BYTES, format_address
from ping_llm.core.rtt import Floats, Ints
from ping_llm.predict.language_model import (
    KVCache,
    LanguageModel,
    Table,
    extend,
    histories_at_once,
    power_of_two,
    token_table,
)
from ping_llm.predict.prompts import LikelyAddresses, Prompt, TokenOffsets, Tokens, destination_prompt, pack, spell
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS, FIRST_BYTE, RESULT_LAST

_QUESTION_LENGTH: Final = 64
"""More than the longest measurement has."""
_OCTET: Final = re.compile("25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9]")
_GROUP: Final = re.compile("[0-9a-fA-F]{1,4}")


def destinations(
    model: LanguageModel,
    source: str,
    rtt_ms: float | None,
    *,
    history: ProbeRow | None = None,
    time_s: float | None = None,
    count: int = 10,
    beam: int = 256,
    prefix: str = "",
) -> LikelyAddresses:
    """The most probable destinations when this source measures this RTT (None: any result, NaN: it failed).

    Destinations are of the family of the source. With a prefix like `193.0.` or `2001:67c:`, those that begin with it,
    with probabilities given that they do. `beam` is how many prefixes are kept after each byte. With a time, what the
    history has from then on is not used; without, the times of the history are not used.
    """
    family = 6 if ":" in source else 4
    begin = parse_prefix(prefix, family)
    prompt = destination_prompt(source, rtt_ms, history, time_s, model.config.max_target_length)
    missing = ADDRESS_BYTES[family] - len(begin)
    if count < 1 or beam < 1:
        raise PingLlmError(f"count={count} and beam={beam} must be at least 1")
    if missing < 1:
        raise PingLlmError(f"{format_address(family, begin)} is a whole address: there is nothing to complete")
    before, next_byte = _read_prompt(model, prompt, begin)
    path = _no_bytes(before[-1], power_of_two(beam), ADDRESS_BYTES[family] - 1)
    found, scores, next_bytes, covered = np.zeros((1, 0), dtype=np.uint8), np.zeros(1), next_byte[None], 1.0
    for index in range(missing):
        is_last = index == missing - 1
        covered = min(float(np.exp(scores).sum()), 1.0)
        scores = (scores[:, None] + next_bytes).reshape(-1)
        best = np.argsort(-scores, kind="stable")[: count if is_last else beam]
        parent, byte = np.divmod(best, 256)
        scores, found = scores[best], np.append(found[parent], byte[:, None].astype(np.uint8), axis=1)
        if not is_last:
            path, next_bytes = _read_byte(model, before, path, index, parent, byte)
    return LikelyAddresses(
        addresses=tuple(format_address(family, begin + rest.tobytes()) for rest in found),
        probability=np.exp(scores),
        covered=covered,
    )


def parse_prefix(text: str, family: int) -> bytes:
    """Bytes of the beginning of an address: whole octets of IPv4, whole groups of four digits of IPv6.

    A dot or colon after the last one may be left out. So `193.0.1` is `193.0.1.` and not the beginning of `193.0.19.`.
    """
    text = text.strip()
    sign, limit, width, part_of = (".", 4, 1, _OCTET) if family == 4 else (":", 8, 2, _GROUP)
    if "::" in text:
        raise PingLlmError(f"{text!r}: write the zeros out, for :: does not say how many they are")
    parts = text.removesuffix(sign).split(sign) if text else []
    for part in parts:
        if not part_of.fullmatch(part):
            raise PingLlmError(f"{text!r} is not the beginning of an IPv{family} address: {part!r} is no part of one")
    if len(parts) > limit:
        raise PingLlmError(f"{text!r} has {len(parts)} parts, an IPv{family} address has {limit}")
    return b"".join(int(part, 10 if family == 4 else 16).to_bytes(width, "big") for part in parts)


def rank(
    model: LanguageModel,
    source: str,
    candidates: Sequence[str],
    rtt_ms: float | None,
    *,
    history: ProbeRow | None = None,
    time_s: float | None = None,
    per_call: int = 64,
) -> Floats:
    """Natural logarithm of the probability of each candidate, as `destinations` has it. `per_call` are read at once."""
    prompt = destination_prompt(source, rtt_ms, history, time_s, model.config.max_target_length)
    packed = pack([source, *candidates])[1:]
    before, next_byte = _read_prompt(model, prompt, b"")
    scores = next_byte[packed[:, 0]]
    for begin in range(0, len(packed), per_call):
        some = packed[begin : begin + per_call]
        tokens = np.zeros((1, 1, per_call, packed.shape[1]), dtype=np.int32)
        tokens[0, 0, : len(some)] = some + np.int32(FIRST_BYTE)
        later = _log_probabilities(model, before, tokens, only_bytes=True)[0, 0, : len(some)]
        scores[begin : begin + len(some)] += later.sum(axis=1)
    return scores


def _read_prompt(model: LanguageModel, prompt: Prompt, prefix: bytes) -> tuple[list[KVCache], Floats]:
    """What was read up to some byte of the destination, and log-probabilities of the byte that comes next, [256]."""
    question = np.append(prompt.question, np.frombuffer(prefix, dtype=np.uint8) + np.uint16(FIRST_BYTE))
    known = model.read_histories([prompt.history])
    size = np.array([[len(question)]], dtype=np.int32)
    tokens = token_table([question], (1,), _QUESTION_LENGTH)
    logs, read = extend(model.stacked, [known], tokens[None], size, size[..., None] - 1)
    return [known, read], np.asarray(_among_bytes(logs), dtype=np.float64)[0, 0, 0]


def _no_bytes(like: KVCache, beam: int, length: int) -> KVCache:
    """A cache with room for the bytes of each prefix of the beam."""
    layers, *_, heads, size = like.keys.shape
    empty = jnp.zeros((layers, 1, 1, beam, length, heads, size), like.keys.dtype)
    return KVCache(empty, empty, jnp.zeros((1, 1, beam), jnp.int32))


def _read_byte(
    model: LanguageModel, before: list[KVCache], path: KVCache, index: int, parent: Ints, byte: Ints
) -> tuple[KVCache, Floats]:
    """Continue the beam by a byte each. Gives what was read, and log-probabilities of the byte after it."""
    shape = path.sizes.shape
    of = np.zeros(shape[-1], dtype=np.int32)
    of[: len(parent)] = parent
    tokens = np.zeros((*shape, 1), dtype=np.int32)
    tokens[0, 0, : len(byte), 0] = FIRST_BYTE + byte
    path = _taken(path, of)
    logs, read = extend(model.stacked, [*before, path], tokens, np.ones(shape, np.int32), np.zeros_like(tokens))
    return _appended(path, read, index), np.asarray(_among_bytes(logs), dtype=np.float64)[0, 0, : len(byte), 0]


@jax.jit
def _taken(path: KVCache, parent: jax.Array) -> KVCache:
    return KVCache(path.keys[:, :, :, parent], path.values[:, :, :, parent], path.sizes)


@jax.jit
def _appended(path: KVCache, read: KVCache, index: jax.Array) -> KVCache:
    keys, values = (
        old.at[:, :, :, :, index].set(new[:, :, :, :, 0])
        for old, new in ((path.keys, read.keys), (path.values, read.values))
    )
    return KVCache(keys, values, path.sizes + 1)


def _log_probabilities(
    model: LanguageModel, before: list[KVCache], tokens: Table, *, only_bytes: bool = False
) -> Floats:
    """What each token but the first of [..., length] was given: [..., length - 1], natural logarithms.

    `only_bytes`: where nothing else can follow, as probabilities among bytes.
    """
    sizes = np.full(tokens.shape[:-1], tokens.shape[-1], dtype=np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[-1] - 1, dtype=np.int32), tokens[..., 1:].shape)
    logs, _ = extend(model.stacked, before, tokens, sizes, positions)
    target = tokens[..., 1:, None]
    if only_bytes:
        logs, target = _among_bytes(logs), target - FIRST_BYTE
    return np.asarray(jnp.take_along_axis(logs, target, axis=-1)[..., 0], dtype=np.float64)


def _among_bytes(logs: jax.Array) -> jax.Array:
    """Log-probabilities of the 256 bytes, given that a byte comes."""
    return jax.nn.log_softmax(logs[..., FIRST_BYTE:])


# Negative log-likelihood of measurements.

_FIELDS: Final = ("start", "time", "source", "destination", "result")
_FIELD_OF_ROLE: Final = np.array([0, 2, 2, 3, 3, 1, 1, 1, 4, 4, 4])
"""Index in `_FIELDS` of what each role begins."""


@dataclass(frozen=True, kw_only=True)
class FieldBits:
    """NLL of each measurement in bits, by field. A field includes the token of its role."""

    time: Floats
    source: Floats
    destination: Floats
    """Given time and source."""
    result: Floats
    """Given time, source and destination: the anomaly score."""
    start: Floats
    """That another measurement comes; 0 for the first, which is not predicted."""

    @property
    def total(self) -> Floats:
        return self.start + self.time + self.source + self.destination + self.result


def score_rows(model: LanguageModel, rows: Sequence[ProbeRow], *, timed: bool = True) -> list[FieldBits]:
    """Bits of each measurement of some rows, given those before it in its row; untimed, times are neither seen nor
    predicted. Rows are read together, but know nothing of each other."""
    length = model.config.max_target_length
    windows: list[tuple[int, Ints, Tokens]] = []  # number of a row; of each token the measurement, -1 if scored before
    for number, row in enumerate(rows):
        for first, new, stop in TokenOffsets.of(row, timed=timed).windows(length):
            chosen = np.arange(first, stop)
            tokens, counts = spell(row, chosen, timed=timed, order=RESULT_LAST)
            windows.append((number, np.repeat(np.where(chosen >= new, chosen, -1), counts), tokens))
    bits = [np.zeros((len(row), len(_FIELDS))) for row in rows]
    nats = _sequence_nats(model, [tokens for *_, tokens in windows])
    for (number, measurement, tokens), of_window in zip(windows, nats, strict=True):
        # A token belongs to the field that the last role began.
        role = tokens[np.maximum.accumulate(np.where(tokens < FIRST_BYTE, np.arange(len(tokens)), 0))]
        here = measurement >= 0
        np.add.at(bits[number], (measurement[here], _FIELD_OF_ROLE[role][here]), of_window[here] / np.log(2))
    return [FieldBits(**dict(zip(_FIELDS, of_row.T, strict=True))) for of_row in bits]


def _sequence_nats(model: LanguageModel, sequences: Sequence[Tokens]) -> list[Floats]:
    """NLL of the tokens of each sequence, 0 for its first. Sequences of similar length are read together."""
    found = [np.zeros(len(tokens)) for tokens in sequences]
    lengths, per_call = np.array([model.padded_history(len(tokens)) for tokens in sequences]), histories_at_once()[-1]
    for length in np.unique(lengths).tolist():
        members = np.flatnonzero(lengths == length)
        for begin in range(0, len(members), per_call):
            some = members[begin : begin + per_call].tolist()
            logs = _log_probabilities(model, [], token_table([sequences[i] for i in some], (per_call,), length))
            for i, of_sequence in zip(some, logs, strict=False):
                found[i][1:] = -of_sequence[: len(found[i]) - 1]
    return found


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


def field_order_likelihoods(model: LanguageModel, row: ProbeRow, index: int, *, timed: bool = True) -> FieldOrders:
    """Of measurement `index` of a row, given those before it, which are written with their results last.

    That a measurement begins at all is given. Without times there are 6 orders, else 24.
    """
    if not 0 <= index < len(row):
        raise PingLlmError(f"there is no measurement {index} in a row of {len(row)}")
    first = TokenOffsets.of(row, timed=timed).first(index + 1, model.config.max_target_length)
    chosen = np.arange(first, index + 1)
    orders = {tuple(f for f in fields if timed or f != "time"): order for order, fields in enumerate(FIELD_ORDERS)}
    written = [
        spell(row, chosen, timed=timed, order=np.append(np.full(len(chosen) - 1, RESULT_LAST), order))
        for order in orders.values()
    ]
    tokens, counts = written[0]
    size = int(counts[-1])
    known = model.read_histories([tokens[:-size]])
    shape = (power_of_two(len(written)),)
    questions = token_table([tokens[-size:] for tokens, _ in written], shape, _QUESTION_LENGTH)
    logs = _log_probabilities(model, [known], questions[None])[0, : len(written), : size - 1]
    return FieldOrders(orders=tuple(orders), log_likelihood=logs.sum(axis=1))
