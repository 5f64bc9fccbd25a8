"""Destinations that the language model finds likely: for a result, for the beginning of an address, or among some.

A question is written up to the role of its destination, after the result if one is given. Only bytes can follow there,
so the probability of an address is the product of those of its bytes, each among all bytes and given the ones before.
The search keeps the likeliest beginnings of addresses, byte by byte.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.addresses import ADDRESS_BYTES, format_address
from ping_llm.core.errors import PingLlmError
from ping_llm.predict.kv_cache import Cache
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.scoring import (
    Floats,
    Ints,
    Question,
    among_bytes,
    log_probabilities,
    pack,
    padded,
    power_of_two,
    read_history,
)
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIRST_BYTE

_BEAM: Final = 256
_CANDIDATES_AT_ONCE: Final = 256

_OCTET: Final = re.compile("25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9]")
_GROUP: Final = re.compile("[0-9a-fA-F]{1,4}")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Likely:
    """The likeliest addresses that were found, best first."""

    addresses: tuple[str, ...]
    probability: Floats
    """Of each: exact, and given the beginning that was asked for."""
    covered: float
    """Probability of all addresses that were looked at. What is missing to 1 is that of all others together."""


def destinations(
    model: LanguageModel,
    source: str,
    rtt_ms: float | None,
    *,
    history: ProbeRow | None = None,
    time_s: float | None = None,
    count: int = 10,
    beam: int = _BEAM,
    prefix: bytes = b"",
) -> Likely:
    """The most probable destinations when this source measures this RTT (None: any result, NaN: it failed).

    Destinations are of the family of the source. `prefix` are bytes that they begin with; `beam` is how many beginnings
    are kept after each byte. With a time, what the history has from then on is not used; without, the times of the
    history are not used.
    """
    question = Question(source=source, rtt_ms=rtt_ms, history=history, time_s=time_s)
    if count < 1 or beam < 1:
        raise PingLlmError(f"count={count} and beam={beam} must be at least 1")
    if len(prefix) >= ADDRESS_BYTES[question.family]:
        raise PingLlmError(
            f"{format_address(question.family, prefix)} is a whole address: there is nothing to complete"
        )
    found, logs, covered = _search(model, _Asked.of(model, question, prefix), count, beam)
    return Likely(
        addresses=tuple(format_address(question.family, prefix + rest.tobytes()) for rest in found),
        probability=np.exp(logs),
        covered=covered,
    )


def complete(
    model: LanguageModel,
    source: str,
    prefix: str,
    *,
    rtt_ms: float | None = None,
    history: ProbeRow | None = None,
    time_s: float | None = None,
    count: int = 10,
    beam: int = _BEAM,
) -> Likely:
    """The most probable destinations that begin like `193.0.` or `2001:67c:`, with probabilities given that they do."""
    known = parse_prefix(prefix, 6 if ":" in source else 4)
    return destinations(model, source, rtt_ms, history=history, time_s=time_s, count=count, beam=beam, prefix=known)


def rank(
    model: LanguageModel,
    source: str,
    candidates: Sequence[str],
    rtt_ms: float | None,
    *,
    history: ProbeRow | None = None,
    time_s: float | None = None,
) -> Floats:
    """Natural logarithm of the probability of each candidate, as `destinations` has it."""
    question = Question(source=source, rtt_ms=rtt_ms, history=history, time_s=time_s)
    packed = pack([source, *candidates])[1:]
    asked = _Asked.of(model, question, b"")
    scores = asked.next_byte[packed[:, 0]]
    for begin in range(0, len(packed), _CANDIDATES_AT_ONCE):
        some = packed[begin : begin + _CANDIDATES_AT_ONCE]
        count = _CANDIDATES_AT_ONCE if model.steady else power_of_two(len(some))
        tokens = np.zeros((1, 1, count, packed.shape[1]), dtype=np.int32)
        tokens[0, 0, : len(some)] = some + np.int32(FIRST_BYTE)
        later = log_probabilities(model, asked.before, tokens, only_bytes=True)[0, 0, : len(some)]
        scores[begin : begin + len(some)] += later.sum(axis=1)
    return scores


def parse_prefix(text: str, family: int) -> bytes:
    """Bytes of the beginning of an address: whole octets of IPv4, whole groups of four digits of IPv6.

    A dot or colon after the last one may be left out. So `193.0.1` is `193.0.1.` and not the beginning of `193.0.19.`.
    """
    text = text.strip()
    sign, most, width, part_of = (".", 4, 1, _OCTET) if family == 4 else (":", 8, 2, _GROUP)
    if "::" in text:
        raise PingLlmError(f"{text!r}: write the zeros out, for :: does not say how many they are")
    parts = text.removesuffix(sign).split(sign) if text else []
    for part in parts:
        if not part_of.fullmatch(part):
            raise PingLlmError(f"{text!r} is not the beginning of an IPv{family} address: {part!r} is no part of one")
    if len(parts) > most:
        raise PingLlmError(f"{text!r} has {len(parts)} parts, an IPv{family} address has {most}")
    return b"".join(int(part, 10 if family == 4 else 16).to_bytes(width, "big") for part in parts)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question that was read up to some byte of its destination."""

    before: list[Cache]
    next_byte: Floats
    """[256]: log-probabilities of the byte that comes next."""
    missing: int
    """Bytes of the destination that are still to come."""
    width: int
    """Of a whole address."""

    @classmethod
    def of(cls, model: LanguageModel, question: Question, prefix: bytes) -> Self:
        history, asked = question.spelled(model.config.max_target_length)
        asked = np.append(asked, np.frombuffer(prefix, dtype=np.uint8) + np.uint16(FIRST_BYTE))
        known = read_history(model, history)
        size = np.array([[len(asked)]], dtype=np.int32)
        places = size[..., None] - 1
        logs, read = model._follow(model.weights, [known], padded([asked], 64)[None], size, places)
        width = ADDRESS_BYTES[question.family]
        next_byte = _of_bytes(logs)[0, 0, 0]
        return cls(before=[known, read], next_byte=next_byte, missing=width - len(prefix), width=width)


def _of_bytes(logs: jax.Array) -> Floats:
    return np.asarray(among_bytes(logs), dtype=np.float64)


def _search(model: LanguageModel, asked: _Asked, count: int, beam: int) -> tuple[Bytes, Floats, float]:
    """The likeliest rests of an address, their log-probabilities, and the probability of all that were looked at."""
    path = _no_path(asked.before[-1], power_of_two(beam), asked.width - 1)
    found, scores, next_byte = np.zeros((1, 0), dtype=np.uint8), np.zeros(1), asked.next_byte[None]
    for place in range(asked.missing):
        kept = beam if place < asked.missing - 1 else count
        covered = float(np.exp(scores).sum())
        scores = (scores[:, None] + next_byte).reshape(-1)
        best = np.argsort(-scores, kind="stable")[:kept]
        parent, byte = np.divmod(best, 256)
        scores, found = scores[best], np.append(found[parent], byte[:, None].astype(np.uint8), axis=1)
        if place < asked.missing - 1:
            path, next_byte = _read_byte(model, asked.before, path, place, parent, byte)
    return found, scores, min(covered, 1.0)


def _no_path(like: Cache, beam: int, length: int) -> Cache:
    """Room for the bytes of each beginning that is kept."""
    layers = jax.tree.map(lambda part: jnp.zeros((1, 1, beam, length, *part.shape[-2:]), part.dtype), like.layers)
    return Cache(layers, jnp.zeros((1, 1, beam), jnp.int32))


def _read_byte(
    model: LanguageModel, before: list[Cache], path: Cache, place: int, parent: Ints, byte: Ints
) -> tuple[Cache, Floats]:
    """Continue beginnings by a byte each. Gives what was read, and log-probabilities of the byte after it."""
    shape = path.sizes.shape
    of = np.zeros(shape[-1], dtype=np.int32)
    of[: len(parent)] = parent
    tokens = np.zeros((*shape, 1), dtype=np.int32)
    tokens[0, 0, : len(byte), 0] = FIRST_BYTE + byte
    path = _taken(path, of)
    logs, read = model._follow(model.weights, [*before, path], tokens, np.ones(shape, np.int32), np.zeros_like(tokens))
    return _extended(path, read, place), _of_bytes(logs)[0, 0, : len(byte), 0]


@jax.jit
def _taken(path: Cache, parent: jax.Array) -> Cache:
    return jax.tree.map(lambda part: part[:, :, parent], path)


@jax.jit
def _extended(path: Cache, read: Cache, place: jax.Array) -> Cache:
    layers = jax.tree.map(lambda part, new: part.at[:, :, :, place].set(new[:, :, :, 0]), path.layers, read.layers)
    return Cache(layers, path.sizes + 1)
