"""Attention to the context: context and questions look at all measurements of the context, nobody at a question."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.core.errors import PingLlmError
from ping_llm.models.completer.answers import (
    PRECISIONS,
    TIME_FEATURES,
    VALUE_FEATURES,
    Answers,
    time_features,
    value_features,
)
from ping_llm.models.lm.attention import choose_attention, rms_norm
from ping_llm.models.lm.transformer import Layer, linear
from ping_llm.prior.shared_prefixes import LEVEL_SHARES, LEVELS, OWN_SHARE
from ping_llm.prior.worlds import ANSWERED, NOTHING, Batch


@dataclass(frozen=True, kw_only=True)
class CompleterSettings:
    """A set transformer. The defaults have 18 M parameters and are 36 MB in 16 bits."""

    layers: int = 10
    width: int = 384
    heads: int = 6
    head_dim: int = 64
    mlp_width: int = 1024
    identity: int = 128
    """Length of the random vectors that stand for nodes. Cosines between 400 of them stay below 0.45."""
    bins: int = 512
    """Of ln RTT from 0.05 to 2000 ms: 2 % each, and finer where neighbours share the probability."""
    dtype: str = "bfloat16"
    """Of activations and of the matrices they are multiplied with. Norms, logits and the loss are float32."""
    weight_dtype: str = "float32"
    attention: str = "auto"
    """`plain`, `cudnn` (NVIDIA GPUs, 16 bits), or `auto`: whichever is best here."""

    def __post_init__(self) -> None:
        if 2 * self.identity >= self.width:
            raise PingLlmError(f"two identities of {self.identity} leave nothing of a width of {self.width}")

    @property
    def parameters(self) -> int:
        attention = 4 * self.width * self.heads * self.head_dim
        embedding = 2 * self.identity + VALUE_FEATURES + TIME_FEATURES + 4
        head = self.bins + 1 + 2 * self.head_dim + 1 + PRECISIONS
        return self.layers * (attention + 3 * self.width * self.mlp_width) + (embedding + head) * self.width

    def flops_per_context(self, context: int, questions: int) -> int:
        """Of a training step, for one context: 6 a parameter and position, and attention to the whole context."""
        positions = context + questions
        return 6 * self.parameters * positions + 12 * self.layers * self.heads * self.head_dim * context * positions


def attend(query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array, implementation: str) -> jax.Array:
    """[contexts, positions, heads, head size] of queries; keys and values of the context only, of which the first
    `length` count: at least one.

    cuDNN takes the lengths as they are and skips what lies behind them; a mask would become a bias as large as all
    scores, which is slower than computing them.
    """
    if implementation == "cudnn":
        positions = jnp.full_like(length, query.shape[1])
        return jax.nn.dot_product_attention(
            query, key, value, query_seq_lengths=positions, key_value_seq_lengths=length, implementation="cudnn"
        )
    counts = jnp.arange(key.shape[1]) < length[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=counts[:, None, None, :], implementation="xla")


# The completer's network: a set transformer with one position for each measurement and each question.
#
#     identity   a random vector that stands for a node, drawn afresh for every context, and more or less like those of
#                its kin. The model can only ask whether two measurements share a node, or have nodes with a common
#                prefix, so it works for any address, and memorises none
#     context    positions of measurements: two identities, RTT or failure, age. Their order carries no meaning
#     question   positions of two identities. They see the context, and nothing sees them: each is answered as if alone
#
# Layers are unrolled and matrices fused as in `ping_llm.models.lm.transformer`, for the same reasons.

# mypy: disallow-untyped-calls=False


_SHARPNESS = 2.0
"""Queries and keys have length √64 each: scores lie within ±16, enough to single out one of thousands."""
_MATCHING_LAYERS = 2
"""Layers that begin with matching heads. A small model on small worlds is then at 3.47 nats after 1,000 steps, not at
3.61, and gets in 500 steps to where it would be after 1,000."""
_KINDS = 3
_BINS_AHEAD = 3.0
"""Of the bins before the model has learnt to point: a share of 80 %."""
_NEVER = -1e9


class Block(Layer):
    """A layer that attends to the context."""

    def __call__(self, x: jax.Array, context: int, length: jax.Array, implementation: str, first: int = 0) -> jax.Array:
        """Positions from `first` on: the last layer needs the questions only."""
        query, key, value = self.query_key_value(x)
        query, x = query[:, first:], x[:, first:]
        attended = attend(
            rms_norm(query) * _SHARPNESS, rms_norm(key[:, :context]), value[:, :context], length, implementation
        )
        return self.add(x, attended)


class SetTransformer(nnx.Module):
    """Call it with a batch of `worlds` or `context`, for answers to every question."""

    def __init__(self, settings: CompleterSettings, rngs: nnx.Rngs) -> None:
        self.settings = settings
        s = settings
        self.source = linear(s, s.identity, s.width, rngs)
        self.destination = linear(s, s.identity, s.width, rngs)
        self.value = linear(s, VALUE_FEATURES, s.width, rngs)
        self.time = linear(s, TIME_FEATURES, s.width, rngs)
        start = nnx.initializers.normal(0.3)
        self.kind_embedding = nnx.Param(start(rngs.params(), (_KINDS + 1, s.width), jnp.dtype(s.weight_dtype)))
        self.blocks = nnx.List([Block(s, rngs) for _ in range(s.layers)])
        self.head = linear(s, s.width, s.bins + 1, rngs)
        start_matching(self, rngs)
        self.point_from = linear(s, s.width, s.head_dim, rngs)
        self.point_at = linear(s, s.width, s.head_dim, rngs)
        self.choice = linear(s, s.width, 1 + PRECISIONS, rngs)
        start_pointing(self, rngs)

    def __call__(self, batch: Batch) -> Answers:
        s = self.settings
        dtype = jnp.dtype(s.dtype)
        implementation = choose_attention(s.attention, s.dtype)
        context = batch["context_source"].shape[1]
        source = jnp.concatenate([batch["context_source"], batch["question_source"]], axis=1)
        destination = jnp.concatenate([batch["context_destination"], batch["question_destination"]], axis=1)
        identity = identities(batch["identity_key"], batch["node_kin"], s.identity).astype(dtype)
        x = self.source(_looked_up(identity, source)) + self.destination(_looked_up(identity, destination))
        told = jnp.pad(self._told(batch, dtype), ((0, 0), (0, batch["question_source"].shape[1]), (0, 0)))
        kind = jnp.pad(batch["context_kind"], ((0, 0), (0, batch["question_source"].shape[1])), constant_values=_KINDS)
        x = jnp.where((kind == NOTHING)[..., None], 0.0, x)
        x = x + told + jax.nn.one_hot(kind, _KINDS + 1, dtype=dtype) @ self.kind_embedding[...].astype(dtype)
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, context, batch["context_length"], implementation)
        measured = x[:, :context]
        x = rms_norm(last(x, context, batch["context_length"], implementation, first=context))
        logits = self.head(x).astype(jnp.float32)
        counts = jnp.arange(context) < batch["context_length"][:, None]
        choice, pointed = self._pointed(x, rms_norm(measured), counts & (batch["context_kind"] == ANSWERED))
        return Answers(
            bin_logits=logits[..., :-1],
            failure_logit=logits[..., -1],
            choice=choice,
            pointed=pointed,
            context_log_rtt=batch["context_log_rtt"],
        )

    def _pointed(self, x: jax.Array, measured: jax.Array, is_answered: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log shares of bins and pointers, and of the measurements that have an RTT to point at."""
        query, key = rms_norm(self.point_from(x)), rms_norm(self.point_at(measured))
        score = jnp.einsum("bqh,bkh->bqk", query * _SHARPNESS, key, preferred_element_type=jnp.float32)
        score = jnp.where(is_answered[:, None], score / query.shape[-1] ** 0.5, _NEVER)
        choice = self.choice(x).astype(jnp.float32) + jnp.array([_BINS_AHEAD] + [0.0] * PRECISIONS)
        nobody = ~jnp.any(is_answered, axis=-1)[:, None, None] & (jnp.arange(1 + PRECISIONS) > 0)
        return jax.nn.log_softmax(jnp.where(nobody, _NEVER, choice)), jax.nn.log_softmax(score)

    def _told(self, batch: Batch, dtype: Any) -> jax.Array:
        """What a measurement says beside its ends. A failure says when, a place that holds nothing says nothing."""
        kind = batch["context_kind"]
        value = jnp.where((kind == ANSWERED)[..., None], value_features(batch["context_log_rtt"]), 0.0)
        time = jnp.where((kind != NOTHING)[..., None], time_features(batch["context_age_s"]), 0.0)
        return self.value(value.astype(dtype)) + self.time(time.astype(dtype))


def start_matching(model: SetTransformer, rngs: nnx.Rngs) -> None:
    """Begin with four heads that look for measurements of the same nodes, one for each end against each end.

    Without them a model first has to find out that identities are there to be compared: thousands of steps of no gain.
    The three parts of a position, source, destination and what is told, get places of their own in the vector, and a
    matching head projects one end of the query and one end of the key in the same way. All of it is free to change.
    """
    s = model.settings
    size, dtype = s.identity, jnp.dtype(s.weight_dtype)
    for end, part in enumerate((model.source, model.destination)):
        part.kernel[...] = jnp.eye(size, s.width, end * size, dtype=dtype)
    for told in (model.value.kernel, model.time.kernel, model.kind_embedding):
        told[...] = told[...].at[:, : 2 * size].set(0.0)
    for block in list(model.blocks)[:_MATCHING_LAYERS]:
        kernel = block.qkv.kernel[...].reshape(s.width, 3, s.heads, s.head_dim)
        for head in range(min(4, s.heads)):
            same = jax.random.normal(rngs.params(), (size, s.head_dim), dtype) * size**-0.5
            for of, end in enumerate((head // 2, head % 2)):
                column = jnp.zeros((s.width, s.head_dim), dtype).at[end * size : (end + 1) * size].set(same)
                kernel = kernel.at[:, of, head].set(column)
        block.qkv.kernel[...] = kernel.reshape(s.width, -1)


def start_pointing(model: SetTransformer, rngs: nnx.Rngs) -> None:
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


def identities(keys: jax.Array, kin: jax.Array, size: int) -> jax.Array:
    """[contexts, nodes, size]: random directions, all of length 3, of kin closer together.

    One vector is drawn for each node; turned, it also stands for each prefix whose first node this is.
    """
    nodes = kin.shape[1]
    drawn = jax.vmap(lambda key: jax.random.normal(jax.random.wrap_key_data(key), (nodes, size)))(keys)
    identity = OWN_SHARE**0.5 * drawn
    for level, share in enumerate(LEVEL_SHARES):
        turned = jnp.roll(drawn, (level + 1) * size // (1 + LEVELS), axis=-1)
        identity += share**0.5 * _looked_up(turned, kin[..., level])
    return 3.0 * identity / jnp.linalg.norm(identity, axis=-1, keepdims=True)


def _looked_up(identity: jax.Array, nodes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(identity, nodes[..., None], axis=1, mode="clip")
