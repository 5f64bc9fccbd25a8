"""Root-mean-square norms, without a learnt scale: the matrix that follows can hold it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ping_llm.core.errors import PingLlmError

_EPSILON = 1e-6


def norm(x: jax.Array) -> jax.Array:
    """To a root mean square of 1 over the last axis."""
    return (x.astype(jnp.float32) * norm_factor(x)).astype(x.dtype)


def norm_factor(x: jax.Array) -> jax.Array:
    """What `norm` multiplies with: float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)


# Causal attention that stays inside its segment: a packed sequence behaves as its segments would alone.
#
# Two ways to the same result:
#
# - `plain`: scores of all pairs, masked. Works everywhere; the cost grows with the square of the whole sequence.
# - `cudnn`: cuDNN's packed layout, which is told where each segment begins and ends and never computes a score across.
#   NVIDIA GPUs from Hopper on, 16-bit only.
#
# The packed layout has three traps. Offsets name the *beginnings* of segments: one more entry for the end of the last
# one shifts the offsets of every sequence after it against their lengths (gradients become NaN). Places that belong
# to no segment are never written, so padding counts as part of the segment before it: it comes after all real tokens,
# which therefore never see it. And the cost grows with the number of segments that a sequence *may* have (1.2 ms a
# step each, at batch 64 of `latency_network` on an H200), so that number has to be tight.

IMPLEMENTATIONS = ("auto", "plain", "cudnn")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where attention may look, made once for all layers. Padding belongs to the segment before it."""

    number: jax.Array
    """[batch, length]: of each place, its segment."""
    lengths: jax.Array
    """[batch, most segments]: tokens of each segment, -1 where there is none."""
    starts: jax.Array
    """[batch, most segments + 1]: first place of each segment, -1 where there is none."""


def segments_of(segmentation: jax.Array, most: int) -> Segments:
    """From the batch's segment ids: 1, 2, … and 0 for the padding at the end. No sequence may have more than `most`."""
    number = jnp.maximum(jax.lax.cummax(segmentation, axis=1) - 1, 0)
    lengths = jnp.sum(number[:, :, None] == jnp.arange(most), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
    empty = lengths == 0
    return Segments(
        number=number,
        lengths=jnp.where(empty, -1, lengths),
        starts=jnp.pad(jnp.where(empty, -1, starts), ((0, 0), (0, 1)), constant_values=-1),
    )


def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments, implementation: str) -> jax.Array:
    """Attention of [batch, length, heads, head size] arrays; the same shape comes back."""
    if implementation == "cudnn":
        return _cudnn(query, key, value, segments)
    same = segments.number[:, None, :, None] == segments.number[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True, implementation="xla")


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments) -> jax.Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths, starts = segments.lengths, segments.starts
    return dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=query.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING_CAUSAL,
    )


def choose(wanted: str, dtype: str) -> str:
    """What `auto` stands for on this machine; what cannot run here is an error."""
    if wanted not in IMPLEMENTATIONS:
        raise PingLlmError(f"attention={wanted} is none of {', '.join(IMPLEMENTATIONS)}")
    possible = dtype in ("bfloat16", "float16") and is_hopper_or_newer()
    if wanted == "cudnn" and not possible:
        raise PingLlmError(
            "attention=cudnn needs an NVIDIA GPU of the Hopper generation or newer and dtype=bfloat16; "
            "use attention=plain or auto"
        )
    if wanted == "auto":
        return "cudnn" if possible else "plain"
    return wanted


def is_hopper_or_newer() -> bool:
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return False
    capability = str(getattr(device, "compute_capability", "0"))
    return capability.replace(".", "").isdigit() and float(capability) >= 9.0
