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
from ping_llm.runs.checkpoints import first_state

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.models.lm import Transformer, float8
from ping_llm.models.lm.attention import norm
from ping_llm.models.lm.float8 import SLOPE, VALUE, Quantised, gate, gate_slopes, quantise, quantise_normed, to_float8
from ping_llm.models.lm.transformer import Block, Float8Block
from ping_llm.runs.task import task_of
from ping_llm.training.step import make_train_step, optimizer
from test_model import TINY, batch_of, logits_of, loss_and_slope

EIGHT_BITS = dataclasses.replace(TINY, dtype="bfloat16", quantization="fp8")
SIXTEEN_BITS = dataclasses.replace(TINY, dtype="bfloat16")
ONE = jnp.ones(())


def random(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def error(found: jax.Array, wanted: jax.Array) -> float:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def with_slopes(function: Any, slope: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """What the function gives, and the slopes of its inputs from that of its output."""

    def both(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        found, back = jax.vjp(function, *inputs)
        return found, *back(slope)

    return jax.jit(both)(*inputs)


def bits(pair: Quantised) -> list[np.ndarray]:
    return [np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8)) for x in pair]


class TestQuantise:
    def test_numbers_keep_three_bits_as_values_and_two_as_slopes(self) -> None:
        x = jnp.array([[1.0, 1.06, 1.07, 1.125, 300.0]])
        assert quantise(x, ONE, VALUE).rows.astype(jnp.float32).tolist() == [[1.0, 1.0, 1.125, 1.125, 288.0]]
        assert quantise(x, ONE, SLOPE).rows.astype(jnp.float32).tolist() == [[1.0, 1.0, 1.0, 1.0, 320.0]]

    @pytest.mark.parametrize(("dtype", "largest"), [(VALUE, 448.0), (SLOPE, 57344.0)])
    def test_what_is_too_large_becomes_the_largest_and_nan_stays(self, dtype: Any, largest: float) -> None:
        x = jnp.array([1e9, -1e9, jnp.inf, jnp.nan])
        found = to_float8(x, 2 * ONE, dtype).astype(jnp.float32)
        assert found[:3].tolist() == [largest, -largest, largest]
        assert bool(jnp.isnan(found[3]))

    def test_columns_are_the_transposed_rows(self) -> None:
        rows, columns = quantise(random(6, 10), 16 * ONE, VALUE)
        assert columns.shape == (10, 6)
        assert jnp.array_equal(rows.T, columns)

    @pytest.mark.parametrize(
        ("run", "shapes"),
        [
            (partial(quantise, scale=16 * ONE, dtype=VALUE), [(256, 128)]),
            (partial(quantise, scale=256 * ONE, dtype=SLOPE), [(128, 256)]),
            (partial(quantise_normed, scale=16 * ONE), [(128, 256)]),
            (partial(gate, scale=4 * ONE), [(64, 512)]),
            (partial(gate_slopes, scale=256 * ONE), [(128, 128), (128, 256)]),
        ],
        ids=["values", "slopes", "normed", "gate", "gate slopes"],
    )
    def test_kernels_give_the_bits_of_plain_array_code(self, run: Any, shapes: list[tuple[int, int]]) -> None:
        inputs = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        from_kernel, from_arrays = (bits(jax.jit(partial(run, kernel=kernel))(*inputs)) for kernel in (True, False))
        for one, other in zip(from_kernel, from_arrays, strict=True):
            assert one.shape == other.shape
            assert np.mean(one != other) < 1e-3  # the last bit of a function may differ

    def test_the_gate_and_its_slopes_are_those_of_automatic_differentiation(self) -> None:
        gate_up, slope = random(16, 64, dtype=jnp.float32), random(16, 32, seed=1, dtype=jnp.float32)

        def gated(gate_up: jax.Array) -> jax.Array:
            left, right = jnp.split(gate_up, 2, axis=1)
            return jax.nn.silu(left) * right

        wanted, back = jax.vjp(gated, gate_up)
        assert error(gate(gate_up, 4 * ONE).rows.astype(jnp.float32) / 4, wanted) < 0.04
        assert error(gate_slopes(slope, gate_up, 256 * ONE).rows.astype(jnp.float32) / 256, back(slope)[0]) < 0.08


class TestProducts:
    @pytest.mark.parametrize("normed", [False, True])
    def test_a_product_and_its_slopes_are_those_in_32_bits_but_for_a_few_per_cent(self, normed: bool) -> None:
        x, weights = 3 * random(4, 64, 128), 0.04 * random(128, 96, seed=1, dtype=jnp.float32)
        slope = random(4, 64, 96, seed=2)

        def wanted_of(x: jax.Array, weights: jax.Array) -> jax.Array:
            return ((norm(x) if normed else x).astype(jnp.float32) @ weights).astype(jnp.bfloat16)

        ours_of = float8.normed_linear if normed else partial(float8.linear, bound=jnp.float32(20))
        found, wanted = (with_slopes(function, slope, x, weights) for function in (ours_of, wanted_of))
        for ours, theirs, limit in zip(found, wanted, (0.05, 0.08, 0.08), strict=True):
            assert ours.dtype == theirs.dtype
            assert 0 < error(ours, theirs) < limit

    @pytest.mark.parametrize("size", [0.1, 3.0], ids=["small", "thousands inside"])
    def test_the_gated_mlp_is_that_in_32_bits_but_for_a_few_per_cent(self, size: float) -> None:
        x = 3 * random(2, 64, 64)
        gate_up, down = size * random(64, 96, dtype=jnp.float32), 0.1 * random(48, 64, seed=1, dtype=jnp.float32)

        def mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            left, right = jnp.split(norm(x).astype(jnp.float32) @ gate_up, 2, axis=-1)
            return ((jax.nn.silu(left) * right) @ down).astype(jnp.bfloat16)

        slope = random(2, 64, 64, seed=3)
        found, wanted = (with_slopes(function, slope, x, gate_up, down) for function in (float8.normed_mlp, mlp))
        for ours, theirs, limit in zip(found, wanted, (0.08, 0.12, 0.12, 0.12), strict=True):
            assert 0 < error(ours, theirs) < limit

    def test_slopes_of_weights_are_summed_in_32_bits(self) -> None:
        """The units' own sums are too short for so many tokens. A CPU has no such units: look at what is asked for."""
        x, weights = random(64, 32), random(32, 48, seed=1, dtype=jnp.float32)
        program = jax.make_jaxpr(jax.grad(lambda x, w: float8.normed_linear(x, w).sum().astype(jnp.float32), (0, 1)))
        products = [e for e in program(x, weights).eqns if e.primitive.name == "dot_general"]
        asked = {e.outvars[0].aval.shape: e.params["precision"] for e in products}
        assert asked[32, 48] == (jax.lax.Precision.HIGHEST,) * 2
        assert asked[64, 32] is None


class TestBounds:
    """Forwards, nothing is ever cut off."""

    def test_nor_is_what_was_attended_to_however_large_the_values(self) -> None:
        ours, theirs = (kind(SIXTEEN_BITS, nnx.Rngs(0)) for kind in (Float8Block, Block))
        for block in (ours, theirs):
            block.qkv.kernel[...] *= 100
        value = theirs.query_key_value(random(2, 16, 32))[2].reshape(2, 16, 32)
        assert float(jnp.abs(value).max()) > 200
        assert 0 < error(ours._join(value), theirs._join(value)) < 0.05

    @settings(deadline=None)
    @given(st.sampled_from([8, 100]), st.integers(0, 2**31), st.floats(0.01, 100.0))
    def test_no_product_of_a_normed_vector_exceeds_its_bound(self, width: int, seed: int, size: float) -> None:
        random_weights = size * np.random.default_rng(seed).standard_normal((width, 6), dtype=np.float32)
        worst = np.concatenate([random_weights.T, random_weights.sum(axis=1, keepdims=True).T])  # along its columns
        product = norm(jnp.array(worst)) @ random_weights
        bound = float(float8.product_bound(jnp.array(random_weights)))
        assert float(jnp.abs(product).max()) <= 1.001 * bound <= 1.1 * float(jnp.abs(product).max())
        gated = jnp.abs(jax.nn.silu(product[:, :3]) * product[:, 3:])
        assert float(gated.max()) <= 1.001 * float(float8.gated_bound(jnp.array(random_weights)))

    @settings(deadline=None)
    @given(st.floats(2.0**-60, 2.0**60, width=32))
    def test_scales_are_powers_of_two_that_take_the_bound_to_the_upper_half(self, bound: float) -> None:
        scale = float(float8._scale(jnp.float32(bound)))
        assert np.frexp(scale)[0] == 0.5
        assert 223 < bound * scale <= 448

    def test_a_matrix_of_zeros_gives_zeros(self) -> None:
        zeros, x = jnp.zeros((16, 32)), random(4, 16)
        assert not float8.normed_linear(x, zeros).any()
        assert not float8.normed_mlp(x, zeros, jnp.zeros((16, 16))).any()


class TestModel:
    def test_it_has_the_same_weights(self) -> None:
        shapes = [
            jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(Transformer(kind, nnx.Rngs(0)))))
            for kind in (SIXTEEN_BITS, EIGHT_BITS)
        ]
        assert shapes[0] == shapes[1]

    @pytest.mark.slow
    def test_loss_and_gradient_stay_close_to_those_in_16_bits(self) -> None:
        batch = batch_of([[20, 30, 14], [40, 3], [64]])
        (loss, slopes), (wanted, wanted_slopes) = (loss_and_slope(s, batch) for s in (EIGHT_BITS, SIXTEEN_BITS))
        assert float(loss) == pytest.approx(float(wanted), rel=0.01)
        for ours, theirs in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted_slopes), strict=True):
            assert error(ours, theirs) < 0.35  # of few tokens

    def test_a_packed_sequence_has_the_logits_of_its_segments_alone(self) -> None:
        model = nnx.jit(Transformer(EIGHT_BITS, nnx.Rngs(0)), static_argnums=3)
        together = logits_of(model, batch_of([[20, 30]]))[0, 20:50]
        alone = logits_of(model, batch_of([[20], [30]]))[1, :30]
        other = logits_of(model, batch_of([[20], [30]], seed=1))[1, :30]
        assert error(together, alone) < 0.02 < 0.5 < error(other, alone)

    def test_auto_means_none_on_a_machine_without_the_units(self) -> None:
        assert float8.choose("auto", "bfloat16", has_units=False) == "none"
        assert float8.choose("auto", "float32", has_units=True) == "none"
        assert float8.choose("auto", "bfloat16", has_units=True) == "fp8"
        assert float8.choose("fp8", "bfloat16", has_units=False) == "fp8"

    def test_everything_else_must_be_16_bits(self) -> None:
        with pytest.raises(PingLlmError, match="quantization=fp8 needs dtype=bfloat16, not float32"):
            task_of(Config(quantization="fp8", dtype="float32"))


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "keys",
        [{}, {"remat_policy": "full"}, {"weight_dtype": "bfloat16"}],
        ids=["as it is", "remat", "weights in 16 bits"],
    )
    def test_steps_change_weights_as_in_16_bits(self, keys: dict[str, Any]) -> None:
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
    change = optimizer(config)
    state = jax.jit(lambda: first_state(config, change))()
    step = make_train_step(task_of(config), change, config)
    found = []
    for _ in range(steps):
        state, values = step(state, batch, 8)
        found.append(float(values["loss"]))
    return found
