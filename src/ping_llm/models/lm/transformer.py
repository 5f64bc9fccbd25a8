"""The language model: a decoder-only transformer with RoPE, RMSNorm and SwiGLU, over packed sequences.

Embedding is a matmul with one-hot vectors: with so few tokens it costs next to nothing, and its gradient is a matmul
instead of millions of colliding additions, whose order would differ from run to run.

Attention is causal and stays inside its segment: a packed sequence behaves as its segments would alone. It has two
implementations with one result:

- `plain`: scores of all pairs, masked. Works everywhere; the cost grows with the square of the whole sequence.
- `cudnn`: cuDNN's packed layout, which is given the offset and length of each segment and never computes a score across
  segments. NVIDIA GPUs from Hopper on, 16-bit types only.

The packed layout has three traps. Offsets name the *beginnings* of segments: one more entry for the end of the last one
shifts the offsets of every later sequence against their lengths (gradients become NaN). Positions that belong to no
segment are never written, so padding counts as part of the segment before it: it comes after all real tokens, which
therefore never see it. And the cost grows with the number of segments that a sequence *may* have (1.2 ms per step each,
at batch 64 of `latency_network` on an H200), so that number has to be tight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.models.layers import LayerSettings, rms_norm
from ping_llm.models.lm import float8
from ping_llm.models.modules import Layer, choose_attention, linear
from ping_llm.tokens import FIRST_BYTE, VOCABULARY_SIZE, Role

_VOCABULARY_MULTIPLE: Final = 64
"""Tensor cores are fastest on round sizes. The rows that pad the embedding stand for no token and are cut off."""
_TYPICAL_TOKENS: Final = 16
"""Of a measurement."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(LayerSettings):
    """The shape of the language model. The defaults have 112 M parameters."""

    vocabulary: int = VOCABULARY_SIZE
    rope_period: float = 10_000.0
    qk_norm: bool = False
    byte_features: int = 0
    """Cosines of a byte's value that embedding and head have beside the token: near values are alike from the start."""
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
        return self.layer_parameters + 2 * (self.vocabulary + self.byte_features) * self.width

    def flops_per_token(self, length: int) -> int:
        """Of a training step, by the usual convention: 6 per parameter, and causal attention over the whole sequence.

        Attention within segments needs less and padding nothing, and recomputation is not counted: a yardstick that is
        the same for every implementation.
        """
        return 6 * self.parameters + 6 * self.layers * self.heads * self.head_dim * length


Sums = dict[str, jax.Array]


def loss_sums(
    logits: jax.Array,
    targets: jax.Array,
    targets_segmentation: jax.Array,
    z_loss: float = 0.0,
    weights: jax.Array | None = None,
) -> Sums:
    """Cross entropy of the next token, over the positions that have a target.

    Sums, not means, so that parts of a batch (micro-batches, hosts, evaluation batches) add up exactly. `weights` say
    how much each position counts in the objective. `z_loss` pulls the logarithm of the softmax's normalizer to zero,
    which keeps logits from drifting. `cross_entropy` is without either.
    """
    counted = targets_segmentation > 0
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = jnp.where(counted, normalizer - right, 0.0)
    cross_entropy = jnp.sum(each)
    penalty = z_loss * jnp.sum(jnp.where(counted, normalizer**2, 0.0)) if z_loss else 0.0
    return {
        "objective": (cross_entropy if weights is None else jnp.sum(weights * each)) + penalty,
        "cross_entropy": cross_entropy,
        "targets": jnp.sum(counted, dtype=jnp.int32),
    }


def rtt_weights(inputs: jax.Array, weight: float) -> jax.Array:
    """Weights of the loss in which the two bytes of an RTT count `weight` times as much as any other token.

    Their mean over the tokens of an IPv4 measurement is about 1, so that gradients keep their size.
    """
    starts = inputs == Role.RTT_START
    is_rtt = starts | jnp.pad(starts, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(is_rtt, weight, 1.0) * (_TYPICAL_TOKENS / (_TYPICAL_TOKENS - 2 + 2 * weight))


class Segments(NamedTuple):
    """What each position may attend to, computed once for all layers. Padding belongs to the segment before it."""

    number: jax.Array  # [batch, length]: the segment of each position
    lengths: jax.Array  # [batch, max segments]: tokens of each segment, -1 where there is none
    starts: jax.Array  # [batch, max segments + 1]: offset of each segment, -1 where there is none


def segments_of(segmentation: jax.Array, max_segments: int) -> Segments:
    """From the batch's segment ids: 1, 2, … and 0 for the padding at the end."""
    number = jnp.maximum(jax.lax.cummax(segmentation, axis=1) - 1, 0)
    lengths = jnp.sum(number[:, :, None] == jnp.arange(max_segments), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
    empty = lengths == 0
    return Segments(
        number=number,
        lengths=jnp.where(empty, -1, lengths),
        starts=jnp.pad(jnp.where(empty, -1, starts), ((0, 0), (0, 1)), constant_values=-1),
    )


def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments, implementation: str) -> jax.Array:
    """Attention of [batch, length, heads, head size] arrays; the same shape comes back."""
    if implementation != "cudnn":
        same = segments.number[:, None, :, None] == segments.number[:, None, None, :]
        return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True, implementation="xla")
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention(
        query,
        key,
        value,
        q_seqlen=segments.lengths,
        kv_seqlen=segments.lengths,
        q_offsets=segments.starts,
        kv_offsets=segments.starts,
        scale=query.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING_CAUSAL,
    )


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


class Block(Layer):
    """A layer with RoPE, and RMSNorm of queries and keys if the model has it."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        super().__init__(settings, rngs)
        self.qk_norm = settings.qk_norm

    def __call__(self, x: jax.Array, rope: Rope, attention: Callable[..., jax.Array]) -> jax.Array:
        """`attention` takes query, key and value, [batch, length, heads, head size] each."""
        query, key, value = self.query_key_value(x)
        if self.qk_norm:
            query, key = rms_norm(query), rms_norm(key)
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


def byte_cosines(settings: ModelSettings) -> jax.Array:
    """[padded vocabulary, byte features]: cosines of each byte's value, zeros for roles and padding."""
    wave = jnp.arange(1, settings.byte_features + 1)
    cosines = jnp.cos(jnp.pi / 256 * (jnp.arange(256)[:, None] + 0.5) * wave) * (2 / settings.byte_features) ** 0.5
    return jnp.zeros((settings.padded_vocabulary, settings.byte_features)).at[FIRST_BYTE:VOCABULARY_SIZE].set(cosines)


class Transformer(nnx.Module):
    """The language model. Call it with a batch's inputs, positions and segments."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        self.settings = settings
        table = nnx.initializers.normal(0.02)
        shape = settings.padded_vocabulary, settings.width
        shape_dtype = jnp.dtype(settings.weight_dtype)
        self.embedding = nnx.Param(table(rngs.params(), shape, shape_dtype))
        kind = Float8Block if settings.quantization == "fp8" else Block
        self.blocks = nnx.List([kind(settings, rngs) for _ in range(settings.layers)])
        self.head = linear(settings, settings.width, settings.padded_vocabulary, rngs)
        if settings.byte_features:
            self.byte_embedding = nnx.Param(table(rngs.params(), (settings.byte_features, settings.width), shape_dtype))
            self.byte_head = linear(settings, settings.width, settings.byte_features, rngs)

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
        dtype, table = jnp.dtype(self.settings.dtype), self.embedding[...]
        if self.settings.byte_features:
            table += byte_cosines(self.settings) @ self.byte_embedding[...]
        return jax.nn.one_hot(tokens, self.settings.padded_vocabulary, dtype=dtype) @ table.astype(dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        s = self.settings
        x = rms_norm(x)
        logits = self.head(x)
        if s.byte_features:
            logits += self.byte_head(x) @ byte_cosines(s).T.astype(logits.dtype)
        logits = logits[..., : s.vocabulary].astype(jnp.float32)
        return s.logits_soft_cap * jnp.tanh(logits / s.logits_soft_cap) if s.logits_soft_cap else logits
