"""Numbers in 8 bits, each array in two layouts: as it is and transposed.

The matrix units that multiply 8-bit numbers want the summed-over axis last in both factors. A product's slopes sum over
other axes than the product itself, so everything is written twice. On a GPU that has such units one kernel reads its
input once and writes both; XLA alone would take three passes and be slow at the transposed one. Elsewhere, and for
shapes that do not divide into blocks, plain array code gives the same bits.

What a number becomes depends on itself and the scale alone, never on other tokens of the batch: a packed sequence still
behaves as its segments would alone. Beyond the largest 8-bit number there is no infinity here: values stay at the
largest. NaN stays NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ping_llm.core.errors import PingLlmError
from ping_llm.models.lm.attention import is_hopper_or_newer, norm, norm_factor

VALUE: Final = jnp.float8_e4m3fn
"""Of weights and activations: three bits behind the point, up to 448."""
SLOPE: Final = jnp.float8_e5m2
"""Of slopes: two bits, but up to 57,344 and down to 0.000015."""


class Quantised(NamedTuple):
    rows: jax.Array
    columns: jax.Array
    """The transposed of `rows`."""


_ROWS, _COLUMNS, _WARPS = 64, 128, 8
"""Of the block that one instance of a kernel works on: the fastest of 14 on an H200, for all kernels here."""


def to_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -largest, largest).astype(dtype)


def quantise(x: jax.Array, scale: jax.Array, dtype: Any, *, kernel: bool | None = None) -> Quantised:
    """[n, m] numbers, times the scale."""

    def block(x_ref: Any, rows: Any, columns: Any) -> list[jax.Array]:
        return [x_ref[rows, columns]]

    if _runs(x.shape, kernel):
        return _run(block, "quantise", (x,), scale, x.shape, dtype)
    return _both(to_float8(x, scale, dtype))


def quantise_normed(x: jax.Array, scale: jax.Array, *, kernel: bool | None = None) -> Quantised:
    """[n, m] numbers, each row normed, times the scale."""
    factors = norm_factor(x)

    def block(x_ref: Any, factors_ref: Any, rows: Any, columns: Any) -> list[jax.Array]:
        return [x_ref[rows, columns].astype(jnp.float32) * factors_ref[rows][:, None]]

    if _runs(x.shape, kernel):
        return _run(block, "quantise_normed", (x, factors[:, 0]), scale, x.shape, VALUE)
    return _both(to_float8(x.astype(jnp.float32) * factors, scale, VALUE))


def gate(gate_up: jax.Array, scale: jax.Array, *, kernel: bool | None = None) -> Quantised:
    """silu(gate) × up, [n, m], from both side by side, [n, 2 m]."""
    n, m = gate_up.shape[0], gate_up.shape[1] // 2

    def block(gate_up_ref: Any, rows: Any, columns: Any) -> list[jax.Array]:
        return [_gated(gate_up_ref[rows, columns], gate_up_ref[rows, _further(columns, m)])]

    if _runs((n, m), kernel):
        return _run(block, "gate", (gate_up,), scale, (n, m), VALUE)
    return _both(to_float8(_gated(*jnp.split(gate_up, 2, axis=1)), scale, VALUE))


def gate_slopes(slope: jax.Array, gate_up: jax.Array, scale: jax.Array, *, kernel: bool | None = None) -> Quantised:
    """The slopes of gate and up side by side, [n, 2 m], from that of silu(gate) × up, [n, m]."""
    m = slope.shape[1]

    def block(slope_ref: Any, gate_up_ref: Any, rows: Any, columns: Any) -> tuple[jax.Array, ...]:
        both = gate_up_ref[rows, columns], gate_up_ref[rows, _further(columns, m)]
        return _gate_slopes(slope_ref[rows, columns], *both)

    if _runs(slope.shape, kernel):
        return _run(block, "gate_slopes", (slope, gate_up), scale, slope.shape, SLOPE, parts=2)
    return _both(to_float8(jnp.concatenate(_gate_slopes(slope, *jnp.split(gate_up, 2, axis=1)), axis=1), scale, SLOPE))


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return gate * jax.nn.sigmoid(gate) * up


def _gate_slopes(slope: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    slope, gate, up = (x.astype(jnp.float32) for x in (slope, gate, up))
    share = jax.nn.sigmoid(gate)
    return slope * up * share * (1 + gate * (1 - share)), slope * gate * share


def _both(rows: jax.Array) -> Quantised:
    return Quantised(rows=rows, columns=rows.T)


# -- kernels


def _runs(shape: tuple[int, ...], wanted: bool | None) -> bool:
    fits = shape[0] % _ROWS == 0 and shape[1] % _COLUMNS == 0
    if wanted is not None:
        assert fits or not wanted
        return wanted
    # XLA cannot share a kernel's work out over several devices; it can do so with plain array code.
    return fits and is_hopper_or_newer() and jax.device_count() == 1


def _further(columns: Any, by: int) -> Any:
    return pl.ds(columns.start + by, columns.size)


def _run(
    block: Callable[..., Sequence[jax.Array]],
    name: str,
    inputs: tuple[jax.Array, ...],
    scale: jax.Array,
    work: tuple[int, ...],
    dtype: Any,
    parts: int = 1,
) -> Quantised:
    """All blocks of an array of shape `work`, quantised. A block may have two parts, which then lie `work[1]` apart.

    Blocks with the same rows are neighbours in time: they read memory side by side.
    """
    shape = work[0], parts * work[1]

    def one(*references: Any) -> None:
        *inside, scale_ref, rows_ref, columns_ref = references
        rows = pl.ds(pl.program_id(1) * _ROWS, _ROWS)
        columns = pl.ds(pl.program_id(0) * _COLUMNS, _COLUMNS)
        for number, part in enumerate(block(*inside, rows, columns)):
            place = _further(columns, number * work[1])
            small = to_float8(part, scale_ref[0], dtype)
            rows_ref[rows, place] = small
            columns_ref[place, rows] = small.T

    on_gpu = is_hopper_or_newer()
    return Quantised(
        *pl.pallas_call(
            one,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[::-1], dtype)],
            grid=(work[1] // _COLUMNS, work[0] // _ROWS),
            interpret=not on_gpu,
            compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1) if on_gpu else None,
            name=name,
        )(*inputs, scale.reshape(1))
    )


# Matrix products in 8 bits, with slopes in 8 bits: on GPUs that have the units for it, half the time of 16 bits.
#
# Activations and weights have three bits behind the point, slopes two (`quantise`). Products and what lies between them
# are bfloat16, and the optimizer's weights stay float32.
#
# Nothing but slopes can be too large for 8 bits: scales come from bounds that follow from the weights. A normed vector
# has length √width, so its product with a matrix is at most √width times the longest column; what is attended to is an
# average of such products, and the inside of the MLP at most a product of two. Such bounds are hundreds of times the
# usual size, but these formats hold as much. With values cut off at 112 instead, slopes did not know and drove them on:
# after 600 steps of `latency_network` the evaluation loss in 16 bits was 1.66 instead of 0.69.
#
# The slopes of the weights sum over all tokens of a batch, tens of thousands. The units add with some 14 bits, which is
# enough for the hundreds of numbers in other products and ruins this one (after 64 steps of `latency_network` the loss
# was 3.6 instead of 3.1), so there the sum leaves the units now and then for float32: `_EXACT_SUM`.

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
