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

from ping_llm.model.attention import is_hopper_or_newer
from ping_llm.model.norm import norm_factor

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
