"""The language model: a decoder-only transformer with RoPE, RMSNorm and SwiGLU, over packed sequences.

Layers are unrolled, not scanned: compiling takes longer, but the compiler then fuses across layers and keeps no stacked
copies, which makes a training step a quarter faster. Query, key and value come from one matrix, as do gate and up of
SwiGLU: fewer, larger matmuls. Embedding is a matmul with one-hot vectors: with so few tokens it costs next to nothing,
and its gradient is a matmul instead of millions of colliding additions, whose order would differ from run to run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.models.lm import float8
from ping_llm.models.lm.attention import attend, choose_attention, rms_norm, segments_of
from ping_llm.tokens import VOCABULARY_SIZE

_VOCABULARY_MULTIPLE: Final = 64
"""Tensor cores are fastest on round sizes. The rows that pad the embedding stand for no token and are cut off."""


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What every model's layers are made of. The defaults are `latency_network`."""

    layers: int = 20
    width: int = 640
    heads: int = 10
    head_dim: int = 64
    mlp_width: int = 2048
    dtype: str = "bfloat16"
    """Of activations and of the matrices they are multiplied with. RMSNorm, RoPE, logits and the loss are float32."""
    weight_dtype: str = "float32"
    """Of the parameters that the optimizer changes."""
    attention: str = "auto"
    """`plain`, `cudnn` (NVIDIA GPUs, 16-bit types), or `auto`: whichever is best here."""

    @property
    def layer_parameters(self) -> int:
        """Of all layers."""
        return self.layers * (4 * self.width * self.heads * self.head_dim + 3 * self.width * self.mlp_width)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(LayerSettings):
    """The shape of the language model. The defaults have 112 M parameters."""

    vocabulary: int = VOCABULARY_SIZE
    rope_period: float = 10_000.0
    logits_soft_cap: float = 0.0
    """Logits are squeezed into ± this by tanh; 0 = not."""
    quantization: str = "none"
    """`fp8`: the matmuls of the layers, and their gradients, in FP8 (`models/lm/float8.py`)."""
    remat: str = "none"
    """`none` keeps all activations for the backward pass; `full` keeps a layer's input and recomputes the rest."""

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    @property
    def parameters(self) -> int:
        """Without the rows that pad the embedding."""
        return self.layer_parameters + 2 * self.vocabulary * self.width

    def flops_per_token(self, length: int) -> int:
        """Of a training step, by the usual convention: 6 per parameter, and causal attention over the whole sequence.

        Attention within segments needs less and padding nothing, and recomputation is not counted: a yardstick that is
        the same for every implementation.
        """
        return 6 * self.parameters + 6 * self.layers * self.heads * self.head_dim * length


Sums = dict[str, jax.Array]


def loss_sums(logits: jax.Array, targets: jax.Array, targets_segmentation: jax.Array, z_loss: float = 0.0) -> Sums:
    """Cross entropy of the next token, over the positions that have a target.

    Sums, not means, so that parts of a batch (micro-batches, hosts, evaluation batches) add up exactly. `z_loss` pulls
    the logarithm of the softmax's normalizer to zero, which keeps logits from drifting; `cross_entropy` is without it.
    """
    counted = targets_segmentation > 0
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.sum(jnp.where(counted, normalizer - right, 0.0))
    penalty = z_loss * jnp.sum(jnp.where(counted, normalizer**2, 0.0)) if z_loss else 0.0
    return {
        "objective": cross_entropy + penalty,
        "cross_entropy": cross_entropy,
        "targets": jnp.sum(counted, dtype=jnp.int32),
    }


Rope = tuple[jax.Array, jax.Array]


def rope_angles(position: jax.Array, head_dim: int, period: float) -> Rope:
    """Cosine and signed sine of each position's angles, [batch, length, 1, 2, head size / 2]."""
    half = head_dim // 2
    frequency = period ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None, None].astype(jnp.float32) * frequency
    sine = jnp.sin(angle)
    return jnp.cos(angle), jnp.concatenate([-sine, sine], axis=-2)


def apply_rope(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate each pair (i, i + head size / 2). A flip compiles to one pass over memory, a concatenation to two."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    return (halves * cosine + jnp.flip(halves, axis=-2) * sine).astype(x.dtype).reshape(x.shape)


class Layer(nnx.Module):
    """Attention, then a SwiGLU MLP, each added to its input. A model's own layer says who attends to what."""

    def __init__(self, settings: LayerSettings, rngs: nnx.Rngs) -> None:
        heads = settings.heads * settings.head_dim
        self.settings = settings
        self.qkv = linear(settings, settings.width, 3 * heads, rngs)
        self.out = linear(settings, heads, settings.width, rngs, into_residual=True)
        self.gate_up = linear(settings, settings.width, 2 * settings.mlp_width, rngs)
        self.down = linear(settings, settings.mlp_width, settings.width, rngs, into_residual=True)

    def query_key_value(self, x: jax.Array) -> list[jax.Array]:
        s = self.settings
        return jnp.split(self.project(x).reshape(*x.shape[:2], 3 * s.heads, s.head_dim), 3, axis=2)

    def add(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The residual stream after attention and MLP."""
        x = x + self.join(attended.reshape(*x.shape[:2], self.settings.heads * self.settings.head_dim))
        return x + self.mlp(x)

    def project(self, x: jax.Array) -> jax.Array:
        return self.qkv(rms_norm(x))

    def join(self, attended: jax.Array) -> jax.Array:
        return self.out(attended)

    def mlp(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(rms_norm(x)), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(Layer):
    """A layer with RoPE."""

    def __call__(self, x: jax.Array, rope: Rope, attention: Callable[..., jax.Array]) -> jax.Array:
        """`attention` takes query, key and value, [batch, length, heads, head size] each."""
        query, key, value = self.query_key_value(x)
        return self.add(x, attention(apply_rope(query, *rope), apply_rope(key, *rope), value))


class Float8Block(Block):
    """The same layer with FP8 matmuls."""

    def project(self, x: jax.Array) -> jax.Array:
        return float8.normed_linear(x, self.qkv.kernel[...])

    def join(self, attended: jax.Array) -> jax.Array:
        value = self.qkv.kernel[..., -attended.shape[-1] :]  # attention returns averages of values
        return float8.linear(attended, self.out.kernel[...], float8.product_bound(value))

    def mlp(self, x: jax.Array) -> jax.Array:
        return float8.normed_swiglu(x, self.gate_up.kernel[...], self.down.kernel[...])


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

    def __call__(self, tokens: jax.Array, position: jax.Array, segmentation: jax.Array, max_segments: int) -> jax.Array:
        """Logits, float32 [batch, length, vocabulary]. No sequence may have more than `max_segments` segments."""
        s = self.settings
        segments = segments_of(segmentation, max_segments)
        implementation = choose_attention(s.attention, s.dtype)
        rope = rope_angles(position, s.head_dim, s.rope_period)

        def layer(block: Block, x: jax.Array) -> jax.Array:
            return block(x, rope, lambda query, key, value: attend(query, key, value, segments, implementation))

        run: Any = nnx.remat(layer) if s.remat == "full" else layer
        x = self.embed(tokens)
        for block in self.blocks:
            x = run(block, x)
        return self.logits(x)

    def embed(self, tokens: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.settings.dtype)
        return jax.nn.one_hot(tokens, self.settings.padded_vocabulary, dtype=dtype) @ self.embedding[...].astype(dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        s = self.settings
        logits = self.head(rms_norm(x))[..., : s.vocabulary].astype(jnp.float32)
        return s.logits_soft_cap * jnp.tanh(logits / s.logits_soft_cap) if s.logits_soft_cap else logits


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
