"""The completer on JAX: the network of `network.py` as a Flax module, its initial weights, its loss, and `OnJax`, which
compiles it for prediction on an accelerator. (A CPU predicts without JAX.)"""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ping_llm.models.completer.network import (
    KERNEL_WIDTHS,
    KINDS,
    PRECISIONS,
    TIME_FEATURES,
    VALUE_FEATURES,
    BlockFunctions,
    CompleterSettings,
    Encoded,
    Measurements,
    Mixture,
    Network,
    counted,
    identities,
)
from ping_llm.models.layers import LayerSettings, Singles
from ping_llm.models.modules import Layer, choose_attention, keep_compiled, linear, with_arrays

Batch = dict[str, jax.Array]

_MATCHING_LAYERS = 2
"""Layers that begin with matching heads. A small model on small worlds then reaches 3.47 nats after 1,000 steps instead
of 3.61, and needs 500 steps instead of 1,000 for the latter."""


class ContextBlock(BlockFunctions, Layer):
    """The matrices of one layer. Before training, the sharpness of attention does not depend on the number of keys."""

    def __init__(self, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        super().__init__(settings, rngs)
        self.sharpen = linear(settings, settings.width, settings.heads, rngs)
        self.sharpen.kernel[...] = jnp.zeros_like(self.sharpen.kernel[...])


class SetTransformer(Network, nnx.Module):
    """Call it with a batch of `prior.worlds` for answers to every query, or `encode` once and `answer` many."""

    def __init__(self, settings: CompleterSettings, rngs: nnx.Rngs) -> None:
        self.settings = settings
        s = settings
        self.source = linear(s, s.identity, s.width, rngs)
        self.destination = linear(s, s.identity, s.width, rngs)
        self.value = linear(s, VALUE_FEATURES, s.width, rngs)
        self.time = linear(s, TIME_FEATURES, s.width, rngs)
        start = nnx.initializers.normal(0.3)
        self.kind_embedding = nnx.Param(start(rngs.params(), (KINDS + 1, s.width), jnp.dtype(s.weight_dtype)))
        self.blocks = nnx.List([ContextBlock(s, rngs) for _ in range(s.layers)])
        self.head = linear(s, s.width, s.bins + 1, rngs)
        _init_matching_heads(self, rngs)
        self.point_from = linear(s, s.width, s.head_dim, rngs)
        self.point_at = linear(s, s.width, s.head_dim, rngs)
        self.choice = linear(s, s.width, 1 + PRECISIONS, rngs)
        _init_pointer(self, rngs)

    def __call__(self, batch: Batch) -> Mixture:
        table = identities(batch["node_words"], self.settings.identity, batch.get("node_position"))
        ends = (_looked_up(table, batch[f"context_{end}"]) for end in ("source", "destination"))
        columns = {name: batch[f"context_{name}"] for name in ("kind", "log_rtt", "age_s", "length")}
        encoded = self.encode(Measurements(**dict(zip(("source", "destination"), ends, strict=True)), **columns))
        return self.answer(encoded, *(_looked_up(table, batch[f"question_{end}"]) for end in ("source", "destination")))

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, length: jax.Array) -> jax.Array:
        mask: dict[str, Any]
        if choose_attention(self.settings.attention, self.settings.dtype) == "cudnn":
            # It skips what lies behind the lengths; a mask would become a bias, slower.
            positions = jnp.full_like(length, query.shape[1])
            mask = {"query_seq_lengths": positions, "key_value_seq_lengths": length, "implementation": "cudnn"}
        else:
            mask = {"mask": counted(key, length)[:, None, None, :], "implementation": "xla"}
        return jax.nn.dot_product_attention(query, key, value, **mask)

    def similarity(self, query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.einsum("bqh,bkh->bqk", query, key, preferred_element_type=jnp.float32)


def _looked_up(identity: jax.Array, nodes: jax.Array) -> jax.Array:
    return jnp.take_along_axis(identity, nodes[..., None], axis=1, mode="clip")


def log_density(mixture: Mixture, log_rtt: jax.Array) -> jax.Array:
    """Log density of one ln RTT per question, in units of bins: 0 where one bin's width holds all of it, evenly."""
    lower, share = mixture.bins.between(log_rtt)
    log_bins = mixture.bin_logits - jax.nn.logsumexp(mixture.bin_logits, axis=-1, keepdims=True)
    ends = jnp.take_along_axis(log_bins, jnp.stack([lower, lower + 1], axis=-1), axis=-1)
    parts = [jax.nn.logsumexp(ends, axis=-1, b=jnp.stack([1 - share, share], axis=-1))]
    distance = jnp.abs(log_rtt[:, :, None] - mixture.context_log_rtt[:, None])
    for width in KERNEL_WIDTHS:
        near = jax.nn.logsumexp(mixture.pointer_log_share - distance / width, axis=-1)
        parts.append(near + np.log(mixture.bins.width / (2 * width)))
    return jax.nn.logsumexp(mixture.log_share + jnp.stack(parts, axis=-1), axis=-1)


def loss_sums(mixture: Mixture, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The training objective: the negative log-likelihood of RTTs (density per bin) and of failures.

    Sums, not means, so that parts of a batch add up exactly.
    """
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    of_rtt = -jnp.sum(jnp.where(answered, log_density(mixture, batch["question_log_rtt"]), 0.0))
    logit = mixture.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    total = of_rtt + of_failure
    return {"objective": total, "cross_entropy": total, "targets": jnp.sum(counts, dtype=jnp.int32)}


# Initial weights. Training is free to change all of them.


def _init_matching_heads(model: SetTransformer, rngs: nnx.Rngs) -> None:
    """Begin with four heads that look for measurements of the same nodes: each compares one end of the query with one
    end of the key.

    Without them, a model stays on a plateau for thousands of steps before it learns to compare identities. Source,
    destination and features of a position begin in separate ranges of the vector, and a matching head projects one end
    of the query and one end of the key by the same matrix.
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
    """Begin with a pointer at measurements of the same two nodes, which gets a small share of the mixture."""
    s = model.settings
    shape = (s.identity, s.head_dim)
    same = sum(
        end.kernel[...].T @ (jax.random.normal(rngs.params(), shape, jnp.dtype(s.weight_dtype)) * s.identity**-0.5)
        for end in (model.source, model.destination)
    )
    for pointer in (model.point_from, model.point_at):
        pointer.kernel[...] = jnp.asarray(same)
    model.choice.kernel[...] = jnp.zeros_like(model.choice.kernel[...])


# Prediction on an accelerator.

_CONTEXT_SIZES: Final = (64, 256, 1024, 2048, 4096, 8192)
_QUERY_SIZES: Final = (1, 16, 256)
"""The shapes that are compiled: few, since each takes some seconds."""


class OnJax:
    """The network compiled for a few shapes, to which contexts and queries are padded."""

    def __init__(self, settings: CompleterSettings, weights: dict[str, Singles], contexts_at_once: int) -> None:
        keep_compiled()
        dtype = "float32" if jax.default_backend() == "cpu" else settings.dtype  # CPUs are slower in 16 bits than in 32
        settings = replace(settings, dtype=dtype, attention="plain")
        graph, state = nnx.split(nnx.eval_shape(lambda: SetTransformer(settings, nnx.Rngs(0))))
        self.contexts_at_once, self.queries_at_once = contexts_at_once, _QUERY_SIZES[-1]
        self._weights = with_arrays(state, weights)

        @jax.jit
        def encode(weights: Any, context: Measurements) -> Encoded:
            return nnx.merge(graph, weights).encode(context)

        @jax.jit
        def answer(weights: Any, encoded: Encoded, source: Any, destination: Any) -> tuple[jax.Array, jax.Array]:
            answers = nnx.merge(graph, weights).answer(encoded, source, destination)
            return answers.probabilities(), jax.nn.sigmoid(answers.failure_logit)

        self._encode, self._answer = encode, answer

    def padded_context(self, slots: int) -> int:
        return _padded(slots, _CONTEXT_SIZES)

    def padded_queries(self, queries: int) -> int:
        return _padded(queries, _QUERY_SIZES)

    def encode(self, context: Measurements) -> Encoded:
        return self._encode(self._weights, context)

    def answer(self, encoded: Encoded, source: Singles, destination: Singles) -> tuple[Singles, Singles]:
        probability, p_failed = self._answer(self._weights, encoded, source, destination)
        return np.asarray(probability), np.asarray(p_failed)


def _padded(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that is large enough, or else the count itself."""
    return next((size for size in sizes if count <= size), count)
