import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.batches.batch import PackedTokens, expand
from ping_llm.core.errors import PingLlmError
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.lm.transformer import apply_rope, attend, loss_sums, rope_angles, segments_of
from ping_llm.models.modules import choose_attention
from ping_llm.training.loop import rounded_up

TINY = ModelSettings(layers=2, width=32, heads=2, head_dim=16, mlp_width=48, dtype="float32")
LENGTH = 64


def batch_of(sizes: list[list[int]], length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    """Random tokens in segments of these sizes, one list per sequence."""
    flat = [size for row in sizes for size in row]
    packed = PackedTokens(
        tokens=np.random.default_rng(seed).integers(1, 267, sum(flat), dtype=np.uint16),
        sizes=np.array(flat, dtype=np.int32),
        sequence=np.repeat(np.arange(len(sizes)), [len(row) for row in sizes]).astype(np.int32),
    )
    return expand(packed, len(sizes), length)


def logits_of(model: Any, batch: dict[str, Any]) -> jax.Array:
    return model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], 8)


def loss_and_gradient(settings: ModelSettings, batch: dict[str, Any]) -> tuple[jax.Array, Any]:
    graph, weights = nnx.split(Transformer(settings, nnx.Rngs(3)))

    def loss(weights: Any) -> jax.Array:
        logits = logits_of(nnx.merge(graph, weights), batch)
        return loss_sums(logits, batch["targets"], batch["targets_segmentation"])["objective"]

    return jax.jit(jax.value_and_grad(loss))(weights)


class TestPacking:
    """A packed sequence is as good as its segments alone."""

    sizes: tuple[list[int], ...] = ([20, 30, 14], [40, 3], [64], [5, 5, 5, 5, 5])

    def test_each_segment_gets_the_logits_it_would_get_alone(self) -> None:
        model = nnx.jit(Transformer(TINY, nnx.Rngs(0)), static_argnums=3)
        together = np.asarray(logits_of(model, batch_of(list(self.sizes))))
        alone = np.asarray(logits_of(model, batch_of([[size] for row in self.sizes for size in row])))
        number = 0
        for row, sizes in enumerate(self.sizes):
            for begin, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
                np.testing.assert_allclose(together[row, begin : begin + size], alone[number, :size], atol=2e-5)
                number += 1

    def test_loss_and_gradient_are_the_sums_of_those_of_the_segments(self) -> None:
        together = loss_and_gradient(TINY, batch_of(list(self.sizes)))
        apart = loss_and_gradient(TINY, batch_of([[size] for row in self.sizes for size in row]))
        np.testing.assert_allclose(together[0], apart[0], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(together[1]), jax.tree.leaves(apart[1]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)

    def test_a_token_changes_nothing_before_it_nor_in_other_segments(self) -> None:
        model = nnx.jit(Transformer(TINY, nnx.Rngs(0)), static_argnums=3)
        packed = batch_of([[20, 30, 14]])
        before = logits_of(model, packed)
        other = packed["inputs"].copy()
        other[0, 30] = 7
        after = logits_of(model, packed | {"inputs": other})
        changed = np.flatnonzero(np.any(np.asarray(before != after)[0], axis=-1))
        assert changed.min() == 30
        assert changed.max() == 49

    def test_padding_carries_no_loss_and_an_empty_batch_no_nan(self) -> None:
        loss, _ = loss_and_gradient(TINY, batch_of([[10], []]))
        short, _ = loss_and_gradient(TINY, batch_of([[10]]))
        np.testing.assert_allclose(loss, short, rtol=1e-6)
        empty, gradient = loss_and_gradient(TINY, batch_of([[], []]))
        assert float(empty) == 0
        assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5))
def test_segment_layout_names_the_offset_and_the_size_of_every_segment(sizes: list[list[int]]) -> None:
    segments = segments_of(jnp.array(batch_of(sizes)["inputs_segmentation"]), 6)
    for row, expected in enumerate(sizes):
        expected = expected or [0]
        expected = [*expected[:-1], expected[-1] + LENGTH - sum(expected)]  # padding goes with the last one
        count = len(expected)
        assert segments.lengths[row].tolist() == expected + [-1] * (6 - count)
        starts = np.cumsum([0, *expected])[:-1].tolist()
        assert segments.starts[row].tolist() == starts + [-1] * (7 - count)


def test_rope_depends_on_distance_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def product(i: int, j: int) -> float:
        angles = [rope_angles(jnp.array([[position]]), 16, 10_000.0) for position in (i, j)]
        return float(jnp.sum(apply_rope(query, *angles[0]) * apply_rope(key, *angles[1])))

    assert product(5, 3) == pytest.approx(product(905, 903), rel=1e-3)
    assert product(5, 3) != pytest.approx(product(5, 2), rel=1e-3)


@pytest.mark.slow
def test_recomputing_activations_changes_no_gradient() -> None:
    batch = batch_of([[20, 30], [64]])
    kept, again = (loss_and_gradient(dataclasses.replace(TINY, remat=remat), batch) for remat in ("none", "full"))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_soft_cap_bounds_logits() -> None:
    model = Transformer(dataclasses.replace(TINY, logits_soft_cap=0.5), nnx.Rngs(0))
    assert float(jnp.max(jnp.abs(logits_of(model, batch_of([[64]]))))) < 0.5


def test_z_loss_is_in_the_objective_and_not_in_the_cross_entropy() -> None:
    logits, targets = jnp.full((1, 4, 8), 3.0), jnp.zeros((1, 4), jnp.int32)
    plain, with_z = (loss_sums(logits, targets, targets + 1, z_loss) for z_loss in (0.0, 0.1))
    assert float(with_z["cross_entropy"]) == float(plain["cross_entropy"])
    assert float(with_z["objective"]) > float(plain["objective"])


def test_the_default_model_has_112_million_parameters_and_the_formula_counts_them() -> None:
    assert round(ModelSettings().parameters / 1e6) == 112
    weights = nnx.split(Transformer(TINY, nnx.Rngs(0)))[1]
    fill = 2 * TINY.width * (TINY.padded_vocabulary - TINY.vocabulary)
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == TINY.parameters + fill


def test_bfloat16_stays_close_to_float32() -> None:
    batch = batch_of([[30, 34]])
    exact, rough = (
        loss_and_gradient(dataclasses.replace(TINY, dtype=dtype), batch)[0] for dtype in ("float32", "bfloat16")
    )
    assert float(rough) == pytest.approx(float(exact), rel=0.02)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_attention_that_cannot_run_here_is_refused_with_the_reason() -> None:
    assert choose_attention("auto", "bfloat16") == "plain"
    with pytest.raises(PingLlmError, match="Hopper"):
        choose_attention("cudnn", "bfloat16")


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU of the Hopper generation")
def test_packed_attention_of_cudnn_agrees_with_the_plain_one() -> None:
    batch = batch_of([[500, 400, 100], [1024], [300]], length=1024)
    segments = segments_of(jnp.array(batch["inputs_segmentation"]), 4)
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, 3, 1024, 4, 64), jnp.bfloat16)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> jax.Array:
        return jnp.sum((attend(q, k, v, segments, implementation) * weight).astype(jnp.float32))

    plain, cudnn = (jax.grad(total, (0, 1, 2))(q, k, v, name) for name in ("plain", "cudnn"))
    for a, b in zip(plain, cudnn, strict=True):
        difference = jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(a.astype(jnp.float32))
        assert float(difference) < 0.02


@given(st.integers(1, 500))
def test_segment_bounds_are_rounded_up_by_a_quarter_at_most_to_few_values(count: int) -> None:
    assert count <= rounded_up(count) <= max(4, count * 1.25)
    assert len({rounded_up(i) for i in range(1, 501)}) < 30
