"""What both models are made of: RMSNorm, SwiGLU layers around attention, and the choice of an attention that runs here.

Layers are unrolled, not scanned: compiling takes longer, but the compiler then fuses across layers and keeps no stacked
copies, which makes a training step a quarter faster. Query, key and value come from one matrix, as do gate and up of
SwiGLU: fewer, larger matmuls.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from ping_llm.core.errors import PingLlmError

_EPSILON = 1e-6


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
    attention: str = "auto"

    @property
    def layer_parameters(self) -> int:
        return self.layers * (4 * self.width * self.heads * self.head_dim + 3 * self.width * self.mlp_width)


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


def linear(
    settings: LayerSettings, inputs: int, outputs: int, rngs: nnx.Rngs, *, into_residual: bool = False
) -> nnx.Linear:
    """A matrix that keeps the size of what it multiplies, or that of the sum of all that goes into the residual."""
    scale = inputs**-0.5
    if into_residual:  # 2 × layers of them are added up
        scale *= (2 * settings.layers) ** -0.5
    start, dtype, kept = nnx.initializers.normal(scale), jnp.dtype(settings.dtype), jnp.dtype(settings.weight_dtype)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=start, dtype=dtype, param_dtype=kept, rngs=rngs)


def rms_norm(x: jax.Array) -> jax.Array:
    """To a root mean square of 1 over the last axis, without a learned scale: the matrix that follows can hold it."""
    return (x.astype(jnp.float32) * rms_factor(x)).astype(x.dtype)


def rms_factor(x: jax.Array) -> jax.Array:
    """What `rms_norm` multiplies with: float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)


def choose_attention(name: str, dtype: str) -> str:
    """What `auto` stands for on this machine; what cannot run here is an error."""
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
