"""The completer as it is trained: the network of `network.py` as a Flax module, its first weights, and its loss."""

from typing import Any

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
    Measurements,
    Mixture,
    Network,
    counted,
    identities,
)
from ping_llm.models.layers import LayerSettings
from ping_llm.models.modules import Layer, choose_attention, linear

# mypy: disallow-untyped-calls=False

Batch = dict[str, jax.Array]

_MATCHING_LAYERS = 2
"""Layers that begin with matching heads. A small model on small worlds is then at 3.47 nats after 1,000 steps, not at
3.61, and gets in 500 steps to where it would be after 1,000."""


class ContextBlock(BlockFunctions, Layer):
    """The matrices of a layer. As initialised, attention is as sharp for any number of keys."""

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
        table = identities(batch["node_words"], self.settings.identity)
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
    """Of one ln RTT for each question, in bins: 0 where it is spread evenly over one of them."""
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
    """What training minimises, the negative log-likelihood of RTTs (by their density, in bins) and of failures.

    Sums, not means, so that parts of a batch add up exactly.
    """
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    of_rtt = -jnp.sum(jnp.where(answered, log_density(mixture, batch["question_log_rtt"]), 0.0))
    logit = mixture.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    total = of_rtt + of_failure
    return {"objective": total, "cross_entropy": total, "targets": jnp.sum(counts, dtype=jnp.int32)}


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
