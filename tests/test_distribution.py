"""Every kind of predicted distribution keeps the same laws."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.baselines.forecasts import PointWithResiduals, cumulative
from ping_llm.core.rtt import CODE_MS, RttDistribution, code_bounds, encode_rtt
from ping_llm.models.completer.inference import BinDistribution
from ping_llm.models.completer.network import MAX_MS, Bins
from ping_llm.predict.language_model import CodeDistribution
from ping_llm.sources.simulator import DelayDistribution

ROWS = 4
FIRST_BYTES = np.array([byte < 8 or byte & 4 > 0 for byte in range(256)])


def codes(rng: np.random.Generator, concentration: float) -> CodeDistribution:
    first = np.zeros((ROWS, 256))
    first[:, FIRST_BYTES] = rng.dirichlet(np.full(FIRST_BYTES.sum(), concentration), ROWS)
    second = rng.dirichlet(np.full(256, concentration), 20).astype(np.float32)
    second[-1] = 1 / 256
    return CodeDistribution(
        p_failed=rng.random(ROWS) / 2, first=first, kept=rng.integers(0, 20, (ROWS, 256)), second=second
    )


def bins(rng: np.random.Generator, concentration: float, count: int = 64) -> BinDistribution:
    return BinDistribution(
        p_failed=rng.random(ROWS) / 2, probability=rng.dirichlet(np.full(count, concentration), ROWS)
    )


def residuals(rng: np.random.Generator, concentration: float) -> PointWithResiduals:
    errors = (rng.normal(0.0, concentration, 300), rng.normal(0.1, 1.0, 40), np.zeros(0))
    return PointWithResiduals(
        p_failed=rng.random(ROWS) / 2,
        point_ms=rng.lognormal(3.0, 2.0, ROWS),
        bucket=rng.integers(0, 3, ROWS),
        cumulative=np.stack([cumulative(some) for some in errors]),
    )


def truth(rng: np.random.Generator, concentration: float) -> DelayDistribution:
    share = rng.random(ROWS)
    return DelayDistribution(
        p_failed=rng.random(ROWS) / 2,
        floor_ms=rng.lognormal(3.0, 1.0, ROWS),
        weight=np.stack([share, 1 - share], axis=1),
        log_median=rng.normal([-1.0, 3.0], 1.0, (ROWS, 2)),
        sigma=(0.05 + concentration, 1.0),
    )


KINDS = {make.__name__: make for make in (codes, bins, residuals, truth)}


def made(kind: str, seed: int = 0, concentration: float = 0.3) -> RttDistribution:
    return KINDS[kind](np.random.default_rng(seed), concentration)


DISTRIBUTIONS = st.builds(
    made, st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.sampled_from([0.03, 0.3, 1.0])
)

GRID_MS = np.geomspace(1e-4, 1e7, 3001)
LEVELS = np.array([1e-4, 0.01, 0.05, 0.3, 0.5, 0.7, 0.95, 0.99, 0.9999])
few = settings(max_examples=40, deadline=None)


@few
@given(DISTRIBUTIONS)
def test_cdf_rises_from_0_to_1(d: RttDistribution) -> None:
    values = d.cdf(GRID_MS[None])
    assert values.shape == (ROWS, len(GRID_MS))
    assert np.all(np.diff(values, axis=1) >= -1e-12)
    assert np.all((values >= 0) & (values <= 1 + 1e-12))
    assert np.all(d.cdf(0.0) < 1e-300)
    assert np.all(d.cdf(4.4e9) > 1 - 1e-6)
    np.testing.assert_array_equal(d.cdf(GRID_MS[1500]), values[:, 1500])
    np.testing.assert_array_equal(d.cdf(np.full(ROWS, GRID_MS[1500])), values[:, 1500])


@few
@given(DISTRIBUTIONS)
def test_a_quantile_is_where_the_cdf_reaches_its_level(d: RttDistribution) -> None:
    rtt = d.quantile(LEVELS)
    assert rtt.shape == (ROWS, len(LEVELS))
    assert np.all(np.diff(rtt, axis=1) >= 0)
    assert np.all(d.cdf(rtt * (1 + 1e-9)) >= LEVELS - 1e-9)
    assert np.all(d.cdf(rtt * (1 - 1e-9)) <= LEVELS + 1e-6)
    np.testing.assert_array_equal(d.quantile(0.3), rtt[:, 3])
    for level in (0.0, 1.0, np.nan):
        with pytest.raises(ValueError, match="levels must lie between 0 and 1"):
            d.quantile([0.5, level])
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        d.interval(1.0)


@few
@given(DISTRIBUTIONS)
def test_pmf_sums_to_1_and_is_what_the_cdf_has_between_the_bounds_of_a_code(d: RttDistribution) -> None:
    rtt, probability = d.pmf(2)
    np.testing.assert_array_equal(rtt, CODE_MS)
    assert probability.sum() == pytest.approx(1.0, abs=1e-6)
    assert np.all(probability >= -1e-15)
    some = slice(0, None, 501)
    low, high = code_bounds(rtt[some])
    between = d.cdf(high[None])[2] - d.cdf(low[None])[2]
    np.testing.assert_allclose(probability[some], between, atol=1e-12)


@few
@given(DISTRIBUTIONS)
def test_likelihoods_are_those_of_the_pmf_and_of_failure(d: RttDistribution) -> None:
    rtt, probability = d.pmf(1)
    likeliest = int(np.argmax(probability))
    for value in (rtt[likeliest], rtt[likeliest] * (1 + 1e-5)):
        likelihood = d.log_likelihood(np.full(ROWS, value))[1]
        assert likelihood == pytest.approx(np.log((1 - d.p_failed[1]) * probability[likeliest]), abs=1e-9)
    np.testing.assert_allclose(d.log_likelihood(np.nan), np.log(d.p_failed))
    observed = np.array([np.nan, rtt[likeliest], 0.0, np.nan])
    np.testing.assert_allclose(d.bits(observed), -d.log_likelihood(observed) / np.log(2))


@few
@given(DISTRIBUTIONS)
def test_median_and_intervals_are_nested(d: RttDistribution) -> None:
    (low, high), (least, most) = d.interval(0.5), d.interval()
    assert np.all((least <= low) & (low <= d.median) & (d.median <= high) & (high <= most))
    np.testing.assert_array_equal(most, d.quantile(0.95))


@few
@given(DISTRIBUTIONS)
def test_impossible_and_extreme_results_have_a_finite_likelihood(d: RttDistribution) -> None:
    for rtt in (1e-6, 1e-3, 0.05, 2000.0, 1e5, np.nan):
        assert np.all(np.isfinite(d.bits(rtt)))
    for rtt in (1e-3, 2000.0, 1e5):
        assert np.all(np.isfinite(d.crps(rtt)))


@few
@given(DISTRIBUTIONS)
def test_a_part_answers_as_the_whole(d: RttDistribution) -> None:
    for rows in (np.array([2, 0]), slice(0, 2), np.array([True, False, True, False])):
        part = d.take(rows)
        assert len(part) == 2
        np.testing.assert_allclose(part.quantile(LEVELS), d.quantile(LEVELS)[rows])
        np.testing.assert_allclose(part.p_failed, d.p_failed[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_cdf(kind: str) -> None:
    d = made(kind, seed=5)
    drawn = d.sample(20_000, seed=1)
    assert drawn.shape == (ROWS, 20_000)
    np.testing.assert_allclose(np.isnan(drawn).mean(axis=1), d.p_failed, atol=0.015)
    np.testing.assert_array_equal(drawn, d.sample(20_000, seed=1))
    for row in range(ROWS):
        answered = drawn[row][~np.isnan(drawn[row])]
        at = d.quantile(LEVELS[1:-1])[row]
        found = (answered[:, None] <= at).mean(axis=0)
        np.testing.assert_allclose(found, d.cdf(np.broadcast_to(at, (ROWS, len(at))))[row], atol=0.02)
    one, other = np.log(drawn[:2, ~np.isnan(drawn[:2]).any(axis=0)])
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05  # each question is drawn on its own


@pytest.mark.parametrize("kind", ["codes", "bins", "truth"])
def test_an_exact_mean_is_that_of_the_pmf(kind: str) -> None:
    d = made(kind, seed=2).take([0])
    if kind == "codes":  # where any code, up to 50 days, is as likely as any other
        rtt, probability = d.pmf(0)
        assert d.mean[0] == pytest.approx(rtt @ probability)
    else:
        rtt = np.geomspace(1e-4, 1e12, 400_001)
        assert d.mean[0] == pytest.approx(np.sqrt(rtt[1:] * rtt[:-1]) @ np.diff(d.cdf(rtt[None])[0]), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_crps_is_the_squared_distance_of_the_cdf_from_the_answer(kind: str) -> None:
    d = made(kind, seed=3, concentration=1.0)
    if kind == "codes":  # keep to RTTs of some ms, so that a grid can follow
        d = CodeDistribution(**vars(codes(np.random.default_rng(3), 1.0)) | {"first": np.eye(256)[[60, 68, 70, 78]]})
    observed = np.array([0.5, 20.0, np.nan, 300.0])
    edges = np.geomspace(1e-3, 1e7, 200_001)
    middle = np.sqrt(edges[1:] * edges[:-1])
    distance = (d.cdf(middle[None]) - (middle >= observed[:, None])) ** 2 @ np.diff(edges)
    found = d.crps(observed)
    assert np.isnan(found).tolist() == [False, False, True, False]
    np.testing.assert_allclose(found[[0, 1, 3]], distance[[0, 1, 3]], rtol=0.015)


def test_crps_of_a_certain_answer_is_its_absolute_error() -> None:
    d = certain(np.log(50.0))
    assert d.crps(80.0)[0] == pytest.approx(30.0, rel=0.02)
    assert d.crps(50.0)[0] == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_questions_have_no_answers(kind: str) -> None:
    d = made(kind).take(slice(0, 0))
    assert len(d) == 0
    assert d.median.shape == d.mean.shape == d.bits(np.zeros(0)).shape == d.crps(np.zeros(0)).shape == (0,)
    assert d.quantile([0.1, 0.9]).shape == (0, 2)
    assert d.sample(3).shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_levels_outside_0_and_1_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        made(kind).quantile([0.5, 1.1])


def certain(log_rtt: float, count: int = 512) -> BinDistribution:
    """All probability where the target of this value would be."""
    lower, share = (np.asarray(x) for x in Bins(count).between(jnp.array([log_rtt])))
    probability = np.zeros((1, count))
    probability[0, lower[0]], probability[0, lower[0] + 1] = 1 - share[0], share[0]
    return BinDistribution(p_failed=np.zeros(1), probability=probability)


class TestBins:
    @pytest.mark.parametrize("rtt_ms", [0.2, 3.3, 47.11, 48.0, 1234.5])
    def test_a_certain_answer_is_exact_to_a_fraction_of_a_bin(self, rtt_ms: float) -> None:
        d = certain(np.log(rtt_ms))
        assert d.median[0] == pytest.approx(rtt_ms, rel=0.002)
        assert d.mean[0] == pytest.approx(rtt_ms, rel=0.002, abs=0.1)  # 1e-4 is spread over all bins, up to 10 s
        low, high = d.interval(0.9)
        assert low[0] < rtt_ms < high[0] < low[0] * 1.06

    def test_what_was_not_expected_at_all_has_a_bounded_nll(self) -> None:
        d = certain(np.log(50.0))
        assert np.all([d.bits(rtt) < 30 for rtt in (0.06, 5.0, 60.0, 1900.0)])
        assert np.all([d.bits(rtt) < 50 for rtt in (1e-3, 3000.0, 60_000.0)])

    def test_what_training_puts_into_the_last_bin_lies_beyond_it_too(self) -> None:
        d = certain(np.log(1e9))
        assert d.cdf(MAX_MS)[0] == pytest.approx(0.5, abs=0.02)
        assert 2.5 * MAX_MS < d.quantile(0.9)[0] < 5 * MAX_MS

    def test_probabilities_must_match_the_questions(self) -> None:
        with pytest.raises(ValueError, match="2 questions"):
            BinDistribution(p_failed=np.zeros(2), probability=np.ones((3, 8)) / 8)


class TestCodes:
    def test_the_code_that_no_rtt_has_counts_as_the_least(self) -> None:
        first, second = np.eye(256)[:1], np.zeros((2, 256), np.float32)
        second[:, :2] = 0.75, 0.25
        d = CodeDistribution(p_failed=np.zeros(1), first=first, kept=np.zeros((1, 256), np.int64), second=second)
        assert d.pmf(0)[1][0] == pytest.approx(1.0)
        assert d.bits(0.001)[0] == pytest.approx(0.0)
        assert d.median[0] == 0.001
        assert d.cdf(0.001)[0] == pytest.approx(1.0)

    def test_a_quantile_is_an_rtt_of_a_code(self) -> None:
        found = made("codes").quantile(LEVELS)
        np.testing.assert_array_equal(CODE_MS[np.searchsorted(CODE_MS, found)], found)
        assert np.all(encode_rtt(found) > 0)
