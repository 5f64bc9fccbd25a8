"""FP8 training: the matmuls of the layers in 8-bit floating point, forwards and backwards.

A Hopper or newer GPU multiplies FP8 matrices in half the time of BF16. With q(x) = cast(clip(scale x, ±largest)):

    y          =  q(x) @ q(W)              x and W in e4m3: 3 mantissa bits, largest number 448
    gradient x =  q(gradient y) @ q(W).T   gradients in e5m2: 2 mantissa bits, but from 0.000015 to 57,344
    gradient W =  q(x).T @ q(gradient y)

each divided by the two scales. Matmuls give bfloat16, and so is all that lies between them; the optimizer's weights
stay float32. e4m3fn has no infinity: too large a number becomes the largest, and NaN stays NaN.

Scales are powers of two that follow from the weights alone, so packing and resuming stay exact, and nothing is clipped
forwards. An RMS-normalized vector has length √width, so no entry of its product with W exceeds √width times W's longest
column; what attention returns is an average of such products, and the inside of SwiGLU at most a product of two. Those
bounds are hundreds of times the usual size, but e4m3 has the range. With values clipped at 112 instead, gradients did
not notice and drove them further: after 600 steps of `latency_network` the BF16 evaluation loss was 1.66 instead of
0.69. Gradients are those of a loss *summed* over tokens, so one constant scale serves every batch size.

Accumulation. Tensor cores add FP8 products with some 14 bits. That is enough for sums over a layer's width, and ruins
gradient W, a sum over all tokens of the batch (after 64 steps of `latency_network` the loss was 3.6 instead of 3.1):
there the partial sums are promoted to float32 now and then, which is what `Precision.HIGHEST` asks for.

Layouts. FP8 tensor cores want the contracted axis last in both operands. The three matmuls contract three different
axes, so everything is written twice, as it is and transposed. On a GPU a Pallas kernel reads its input once and writes
both; XLA alone takes three passes and is slow at the transposed one. Elsewhere, on several devices (XLA cannot
partition a kernel), and for shapes that do not divide into tiles, plain array code gives the same bits.

Not here, on purpose: per-row or per-tile scales, delayed scaling, amax histories, FP8 in attention, embedding or head.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ping_llm.core.errors import PingLlmError
from ping_llm.models.layers import rms_factor, rms_norm
from ping_llm.models.modules import is_hopper_or_newer

VALUE: Final = jnp.float8_e4m3fn
"""Of weights and activations."""
GRADIENT: Final = jnp.float8_e5m2

_GRADIENT_SCALE: Final = 16.0
"""Gradients from 0.000004 to 3,584."""

_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 8
"""Of the tile that one program of a kernel works on: the fastest of 14 on an H200, for all kernels here."""


def choose_quantization(name: str, dtype: str, *, has_fp8: bool) -> str:
    """What `auto` stands for on this machine."""
    if name == "fp8" and dtype != "bfloat16":
        raise PingLlmError(f"quantization=fp8 needs dtype=bfloat16, not {dtype}: what is not FP8 is BF16")
    if name == "auto":
        return "fp8" if has_fp8 and dtype == "bfloat16" else "none"
    return name


# -- matmuls with their gradients


@jax.custom_vjp
def linear(x: jax.Array, weights: jax.Array, bound: jax.Array) -> jax.Array:
    """x @ weights, [..., inputs] and [inputs, outputs]. No number in `x` may be larger than `bound`."""
    return _linear(x, weights, bound)[0]


def _linear(x: jax.Array, weights: jax.Array, bound: jax.Array) -> tuple[jax.Array, Any]:
    inputs = quantize(_flat(x), scale_for(bound), VALUE)
    return _like(x, _times(inputs, weights)), (inputs.columns, inputs.scale, weights)


def _linear_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    columns, scale, weights = saved
    outputs = _quantized_gradient(gradient)
    of_x = _like(gradient, _times_transposed(outputs, weights))
    return of_x, _weight_gradient(columns, scale, outputs, weights), jnp.zeros_like(scale)


linear.defvjp(_linear, _linear_backward)


@jax.custom_vjp
def normed_linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """rms_norm(x) @ weights."""
    return _normed_linear(x, weights)[0]


def _normed_linear(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    inputs = quantize_normed(_flat(x), _normed_scale(x))
    return _like(x, _times(inputs, weights)), (x, inputs.columns, weights)


def _normed_linear_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, columns, weights = saved
    outputs = _quantized_gradient(gradient)
    of_x = _before_norm(x, _like(x, _times_transposed(outputs, weights)))
    return of_x, _weight_gradient(columns, _normed_scale(x), outputs, weights)


normed_linear.defvjp(_normed_linear, _normed_linear_backward)


@jax.custom_vjp
def normed_swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """(silu(gate) × up) @ down, where gate and up are the halves of rms_norm(x) @ gate_up."""
    return _normed_swiglu(x, gate_up, down)[0]


def _normed_swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    inputs = quantize_normed(_flat(x), _normed_scale(x))
    both = _times(inputs, gate_up)
    hidden = quantize_swiglu(both, scale_for(swiglu_bound(gate_up)))
    saved = x, inputs.columns, both, hidden.columns, hidden.scale, gate_up, down
    return _like(x, _times(hidden, down)), saved


def _normed_swiglu_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, columns, both, hidden_columns, hidden_scale, gate_up, down = saved
    outputs = _quantized_gradient(gradient)
    inside = quantize_swiglu_gradient(_times_transposed(outputs, down), both, jnp.float32(_GRADIENT_SCALE))
    return (
        _before_norm(x, _like(x, _times_transposed(inside, gate_up))),
        _weight_gradient(columns, _normed_scale(x), inside, gate_up),
        _weight_gradient(hidden_columns, hidden_scale, outputs, down),
    )


normed_swiglu.defvjp(_normed_swiglu, _normed_swiglu_backward)


def _before_norm(x: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.vjp(rms_norm, x)[1](gradient)[0]


# -- bounds and scales


def product_bound(weights: jax.Array) -> jax.Array:
    """What no number in rms_norm(x) @ weights exceeds."""
    return weights.shape[0] ** 0.5 * jnp.max(_column_lengths(weights))


def swiglu_bound(gate_up: jax.Array) -> jax.Array:
    """What no number in silu(gate) × up exceeds, where gate and up are the halves of rms_norm(x) @ gate_up."""
    of_gate, of_up = jnp.split(_column_lengths(gate_up), 2)
    return gate_up.shape[0] * jnp.max(of_gate * of_up)


def scale_for(bound: jax.Array) -> jax.Array:
    """The largest power of two (multiplying by one loses nothing) that takes the bound to 448 or less."""
    exact = float(jnp.finfo(VALUE).max) / jnp.maximum(bound, 1e-30)
    exponent = jax.lax.bitcast_convert_type(exact, jnp.uint32) & jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def _column_lengths(weights: jax.Array) -> jax.Array:
    return jnp.linalg.norm(weights.astype(jnp.float32), axis=0)


def _normed_scale(x: jax.Array) -> jax.Array:
    return scale_for(jnp.float32(x.shape[-1] ** 0.5))


# -- FP8 matmuls: [n, k] and [m, k] to [n, m]


def _times(x: "Quantized", weights: jax.Array) -> jax.Array:
    quantized, scale = _quantized_weights(weights)
    return _matmul(x.rows, x.scale, quantized.T, scale)


def _times_transposed(gradient: "Quantized", weights: jax.Array) -> jax.Array:
    return _matmul(gradient.rows, gradient.scale, *_quantized_weights(weights))


def _weight_gradient(columns: jax.Array, scale: jax.Array, gradient: "Quantized", weights: jax.Array) -> jax.Array:
    exact = {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    return _matmul(columns, scale, gradient.columns, gradient.scale, **exact).astype(weights.dtype)


def _quantized_weights(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """And their scale. The length of a column, which is known anyway, is a bound for what is in it."""
    scale = scale_for(jnp.max(_column_lengths(weights)))
    return to_float8(weights, scale, VALUE), scale


def _matmul(
    a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array, dtype: Any = jnp.bfloat16, precision: Any = None
) -> jax.Array:
    """Without the scales, written such that XLA recognises an FP8 matmul."""
    wide = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # both hold FP8; CPUs multiply the former

    def value(x: jax.Array, scale: jax.Array) -> jax.Array:
        # Were it a constant to the compiler, it would move it behind the matmul, into a pass of its own.
        return x.astype(wide) * jax.lax.optimization_barrier((1 / scale).astype(wide))

    last_axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        value(a, a_scale), value(b, b_scale), last_axes, precision=precision, preferred_element_type=dtype
    )


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _like(x: jax.Array, flat: jax.Array) -> jax.Array:
    """All axes but the last as in `x`."""
    return flat.reshape(*x.shape[:-1], -1)


# -- quantization: to FP8 in both layouts. `kernel` chooses between the Pallas kernel and array code; None = the best


class Quantized(NamedTuple):
    rows: jax.Array
    columns: jax.Array  # `rows`, transposed
    scale: jax.Array


def to_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -largest, largest).astype(dtype)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any, *, kernel: bool | None = None) -> Quantized:
    return _quantized(_same, (x,), scale, x.shape, dtype, kernel=kernel)


def quantize_normed(x: jax.Array, scale: jax.Array, *, kernel: bool | None = None) -> Quantized:
    """Of rms_norm(x)."""
    return _quantized(_rows_times, (x, rms_factor(x)[:, 0]), scale, x.shape, VALUE, kernel=kernel)


def quantize_swiglu(gate_up: jax.Array, scale: jax.Array, *, kernel: bool | None = None) -> Quantized:
    """Of silu(gate) × up, [n, m], from both side by side, [n, 2 m]."""
    shape = gate_up.shape[0], gate_up.shape[1] // 2
    return _quantized(_swiglu, (gate_up,), scale, shape, VALUE, kernel=kernel)


def quantize_swiglu_gradient(
    gradient: jax.Array, gate_up: jax.Array, scale: jax.Array, *, kernel: bool | None = None
) -> Quantized:
    """Of the gradients of gate and up side by side, [n, 2 m], from that of silu(gate) × up, [n, m]."""
    inputs = gradient, gate_up
    return _quantized(_swiglu_gradient, inputs, scale, gradient.shape, GRADIENT, results=2, kernel=kernel)


def _quantized_gradient(gradient: jax.Array) -> Quantized:
    return quantize(_flat(gradient), jnp.float32(_GRADIENT_SCALE), GRADIENT)


def _same(x: jax.Array) -> list[jax.Array]:
    return [x]


def _rows_times(x: jax.Array, factor: jax.Array) -> list[jax.Array]:
    return [x.astype(jnp.float32) * factor]


def _swiglu(gate: jax.Array, up: jax.Array) -> list[jax.Array]:
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return [gate * jax.nn.sigmoid(gate) * up]


def _swiglu_gradient(gradient: jax.Array, gate: jax.Array, up: jax.Array) -> list[jax.Array]:
    gradient, gate, up = (x.astype(jnp.float32) for x in (gradient, gate, up))
    share = jax.nn.sigmoid(gate)
    return [gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share]


def _quantized(
    function: Callable[..., Sequence[jax.Array]],
    inputs: tuple[jax.Array, ...],
    scale: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    results: int = 1,
    kernel: bool | None,
) -> Quantized:
    """An elementwise function of [n, m] arrays, to FP8.

    An input [n, k m] is k such arrays side by side, and so are several results; an input [n] is a number for each row.
    """
    (n, m), tile = shape, (_TILE_ROWS, _TILE_COLUMNS)
    on_gpu = is_hopper_or_newer()
    fits = n % tile[0] == 0 and m % tile[1] == 0
    if kernel is None:
        kernel = fits and on_gpu and jax.device_count() == 1
    if not kernel:
        splits = ([x[:, None]] if x.ndim == 1 else jnp.split(x, x.shape[1] // m, axis=1) for x in inputs)
        arrays = [part for parts in splits for part in parts]
        rows = to_float8(jnp.concatenate(function(*arrays), axis=1), scale, dtype)
        return Quantized(rows=rows, columns=rows.T, scale=scale)
    assert fits

    def program(*references: Any) -> None:
        *input_refs, scale_ref, rows_ref, columns_ref = references
        rows = pl.ds(pl.program_id(1) * tile[0], tile[0])

        def columns(number: int) -> Any:
            return pl.ds(pl.program_id(0) * tile[1] + number * m, tile[1])

        tiles: list[jax.Array] = []
        for ref in input_refs:
            if len(ref.shape) == 1:
                tiles.append(ref[rows][:, None])
            else:
                tiles += [ref[rows, columns(number)] for number in range(ref.shape[1] // m)]
        for number, result in enumerate(function(*tiles)):
            small = to_float8(result, scale_ref[0], dtype)
            rows_ref[rows, columns(number)] = small
            columns_ref[columns(number), rows] = small.T

    out = n, results * m
    rows, columns = pl.pallas_call(
        program,
        out_shape=[jax.ShapeDtypeStruct(out, dtype), jax.ShapeDtypeStruct(out[::-1], dtype)],
        grid=(m // tile[1], n // tile[0]),  # tiles with the same rows are neighbours in time: they read memory together
        interpret=not on_gpu,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1) if on_gpu else None,
        name=f"quantize{function.__name__}",
    )(*inputs, scale.reshape(1))
    return Quantized(rows=rows, columns=columns, scale=scale)
