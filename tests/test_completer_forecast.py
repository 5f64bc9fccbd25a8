"""Forecasts: the mathematics of a density made of straight lines."""

import jax.numpy as jnp
import numpy as np
import pytest

from ping_llm.completer.bins import Bins
from ping_llm.completer.forecast import RttForecast, averaged
from ping_llm.tokens.rtt_code import decode_rtt, normalised_codes


def forecast(rows: int = 4, bins: int = 64, seed: int = 0) -> RttForecast:
    rng = np.random.default_rng(seed)
    probability = rng.dirichlet(np.full(bins, 0.3), rows)
    return RttForecast(p_failed=rng.random(rows) * 0.3, probability=probability)


def certain(log_rtt: float, bins: int = 512) -> RttForecast:
    """All probability where the target of this value would be."""
    lower, share = (np.asarray(x) for x in Bins(bins).between(jnp.array([log_rtt])))
    probability = np.zeros((1, bins))
    probability[0, lower[0]], probability[0, lower[0] + 1] = 1 - share[0], share[0]
    return RttForecast(p_failed=np.zeros(1), probability=probability)


GRID_MS = np.exp(np.linspace(np.log(0.03), np.log(3000), 4001))


def test_cdf_rises_from_0_to_1() -> None:
    values = np.array([forecast().cdf(rtt) for rtt in GRID_MS])
    assert np.all(np.diff(values, axis=0) >= -1e-12)
    assert np.allclose(values[0], 0)
    assert np.allclose(values[-1], 1)


def test_quantiles_invert_the_cdf() -> None:
    levels = np.linspace(0.01, 0.99, 37)
    rtt = forecast().quantile(levels)
    assert rtt.shape == (4, 37)
    for column, level in enumerate(levels):
        assert np.allclose(forecast().cdf(rtt[:, column]), level, atol=1e-9)


def test_density_integrates_to_the_cdf() -> None:
    middle = np.sqrt(GRID_MS[1:] * GRID_MS[:-1])
    inside = (middle > 0.06) & (middle < 1800)
    step = np.log(GRID_MS[1] / GRID_MS[0])
    density = np.exp([forecast().log_density(rtt) for rtt in middle[inside]])
    ends = forecast().cdf(GRID_MS[1:][inside][-1]) - forecast().cdf(GRID_MS[:-1][inside][0])
    assert np.allclose(density.sum(axis=0) * step, ends, atol=2e-3)


def test_probabilities_of_all_codes_and_failure_sum_to_1() -> None:
    f = forecast(rows=1)
    codes = decode_rtt(normalised_codes())
    inside = codes[(codes > 0.06) & (codes < 1700)]
    total = sum(2.0 ** -f.bits(rtt)[0] for rtt in inside)
    between = f.cdf(inside[-1])[0] - f.cdf(inside[0])[0]
    assert total == pytest.approx((1 - f.p_failed[0]) * between, abs=2e-3)
    assert 2.0 ** -f.bits(np.nan)[0] == pytest.approx(f.p_failed[0])


@pytest.mark.parametrize("rtt_ms", [0.2, 3.3, 47.11, 48.0, 1234.5])
def test_a_certain_answer_is_exact_to_a_fraction_of_a_bin(rtt_ms: float) -> None:
    f = certain(np.log(rtt_ms))
    assert f.median[0] == pytest.approx(rtt_ms, rel=0.002)
    assert f.mean[0] == pytest.approx(rtt_ms, rel=0.002)
    low, high = f.interval(0.9)
    assert low[0] < rtt_ms < high[0] < low[0] * 1.06


def test_mean_and_quantiles_agree_with_samples() -> None:
    f = RttForecast(p_failed=np.array([0.25]), probability=forecast(rows=1).probability)
    drawn = f.sample(200_000, seed=1)[0]
    assert np.isnan(drawn).mean() == pytest.approx(0.25, abs=0.005)
    answered = drawn[~np.isnan(drawn)]
    assert answered.mean() == pytest.approx(f.mean[0], rel=0.02)
    assert np.quantile(answered, 0.3) == pytest.approx(f.quantile(0.3)[0], rel=0.03)


def test_what_lies_outside_the_bins_is_finite() -> None:
    f = forecast()
    assert np.all(np.isfinite(f.bits(1e-6)))
    assert np.all(np.isfinite(f.bits(1e6)))
    assert np.all(np.isfinite(f.log_density(1e6)))
    assert np.all(f.cdf(0.0) == 0)
    assert np.all(np.isfinite(f.quantile([0.0, 1.0])))


def test_levels_outside_0_and_1_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        forecast().quantile(1.1)


def test_no_questions_have_no_answers() -> None:
    f = RttForecast(p_failed=np.zeros(0), probability=np.zeros((0, 64)))
    assert f.median.shape == (0,)
    assert f.quantile([0.1, 0.9]).shape == (0, 2)


def test_an_average_is_the_mixture() -> None:
    one, other = forecast(seed=1), forecast(seed=2)
    assert np.allclose(averaged([one, other]).cdf(40.0), (one.cdf(40.0) + other.cdf(40.0)) / 2)
