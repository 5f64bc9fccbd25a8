"""RMSNorm, and causal attention that stays inside its segment: a packed sequence behaves as its segments would alone.

Attention has two implementations with one result:

- `plain`: scores of all pairs, masked. Works everywhere; the cost grows with the square of the whole sequence.
- `cudnn`: cuDNN's packed layout, which is given the offset and length of each segment and never computes a score across
  segments. NVIDIA GPUs from Hopper on, 16-bit types only.

The packed layout has three traps. Offsets name the *beginnings* of segments: one more entry for the end of the last one
shifts the offsets of every later sequence against their lengths (gradients become NaN). Positions that belong to no
segment are never written, so padding counts as part of the segment before it: it comes after all real tokens, which
therefore never see it. And the cost grows with the number of segments that a sequence *may* have (1.2 ms per step each,
at batch 64 of `latency_network` on an H200), so that number has to be tight.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ping_llm.core.errors import PingLlmError

IMPLEMENTATIONS = ("auto", "plain", "cudnn")
_EPSILON = 1e-6


def rms_norm(x: jax.Array) -> jax.Array:
    """To a root mean square of 1 over the last axis, without a learned scale: the matrix that follows can hold it."""
    return (x.astype(jnp.float32) * rms_factor(x)).astype(x.dtype)


def rms_factor(x: jax.Array) -> jax.Array:
    """What `rms_norm` multiplies with: float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Segments:
    """What each position may attend to, computed once for all layers. Padding belongs to the segment before it."""

    number: jax.Array
    """[batch, length]: the segment of each position."""
    lengths: jax.Array
    """[batch, max segments]: tokens of each segment, -1 where there is none."""
    starts: jax.Array
    """[batch, max segments + 1]: offset of each segment, -1 where there is none."""


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


def choose_attention(name: str, dtype: str) -> str:
    """What `auto` stands for on this machine; what cannot run here is an error."""
    if name not in IMPLEMENTATIONS:
        raise PingLlmError(f"attention={name} is none of {', '.join(IMPLEMENTATIONS)}")
    possible = dtype in ("bfloat16", "float16") and is_hopper_or_newer()
    if name == "cudnn" and not possible:
        raise PingLlmError(
            "attention=cudnn needs an NVIDIA GPU of the Hopper generation or newer and dtype=bfloat16; "
            "use attention=plain or auto"
        )
    return name if name != "auto" else "cudnn" if possible else "plain"


def is_hopper_or_newer() -> bool:
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "0"))
    return device.platform == "gpu" and capability.replace(".", "").isdigit() and float(capability) >= 9.0
