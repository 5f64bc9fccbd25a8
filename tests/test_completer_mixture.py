"""Mixture: a mixture of bins and of kernels around measurements, as a density and on a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ping_llm.models.completer.inference import BinDistribution
from ping_llm.models.completer.model import log_density
from ping_llm.models.completer.network import FINE, KERNEL_WIDTHS, PRECISIONS, Bins, Mixture

NEVER = -1e9


def some_mixture(seed: int = 0, bins: int = 512, context: int = 6, questions: int = 3) -> Mixture:
    rng = np.random.default_rng(seed)
    return Mixture(
        bin_logits=jnp.asarray(3 * np.cumsum(rng.normal(size=(2, questions, bins)), axis=-1) / 8, jnp.float32),
        failure_logit=jnp.zeros((2, questions)),
        log_share=jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, questions, 1 + PRECISIONS)), jnp.float32)),
        pointer_log_share=jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, questions, context)), jnp.float32)),
        context_log_rtt=jnp.asarray(rng.uniform(0, 6, (2, context)), jnp.float32),
    )


def only(answers: Mixture, part: int) -> Mixture:
    """All of it in the bins (0) or in one precision."""
    share = jnp.full((2, 3, 1 + PRECISIONS), NEVER).at[..., part].set(0.0)
    return answers._replace(log_share=share)


def distribution(answers: Mixture) -> BinDistribution:
    grid = np.asarray(answers.probabilities(), np.float64).reshape(-1, FINE)
    return BinDistribution(p_failed=np.zeros(len(grid)), probability=grid)


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, *range(1 + PRECISIONS)])
def test_the_density_of_training_is_that_of_prediction(part: int | None) -> None:
    answers = some_mixture() if part is None else only(some_mixture(), part)
    low, high = np.log(0.06), np.log(1900)
    edges = np.linspace(low, high, 20_001)
    middles = jnp.asarray((edges[1:] + edges[:-1]) / 2, jnp.float32)
    found = jax.vmap(lambda x: log_density(answers, jnp.full((2, 3), x)), out_axes=-1)(middles)
    density = np.exp(np.asarray(found, np.float64)) / answers.bins.width
    until = np.cumsum(density, axis=-1).reshape(-1, 20_000) * (edges[1] - edges[0])
    values = np.exp(edges[2_000::2_000])
    expected = distribution(answers).cdf(np.broadcast_to(values, (6, len(values))))
    begin = distribution(answers).cdf(np.full((6, 1), np.exp(low)))
    np.testing.assert_allclose(until[:, 1_999::2_000], expected - begin, atol=0.01)


def test_the_grid_holds_all_probability() -> None:
    np.testing.assert_allclose(np.asarray(some_mixture().probabilities()).sum(axis=-1), 1, atol=1e-5)


def test_pointing_at_one_measurement_answers_with_it_to_a_fraction_of_a_fine_bin() -> None:
    answers = only(some_mixture(), 1)
    pointer = jnp.full((2, 3, 6), NEVER).at[..., 2].set(0.0)
    median = distribution(answers._replace(pointer_log_share=pointer)).median.reshape(2, 3)
    expected = np.exp(np.asarray(answers.context_log_rtt)[:, 2])
    np.testing.assert_allclose(median, np.broadcast_to(expected[:, None], (2, 3)), rtol=5e-4)


def test_kernels_are_as_wide_as_they_say() -> None:
    for precision, width in enumerate(KERNEL_WIDTHS):
        answers = only(some_mixture(), 1 + precision)
        pointer = jnp.full((2, 3, 6), NEVER).at[..., 2].set(0.0)
        interval = np.log(distribution(answers._replace(pointer_log_share=pointer)).quantile([0.25, 0.75]))
        expected = 2 * np.log(2) * width
        assert interval[0, 1] - interval[0, 0] == pytest.approx(expected, rel=0.1, abs=Bins(FINE).width)
