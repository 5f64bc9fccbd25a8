"""The layers of both models, RMSNorm and SwiGLU around attention, for JAX and NumPy arrays alike.

JAX traces them for training and for accelerators; prediction on a CPU runs them on NumPy, which needs no compiling and
no JAX. `functions_of` returns the functions that the two libraries name differently.

Layers are unrolled, not scanned: compiling takes longer, but the compiler then fuses across layers and keeps no stacked
copies, which makes a training step a quarter faster. Query, key and value come from one matrix, as do gate and up of
SwiGLU: fewer, larger matmuls.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Lock
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Array = Any
"""An array of JAX or of NumPy."""
Singles = npt.NDArray[np.float32]

_EPSILON: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The sizes and number formats of a model's layers. The defaults are `latency_network`."""

    layers: int = 20
    width: int = 640
    heads: int = 10
    head_dim: int = 64
    mlp_width: int = 2048
    dtype: str = "bfloat16"
    """Number format of activations and matmuls. RMSNorm, RoPE, logits and the loss are always float32."""
    weight_dtype: str = "float32"
    attention: str = "auto"

    @property
    def layer_parameters(self) -> int:
        return self.layers * (4 * self.width * self.heads * self.head_dim + 3 * self.width * self.mlp_width)


class Linear(Protocol):
    """A linear map: Flax's `nnx.Linear`, or `Matrix`."""

    kernel: Any

    def __call__(self, x: Array, /) -> Array: ...


class Matrix:
    """A linear map of NumPy arrays."""

    def __init__(self, kernel: Singles) -> None:
        self.kernel = kernel

    def __call__(self, x: Singles, /) -> Singles:
        return x @ self.kernel


class LayerFunctions:
    """Attention, then a SwiGLU MLP, each added to its input. Subclasses define which positions attend to which."""

    settings: LayerSettings
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear

    def query_key_value(self, x: Array) -> list[Array]:
        s = self.settings
        projected = self.project(x).reshape(*x.shape[:2], 3 * s.heads, s.head_dim)
        return list(x.__array_namespace__().split(projected, 3, axis=2))

    def add(self, x: Array, attended: Array) -> Array:
        """The residual stream after attention and MLP."""
        x = x + self.join(attended.reshape(*x.shape[:2], self.settings.heads * self.settings.head_dim))
        return x + self.mlp(x)

    def project(self, x: Array) -> Array:
        return self.qkv(rms_norm(x))

    def join(self, attended: Array) -> Array:
        return self.out(attended)

    def mlp(self, x: Array) -> Array:
        gate, up = x.__array_namespace__().split(self.gate_up(rms_norm(x)), 2, axis=-1)
        return self.down(functions_of(x).silu(gate) * up)


def rms_norm(x: Array) -> Array:
    """Scale the last axis to a root mean square of 1. There is no learned scale: the next matrix can absorb it."""
    return (x.astype(np.float32, copy=False) * rms_factor(x)).astype(x.dtype, copy=False)


def rms_factor(x: Array) -> Array:
    """The factor that `rms_norm` multiplies by: float32 [..., 1]."""
    f, wide = functions_of(x), x.astype(np.float32, copy=False)
    return f.rsqrt(f.mean_square(wide) + np.float32(_EPSILON))


@cache
def _of_jax() -> SimpleNamespace:
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    return SimpleNamespace(
        erf_inv=jax.lax.erf_inv,
        log_softmax=jax.nn.log_softmax,
        mean_square=lambda x: jnp.mean(x * x, axis=-1, keepdims=True),
        one_hot=jax.nn.one_hot,
        rsqrt=jax.lax.rsqrt,
        silu=jax.nn.silu,
        softmax=jax.nn.softmax,
    )


def functions_of(x: Array) -> Any:
    """Functions that NumPy lacks, has under another name, or computes more slowly than need be, for arrays like `x`."""
    return _NumPy if isinstance(x, np.ndarray) else _of_jax()


class _NumPy:
    """JAX's functions of these names, for the arguments that the models use. They work in place where possible: a pass
    over a newly allocated array takes several times as long as one over an array in the CPU's cache."""

    @staticmethod
    def erf_inv(x: Singles) -> Singles:
        from scipy.special import erfinv  # type: ignore[import-untyped]

        return np.asarray(erfinv(x))

    @staticmethod
    def log_softmax(x: Singles) -> Singles:
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    @staticmethod
    def mean_square(x: Singles) -> Singles:
        return np.asarray(np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1], np.float32)

    @staticmethod
    def one_hot(x: npt.NDArray[np.integer[Any]], size: int, *, dtype: str) -> Singles:
        return np.asarray(np.eye(size, dtype=dtype)[x], np.float32)

    @staticmethod
    def rsqrt(x: Singles) -> Singles:
        return np.reciprocal(np.sqrt(x))

    @staticmethod
    def silu(x: Singles) -> Singles:
        with np.errstate(over="ignore"):  # infinity is as it should be: the result is zero
            found = np.exp(-x)
        found += 1
        return np.divide(x, found, out=found)

    @staticmethod
    def softmax(x: Singles) -> Singles:
        found = x - x.max(axis=-1, keepdims=True)
        np.exp(found, out=found)
        found /= found.sum(axis=-1, keepdims=True)
        return found


def attend(query: Singles, key: Singles, value: Singles, length: npt.NDArray[np.integer[Any]]) -> Singles:
    """Attention to the first `length` keys of each context: [contexts, positions, heads, size] arrays, in NumPy.

    One head at a time, so that the scores of a few hundred queries fit in the CPU's cache.
    """
    attended = np.empty(query.shape, np.float32)
    for context, keys in enumerate(length.tolist()):
        scores = np.empty((query.shape[1], keys), np.float32)
        for head in range(query.shape[2]):
            rows = query[context, :, head] * np.float32(query.shape[3] ** -0.5)
            np.matmul(rows, key[context, :keys, head].T, out=scores)
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            found = scores @ value[context, :keys, head]
            found /= scores.sum(axis=1, keepdims=True)
            attended[context, :, head] = found
    return attended


# Our own threads instead of those of BLAS, which wait for each other by spinning: on a machine where other programs
# compute as well, that takes eight times the CPU time.

_POSITIONS_AT_ONCE: Final = 256
"""The activations of this many positions fit in the second-level cache."""


class _Threads:
    """A pool of as many threads as BLAS would use, and the handle that limits BLAS to one."""

    def __init__(self) -> None:
        self.blas = ThreadpoolController()
        self.count = max((library["num_threads"] for library in self.blas.info()), default=1)
        self.pool = ThreadPoolExecutor(self.count, "ping-llm")
        self.computing = Lock()


_threads = cache(_Threads)
os.register_at_fork(after_in_child=_threads.cache_clear)


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """One computation at a time: it uses all cores, and the limit of BLAS holds for the whole process."""
    threads = _threads()
    with threads.computing, threads.blas.limit(limits=1, user_api="blas"):
        yield


def by_rows(function: Callable[..., Any], *arrays: Singles) -> Any:
    """Apply a function that treats all positions alike to [contexts, positions, …] arrays: by blocks of positions, in
    threads."""
    threads, positions = _threads(), arrays[0].shape[1]
    if positions <= _POSITIONS_AT_ONCE:
        return function(*arrays)
    rounds = -(-positions // (_POSITIONS_AT_ONCE * threads.count))
    blocks = zip(*(np.array_split(array, rounds * threads.count, axis=1) for array in arrays), strict=True)
    found = list(threads.pool.map(lambda block: function(*block), blocks))
    if isinstance(found[0], np.ndarray):
        return np.concatenate(found, axis=1)
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
