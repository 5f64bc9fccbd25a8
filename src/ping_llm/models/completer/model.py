"""The completer's network: a set transformer with one position for each measurement and each query.

    identity   a random vector that stands for a node, drawn afresh for every context, and more or less like those of
               nodes in the same shared-prefix groups. The model can only compare: do two measurements share a node, or
               have nodes with a common prefix? So it works for any address, and memorises none
    context    positions of measurements: two identities, RTT or failure, age. Their order carries no meaning. They
               attend to each other only, so they are encoded once, and their keys and values (`Encoded`) serve any
               number of queries
    query      positions of two identities. They attend to the context, and nothing attends to them: each is answered
               as if alone

Attention over more keys is spread thinner. So queries are multiplied by a power of the number of keys, which each head
chooses for each query (a query-aware scalable softmax), and contexts may be longer than those of training.

It outputs a mixture of bins of ln RTT, and of narrow kernels around RTTs copied from the measurements.

Bins are equally wide in ln RTT, 2 % for 592 of them. A value between the centres of two bins belongs to both, by how
near it is to each: a bin's probability stands for a triangle over its neighbours, and the density is the straight line
from centre to centre. So a certain prediction is exact to a fraction of a bin.

A quiet pair repeats itself to a few per mille, though. So a query also points at measurements of its context, the
pointer (or copy) mechanism of language models: "about what this one took", in one of several precisions. How much of
the answer is in the bins and how much in each precision is for the model to say. A small model (4 layers of 192, 1,000
steps) with pointers is at 2.49 nats where the pair was measured before and at 5.03 elsewhere, without them at 3.02 and
5.13. For prediction, all of it is put on a grid of finer bins.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats
from ping_llm.models.layers import Layer, LayerSettings, choose_attention, linear, rms_norm
from ping_llm.prior.prng import hash32, hash_with, unit_interval
from ping_llm.prior.selection import ANSWERED, EMPTY, Singles

# mypy: disallow-untyped-calls=False

Batch = dict[str, jax.Array]

OWN_SHARE: Final = 0.35
LEVEL_SHARES: Final = (0.25, 0.2, 0.2)
"""Of a node's own vector in its identity, and of those of its groups: two nodes with one /24 have a cosine of 0.65,
with one /8 of 0.2."""
_SHARPNESS: Final = 2.0
"""Queries and keys have length √64 each: scores lie within ±16, enough to single out one of thousands."""
_MATCHING_LAYERS: Final = 2
"""Layers that begin with matching heads. A small model on small worlds is then at 3.47 nats after 1,000 steps, not at
3.61, and gets in 500 steps to where it would be after 1,000."""
_KINDS: Final = 3
_BINS_AHEAD: Final = 3.0
"""Logit of the bins before the model has learned to point: a share of 80 %."""
_NEVER: Final = -1e9

_VALUE_SCALES: Final = 0.5 * 2.0 ** (np.arange(19) / 2)
"""Radians for each unit of ln RTT: from 0.5, which tells a whole range apart, to 256, which tells 0.1 % apart."""
_MIDDLE: Final = 3.5
"""ln of 33 ms."""
_AGE_SCALES: Final = 0.25 * 2.0 ** np.arange(6)
_AGE_UNIT_S: Final = 10.0
_DAY_S: Final = 86_400.0
_CYCLES_S: Final = np.array([_DAY_S, _DAY_S / 2, 7 * _DAY_S])
VALUE_FEATURES: Final = 2 * len(_VALUE_SCALES) + 1
TIME_FEATURES: Final = 2 * len(_AGE_SCALES) + 2 * len(_CYCLES_S) + 2

_POWER: Final = 0.1
"""Of the number of keys, for each unit of what a head asks for: sharpness reacts to it exponentially."""
_USUAL_KEYS: Final = 512
"""Keys for which attention is as sharp as without the scalable softmax."""

MIN_MS: Final = 0.05
BINS: Final = 592
"""2.07 % each."""
MAX_MS: Final = MIN_MS * 40_000 ** (BINS / 512)
"""10.5 s."""
KERNEL_WIDTHS: Final = (0.0015, 0.006, 0.025, 0.1, 0.3)
"""Of the Laplace kernel of each precision, in ln RTT."""
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

    def between(self, log_rtt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin whose centre is at or below each value, and how far it is on the way to the next. Both ends hold."""
        at = jnp.clip((log_rtt - np.log(MIN_MS)) / self.width - 0.5, 0.0, self.count - 1.0)
        lower = jnp.minimum(at.astype(jnp.int32), self.count - 2)
        return lower, at - lower


class Mixture(NamedTuple):
    bin_logits: jax.Array  # [contexts, questions, bins]
    failure_logit: jax.Array  # [contexts, questions]
    log_share: jax.Array  # [contexts, questions, 1 + precisions]: of the bins, and of each precision
    pointer_log_share: jax.Array  # [contexts, questions, context]: of the context's measurements
    context_log_rtt: jax.Array  # [contexts, context]

    @property
    def bins(self) -> Bins:
        return Bins(self.bin_logits.shape[-1])

    def log_density(self, log_rtt: jax.Array) -> jax.Array:
        """Of one ln RTT for each question, in bins: 0 where it is spread evenly over one of them."""
        lower, share = self.bins.between(log_rtt)
        log_bins = self.bin_logits - jax.nn.logsumexp(self.bin_logits, axis=-1, keepdims=True)
        ends = jnp.take_along_axis(log_bins, jnp.stack([lower, lower + 1], axis=-1), axis=-1)
        parts = [jax.nn.logsumexp(ends, axis=-1, b=jnp.stack([1 - share, share], axis=-1))]
        distance = jnp.abs(log_rtt[:, :, None] - self.context_log_rtt[:, None])
        for width in KERNEL_WIDTHS:
            near = jax.nn.logsumexp(self.pointer_log_share - distance / width, axis=-1)
            parts.append(near + np.log(self.bins.width / (2 * width)))
        return jax.nn.logsumexp(self.log_share + jnp.stack(parts, axis=-1), axis=-1)

    def probabilities(self) -> jax.Array:
        """[contexts, questions, fine bins]"""
        fine = Bins(FINE)
        share = jnp.exp(self.log_share)
        found = share[..., :1] * (jax.nn.softmax(self.bin_logits, axis=-1) @ _refined(self.bins, fine))
        lower, part = fine.between(self.context_log_rtt)
        pointed_at = jax.vmap(_on_grid)(jnp.exp(self.pointer_log_share), lower, part)
        found += _convolved(pointed_at, share[..., 1:], _kernels(fine))
        return found / jnp.sum(found, axis=-1, keepdims=True)


def _refined(coarse: Bins, fine: Bins) -> Singles:
    """From probabilities of bins to those of finer ones, along the straight lines between the coarse centres."""
    at = np.clip((fine.centres - coarse.centres[0]) / coarse.width, 0, coarse.count - 1)
    near = np.maximum(1 - np.abs(at - np.arange(coarse.count)[:, None]), 0)
    return (near * fine.width / coarse.width).astype(np.float32)


def _on_grid(weight: jax.Array, lower: jax.Array, part: jax.Array) -> jax.Array:
    """[questions, FINE]: weights of the context's measurements, each shared by the two bins around its RTT."""
    empty = jnp.zeros((weight.shape[0], FINE))
    return empty.at[:, lower].add(weight * (1 - part)).at[:, lower + 1].add(weight * part)


def _kernels(fine: Bins) -> Singles:
    """[precisions, odd]: shares of the bins around the middle one, until nothing is left of the widest kernel."""
    reach = min(int(np.ceil(12 * max(KERNEL_WIDTHS) / fine.width)), FINE // 4)
    edge = (np.arange(-reach, reach + 2) - 0.5) * fine.width / np.array(KERNEL_WIDTHS)[:, None]
    until = np.where(edge < 0, np.exp(np.minimum(edge, 0)) / 2, 1 - np.exp(-np.maximum(edge, 0)) / 2)
    share = np.diff(until)
    return (share / share.sum(axis=1, keepdims=True)).astype(np.float32)


def _convolved(columns: jax.Array, shares: jax.Array, kernels: Singles) -> jax.Array:
    """Columns spread by a sum of kernels, of each its share."""
    size, reach = FINE + kernels.shape[1] - 1, kernels.shape[1] // 2
    spread = shares.astype(jnp.complex64) @ np.fft.rfft(kernels, size).astype(np.complex64)
    return jnp.maximum(jnp.fft.irfft(jnp.fft.rfft(columns, size) * spread, size)[..., reach : reach + FINE], 0.0)


def loss_sums(mixture: Mixture, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What training minimises, the negative log-likelihood of RTTs (by their density, in bins) and of failures.

    Sums, not means, so that parts of a batch add up exactly.
    """
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    of_rtt = -jnp.sum(jnp.where(answered, mixture.log_density(batch["question_log_rtt"]), 0.0))
    logit = mixture.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    total = of_rtt + of_failure
    return {"objective": total, "cross_entropy": total, "targets": jnp.sum(counts, dtype=jnp.int32)}


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
    """Of ln RTT from 0.05 ms to 10.5 s: 2 % each, and finer where neighbours share the probability."""

    def __post_init__(self) -> None:
        if 2 * self.identity >= self.width:
            raise PingLlmError(f"two identities of {self.identity} leave nothing of a width of {self.width}")

    @property
    def parameters(self) -> int:
        embedding = 2 * self.identity + VALUE_FEATURES + TIME_FEATURES + 4
        head = self.bins + 1 + 2 * self.head_dim + 1 + PRECISIONS + self.layers * self.heads
        return self.layer_parameters + (embedding + head) * self.width

    def flops_per_context(self, context: int, questions: int) -> int:
        """Of a training step, for one context: 6 per parameter and position, and attention to the whole context."""
        positions = context + questions
        return 6 * self.parameters * positions + 12 * self.layers * self.heads * self.head_dim * context * positions


class Measurements(NamedTuple):
    """Of contexts, [contexts, slots]; only the first `length` slots of each count."""

    source: jax.Array  # [contexts, slots, identity]
    destination: jax.Array  # [contexts, slots, identity]
    kind: jax.Array
    log_rtt: jax.Array
    age_s: jax.Array
    length: jax.Array


class Encoded(NamedTuple):
    """Contexts that were read: all that queries need of them."""

    layers: list[tuple[jax.Array, jax.Array]]  # keys and values, [contexts, slots, heads, size] each
    pointed_at: jax.Array  # [contexts, slots, size]: keys of the pointer
    is_answered: jax.Array
    log_rtt: jax.Array
    length: jax.Array


class SetTransformer(nnx.Module):
    """Call it with a batch of `prior.worlds` for answers to every query, or `encode` once and `answer` many."""

    def __init__(self, settings: CompleterSettings, rngs: nnx.Rngs) -> None:
        self.settings = settings
        s = settings
        self.source = linear(s, s.identity, s.width, rngs)
        self.destination = linear(s, s.identity, s.width, rngs)
        self.value = linear(s, VALUE_FEATURES, s.width, rngs)
        self.time = linear(s, TIME_FEATURES, s.width, rngs)
        start = nnx.initializers.normal(0.3)
        self.kind_embedding = nnx.Param(start(rngs.params(), (_KINDS + 1, s.width), jnp.dtype(s.weight_dtype)))
        self.blocks = nnx.List([ContextBlock(s, rngs) for _ in range(s.layers)])
        self.head = linear(s, s.width, s.bins + 1, rngs)
        _init_matching_heads(self, rngs)
        self.point_from = linear(s, s.width, s.head_dim, rngs)
        self.point_at = linear(s, s.width, s.head_dim, rngs)
        self.choice = linear(s, s.width, 1 + PRECISIONS, rngs)
        _init_pointer(self, rngs)

    def __call__(self, batch: Batch) -> Mixture:
        table = identities(batch["node_words"], self.settings.identity)
        ends = (_looked_up(table, batch[f"context_{end}"]) for end in ("source", "destination"))
        columns = {name: batch[f"context_{name}"] for name in ("kind", "log_rtt", "age_s", "length")}
        encoded = self.encode(Measurements(**dict(zip(("source", "destination"), ends, strict=True)), **columns))
        return self.answer(encoded, *(_looked_up(table, batch[f"question_{end}"]) for end in ("source", "destination")))

    def encode(self, context: Measurements) -> Encoded:
        """Of the last layer, only keys and values are needed."""
        implementation = choose_attention(self.settings.attention, self.settings.dtype)
        x = self._embedded(context)
        *blocks, last = self.blocks
        layers = []
        for block in blocks:
            query, key, value = block.read(x, context.length)
            layers.append((key, value))
            x = block.add(x, _attend(query, key, value, context.length, implementation))
        layers.append(last.read(x, context.length)[1:])
        return Encoded(
            layers=layers,
            pointed_at=rms_norm(self.point_at(rms_norm(x))),
            is_answered=_counts(context.kind, context.length) & (context.kind == ANSWERED),
            log_rtt=context.log_rtt,
            length=context.length,
        )

    def answer(self, encoded: Encoded, source: jax.Array, destination: jax.Array) -> Mixture:
        """To queries by the identities of their ends, [contexts, queries, identity]."""
        implementation = choose_attention(self.settings.attention, self.settings.dtype)
        x = self._ends(source, destination) + self.kind_embedding[...][_KINDS].astype(self.settings.dtype)
        for block, (key, value) in zip(self.blocks, encoded.layers, strict=True):
            query = block.read(x, encoded.length)[0]
            x = block.add(x, _attend(query, key, value, encoded.length, implementation))
        x = rms_norm(x)
        logits = self.head(x).astype(jnp.float32)
        log_share, pointer = self._pointer(x, encoded)
        return Mixture(
            bin_logits=logits[..., :-1],
            failure_logit=logits[..., -1],
            log_share=log_share,
            pointer_log_share=pointer,
            context_log_rtt=encoded.log_rtt,
        )

    def _ends(self, source: jax.Array, destination: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.settings.dtype)
        return self.source(source.astype(dtype)) + self.destination(destination.astype(dtype))

    def _embedded(self, m: Measurements) -> jax.Array:
        """Ends, and what a measurement says beside them. A failure says when, an empty slot says nothing."""
        dtype = jnp.dtype(self.settings.dtype)
        is_measurement = (m.kind != EMPTY)[..., None]
        value = jnp.where((m.kind == ANSWERED)[..., None], _value_features(m.log_rtt), 0.0)
        time = jnp.where(is_measurement, _time_features(m.age_s), 0.0)
        kind = jax.nn.one_hot(m.kind, _KINDS + 1, dtype=dtype) @ self.kind_embedding[...].astype(dtype)
        features = self.value(value.astype(dtype)) + self.time(time.astype(dtype))
        return jnp.where(is_measurement, self._ends(m.source, m.destination), 0.0) + features + kind

    def _pointer(self, x: jax.Array, encoded: Encoded) -> tuple[jax.Array, jax.Array]:
        """Log shares of bins and precisions, and of the measurements that have an RTT to copy."""
        query = rms_norm(self.point_from(x)) * _SHARPNESS
        score = jnp.einsum("bqh,bkh->bqk", query, encoded.pointed_at, preferred_element_type=jnp.float32)
        score = jnp.where(encoded.is_answered[:, None], score / query.shape[-1] ** 0.5, _NEVER)
        choice = self.choice(x).astype(jnp.float32) + jnp.array([_BINS_AHEAD] + [0.0] * PRECISIONS)
        nothing = ~jnp.any(encoded.is_answered, axis=-1)[:, None, None] & (jnp.arange(1 + PRECISIONS) > 0)
        return jax.nn.log_softmax(jnp.where(nothing, _NEVER, choice)), jax.nn.log_softmax(score)


class ContextBlock(Layer):
    """A layer whose attention grows sharper with the number of keys."""

    def __init__(self, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        super().__init__(settings, rngs)
        self.sharpen = linear(settings, settings.width, settings.heads, rngs)
        self.sharpen.kernel[...] = jnp.zeros_like(self.sharpen.kernel[...])

    def read(self, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of each position; `keys` are how many each context's positions attend to."""
        query, key, value = self.query_key_value(x)
        power = _POWER * self.sharpen(rms_norm(x)).astype(jnp.float32)
        more = jnp.log(keys.astype(jnp.float32) / _USUAL_KEYS)[:, None, None]
        sharpness = _SHARPNESS * jnp.exp(jnp.clip(power * more, -2.0, 2.0))
        return (rms_norm(query) * sharpness[..., None]).astype(x.dtype), rms_norm(key), value


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array, implementation: str) -> jax.Array:
    """To the first `length` keys of each context, at least one."""
    mask: dict[str, Any]
    if implementation == "cudnn":  # which skips what lies behind the lengths; a mask would become a bias, slower
        positions = jnp.full_like(length, query.shape[1])
        mask = {"query_seq_lengths": positions, "key_value_seq_lengths": length, "implementation": "cudnn"}
    else:
        mask = {"mask": _counts(key, length)[:, None, None, :], "implementation": "xla"}
    return jax.nn.dot_product_attention(query, key, value, **mask)


def _counts(slots: jax.Array, length: jax.Array) -> jax.Array:
    return jnp.arange(slots.shape[1]) < length[:, None]


# Features: sines and cosines at several scales, so that a matrix can read near and far alike.


def _value_features(log_rtt: jax.Array) -> jax.Array:
    value = (jnp.clip(log_rtt, -4.0, 9.4) - _MIDDLE)[..., None]
    return jnp.concatenate([*_waves(value, _VALUE_SCALES), value / 2], axis=-1)


def _time_features(age_s: jax.Array) -> jax.Array:
    """Of seconds before the question: how long ago, and at what time of its day and week. All 0 where it is unknown.

    The hour is the question's own: what hour it is where, no measurement says.
    """
    known = (age_s >= 0)[..., None]
    age = jnp.maximum(age_s, 0.0)[..., None]
    long_ago = jnp.log1p(age / _AGE_UNIT_S)
    cycle = _waves(2 * np.pi * (age % _CYCLES_S) / _CYCLES_S, np.ones(1))
    features = jnp.concatenate([*_waves(long_ago, _AGE_SCALES), *cycle, long_ago / 8, jnp.ones_like(age)], axis=-1)
    return jnp.where(known, features, 0.0)


def _waves(value: jax.Array, scales: npt.NDArray[np.floating[Any]]) -> tuple[jax.Array, jax.Array]:
    angle = value * jnp.asarray(scales, jnp.float32)
    return jnp.sin(angle), jnp.cos(angle)


def identities(words: jax.Array, size: int) -> jax.Array:
    """[contexts, nodes, size]: random directions, all of length 3, closer together where prefixes are shared.

    `words`, [contexts, nodes, 1 + levels], are a number of the node's own and one of each of its shared-prefix groups:
    equal numbers stand for equal vectors, and anything that changes a number draws another.
    """
    index = hash_with(jnp.arange(size, dtype=jnp.uint32), 1)
    identity = jnp.zeros((*words.shape[:2], size))
    for level, share in enumerate((OWN_SHARE, *LEVEL_SHARES)):
        stream = hash_with(words[..., level].astype(jnp.uint32), 2 + level)
        uniform = unit_interval(hash32(hash32(stream)[..., None] ^ index))
        identity += share**0.5 * jax.lax.erf_inv(2.0 * uniform - 1.0)
    return 3.0 * identity / jnp.linalg.norm(identity, axis=-1, keepdims=True)


def _looked_up(identity: jax.Array, nodes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(identity, nodes[..., None], axis=1, mode="clip")


# Initial weights: all of it is free to change.


def _init_matching_heads(model: SetTransformer, rngs: nnx.Rngs) -> None:
    """Begin with four heads that look for measurements of the same nodes, one for each end against each end.

    Without them a model first has to find out that identities are there to be compared: thousands of steps of no gain.
    The three parts of a position (source, destination and features) get ranges of the vector of their own, and a
    matching head projects one end of the query and one end of the key in the same way.
    """
    s = model.settings
    size, dtype = s.identity, jnp.dtype(s.weight_dtype)
    for end, part in enumerate((model.source, model.destination)):
        part.kernel[...] = jnp.eye(size, s.width, end * size, dtype=dtype)
    for features in (model.value.kernel, model.time.kernel, model.kind_embedding):
        features[...] = features[...].at[:, : 2 * size].set(0.0)
    for block in list(model.blocks)[:_MATCHING_LAYERS]:
        kernel = block.qkv.kernel[...].reshape(s.width, 3, s.heads, s.head_dim)
        for head in range(min(4, s.heads)):
            same = jax.random.normal(rngs.params(), (size, s.head_dim), dtype) * size**-0.5
            for of, end in enumerate((head // 2, head % 2)):
                column = jnp.zeros((s.width, s.head_dim), dtype).at[end * size : (end + 1) * size].set(same)
                kernel = kernel.at[:, of, head].set(column)
        block.qkv.kernel[...] = kernel.reshape(s.width, -1)


def _init_pointer(model: SetTransformer, rngs: nnx.Rngs) -> None:
    """Begin by pointing at measurements of the same two nodes, with little trust in them."""
    s = model.settings
    shape = (s.identity, s.head_dim)
    same = sum(
        end.kernel[...].T @ (jax.random.normal(rngs.params(), shape, jnp.dtype(s.weight_dtype)) * s.identity**-0.5)
        for end in (model.source, model.destination)
    )
    for pointer in (model.point_from, model.point_at):
        pointer.kernel[...] = jnp.asarray(same)
    model.choice.kernel[...] = jnp.zeros_like(model.choice.kernel[...])
