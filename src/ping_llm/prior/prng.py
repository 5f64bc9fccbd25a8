"""Random numbers of one simulated world, each a hash of (key of the world, number of the draw, index); named arrays.

Words come from a 32-bit hash (`core.randomness`) instead of JAX's Threefry: a world makes some 120 different draws, and
compiling that many Threefry kernels takes 16 s on a CPU where the hash takes a quarter of it.
"""

import math
from types import SimpleNamespace
from typing import Final

import jax
import jax.numpy as jnp

from ping_llm.core.randomness import hash32, hash_with, unit_interval

Shape = tuple[int, ...]

_POOL: Final = 4
_SCALAR_POOL: Final = 32


class Columns(SimpleNamespace):
    """Named arrays of one world, as a JAX pytree. The functions that make them explain them."""


jax.tree_util.register_pytree_node(
    Columns,
    lambda columns: (tuple(vars(columns).values()), tuple(vars(columns))),
    lambda names, arrays: Columns(**dict(zip(names, arrays, strict=True))),
)


class Draws:
    """A source of random arrays. Several of one shape are computed together, which compiles in a third of the time."""

    def __init__(self, key: jax.Array) -> None:
        self._words = jax.random.key_data(key).astype(jnp.uint32)
        self._pools = 0
        self._left: dict[tuple[str, Shape], list[jax.Array]] = {}

    def _next(self, kind: str, shape: Shape) -> jax.Array:
        left = self._left.setdefault((kind, shape), [])
        if not left:
            self._pools += 1
            pool = (_POOL if shape else _SCALAR_POOL, *shape)
            stream = hash32(self._words[0] ^ hash_with(self._words[1], self._pools))
            index = jnp.arange(math.prod(pool), dtype=jnp.uint32).reshape(pool)
            made = unit_interval(hash32(hash_with(index, 1) ^ stream))
            if kind == "normal":
                made = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * made - 1.0)
            left.extend(jax.lax.optimization_barrier(made)[::-1])
        return left.pop()

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: Shape = ()) -> jax.Array:
        return low + (high - low) * self._next("uniform", shape)

    def log_uniform(self, low: float, high: float, shape: Shape = ()) -> jax.Array:
        return jnp.exp(self.uniform(math.log(low), math.log(high), shape))

    def normal(self, shape: Shape = ()) -> jax.Array:
        return self._next("normal", shape)

    def half_normal(self, scale: float) -> jax.Array:
        return scale * jnp.abs(self.normal())

    def log_normal(self, median: float, spread: float, shape: Shape = ()) -> jax.Array:
        return median * jnp.exp(spread * self.normal(shape))

    def exponential(self, shape: Shape = ()) -> jax.Array:
        return -jnp.log(self.uniform(shape=shape))

    def chance(self, probability: jax.Array | float, shape: Shape = ()) -> jax.Array:
        return self.uniform(shape=shape) < probability

    def sometimes(self, chance: float, value: jax.Array) -> jax.Array:
        return jnp.where(self.chance(chance), value, 0.0)

    def below(self, bound: jax.Array | int, shape: Shape = ()) -> jax.Array:
        """Whole numbers in [0, bound)."""
        return jnp.minimum(self.uniform(shape=shape) * bound, bound - 1).astype(jnp.int32)

    def one_of(self, *columns: jax.Array) -> jax.Array:
        return jnp.stack(columns)[self.below(len(columns))]


def symmetric(square: jax.Array) -> jax.Array:
    """The upper half of a matrix, mirrored."""
    return jnp.triu(square) + jnp.triu(square, 1).T


def first_equal(numbers: jax.Array) -> jax.Array:
    """For each number, the index of the first number in its row that equals it."""
    return jnp.argmax(numbers[..., :, None] == numbers[..., None, :], axis=-1).astype(jnp.int32)
