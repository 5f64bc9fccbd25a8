"""The language model with a KV cache: what many continuations share is read once.

    histories     [n, length]
    questions     [n, k, length]        k about each history
    answers       [n, k, b, length]     b continuations of each question

A sequence attends to what it continues and to itself, nothing else.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.models.lm.transformer import Transformer, rope_angles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of each layer, [..., length, heads, size], of sequences that were read."""

    layers: list[tuple[jax.Array, jax.Array]]
    sizes: jax.Array
    """[...]: tokens of each sequence, without its padding."""


def extend(
    graph: Any, weights: Any, before: list[KVCache], tokens: jax.Array, sizes: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Read sequences, padded at the end. `before` is what they continue: of histories nothing, of questions the
    histories, of answers both.

    Gives log-probabilities of what comes after some `positions` [..., m] of each sequence, [..., m, vocabulary].
    """
    model: Transformer = nnx.merge(graph, weights)
    shape, length = tokens.shape[:-1], tokens.shape[-1]
    layers: list[tuple[jax.Array, jax.Array]] = []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        full = (*shape, length, *query.shape[2:])
        own_key, own_value = key.reshape(full), value.reshape(full)
        known = [(*cache.layers[len(layers)], cache.sizes) for cache in before]
        layers.append((own_key, own_value))
        return _attend(query.reshape(full), own_key, own_value, known).reshape(query.shape)

    begin = sum(cache.sizes.reshape(cache.sizes.shape + (1,) * (len(shape) - cache.sizes.ndim)) for cache in before)
    position = (jnp.broadcast_to(begin, shape)[..., None] + jnp.arange(length)).reshape(-1, length)
    rope = rope_angles(position, model.settings.head_dim, model.settings.rope_period)
    x = model.embed(tokens.reshape(-1, length))
    for block in model.blocks:
        x = block(x, rope, attend)
    x = jnp.take_along_axis(x, positions.reshape(len(x), -1, 1), axis=1)
    logs = jax.nn.log_softmax(model.logits(x))
    return logs.reshape(*positions.shape, -1), KVCache(layers, sizes)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, known: list[tuple[jax.Array, jax.Array, jax.Array]]
) -> jax.Array:
    """One softmax over all that is known and the sequence itself. What is shared is not repeated."""
    *shape, length, _, size = query.shape
    letters = "nkb"[: len(shape)]

    def scores(keys: jax.Array) -> jax.Array:
        products = f"{letters}qhd,{letters[: keys.ndim - 3]}shd->{letters}hqs"
        return jnp.einsum(products, query, keys, preferred_element_type=jnp.float32) * size**-0.5

    parts = []
    for keys, _, sizes in known:
        is_token = jnp.arange(keys.shape[-3]) < sizes[..., None]
        mask = is_token.reshape(*sizes.shape, *(1,) * (len(shape) - sizes.ndim), 1, 1, keys.shape[-3])
        parts.append(jnp.where(mask, scores(keys), -jnp.inf))
    parts.append(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores(key), -jnp.inf))
    share = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(value.dtype)
    attended = jnp.zeros(query.shape, query.dtype)
    edge = 0
    for values in (*(values for _, values, _ in known), value):
        part = share[..., edge : edge + values.shape[-3]]
        attended += jnp.einsum(f"{letters}hqs,{letters[: values.ndim - 3]}shd->{letters}qhd", part, values)
        edge += values.shape[-3]
    return attended
