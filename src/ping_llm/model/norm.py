"""Root-mean-square norms, without a learnt scale: the matrix that follows can hold it."""

import jax
import jax.numpy as jnp

_EPSILON = 1e-6


def norm(x: jax.Array) -> jax.Array:
    """To a root mean square of 1 over the last axis."""
    return (x.astype(jnp.float32) * norm_factor(x)).astype(x.dtype)


def norm_factor(x: jax.Array) -> jax.Array:
    """What `norm` multiplies with: float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
