import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.models.layers import rms_norm
from ping_llm.models.lm import Transformer, float8
from ping_llm.models.lm.float8 import (
    GRADIENT,
    VALUE,
    Quantized,
    choose_quantization,
    quantize,
    quantize_normed,
    quantize_swiglu,
    quantize_swiglu_gradient,
    to_float8,
)
from ping_llm.models.lm.transformer import Block, Float8Block
from ping_llm.runs.task import task_of
from ping_llm.training.state import initial_state
from ping_llm.training.step import make_optimizer, make_train_step
from test_model import TINY, batch_of, logits_of, loss_and_gradient

FP8 = dataclasses.replace(TINY, dtype="bfloat16", quantization="fp8")
BF16 = dataclasses.replace(TINY, dtype="bfloat16")
ONE = jnp.ones(())


def random(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def error(found: jax.Array, wanted: jax.Array) -> float:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def with_gradients(function: Any, gradient: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """What the function gives, and the gradients of its inputs from that of its output."""

    def both(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        found, back = jax.vjp(function, *inputs)
        return found, *back(gradient)

    return jax.jit(both)(*inputs)


def bits(pair: Quantized) -> list[np.ndarray]:
    return [np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8)) for x in (pair.rows, pair.columns)]


class TestQuantize:
    def test_values_keep_three_mantissa_bits_and_gradients_two(self) -> None:
        x = jnp.array([[1.0, 1.06, 1.07, 1.125, 300.0]])
        assert quantize(x, ONE, VALUE).rows.astype(jnp.float32).tolist() == [[1.0, 1.0, 1.125, 1.125, 288.0]]
        assert quantize(x, ONE, GRADIENT).rows.astype(jnp.float32).tolist() == [[1.0, 1.0, 1.0, 1.0, 320.0]]

    @pytest.mark.parametrize(("dtype", "largest"), [(VALUE, 448.0), (GRADIENT, 57344.0)])
    def test_what_is_too_large_becomes_the_largest_and_nan_stays(self, dtype: Any, largest: float) -> None:
        x = jnp.array([1e9, -1e9, jnp.inf, jnp.nan])
        found = to_float8(x, 2 * ONE, dtype).astype(jnp.float32)
        assert found[:3].tolist() == [largest, -largest, largest]
        assert bool(jnp.isnan(found[3]))

    def test_columns_are_the_transposed_rows(self) -> None:
        rows, columns, _ = quantize(random(6, 10), 16 * ONE, VALUE)
        assert columns.shape == (10, 6)
        assert jnp.array_equal(rows.T, columns)

    @pytest.mark.parametrize(
        ("run", "shapes"),
        [
            (partial(quantize, scale=16 * ONE, dtype=VALUE), [(256, 128)]),
            (partial(quantize, scale=256 * ONE, dtype=GRADIENT), [(128, 256)]),
            (partial(quantize_normed, scale=16 * ONE), [(128, 256)]),
            (partial(quantize_swiglu, scale=4 * ONE), [(64, 512)]),
            (partial(quantize_swiglu_gradient, scale=256 * ONE), [(128, 128), (128, 256)]),
        ],
        ids=["values", "gradients", "normed", "swiglu", "swiglu gradients"],
    )
    def test_kernels_give_the_bits_of_plain_array_code(self, run: Any, shapes: list[tuple[int, int]]) -> None:
        inputs = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        from_kernel, from_arrays = (bits(jax.jit(partial(run, kernel=kernel))(*inputs)) for kernel in (True, False))
        for one, other in zip(from_kernel, from_arrays, strict=True):
            assert one.shape == other.shape
            assert np.mean(one != other) < 1e-3  # the last bit of a function may differ

    def test_swiglu_and_its_gradient_are_those_of_automatic_differentiation(self) -> None:
        gate_up, gradient = random(16, 64, dtype=jnp.float32), random(16, 32, seed=1, dtype=jnp.float32)

        def swiglu(gate_up: jax.Array) -> jax.Array:
            left, right = jnp.split(gate_up, 2, axis=1)
            return jax.nn.silu(left) * right

        wanted, back = jax.vjp(swiglu, gate_up)
        assert error(quantize_swiglu(gate_up, 4 * ONE).rows.astype(jnp.float32) / 4, wanted) < 0.04
        of_both = quantize_swiglu_gradient(gradient, gate_up, 256 * ONE).rows.astype(jnp.float32) / 256
        assert error(of_both, back(gradient)[0]) < 0.08


class TestMatmuls:
    @pytest.mark.parametrize("normed", [False, True])
    def test_a_matmul_and_its_gradients_are_those_of_float32_but_for_a_few_per_cent(self, normed: bool) -> None:
        x, weights = 3 * random(4, 64, 128), 0.04 * random(128, 96, seed=1, dtype=jnp.float32)
        gradient = random(4, 64, 96, seed=2)

        def wanted_of(x: jax.Array, weights: jax.Array) -> jax.Array:
            return ((rms_norm(x) if normed else x).astype(jnp.float32) @ weights).astype(jnp.bfloat16)

        ours_of = float8.normed_linear if normed else partial(float8.linear, bound=jnp.float32(20))
        found, wanted = (with_gradients(function, gradient, x, weights) for function in (ours_of, wanted_of))
        for ours, theirs, limit in zip(found, wanted, (0.05, 0.08, 0.08), strict=True):
            assert ours.dtype == theirs.dtype
            assert 0 < error(ours, theirs) < limit

    @pytest.mark.parametrize("size", [0.1, 3.0], ids=["small", "thousands inside"])
    def test_the_swiglu_mlp_is_that_of_float32_but_for_a_few_per_cent(self, size: float) -> None:
        x = 3 * random(2, 64, 64)
        gate_up, down = size * random(64, 96, dtype=jnp.float32), 0.1 * random(48, 64, seed=1, dtype=jnp.float32)

        def mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            left, right = jnp.split(rms_norm(x).astype(jnp.float32) @ gate_up, 2, axis=-1)
            return ((jax.nn.silu(left) * right) @ down).astype(jnp.bfloat16)

        gradient = random(2, 64, 64, seed=3)
        ours_and_theirs = (float8.normed_swiglu, mlp)
        found, wanted = (with_gradients(function, gradient, x, gate_up, down) for function in ours_and_theirs)
        for ours, theirs, limit in zip(found, wanted, (0.08, 0.12, 0.12, 0.12), strict=True):
            assert 0 < error(ours, theirs) < limit

    def test_gradients_of_weights_are_accumulated_in_float32(self) -> None:
        """Tensor cores' own sums are too short for so many tokens. A CPU has none: see what the program asks for."""
        x, weights = random(64, 32), random(32, 48, seed=1, dtype=jnp.float32)
        program = jax.make_jaxpr(jax.grad(lambda x, w: float8.normed_linear(x, w).sum().astype(jnp.float32), (0, 1)))
        matmuls = [e for e in program(x, weights).eqns if e.primitive.name == "dot_general"]
        precision = {e.outvars[0].aval.shape: e.params["precision"] for e in matmuls}
        assert precision[32, 48] == (jax.lax.Precision.HIGHEST,) * 2
        assert precision[64, 32] is None


class TestBounds:
    """Forwards, nothing is ever clipped."""

    def test_nor_is_what_attention_returns_however_large_the_values(self) -> None:
        ours, theirs = (kind(BF16, nnx.Rngs(0)) for kind in (Float8Block, Block))
        for block in (ours, theirs):
            block.qkv.kernel[...] *= 100
        value = theirs.query_key_value(random(2, 16, 32))[2].reshape(2, 16, 32)
        assert float(jnp.abs(value).max()) > 200
        assert 0 < error(ours.join(value), theirs.join(value)) < 0.05

    @settings(deadline=None)
    @given(st.sampled_from([8, 100]), st.integers(0, 2**31), st.floats(0.01, 100.0))
    def test_no_product_of_a_normed_vector_exceeds_its_bound(self, width: int, seed: int, size: float) -> None:
        random_weights = size * np.random.default_rng(seed).standard_normal((width, 6), dtype=np.float32)
        worst = np.concatenate([random_weights.T, random_weights.sum(axis=1, keepdims=True).T])  # along its columns
        product = rms_norm(jnp.array(worst)) @ random_weights
        bound = float(float8.product_bound(jnp.array(random_weights)))
        assert float(jnp.abs(product).max()) <= 1.001 * bound <= 1.1 * float(jnp.abs(product).max())
        gated = jnp.abs(jax.nn.silu(product[:, :3]) * product[:, 3:])
        assert float(gated.max()) <= 1.001 * float(float8.swiglu_bound(jnp.array(random_weights)))

    @settings(deadline=None)
    @given(st.floats(2.0**-60, 2.0**60, width=32))
    def test_scales_are_powers_of_two_that_take_the_bound_to_the_upper_half(self, bound: float) -> None:
        scale = float(float8.scale_for(jnp.float32(bound)))
        assert np.frexp(scale)[0] == 0.5
        assert 223 < bound * scale <= 448

    def test_a_matrix_of_zeros_gives_zeros(self) -> None:
        zeros, x = jnp.zeros((16, 32)), random(4, 16)
        assert not float8.normed_linear(x, zeros).any()
        assert not float8.normed_swiglu(x, zeros, jnp.zeros((16, 16))).any()


class TestModel:
    def test_it_has_the_same_weights(self) -> None:
        shapes = [
            jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(Transformer(kind, nnx.Rngs(0))))) for kind in (BF16, FP8)
        ]
        assert shapes[0] == shapes[1]

    @pytest.mark.slow
    def test_loss_and_gradient_stay_close_to_those_in_bf16(self) -> None:
        batch = batch_of([[20, 30, 14], [40, 3], [64]])
        (loss, gradients), (wanted, wanted_gradients) = (loss_and_gradient(s, batch) for s in (FP8, BF16))
        assert float(loss) == pytest.approx(float(wanted), rel=0.01)
        for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
            assert error(ours, theirs) < 0.35  # of few tokens

    def test_a_packed_sequence_has_the_logits_of_its_segments_alone(self) -> None:
        model = nnx.jit(Transformer(FP8, nnx.Rngs(0)), static_argnums=3)
        together = logits_of(model, batch_of([[20, 30]]))[0, 20:50]
        alone = logits_of(model, batch_of([[20], [30]]))[1, :30]
        other = logits_of(model, batch_of([[20], [30]], seed=1))[1, :30]
        assert error(together, alone) < 0.02 < 0.5 < error(other, alone)

    def test_auto_means_none_on_a_machine_without_fp8(self) -> None:
        assert choose_quantization("auto", "bfloat16", has_fp8=False) == "none"
        assert choose_quantization("auto", "float32", has_fp8=True) == "none"
        assert choose_quantization("auto", "bfloat16", has_fp8=True) == "fp8"
        assert choose_quantization("fp8", "bfloat16", has_fp8=False) == "fp8"

    def test_everything_else_must_be_bf16(self) -> None:
        with pytest.raises(PingLlmError, match="quantization=fp8 needs dtype=bfloat16, not float32"):
            task_of(Config(quantization="fp8", dtype="float32"))


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "keys",
        [{}, {"remat_policy": "full"}, {"weight_dtype": "bfloat16"}],
        ids=["as it is", "remat", "bf16 weights"],
    )
    def test_steps_change_weights_as_in_bf16(self, keys: dict[str, Any]) -> None:
        config = Config(**SMALL, **keys)
        batch = {name: jnp.array(value) for name, value in batch_of([[20, 30, 14], [40, 3], [64], []]).items()}
        losses = {kind: losses_of(config.replace(quantization=kind), batch, steps=8) for kind in ("none", "fp8")}
        assert losses["fp8"] != losses["none"]
        assert losses["none"][-1] < 0.9 * losses["none"][0]
        assert losses["fp8"] == pytest.approx(losses["none"], rel=0.04)

    @pytest.mark.slow
    def test_parts_of_a_batch_add_up_to_the_whole(self) -> None:
        batch = {name: jnp.array(value) for name, value in batch_of([[20, 30, 14], [40, 3], [64], []]).items()}
        config = Config(**SMALL, quantization="fp8")
        whole, parts = (losses_of(config.replace(gradient_accumulation_steps=n), batch, steps=4) for n in (1, 2))
        assert parts == pytest.approx(whole, rel=1e-3)

    def test_a_completer_has_none_of_it(self) -> None:
        with pytest.raises(PingLlmError, match="quantization=fp8 is for the language model"):
            task_of(Config(dataset_type="worlds", quantization="fp8"))
        task_of(Config(dataset_type="worlds", quantization="auto"))


SMALL: dict[str, Any] = {
    "base_num_decoder_layers": 2,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "steps": 8,
}


def losses_of(config: Config, batch: dict[str, Any], steps: int) -> list[float]:
    optimizer = make_optimizer(config)
    state = jax.jit(lambda: initial_state(config, optimizer))()
    step = make_train_step(task_of(config), optimizer, config)
    found = []
    for _ in range(steps):
        state, values = step(state, batch, 8)
        found.append(float(values["loss"]))
    return found
