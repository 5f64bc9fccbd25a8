"""Classical predictors: each recovers the data it is made for, none looks into the future, all survive the unknown."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from ping_llm.baselines import shortcuts, standard_baselines
from ping_llm.baselines.coordinates import Dmfsgd, Vivaldi
from ping_llm.baselines.factors import LogFactors, PairMedian, _Grouped
from ping_llm.baselines.forecasts import Asked
from ping_llm.baselines.interface import Baseline, PairTable, Predict
from ping_llm.baselines.neighbours import Neighbours
from ping_llm.baselines.sequential import LastValue, MedianOfLast, MovingAverage
from ping_llm.core.rtt import DEFAULT_RTT_MS, Floats, History, Ints, Observations, Questions

NODES = 150
STANDARD = [pytest.param(baseline, id=baseline.name) for baseline in standard_baselines()]
SEQUENTIAL = [pytest.param(baseline, id=baseline.name) for baseline in standard_baselines() if baseline.causal]


def observed(*rows: tuple[int, int, float, float]) -> Observations:
    """Measurements from (source, destination, time, rtt)."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Observations(
        source=table[:, 0].astype(np.int64),
        destination=table[:, 1].astype(np.int64),
        time_s=table[:, 2],
        rtt_ms=table[:, 3],
    )


def asked(source: npt.ArrayLike, destination: npt.ArrayLike, time_s: npt.ArrayLike = np.nan) -> Questions:
    ends = np.broadcast_arrays(np.atleast_1d(source), np.atleast_1d(destination), np.atleast_1d(time_s))
    return Questions(source=ends[0].astype(np.int64), destination=ends[1].astype(np.int64), time_s=ends[2] * 1.0)


def random_observations(count: int, *, nodes: int = 40, seed: int = 0) -> Observations:
    rng = np.random.default_rng(seed)
    rtt = rng.lognormal(3.5, 1.0, count)
    rtt[rng.random(count) < 0.05] = np.nan
    source, destination = rng.integers(0, nodes, (2, count))
    return Observations(
        source=source,
        destination=destination,
        time_s=rng.integers(0, 1000, count).astype(np.float64),
        rtt_ms=rtt.astype(np.float32),
    )


def median_error(baseline: Baseline, rtt: Callable[[Ints, Ints], Floats], *, known: float) -> float:
    """Median relative error on the unknown (unordered) pairs of `NODES` nodes."""
    source, destination = np.triu_indices(NODES, 1)
    source, destination = source.astype(np.int64), destination.astype(np.int64)
    train = np.random.default_rng(5).random(len(source)) < known
    value = rtt(source, destination)
    learned = Observations(source=source, destination=destination, time_s=np.zeros(len(source)), rtt_ms=value)
    predicted = baseline.fit(learned.take(train))(learned.take(~train).questions)
    return float(np.median(np.abs(predicted / value[~train] - 1.0)))


def low_rank_in_log(source: Ints, destination: Ints) -> Floats:
    factors = np.random.default_rng(1).normal(0.0, 0.6, (NODES, 3))
    bias = np.random.default_rng(2).normal(0.0, 0.5, NODES)
    return np.exp(4.0 + bias[source] + bias[destination] + (factors[source] * factors[destination]).sum(1))


def low_rank(source: Ints, destination: Ints) -> Floats:
    factors = np.random.default_rng(1).uniform(1.0, 6.0, (NODES, 4))
    return np.asarray((factors[source] * factors[destination]).sum(1))


def euclidean_with_heights(source: Ints, destination: Ints) -> Floats:
    place = np.random.default_rng(1).normal(0.0, 50.0, (NODES, 3))
    height = np.random.default_rng(2).exponential(10.0, NODES)
    return np.asarray(np.linalg.norm(place[source] - place[destination], axis=1) + height[source] + height[destination])


class TestRecovery:
    def test_log_factors_recover_a_low_rank_matrix_of_log_rtts(self) -> None:
        baseline = LogFactors(rank=4, ridge=0.02, bias_ridge=0.02, symmetric=True, sweeps=60)
        assert median_error(baseline, low_rank_in_log, known=0.5) < 0.01

    def test_log_factors_of_rank_zero_recover_source_times_destination(self) -> None:
        def separable(source: Ints, destination: Ints) -> Floats:
            return np.asarray(10.0 * (1 + source % 7) * (1 + destination % 5))

        assert median_error(LogFactors(rank=0, bias_ridge=0.01), separable, known=0.3) < 0.005

    def test_dmfsgd_recovers_a_low_rank_matrix_of_rtts(self) -> None:
        assert median_error(Dmfsgd(rank=6, pull=0.02, symmetric=True), low_rank, known=0.5) < 0.01

    def test_vivaldi_recovers_places_and_heights(self) -> None:
        assert median_error(Vivaldi(dimensions=3, gravity=0.0), euclidean_with_heights, known=0.3) < 0.01

    def test_factors_on_top_of_vivaldi_learn_what_it_cannot(self) -> None:
        def detours(source: Ints, destination: Ints) -> Floats:
            return euclidean_with_heights(source, destination) * np.where((source + destination) % 2 == 0, 1.0, 1.5)

        vivaldi = median_error(Vivaldi(), detours, known=0.5)
        assert median_error(LogFactors(base=Vivaldi(), symmetric=True), detours, known=0.5) < 0.5 * vivaldi

    def test_outliers_do_not_bend_the_factors(self) -> None:
        def spoilt(source: Ints, destination: Ints) -> Floats:
            bad = np.random.default_rng(3).random(len(source)) < 0.03
            return low_rank_in_log(source, destination) * np.where(bad, 30.0, 1.0)

        baseline = LogFactors(rank=4, ridge=0.02, bias_ridge=0.02, symmetric=True, sweeps=60)
        assert median_error(baseline, spoilt, known=0.5) < 0.02


class TestNeighbours:
    @staticmethod
    def sites(source: Ints, destination: Ints) -> Floats:
        """Five nodes at each site; what lies between two sites follows no rule."""
        low, high = np.minimum(source // 5, destination // 5), np.maximum(source // 5, destination // 5)
        return np.asarray(10.0 + np.random.default_rng(4).permutation(100_000)[low * 1000 + high] / 500)

    def test_nodes_of_a_site_answer_for_each_other(self) -> None:
        base = LogFactors(rank=0, symmetric=True)
        assert median_error(base, self.sites, known=0.5) > 0.2
        assert median_error(Neighbours(base=base, symmetric=True), self.sites, known=0.5) < 0.02

    def test_both_directions_are_answered_alike(self) -> None:
        train = random_observations(1000)
        fitted = Neighbours(base=LogFactors(rank=0, symmetric=True), symmetric=True).fit(train)
        assert fitted(train) == pytest.approx(fitted(train.reversed()))

    def test_a_pair_that_was_measured_keeps_its_median(self) -> None:
        train = observed((0, 9, 0, 10), (0, 9, 1, 30), (0, 9, 2, 20), (1, 9, 0, 40), (0, 8, 0, 40), (1, 8, 0, 45))
        fitted = Neighbours(base=LogFactors(rank=0)).fit(train)
        assert fitted(asked([0, 1, 1], [9, 8, 9])) == pytest.approx([20.0, 45.0, 40.0])

    def test_without_neighbours_and_with_too_many_nodes_the_base_answers(self) -> None:
        base, train = LogFactors(rank=0), random_observations(1000)
        questions = asked([0, 1000, 3], [1, 3, 1000], 2000)
        answers, expected = Neighbours(base=base).fit(train)(questions), base.fit(train)(questions)
        assert answers[1:] == pytest.approx(expected[1:])
        assert answers[0] != expected[0]
        few = Neighbours(base=base, most_nodes=5).fit(train)
        assert few(questions) == pytest.approx(expected)

    def test_a_base_that_several_build_on_is_fitted_once(self) -> None:
        class Counted:
            name, causal, fits = "counted", False, 0

            def fit(self, train: Observations) -> Predict:
                self.fits += 1
                return LogFactors(rank=0).fit(train)

        counted = Counted()
        train, other = random_observations(100), random_observations(90)
        for known in (train, other, train):
            LogFactors(rank=1, base=counted).fit(known)
        assert counted.fits == 2


class TestPairs:
    def test_pair_median_is_the_median_and_unseen_pairs_get_the_effects_of_their_ends(self) -> None:
        train = observed((0, 9, 0, 10), (0, 9, 1, 30), (0, 9, 2, 20), (1, 9, 0, 40), (0, 8, 0, 40), (2, 8, 0, 160))
        fitted = PairMedian(fallback=LogFactors(rank=0, bias_ridge=1e-6, sweeps=200)).fit(train)
        assert fitted(asked([0, 1], [9, 8])) == pytest.approx([20.0, 80.0], rel=1e-3)

    def test_table_agrees_with_the_slow_way(self) -> None:
        train = random_observations(3000)
        table = PairTable.of(train)
        known = train.answered
        for pair, median in zip(table.pair, table.rtt_ms, strict=True):
            assert median == pytest.approx(np.median(known.rtt_ms[known.pair == pair]), rel=1e-6)
        assert len(table) == len(np.unique(known.pair))

    def test_columns_of_different_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match="equal length"):
            Questions(source=np.zeros(2, np.int64), destination=np.zeros(3, np.int64), time_s=np.zeros(2))


class TestSequences:
    TRAIN = observed((0, 1, 10, 5.0), (0, 1, 20, 50.0), (0, 1, 30, np.nan), (0, 1, 40, 7.0), (0, 2, 5, 90.0))

    def test_last_value_is_the_latest_answer_strictly_before(self) -> None:
        questions = asked(0, 1, [10.5, 20.0, 20.1, 35.0, 40.0, 41.0, np.nan])
        assert LastValue().fit(self.TRAIN)(questions).tolist() == [5, 5, 50, 50, 50, 7, 7]

    def test_median_of_the_last_few_uses_what_there_is(self) -> None:
        predicted = MedianOfLast().fit(self.TRAIN)(asked(0, 1, [15, 25, 45]))
        assert predicted == pytest.approx([5.0, 27.5, 7.0])
        assert MedianOfLast(window=2).fit(self.TRAIN)(asked(0, 1, 45)) == pytest.approx([28.5])

    def test_moving_average_weighs_by_recency_in_log_space(self) -> None:
        predicted = MovingAverage(rate=0.5).fit(self.TRAIN)(asked(0, 1, [15, 25]))
        assert predicted == pytest.approx([5.0, np.exp((np.log(50) + 0.5 * np.log(5)) / 1.5)])

    @pytest.mark.parametrize("baseline", SEQUENTIAL)
    def test_nothing_measured_at_or_after_a_question_influences_it(self, baseline: Baseline) -> None:
        everything = random_observations(4000)
        fitted = baseline.fit(everything)
        for now in (1.0, 250.0, 900.0):
            source, destination = np.divmod(np.arange(45 * 45), 45)  # with some unknown nodes
            questions = asked(source, destination, now)
            before = baseline.fit(everything.take(everything.time_s < now))
            # a running sum over other keys may differ in its last bits
            assert fitted(questions) == pytest.approx(before(questions), rel=1e-9)

    @pytest.mark.parametrize("baseline", SEQUENTIAL)
    def test_a_pair_measured_only_later_is_answered_by_its_nodes(self, baseline: Baseline) -> None:
        train = observed((0, 1, 10, 20.0), (2, 3, 10, 20.0), (0, 3, 50, 1e5))
        assert baseline.fit(train)(asked(0, 3, 40)) == pytest.approx([20.0], rel=0.01)

    def test_the_order_of_training_rows_does_not_matter(self) -> None:
        train = random_observations(2000, nodes=5)
        _, first = np.unique(np.stack([train.pair, train.time_s], axis=1), axis=0, return_index=True)
        train = train.take(first)
        shuffled = train.take(np.random.default_rng(0).permutation(len(train)))
        assert LastValue().fit(train)(train) == pytest.approx(LastValue().fit(shuffled)(train))

    def test_history_agrees_with_the_slow_way(self) -> None:
        rng = np.random.default_rng(0)
        key, when, value = rng.integers(0, 9, 500), rng.integers(0, 50, 500).astype(np.float64), rng.random(500)
        history = History(key, when, value)
        wanted, now = rng.integers(-1, 11, 300), rng.integers(-1, 52, 300).astype(np.float64)
        mean = history.mean_before(wanted, now, prior=0.5, strength=1.0)
        age = history.age(wanted, now)
        for row in range(300):
            mine = (key == wanted[row]) & (when < now[row])
            assert mean[row] == pytest.approx((value[mine].sum() + 0.5) / (mine.sum() + 1))
            assert age[row] == (now[row] - when[mine].max() if mine.any() else np.inf)


class TestEveryBaseline:
    @pytest.mark.parametrize("baseline", STANDARD)
    @pytest.mark.parametrize("train", [observed(), observed((0, 1, 5, np.nan))], ids=["empty", "only failed"])
    def test_without_training_data_the_answer_is_the_default(self, baseline: Baseline, train: Observations) -> None:
        predicted = baseline.fit(train)(asked([0, 7, -1], [1, 8, -1], 9))
        assert predicted == pytest.approx([DEFAULT_RTT_MS] * 3)

    @pytest.mark.parametrize("baseline", STANDARD)
    def test_unknown_nodes_get_a_sensible_fallback(self, baseline: Baseline) -> None:
        train = random_observations(3000)
        predicted = baseline.fit(train)(asked([0, 1000, 0, -1, 5], [1, 0, 1000, 3, 5], 2000))
        median = np.nanmedian(train.rtt_ms)
        assert predicted.dtype == np.float64
        assert (predicted[1:4] > median / 10).all()
        assert (predicted[1:4] < median * 10).all()

    @pytest.mark.parametrize("baseline", STANDARD)
    def test_predictions_are_positive_finite_and_the_same_again(self, baseline: Baseline) -> None:
        train = random_observations(2000)
        train.rtt_ms[:20] = 0.0
        train.rtt_ms[20:30] = 599_999.0
        predicted = baseline.fit(train)(train)
        assert np.isfinite(predicted).all()
        assert (predicted > 0).all()
        assert (baseline.fit(train)(train) == predicted).all()

    @pytest.mark.parametrize("baseline", STANDARD)
    def test_one_measurement_is_enough(self, baseline: Baseline) -> None:
        predicted = baseline.fit(observed((3, 4, 0, 30.0)))(asked([3, 4], [4, 3], 1))
        assert predicted == pytest.approx([30.0, 30.0], rel=0.5)

    @pytest.mark.parametrize("baseline", [LogFactors(symmetric=True), Dmfsgd(symmetric=True), Vivaldi()])
    def test_symmetric_baselines_answer_both_directions_alike(self, baseline: Baseline) -> None:
        train = random_observations(1000)
        fitted = baseline.fit(train)
        assert fitted(train) == pytest.approx(fitted(train.reversed()))


class TestFailures:
    def test_a_rate_rests_on_the_pair_then_its_ends_then_everything(self) -> None:
        rng = np.random.default_rng(0)
        source, destination = rng.integers(0, 10, (2, 20_000))
        source[destination == 3] = 0
        chance = np.where(destination == 3, 0.5, 0.01)
        rtt = np.where(rng.random(len(source)) < chance, np.nan, 10.0)
        train = Observations(source=source, destination=destination, time_s=np.zeros(len(source)), rtt_ms=rtt)
        overall = np.isnan(rtt).mean()
        assert Asked(train, asked(0, 3)).p_failed == pytest.approx([0.5], abs=0.05)
        assert Asked(train, asked(5, 3)).p_failed[0] > 2 * overall  # never measured, but the destination fails often
        assert Asked(train, asked(77, 78)).p_failed == pytest.approx([overall], rel=0.01)

    def test_without_data_it_is_a_small_default(self) -> None:
        assert Asked(observed(), asked(0, 1)).p_failed == pytest.approx([0.035])

    def test_causal_rates_do_not_count_what_came_later(self) -> None:
        train = observed(*[(0, 1, time, 5.0 if time < 50 else np.nan) for time in range(100)])
        early, late = Asked(train, asked(0, 1, [50, np.nan])).p_failed
        assert early < 0.01
        assert late == pytest.approx(0.5, abs=0.02)


def test_nodes_without_pairs_change_no_solution() -> None:
    rng = np.random.default_rng(0)
    number, pairs = 200, 5000
    node, other = (rng.random((2, pairs)) ** 3 * number).astype(np.int64)  # nodes with a few pairs and with many
    value, weight, others = rng.normal(size=pairs), rng.uniform(0.2, 1.0, pairs), rng.normal(size=(number, 7))
    ridge = np.full(7, 0.25)
    dense = _Grouped(node, other, value, number).solve(others, weight, ridge)
    ids = np.sort(rng.choice(20_000, number, replace=False))
    scattered = rng.normal(size=(20_000, 7))
    scattered[ids] = others
    solved = _Grouped(ids[node], ids[other], value, 20_000).solve(scattered, weight, ridge)
    np.testing.assert_array_equal(solved[ids], dense)
    assert not np.delete(solved, ids, axis=0).any()

    for one in range(number):  # the plain ridge regression
        of_one = node == one
        features = np.column_stack([np.ones(of_one.sum()), others[other[of_one], 1:]])
        weighted = features.T * weight[of_one]
        target = value[of_one] - others[other[of_one], 0]
        plain = np.linalg.solve(weighted @ features + np.diag(ridge), weighted @ target)
        np.testing.assert_allclose(dense[one], plain, rtol=1e-8, atol=1e-10)


def test_what_is_too_large_for_a_baseline_is_said() -> None:
    source, destination = (end.ravel() for end in np.meshgrid(np.arange(3000), np.arange(3000, 3340)))
    pairs = Observations(
        source=source, destination=destination, time_s=np.zeros(len(source)), rtt_ms=np.ones(len(source))
    )
    every = standard_baselines()
    descents, factors, neighbours = shortcuts(pairs, every)
    assert "vivaldi, dmfsgd: each of 1,020,000 pairs is visited 58 times, not 60" in descents
    assert factors == "log factors, vivaldi + log factors: 8 sweeps, not 30"
    assert "more than 2,500 nodes" in neighbours
    assert shortcuts(pairs, every[:3]) == []
    assert shortcuts(pairs.take(slice(0, 2500)), every) == shortcuts(pairs.take(slice(0, 0)), every) == []
