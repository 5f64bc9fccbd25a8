"""The completer's network: a set transformer with one position for each measurement and each query.

    identity   a random vector that stands for a node, drawn afresh for every context, and more or less like those of
               nodes in the same shared-prefix groups. The model can only compare: do two measurements share a node, or
               have nodes with a common prefix? So it works for any address, and memorises none
    context    positions of measurements: two identities, RTT or failure, age. Their order carries no meaning. They
               attend to each other only, so they are encoded once, and their keys and values (`Encoded`) serve any
               number of queries
    query      positions of two identities. They attend to the context, and nothing attends to them: each is answered
               as if alone

The more keys there are, the thinner attention is spread. So each query is multiplied by a power of the number of keys
that its head chooses (a query-aware scalable softmax), and contexts may be longer than those of training.

The output is a mixture of bins of ln RTT and of narrow kernels around RTTs copied from the measurements.

The 592 bins are equally wide in ln RTT, 2 % each. A value between the centres of two bins belongs to both, in
proportion to how near it is to each: the density is linear between neighbouring centres. So a certain prediction is
exact to a fraction of a bin.

RTTs of a quiet pair differ by a few per mille only, less than a bin. So a query also points at measurements of its
context (the pointer or copy mechanism of language models): "about what this one took", in one of several precisions.
The model decides how much of the answer is in the bins and in each precision. A small model (4 layers of 192, 1,000
steps) with pointers reaches 2.49 nats where the pair was measured before and 5.03 elsewhere; without them, 3.02 and
5.13. For prediction, the mixture is evaluated on a grid of finer bins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from ping_llm.core.errors import PingLlmError
from ping_llm.core.geography import is_known
from ping_llm.core.randomness import hash32, hash_with, unit_interval
from ping_llm.core.rtt import Floats
from ping_llm.models.completer.geography import nearness
from ping_llm.models.layers import (
    Array,
    LayerFunctions,
    LayerSettings,
    Linear,
    Matrix,
    Singles,
    attend,
    by_rows,
    functions_of,
    rms_norm,
)
from ping_llm.prior.selection import ANSWERED, EMPTY

OWN_SHARE: Final = 0.35
LEVEL_SHARES: Final = (0.25, 0.2, 0.2)
"""Shares of a node's identity that are its own vector's and those of its prefix groups, longest prefix first: two nodes
of one /24 have a cosine of 0.65, two of one /8 only have 0.2."""
_SHARPNESS: Final = 2.0
"""Factor of queries. Queries and keys have length √64: scores lie within ±16: enough to single out one of thousands."""
KINDS: Final = 3
_BINS_AHEAD: Final = 3.0
"""Initial logit of the bins in the mixture, before the model has learned to point: a share of 80 %."""
_NEVER: Final = -1e9
"""Logit of what must have no probability."""

_VALUE_SCALES: Final = 0.5 * 2.0 ** (np.arange(19) / 2)
"""Radians per unit of ln RTT: from 0.5, which covers the whole range, to 256, which resolves 0.1 %."""
_MIDDLE: Final = 3.5
"""ln of 33 ms."""
_AGE_SCALES: Final = 0.25 * 2.0 ** np.arange(6)
_AGE_UNIT_S: Final = 10.0
_DAY_S: Final = 86_400.0
_CYCLES_S: Final = np.array([_DAY_S, _DAY_S / 2, 7 * _DAY_S], np.float32)
VALUE_FEATURES: Final = 2 * len(_VALUE_SCALES) + 1
TIME_FEATURES: Final = 2 * len(_AGE_SCALES) + 2 * len(_CYCLES_S) + 2

_POWER: Final = 0.1
"""Exponent of the number of keys per unit of a head's output."""
_USUAL_KEYS: Final = 512
"""Number of keys at which the scalable softmax changes nothing."""

MIN_MS: Final = 0.05
BINS: Final = 592
"""2.07 % each."""
MAX_MS: Final = MIN_MS * 40_000 ** (BINS / 512)
"""10.5 s."""
KERNEL_WIDTHS: Final = (0.0015, 0.006, 0.025, 0.1, 0.3)
"""Widths of the Laplace kernels, one per precision, in ln RTT."""
PRECISIONS: Final = len(KERNEL_WIDTHS)
FINE: Final = 8 * BINS
"""Bins of the grid, 0.26 % each."""


@dataclass(frozen=True)
class Bins:
    count: int

    @property
    def width(self) -> float:
        return float(np.log(MAX_MS / MIN_MS)) / self.count

    @property
    def centres(self) -> Floats:
        return np.log(MIN_MS) + self.width * (np.arange(self.count) + 0.5)

    def between(self, log_rtt: Array) -> tuple[Array, Array]:
        """The bin whose centre is at or below each value, and the fraction of the way to the next centre. Values beyond
        the first and last centre are moved to them."""
        xp = log_rtt.__array_namespace__()
        at = xp.clip((log_rtt - float(np.log(MIN_MS))) / self.width - 0.5, 0.0, self.count - 1.0)
        lower = xp.minimum(at.astype(np.int32), self.count - 2)
        return lower, at - lower


class Mixture(NamedTuple):
    bin_logits: Array  # [contexts, questions, bins]
    failure_logit: Array  # [contexts, questions]
    log_share: Array  # [contexts, questions, 1 + precisions]: of the bins, and of each precision
    pointer_log_share: Array  # [contexts, questions, context]: of the context's measurements
    context_log_rtt: Array  # [contexts, context]

    @property
    def bins(self) -> Bins:
        return Bins(self.bin_logits.shape[-1])

    def probabilities(self) -> Array:
        """The mixture on the fine grid, [contexts, questions, fine bins]."""
        xp, fine = self.bin_logits.__array_namespace__(), Bins(FINE)
        share = xp.exp(self.log_share)
        coarse = functions_of(self.bin_logits).softmax(self.bin_logits)
        found = share[..., :1] * (coarse @ _refined(self.bins, fine))
        pointed_at = [
            _on_grid(weight, *fine.between(log_rtt))
            for weight, log_rtt in zip(xp.exp(self.pointer_log_share), self.context_log_rtt, strict=True)
        ]
        found += _convolved(xp.stack(pointed_at), share[..., 1:], _kernels(fine))
        return found / found.sum(axis=-1, keepdims=True)


@cache
def _refined(coarse: Bins, fine: Bins) -> Singles:
    """The matrix from probabilities of bins to those of finer bins: linear between the centres of the coarse ones."""
    at = np.clip((fine.centres - coarse.centres[0]) / coarse.width, 0, coarse.count - 1)
    near = np.maximum(1 - np.abs(at - np.arange(coarse.count)[:, None]), 0)
    return (near * fine.width / coarse.width).astype(np.float32)


def _on_grid(weight: Array, lower: Array, part: Array) -> Array:
    """[questions, FINE]: the weight of each measurement of the context, divided between the two bins around its RTT."""
    if isinstance(weight, np.ndarray):
        slots = np.arange(len(lower))
        ends = np.concatenate([slots, slots]), np.concatenate([lower, lower + 1])
        return weight @ csr_array((np.concatenate([1 - part, part]), ends), shape=(len(lower), FINE))
    empty = weight.__array_namespace__().zeros((weight.shape[0], FINE))
    return empty.at[:, lower].add(weight * (1 - part)).at[:, lower + 1].add(weight * part)


@cache
def _kernels(fine: Bins) -> Singles:
    """[precisions, odd]: the kernels on the fine grid, as far as the widest one reaches."""
    reach = min(int(np.ceil(12 * max(KERNEL_WIDTHS) / fine.width)), FINE // 4)
    edge = (np.arange(-reach, reach + 2) - 0.5) * fine.width / np.array(KERNEL_WIDTHS)[:, None]
    until = np.where(edge < 0, np.exp(np.minimum(edge, 0)) / 2, 1 - np.exp(-np.maximum(edge, 0)) / 2)
    share = np.diff(until)
    return (share / share.sum(axis=1, keepdims=True)).astype(np.float32)


def _convolved(columns: Array, shares: Array, kernels: Singles) -> Array:
    """Columns convolved (by FFT) with the sum of the kernels, each weighted by its share."""
    size, reach = FINE + kernels.shape[1] - 1, kernels.shape[1] // 2
    xp = columns.__array_namespace__()
    spread = shares.astype(np.complex64) @ np.fft.rfft(kernels, size).astype(np.complex64)
    return xp.maximum(xp.fft.irfft(xp.fft.rfft(columns, size) * spread, size)[..., reach : reach + FINE], 0.0)


@dataclass(frozen=True, kw_only=True)
class CompleterSettings(LayerSettings):
    """A set transformer. The defaults have 18 M parameters and are 36 MB in 16 bits."""

    layers: int = 10
    width: int = 384
    heads: int = 6
    head_dim: int = 64
    mlp_width: int = 1024
    identity: int = 128
    """Length of the random vectors that stand for nodes. Cosines between 400 of them stay below 0.45."""
    bins: int = BINS
    """Of ln RTT from 0.05 ms to 10.5 s: 2 % each."""

    def __post_init__(self) -> None:
        if 2 * self.identity >= self.width:
            raise PingLlmError(f"two identities of {self.identity} leave nothing of a width of {self.width}")

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the weights, by name."""
        w, all_heads = self.width, self.heads * self.head_dim
        of_block = {
            "qkv": (w, 3 * all_heads),
            "out": (all_heads, w),
            "gate_up": (w, 2 * self.mlp_width),
            "down": (self.mlp_width, w),
            "sharpen": (w, self.heads),
        }
        matrices = {
            "source": (self.identity, w),
            "destination": (self.identity, w),
            "value": (VALUE_FEATURES, w),
            "time": (TIME_FEATURES, w),
            **{f"blocks.{layer}.{name}": shape for layer in range(self.layers) for name, shape in of_block.items()},
            "head": (w, self.bins + 1),
            "point_from": (w, self.head_dim),
            "point_at": (w, self.head_dim),
            "choice": (w, 1 + PRECISIONS),
        }
        return {"kind_embedding": (KINDS + 1, w)} | {f"{name}.kernel": shape for name, shape in matrices.items()}

    @property
    def parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes.values())

    def flops_per_context(self, context: int, questions: int) -> int:
        """FLOPs of a training step, for one context: 6 per parameter and position, and attention to all of it."""
        positions = context + questions
        return 6 * self.parameters * positions + 12 * self.layers * self.heads * self.head_dim * context * positions


class Measurements(NamedTuple):
    """The measurements of several contexts, [contexts, slots]; only the first `length` slots of each count."""

    source: Array  # [contexts, slots, identity]
    destination: Array  # [contexts, slots, identity]
    kind: Array
    log_rtt: Array
    age_s: Array
    length: Array


class Encoded(NamedTuple):
    """Encoded contexts: all that queries need of them."""

    layers: list[tuple[Array, Array]]  # keys and values, [contexts, slots, heads, size] each
    pointed_at: Array  # [contexts, slots, size]: keys of the pointer
    is_answered: Array
    log_rtt: Array
    length: Array


class Network:
    """The set transformer: `encode` a context once, `answer` many queries from it."""

    settings: CompleterSettings
    source: Linear
    destination: Linear
    value: Linear
    time: Linear
    kind_embedding: Any
    blocks: Any
    head: Linear
    point_from: Linear
    point_at: Linear
    choice: Linear

    def layer(self, block: Any, key: Array, value: Array, length: Array, x: Array, query: Array) -> Array:
        return block.add(x, self.attend(query, key, value, length))

    def attend(self, query: Array, key: Array, value: Array, length: Array) -> Array:
        """Attention to the first `length` keys of each context, at least one."""
        raise NotImplementedError

    def by_rows(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """Apply a function that treats all positions alike to arrays [contexts, positions, …]."""
        return function(*arrays)

    def similarity(self, query: Array, key: Array) -> Array:
        """Dot product of each query and each key, float32."""
        raise NotImplementedError

    def encode(self, context: Measurements) -> Encoded:
        x = self._embedded(context)
        *blocks, last = self.blocks
        layers = []
        for block in blocks:
            query, key, value = self.by_rows(partial(block.read, keys=context.length), x)
            layers.append((key, value))
            x = self.by_rows(partial(self.layer, block, key, value, context.length), x, query)
        layers.append(self.by_rows(partial(last.read, keys=context.length), x)[1:])  # nothing attends to its output
        return Encoded(
            layers=layers,
            pointed_at=rms_norm(self.point_at(rms_norm(x))),
            is_answered=counted(context.kind, context.length) & (context.kind == ANSWERED),
            log_rtt=context.log_rtt,
            length=context.length,
        )

    def answer(self, encoded: Encoded, source: Array, destination: Array) -> Mixture:
        """The answers to queries, which are given by the identities of their ends, [contexts, queries, identity]."""
        x = self._ends(source, destination) + self.kind_embedding[...][KINDS].astype(self.settings.dtype)
        for block, (key, value) in zip(self.blocks, encoded.layers, strict=True):
            x = self.layer(block, key, value, encoded.length, x, block.read(x, encoded.length)[0])
        x = rms_norm(x)
        logits = self.head(x).astype(np.float32, copy=False)
        log_share, pointer = self._pointer(x, encoded)
        return Mixture(
            bin_logits=logits[..., :-1],
            failure_logit=logits[..., -1],
            log_share=log_share,
            pointer_log_share=pointer,
            context_log_rtt=encoded.log_rtt,
        )

    def _ends(self, source: Array, destination: Array) -> Array:
        dtype = self.settings.dtype
        return self.source(source.astype(dtype, copy=False)) + self.destination(destination.astype(dtype, copy=False))

    def _embedded(self, m: Measurements) -> Array:
        """Input vectors of ends, kind, RTT and age. A failure has no RTT, an empty slot only a kind."""
        xp, dtype = m.log_rtt.__array_namespace__(), self.settings.dtype
        is_measurement = (m.kind != EMPTY)[..., None]
        value = xp.where((m.kind == ANSWERED)[..., None], _value_features(m.log_rtt), 0.0)
        time = xp.where(is_measurement, _time_features(m.age_s), 0.0)
        one_hot = functions_of(m.kind).one_hot(m.kind, KINDS + 1, dtype=dtype)
        kind = one_hot @ self.kind_embedding[...].astype(dtype)
        features = self.value(value.astype(dtype)) + self.time(time.astype(dtype))
        return xp.where(is_measurement, self._ends(m.source, m.destination), 0.0) + features + kind

    def _pointer(self, x: Array, encoded: Encoded) -> tuple[Array, Array]:
        """Log shares of the bins, of each precision, and of each measurement with an RTT to copy."""
        xp, log_softmax = x.__array_namespace__(), functions_of(x).log_softmax
        query = rms_norm(self.point_from(x)) * _SHARPNESS
        score = self.similarity(query, encoded.pointed_at)
        score = xp.where(encoded.is_answered[:, None], score / query.shape[-1] ** 0.5, _NEVER)
        choice = self.choice(x).astype(np.float32) + np.array([_BINS_AHEAD] + [0.0] * PRECISIONS, np.float32)
        nothing = ~encoded.is_answered.any(axis=-1)[:, None, None] & (np.arange(1 + PRECISIONS) > 0)
        return log_softmax(xp.where(nothing, _NEVER, choice)), log_softmax(score)


class BlockFunctions(LayerFunctions):
    """A layer whose attention can grow sharper with the number of keys (a scalable softmax)."""

    sharpen: Linear

    def read(self, x: Array, keys: Array) -> tuple[Array, Array, Array]:
        """Query, key and value of each position. `keys`: how many keys each context has to attend to."""
        query, key, value = self.query_key_value(x)
        xp = x.__array_namespace__()
        power = _POWER * self.sharpen(rms_norm(x)).astype(np.float32)
        more = xp.log(keys.astype(np.float32) / _USUAL_KEYS)[:, None, None]
        sharpness = _SHARPNESS * xp.exp(xp.clip(power * more, -2.0, 2.0))
        return (rms_norm(query) * sharpness[..., None]).astype(x.dtype), rms_norm(key), value


class PlainBlock(BlockFunctions):
    def __init__(self, settings: LayerSettings) -> None:
        self.settings = settings


class PlainNetwork(Network):
    """The set transformer on NumPy arrays, in float32."""

    def __init__(self, settings: CompleterSettings, weights: Mapping[str, Singles]) -> None:
        self.settings = settings = replace(settings, dtype="float32")
        self.blocks = [PlainBlock(settings) for _ in range(settings.layers)]
        for name in settings.shapes:
            *block, attribute = name.removesuffix(".kernel").split(".")
            array = np.asarray(weights[name], np.float32)
            part = self.blocks[int(block[1])] if block else self
            setattr(part, attribute, Matrix(array) if name.endswith(".kernel") else array)

    def attend(self, query: Singles, key: Singles, value: Singles, length: Array) -> Singles:
        return attend(query, key, value, length)

    def by_rows(self, function: Callable[..., Any], *arrays: Singles) -> Any:
        return by_rows(function, *arrays)

    def similarity(self, query: Singles, key: Singles) -> Singles:
        return query @ key.swapaxes(-1, -2)


def counted(slots: Array, length: Array) -> Array:
    """[contexts, slots]: whether a slot is one of the first `length` of its context."""
    return slots.__array_namespace__().arange(slots.shape[1]) < length[:, None]


# Features: sines and cosines at several scales, for coarse and for fine differences.


def _value_features(log_rtt: Array) -> Array:
    xp = log_rtt.__array_namespace__()
    value = (xp.clip(log_rtt, -4.0, 9.4) - _MIDDLE)[..., None]
    return xp.concatenate([*_waves(value, _VALUE_SCALES), value / 2], axis=-1)


def _time_features(age_s: Array) -> Array:
    """Features of the seconds before the question, and of their phase in half a day, a day, a week; 0 if unknown.

    Time of day is relative to the question's, since no measurement says which hour it is at its nodes.
    """
    xp = age_s.__array_namespace__()
    known = (age_s >= 0)[..., None]
    age = xp.maximum(age_s, 0.0)[..., None]
    long_ago = xp.log1p(age / _AGE_UNIT_S)
    cycle = _waves(2 * np.pi * (age % _CYCLES_S) / _CYCLES_S, np.ones(1))
    features = xp.concatenate([*_waves(long_ago, _AGE_SCALES), *cycle, long_ago / 8, xp.ones_like(age)], axis=-1)
    return xp.where(known, features, 0.0)


def _waves(value: Array, scales: npt.NDArray[np.floating[Any]]) -> tuple[Array, Array]:
    xp, angle = value.__array_namespace__(), value * scales.astype(np.float32)
    return xp.sin(angle), xp.cos(angle)


def identities(words: Array, size: int, position: Array | None = None) -> Array:
    """[contexts, nodes, size]: random directions, all of length 3, closer together where prefixes are shared.

    `words`, [contexts, nodes, 1 + levels], hold a number for the node itself and one for each of its prefix groups.
    Equal numbers give equal vectors, different numbers independent ones. Nodes with a position have, instead of the
    parts of their shorter prefixes, vectors that are closer together the nearer they are.
    """
    xp = words.__array_namespace__()
    index = hash_with(xp.arange(size, dtype=np.uint32), 1)
    identity = xp.zeros((*words.shape[:2], size), np.float32)
    for level, share in enumerate((OWN_SHARE, *LEVEL_SHARES)):
        stream = hash_with(words[..., level].astype(np.uint32), 2 + level)
        uniform = unit_interval(hash32(hash32(stream)[..., None] ^ index))
        drawn = functions_of(uniform).erf_inv(2.0 * uniform - 1.0)
        if position is not None and level >= 2:
            near = nearness(position, level - 2, size) * np.float32(0.5**0.5)  # of the variance of erf_inv
            drawn = xp.where(is_known(position)[..., None], near, drawn)
        identity += share**0.5 * drawn
    return 3.0 * identity / xp.linalg.norm(identity, axis=-1, keepdims=True)
