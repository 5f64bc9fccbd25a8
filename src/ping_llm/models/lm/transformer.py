"""The shape of the model, and what follows from it: parameters and floating-point operations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.models.lm import float8
from ping_llm.models.lm.attention import attend, choose, norm, segments_of
from ping_llm.tokens import VOCABULARY_SIZE

_VOCABULARY_MULTIPLE: Final = 64
"""Matrix units are fastest on round sizes. The rows that fill up the embedding stand for no token and are cut off."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A decoder with rotary positions, root-mean-square norms without scales, and gated MLPs.

    The defaults are `latency_network`: 112 M parameters.
    """

    layers: int = 20
    width: int = 640
    heads: int = 10
    head_dim: int = 64
    mlp_width: int = 2048
    vocabulary: int = VOCABULARY_SIZE
    rope_period: float = 10_000.0
    logits_soft_cap: float = 0.0
    """Logits are squeezed into ± this by tanh; 0 = not."""
    dtype: str = "bfloat16"
    """Of activations and of the matrices they are multiplied with. Norms, angles, logits and the loss are float32."""
    weight_dtype: str = "float32"
    """Of the parameters that the optimizer changes."""
    quantization: str = "none"
    """`fp8`: the products of the layers, and their slopes, in 8 bits (`model.float8`)."""
    attention: str = "auto"
    remat: str = "none"
    """`none` keeps all activations for the backward pass; `full` keeps a layer's input and computes the rest again."""

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    @property
    def parameters(self) -> int:
        """Counted without the rows that only fill up the embedding."""
        attention = 4 * self.width * self.heads * self.head_dim
        return self.layers * (attention + 3 * self.width * self.mlp_width) + 2 * self.vocabulary * self.width

    def flops_per_token(self, length: int) -> int:
        """Of a training step, by the usual convention: 6 a parameter, and causal attention over the whole sequence.

        Attention within segments does less than that, and padding does none, so this neither counts what was computed
        again nor what was not needed: it is a yardstick that is the same for every implementation.
        """
        return 6 * self.parameters + 6 * self.layers * self.heads * self.head_dim * length


# Cross entropy of the next token, over the places that predict something.

Sums = dict[str, jax.Array]


def loss_sums(logits: jax.Array, targets: jax.Array, targets_segmentation: jax.Array, z_loss: float = 0.0) -> Sums:
    """Sums, not means, so that parts of a batch (micro-batches, hosts, evaluation batches) add up exactly.

    `z_loss` pulls the logarithm of the normaliser to zero, which keeps logits from drifting; what is reported as
    `cross_entropy` is without it.
    """
    counted = targets_segmentation > 0
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.sum(jnp.where(counted, normaliser - right, 0.0))
    penalty = z_loss * jnp.sum(jnp.where(counted, normaliser**2, 0.0)) if z_loss else 0.0
    return {
        "objective": cross_entropy + penalty,
        "cross_entropy": cross_entropy,
        "targets": jnp.sum(counted, dtype=jnp.int32),
    }


# The transformer: from tokens, positions and segments to logits.
#
# Layers are unrolled, not scanned: compiling takes longer, but the compiler then fuses across layers and keeps no
# stacked copies, which makes a training step a quarter faster. Query, key and value come from one matrix, as do gate
# and input of the MLP: fewer, larger products. Embedding is a product with one-hot vectors: with so few tokens it
# costs next to nothing, and its gradient is a matrix product instead of millions of colliding additions, whose order
# would differ from run to run.

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""From query, key and value, [batch, length, heads, head size] each, to what was attended to."""


def rotation(position: jax.Array, head_dim: int, period: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and signed sine of each place's angles, [batch, length, 1, 2, head size / 2]."""
    half = head_dim // 2
    frequency = period ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None, None].astype(jnp.float32) * frequency
    sine = jnp.sin(angle)
    return jnp.cos(angle), jnp.concatenate([-sine, sine], axis=-2)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turn each pair (i, i + head size / 2). A flip compiles to one pass over memory, a concatenation to two."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    return (halves * cosine + jnp.flip(halves, axis=-2) * sine).astype(x.dtype).reshape(x.shape)


class LayerSettings(Protocol):
    """What the settings of every model say about its layers."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weight_dtype(self) -> str: ...


class Layer(nnx.Module):
    """Attention, then a gated MLP, each added to its input. A model's own layer says who attends to what."""

    def __init__(self, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        heads = settings.heads * settings.head_dim
        self.settings = settings
        self.qkv = linear(settings, settings.width, 3 * heads, rngs)
        self.out = linear(settings, heads, settings.width, rngs, into_residual=True)
        self.gate_up = linear(settings, settings.width, 2 * settings.mlp_width, rngs)
        self.down = linear(settings, settings.mlp_width, settings.width, rngs, into_residual=True)

    def query_key_value(self, x: jax.Array) -> list[jax.Array]:
        s = self.settings
        return jnp.split(self._project(x).reshape(*x.shape[:2], 3 * s.heads, s.head_dim), 3, axis=2)

    def add(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """To `x` what was attended to, and what the MLP makes of both."""
        x = x + self._join(attended.reshape(*x.shape[:2], self.settings.heads * self.settings.head_dim))
        return x + self._mlp(x)

    def _project(self, x: jax.Array) -> jax.Array:
        return self.qkv(norm(x))

    def _join(self, attended: jax.Array) -> jax.Array:
        return self.out(attended)

    def _mlp(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(norm(x)), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(Layer):
    """A layer whose queries and keys are turned by their places."""

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array], look: Attention) -> jax.Array:
        query, key, value = self.query_key_value(x)
        return self.add(x, look(rotate(query, *turn), rotate(key, *turn), value))


class Float8Block(Block):
    """The same layer, its products in 8 bits."""

    def _project(self, x: jax.Array) -> jax.Array:
        return float8.normed_linear(x, self.qkv.kernel[...])

    def _join(self, attended: jax.Array) -> jax.Array:
        value = self.qkv.kernel[..., -attended.shape[-1] :]  # what is attended to is an average of values
        return float8.linear(attended, self.out.kernel[...], float8.product_bound(value))

    def _mlp(self, x: jax.Array) -> jax.Array:
        return float8.normed_mlp(x, self.gate_up.kernel[...], self.down.kernel[...])


class Transformer(nnx.Module):
    """The language model. Call it with a batch's inputs, positions and segments."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        self.settings = settings
        table = nnx.initializers.normal(0.02)
        shape = settings.padded_vocabulary, settings.width
        self.embedding = nnx.Param(table(rngs.params(), shape, jnp.dtype(settings.weight_dtype)))
        kind = Float8Block if settings.quantization == "fp8" else Block
        self.blocks = nnx.List([kind(settings, rngs) for _ in range(settings.layers)])
        self.head = linear(settings, settings.width, settings.padded_vocabulary, rngs)

    def __call__(
        self, tokens: jax.Array, position: jax.Array, segmentation: jax.Array, most_segments: int
    ) -> jax.Array:
        """Logits, float32 [batch, length, vocabulary]. No sequence may have more than `most_segments` segments."""
        s = self.settings
        segments = segments_of(segmentation, most_segments)
        implementation = choose(s.attention, s.dtype)

        def look(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(query, key, value, segments, implementation)

        turn = rotation(position, s.head_dim, s.rope_period)
        x = self.embed(tokens)

        def layer(block: Block, x: jax.Array) -> jax.Array:
            return block(x, turn, look)

        run: Any = nnx.remat(layer) if s.remat == "full" else layer
        for block in self.blocks:
            x = run(block, x)
        return self.logits(x)

    def embed(self, tokens: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.settings.dtype)
        return jax.nn.one_hot(tokens, self.settings.padded_vocabulary, dtype=dtype) @ self.embedding[...].astype(dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        s = self.settings
        logits = self.head(norm(x))[..., : s.vocabulary].astype(jnp.float32)
        if s.logits_soft_cap:
            logits = s.logits_soft_cap * jnp.tanh(logits / s.logits_soft_cap)
        return logits


def linear(
    settings: LayerSettings, inputs: int, outputs: int, rngs: nnx.Rngs, *, into_residual: bool = False
) -> nnx.Linear:
    """A matrix that keeps the size of what it multiplies, or that of the sum of all that goes into the residual."""
    scale = inputs**-0.5
    if into_residual:  # 2 × layers of them are added up
        scale *= (2 * settings.layers) ** -0.5
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=nnx.initializers.normal(scale),
        dtype=jnp.dtype(settings.dtype),
        param_dtype=jnp.dtype(settings.weight_dtype),
        rngs=rngs,
    )
