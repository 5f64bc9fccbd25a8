"""A baseline with residuals gives distributions that are proper, calibrated, and learned from training data only."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ping_llm.baselines import standard_baselines
from ping_llm.baselines.factors import PairMedian
from ping_llm.baselines.forecasts import (
    BUCKETS,
    EDGES,
    Asked,
    PointWithResiduals,
    cumulative,
    cumulative_by_bucket,
    forecaster,
)
from ping_llm.baselines.interface import Baseline, GlobalMedian
from ping_llm.baselines.sequential import LastValue
from ping_llm.core.rtt import Observations, Questions


def separable(count: int, *, seed: int, noise: float = 0.2, nodes: int = 60, since: float = 0.0) -> Observations:
    """RTT = source × destination × log-normal noise."""
    rng = np.random.default_rng(seed)
    effect = np.random.default_rng(99).normal(0.0, 0.7, 2 * nodes)
    source, destination = rng.integers(0, nodes, count), nodes + rng.integers(0, nodes, count)
    log_rtt = 3.5 + effect[source] + effect[destination] + rng.normal(0.0, noise, count)
    time_s = since + np.sort(rng.random(count)) * 1e6
    return Observations(source=source, destination=destination, time_s=time_s, rtt_ms=np.exp(log_rtt))


def coverage(forecast: PointWithResiduals, rtt_ms: npt.NDArray[Any], level: float) -> float:
    low, high = forecast.quantile((1 - level) / 2), forecast.quantile((1 + level) / 2)
    return float(((low <= rtt_ms) & (rtt_ms <= high)).mean())


@pytest.mark.parametrize("baseline", [pytest.param(each, id=each.name) for each in standard_baselines()])
def test_intervals_hold_what_they_promise_on_later_measurements(baseline: Baseline) -> None:
    train, test = separable(20_000, seed=0), separable(5_000, seed=1, since=1e6)
    forecast = forecaster(baseline, train)(test.questions)
    assert coverage(forecast, test.rtt_ms, 0.9) == pytest.approx(0.9, abs=0.04)
    assert coverage(forecast, test.rtt_ms, 0.5) == pytest.approx(0.5, abs=0.06)


def test_unfamiliar_questions_get_wider_intervals() -> None:
    train = separable(20_000, seed=0, noise=0.05)
    rng = np.random.default_rng(0)
    train = train.take(rng.random(60 * 120)[train.source * 120 + train.destination] < 0.5)
    ask = Questions(
        source=np.array([train.source[0], 9999]),
        destination=np.array([train.destination[0], train.destination[0]]),
        time_s=np.array([np.nan, np.nan]),
    )
    forecast = forecaster(PairMedian(), train)(ask)
    width = forecast.quantile(0.9) / forecast.quantile(0.1)
    assert width[1] > 1.5 * width[0]


def test_cdf_and_quantile_are_inverse_and_proper() -> None:
    forecast = forecaster(PairMedian(), separable(5_000, seed=0))(separable(100, seed=1).questions)
    levels = [0.001, 0.1, 0.5, 0.9, 0.999]
    for level in levels:
        assert forecast.cdf(forecast.quantile(level)) == pytest.approx(level, abs=1e-6)
    assert (np.diff([forecast.quantile(level) for level in levels], axis=0) > 0).all()
    assert (forecast.cdf(0.0) == 0).all()
    assert (forecast.cdf(1e12) == 1).all()
    assert (forecast.p_failed > 0).all()


def test_every_rtt_between_a_microsecond_and_ten_minutes_has_some_probability() -> None:
    forecast = forecaster(LastValue(), separable(5_000, seed=0))(separable(50, seed=1).questions)
    edges = np.geomspace(0.01, 600_000, 200)
    mass = np.diff([forecast.cdf(edge) for edge in edges], axis=0)
    assert (mass > 0).all()


def test_errors_are_learned_from_training_data_that_was_held_out() -> None:
    # Each pair is measured once with much noise: in the sample the pair median has no error, on new pairs it has.
    train = separable(3_000, seed=0, noise=0.5, nodes=300)
    forecast = forecaster(PairMedian(), train)(separable(2_000, seed=5, noise=0.5, nodes=300))
    spread = np.log(forecast.quantile(0.84) / forecast.quantile(0.16)) / 2
    assert np.median(spread) > 0.4


def test_a_causal_forecast_does_not_depend_on_the_future_of_its_pair() -> None:
    train = separable(4_000, seed=0, nodes=10)
    fitted = forecaster(LastValue(), train)
    cut = 5e5
    past = forecaster(LastValue(), train.take(train.time_s < cut))
    ask = Questions(source=np.arange(10), destination=10 + np.arange(10), time_s=np.full(10, cut))
    now, then = fitted(ask), past(ask)
    assert now.point_ms == pytest.approx(then.point_ms)
    assert now.p_failed == pytest.approx(then.p_failed)
    assert (now.bucket == then.bucket).all()


def test_buckets_go_from_unknown_node_to_fresh_pair() -> None:
    train = Observations(
        source=np.array([0, 2]), destination=np.array([1, 3]), time_s=np.array([0.0, 0.0]), rtt_ms=np.array([9.0, 9.0])
    )
    ages = np.array([1.0, 1.0, 1e6, 4e3, 7e2, 1.0])
    ask = Questions(source=np.array([7, 0, 0, 0, 0, 0]), destination=np.array([1, 3, 1, 1, 1, 1]), time_s=ages)
    assert Asked(train, ask).bucket.tolist() == list(range(BUCKETS))
    whenever = Questions(source=ask.source, destination=ask.destination, time_s=np.full(6, np.nan))
    assert Asked(train, whenever).bucket.tolist() == [0, 1, 2, 2, 2, 2]
    before = Questions(source=ask.source, destination=ask.destination, time_s=np.zeros(6))
    assert Asked(train, before).bucket.tolist() == [0] * 6


def test_a_bucket_with_few_errors_borrows_from_the_nearest() -> None:
    rng = np.random.default_rng(0)
    errors = np.concatenate([rng.normal(0, 0.01, 500), rng.normal(0, 1.0, 500), [5.0]])
    bucket = np.concatenate([np.full(500, 4), np.full(500, 1), [5]])
    table = cumulative_by_bucket(errors, bucket, 6)
    assert (table[5] == table[4]).all()
    assert (table[0] == table[1]).all()
    assert (table[2] == table[1]).all()
    assert not (table[1] == table[4]).all()


def test_without_errors_the_distribution_is_wide_and_centred() -> None:
    row = cumulative(np.zeros(0))
    assert np.interp(0.0, EDGES, row) == pytest.approx(0.5)
    assert np.interp(0.75, row, EDGES) > 0.3


def test_an_empty_training_set_still_gives_a_distribution() -> None:
    empty = separable(1, seed=0).take(slice(0, 0))
    for baseline in (GlobalMedian(), LastValue(), PairMedian()):
        forecast = forecaster(baseline, empty)(separable(3, seed=0).questions)
        assert np.isfinite(forecast.quantile(0.9)).all()
