"""Attention to the context: context and questions look at all measurements of the context, nobody at a question."""

import jax
import jax.numpy as jnp


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
