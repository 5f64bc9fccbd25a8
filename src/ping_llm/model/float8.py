"""Matrix products in 8 bits, with slopes in 8 bits: on GPUs that have the units for it, half the time of 16 bits.

Activations and weights have three bits behind the point, slopes two (`quantise`). Products and what lies between them
are bfloat16, and the optimizer's weights stay float32.

Nothing but slopes can be too large for 8 bits: scales come from bounds that follow from the weights. A normed vector
has length √width, so its product with a matrix is at most √width times the longest column; what is attended to is an
average of such products, and the inside of the MLP at most a product of two. Such bounds are hundreds of times the
usual size, but these formats hold as much. With values cut off at 112 instead, slopes did not know and drove them on:
after 600 steps of `latency_network` the evaluation loss in 16 bits was 1.66 instead of 0.69.

The slopes of the weights sum over all tokens of a batch, tens of thousands. The units add with some 14 bits, which is
enough for the hundreds of numbers in other products and ruins this one (after 64 steps of `latency_network` the loss
was 3.6 instead of 3.1), so there the sum leaves the units now and then for float32: `_EXACT_SUM`.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from ping_llm.errors import PingLlmError
from ping_llm.model.norm import norm
from ping_llm.model.quantise import (
    SLOPE,
    VALUE,
    Quantised,
    gate,
    gate_slopes,
    quantise,
    quantise_normed,
    to_float8,
)

_SLOPE_SCALE: Final = 16.0
"""Slopes from 0.000004 to 3,584: of a loss summed over tokens, not averaged, so the size of the batch is no matter."""

_EXACT_SUM: Final = jax.lax.Precision.HIGHEST


def choose(wanted: str, dtype: str, *, has_units: bool) -> str:
    """What `auto` stands for on this machine."""
    if wanted == "fp8" and dtype != "bfloat16":
        raise PingLlmError(f"quantization=fp8 needs dtype=bfloat16, not {dtype}: all that is not 8 bits wide is 16")
    if wanted == "auto":
        return "fp8" if has_units and dtype == "bfloat16" else "none"
    return wanted


# -- products


@jax.custom_vjp
def linear(x: jax.Array, weights: jax.Array, bound: jax.Array) -> jax.Array:
    """x @ weights, [..., inputs] and [inputs, outputs]. No number in `x` may be larger than `bound`."""
    return _linear(x, weights, bound)[0]


def _linear(x: jax.Array, weights: jax.Array, bound: jax.Array) -> tuple[jax.Array, Any]:
    scale = _scale(bound)
    inputs = quantise(_flat(x), scale, VALUE)
    return _like(x, _times(inputs, scale, weights)), (inputs.columns, scale, weights)


def _linear_slopes(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    inputs, scale, weights = kept
    slopes = _quantised_slopes(slope)
    of_inputs = _like(slope, _times_transposed(slopes, weights))
    return of_inputs, _weight_slope(inputs, scale, slopes, weights), jnp.zeros_like(scale)


linear.defvjp(_linear, _linear_slopes)


@jax.custom_vjp
def normed_linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """norm(x) @ weights."""
    return _normed_linear(x, weights)[0]


def _normed_linear(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    scale = _normed_scale(x)
    inputs = quantise_normed(_flat(x), scale)
    return _like(x, _times(inputs, scale, weights)), (x, inputs.columns, weights)


def _normed_linear_slopes(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, inputs, weights = kept
    slopes = _quantised_slopes(slope)
    of_x = _before_norm(x, _like(x, _times_transposed(slopes, weights)))
    return of_x, _weight_slope(inputs, _normed_scale(x), slopes, weights)


normed_linear.defvjp(_normed_linear, _normed_linear_slopes)


@jax.custom_vjp
def normed_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """(silu(gate) × up) @ down, where gate and up are the halves of norm(x) @ gate_up."""
    return _normed_mlp(x, gate_up, down)[0]


def _normed_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    scale = _normed_scale(x)
    inputs = quantise_normed(_flat(x), scale)
    both = _times(inputs, scale, gate_up)
    hidden_scale = _scale(gated_bound(gate_up))
    hidden = gate(both, hidden_scale)
    y = _like(x, _times(hidden, hidden_scale, down))
    return y, (x, inputs.columns, both, hidden.columns, hidden_scale, gate_up, down)


def _normed_mlp_slopes(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, inputs, both, hidden, hidden_scale, gate_up, down = kept
    slopes = _quantised_slopes(slope)
    inner = gate_slopes(_times_transposed(slopes, down), both, jnp.float32(_SLOPE_SCALE))
    return (
        _before_norm(x, _like(x, _times_transposed(inner, gate_up))),
        _weight_slope(inputs, _normed_scale(x), inner, gate_up),
        _weight_slope(hidden, hidden_scale, slopes, down),
    )


normed_mlp.defvjp(_normed_mlp, _normed_mlp_slopes)


def _before_norm(x: jax.Array, slope: jax.Array) -> jax.Array:
    return jax.vjp(norm, x)[1](slope)[0]


# -- bounds and scales


def product_bound(weights: jax.Array) -> jax.Array:
    """What no number in norm(x) @ weights exceeds."""
    return weights.shape[0] ** 0.5 * jnp.max(_column_lengths(weights))


def gated_bound(gate_up: jax.Array) -> jax.Array:
    """What no number in silu(gate) × up exceeds, where gate and up are the halves of norm(x) @ gate_up."""
    of_gate, of_up = jnp.split(_column_lengths(gate_up), 2)
    return gate_up.shape[0] * jnp.max(of_gate * of_up)


def _column_lengths(weights: jax.Array) -> jax.Array:
    return jnp.linalg.norm(weights.astype(jnp.float32), axis=0)


def _normed_scale(x: jax.Array) -> jax.Array:
    return _scale(jnp.float32(x.shape[-1] ** 0.5))


def _scale(bound: jax.Array) -> jax.Array:
    """A power of two, by which multiplying loses nothing, that takes the bound to the largest number or less."""
    wanted = float(jnp.finfo(VALUE).max) / jnp.maximum(bound, 1e-30)
    exponent_alone = jax.lax.bitcast_convert_type(wanted, jnp.uint32) & jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent_alone, jnp.float32)


def _quantised_slopes(slope: jax.Array) -> Quantised:
    return quantise(_flat(slope), jnp.float32(_SLOPE_SCALE), SLOPE)


def _quantised_weights(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """And their scale. The length of a column, which is known anyway, is a bound for what is in it."""
    scale = _scale(jnp.max(_column_lengths(weights)))
    return to_float8(weights, scale, VALUE), scale


# -- products of 8-bit numbers


def _times(x: Quantised, scale: jax.Array, weights: jax.Array) -> jax.Array:
    quantised, weight_scale = _quantised_weights(weights)
    return _product(x.rows, scale, quantised.T, weight_scale)


def _times_transposed(slopes: Quantised, weights: jax.Array) -> jax.Array:
    return _product(slopes.rows, jnp.float32(_SLOPE_SCALE), *_quantised_weights(weights))


def _weight_slope(inputs: jax.Array, scale: jax.Array, slopes: Quantised, weights: jax.Array) -> jax.Array:
    slope = _product(inputs, scale, slopes.columns, jnp.float32(_SLOPE_SCALE), jnp.float32, _EXACT_SUM)
    return slope.astype(weights.dtype)


def _product(
    a: jax.Array,
    a_scale: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    dtype: Any = jnp.bfloat16,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """[n, k] and [m, k] to [n, m], without the scales: written as XLA recognises a product in 8 bits."""
    wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # both hold 8 bits; CPUs know the former

    def value(x: jax.Array, scale: jax.Array) -> jax.Array:
        # Were it a constant to the compiler, it would move it behind the product, into a pass of its own.
        return x.astype(wide) * jax.lax.optimization_barrier((1 / scale).astype(wide))

    along_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        value(a, a_scale), value(b, b_scale), along_last, precision=precision, preferred_element_type=dtype
    )


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _like(x: jax.Array, flat: jax.Array) -> jax.Array:
    """All axes but the last as in `x`."""
    return flat.reshape(*x.shape[:-1], -1)
