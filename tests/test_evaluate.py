"""Four protocols: everyone is asked the same, knows only what they may, and is scored alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from ping_llm.baselines import standard_baselines
from ping_llm.baselines.factors import PairMedian
from ping_llm.baselines.forecasts import PointWithResiduals, cumulative
from ping_llm.baselines.interface import Baseline, GlobalMedian, Predict
from ping_llm.baselines.sequential import LastValue, MedianOfLast
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations, Questions, RttDistribution
from ping_llm.evaluate.protocols import baseline_forecasts, evaluate, is_mesh
from ping_llm.evaluate.sampling import sufficient
from ping_llm.evaluate.scores import Evaluation, ScoredAnswers, Scores
from ping_llm.evaluate.split import Split, SplitSettings, sampled, split
from ping_llm.predict.support import NO_CHAIN, Support
from ping_llm.rows.measurement_set import MeasurementSet, read_observations
from ping_llm.sources.simulator import SimulatorSettings, World, simulate
from split_fixtures import leaks, random_world

BASELINES: tuple[Baseline, ...] = (GlobalMedian(), PairMedian(), LastValue(), MedianOfLast())


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    simulate(SimulatorSettings(measurements=40_000), folder)
    return folder


@pytest.fixture(scope="module")
def world(raw: Path) -> World:
    return World.load(raw)


@pytest.fixture(scope="module")
def parts(raw: Path) -> Split:
    made = split(read_observations([raw / "*.parquet"]), SplitSettings(unseen_probes=0.2))
    assert not leaks(made)
    return made


@dataclass
class Always:
    """A model that is certain of one RTT, and remembers what it was given."""

    rtt_ms: float = 50.0
    known: list[Observations] = field(default_factory=list)
    nodes: Sequence[str] = ()

    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> RttDistribution:
        self.known.append(known)
        self.nodes = nodes
        return certain(np.full(len(questions), self.rtt_ms))


def certain(rtt_ms: np.ndarray, p_failed: float = 0.1) -> PointWithResiduals:
    return PointWithResiduals(
        p_failed=np.full(len(rtt_ms), p_failed),
        point_ms=rtt_ms,
        bucket=np.zeros(len(rtt_ms), np.int64),
        cumulative=cumulative(np.zeros(5000))[None],
    )


@pytest.fixture(scope="module")
def found(parts: Split, world: World) -> Evaluation:
    return evaluate(parts, {"mine": Always(), "other": Always(80.0)}, baselines=BASELINES, questions=200, oracle=world)


def scores(predicted: PointWithResiduals, observed: Observations) -> Scores:
    return ScoredAnswers.of(predicted, observed).scores


class TestScores:
    def test_are_what_their_names_say(self) -> None:
        observed = observations([20.0, 30.0, 40.0, np.nan])
        got = scores(certain(np.array([10.0, 30.0, 50.0, 7.0])), observed)
        assert got["mae"] == pytest.approx(20 / 3, rel=1e-3)
        assert got["median_ae"] == pytest.approx(10.0, rel=1e-3)
        assert got["median_re"] == pytest.approx(0.25, rel=1e-3)
        assert got["p90_re"] == pytest.approx(0.45, rel=1e-3)
        assert got["crps"] == pytest.approx(20 / 3, rel=0.02)
        assert got["coverage90"] == pytest.approx(1 / 3)
        assert got["brier"] == pytest.approx((3 * 0.1**2 + 0.9**2) / 4)

    def test_surprise_counts_failures(self) -> None:
        d = certain(np.array([10.0, 10.0]), p_failed=0.25)
        assert scores(d, observations([np.nan, np.nan]))["nll_bits"] == pytest.approx(2.0)
        one = scores(d.take([0]), observations([10.0]))["nll_bits"]
        assert scores(d, observations([10.0, np.nan]))["nll_bits"] == pytest.approx((one + 2.0) / 2)

    def test_do_not_depend_on_the_order(self) -> None:
        rng = np.random.default_rng(0)
        rtt, point = rng.lognormal(3, 1, 50), rng.lognormal(3, 1, 50)
        rtt[:5] = np.nan
        order = rng.permutation(50)
        there, back = scores(certain(point), observations(rtt)), scores(certain(point[order]), observations(rtt[order]))
        assert there == pytest.approx(back)

    def test_without_an_answer_there_is_no_error(self) -> None:
        got = scores(certain(np.array([10.0])), observations([np.nan]))
        assert np.isnan([got["mae"], got["crps"], got["coverage90"]]).all()
        assert np.isfinite([got["nll_bits"], got["brier"]]).all()


def observations(rtt_ms: Sequence[float] | np.ndarray) -> Observations:
    ids = np.arange(len(rtt_ms))
    return Observations(
        source=ids, destination=ids + 100, time_s=np.zeros(len(ids)), rtt_ms=np.asarray(rtt_ms, np.float64)
    )


class TestEvaluation:
    def test_everyone_answers_every_protocol(self, found: Evaluation) -> None:
        names = [*(baseline.name for baseline in BASELINES), "mine", "other", "oracle"]
        assert list(found.protocols) == ["unseen_pair", "seen_pair", "unseen_probe", "disconnected"]
        for result in found.protocols.values():
            assert list(result.answers) == names
            assert {len(a.median_ms) for a in result.answers.values()} == {len(result.questions)}
            assert 40 < len(result.questions) <= 200

    def test_nobody_beats_the_truth(self, found: Evaluation) -> None:
        for result in found.protocols.values():
            truth = result.answers["oracle"].scores
            for name, answers in result.answers.items():
                assert truth["nll_bits"] <= answers.scores["nll_bits"], name
                assert truth["crps"] <= answers.scores["crps"], name
            assert truth["coverage90"] == pytest.approx(0.9, abs=0.08)

    def test_protocols_are_hard_in_their_own_ways(self, found: Evaluation) -> None:
        """What a pair measured last says much about a seen pair and nothing about an unseen one."""
        seen, unseen = (found.protocols[name].answers for name in ("seen_pair", "unseen_pair"))
        assert seen["last value"].scores["median_re"] < 0.1 < unseen["last value"].scores["median_re"]

    def test_json_has_the_first_model_under_its_role_and_the_others_under_their_names(self, found: Evaluation) -> None:
        got = found.to_json()
        assert set(got) == {"protocols", "intervals", "leads"}
        for protocol, by_name in got["protocols"].items():
            for name, (low, high) in ((name, ends["mae"]) for name, ends in got["intervals"][protocol].items()):
                assert low < by_name[name]["mae"] < high
            assert set(got["leads"][protocol].values()) < set(by_name)
        for by_name in got["protocols"].values():
            assert set(by_name) == {
                *("global_median", "pair_median", "last_value", "median_of_last_8", "model", "other", "oracle")
            }
            assert set(by_name["model"]) == {
                *("mae", "median_ae", "median_re", "p90_re", "nll_bits", "crps", "coverage90", "brier", "questions"),
            }

    def test_what_could_not_be_scored_is_null(self, parts: Split) -> None:
        failed = parts.questions["seen_pair"].take(np.isnan(parts.questions["seen_pair"].rtt_ms))
        got = evaluate(replace(parts, questions={"seen_pair": failed}), {"mine": Always()}, baselines=()).to_json()
        assert got["protocols"]["seen_pair"]["model"]["mae"] is None

    def test_the_same_again(self, parts: Split, world: World, found: Evaluation) -> None:
        models = {"mine": Always(), "other": Always(80.0)}
        again = evaluate(parts, models, baselines=BASELINES, questions=200, oracle=world)
        assert again.to_json() == found.to_json()

    def test_models_get_the_history_and_the_addresses_but_no_answers(self, parts: Split) -> None:
        model = Always()
        evaluate(parts, {"mine": model}, baselines=(), questions=10)
        assert model.nodes == parts.nodes
        *others, apart = model.known
        assert all(known is parts.history for known in others)
        linked = Support.of(apart, parts.questions["disconnected"].questions)
        assert (linked.chain == NO_CHAIN).all()
        assert (linked.source > 0).any()
        assert 0.4 < len(apart) / len(parts.history) < 0.6

    def test_progress_ends_at_its_total(self, parts: Split) -> None:
        steps: list[float] = []
        totals: list[float | None] = []

        def advance(amount: float = 1, *, total: float | None = None) -> None:
            steps.append(amount)
            totals.append(total)

        evaluate(parts, {"mine": Always()}, baselines=BASELINES[:1], questions=5, advance=advance)
        assert sum(steps) == totals[0] == 8

    def test_the_error_of_a_model_is_raised_whatever_baselines_do(self, parts: Split) -> None:
        class Broken:
            def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> RttDistribution:
                raise PingLlmError("no such thing")

        with pytest.raises(PingLlmError, match="no such thing"):
            evaluate(parts, {"mine": Broken()}, baselines=BASELINES, questions=5)

    def test_whoever_finishes_first_the_order_of_predictors_is_the_same(self, found: Evaluation) -> None:
        expected = [baseline.name for baseline in BASELINES] + ["mine", "other", "oracle"]
        assert all(list(result.answers) == expected for result in found.protocols.values())

    def test_two_predictors_cannot_share_a_name(self, parts: Split) -> None:
        for name in ("last value", "oracle"):
            with pytest.raises(ValueError, match="name of its own"):
                evaluate(parts, {name: Always()}, baselines=BASELINES)

    def test_counts_what_was_known_of_the_source(self, parts: Split, found: Evaluation) -> None:
        for protocol, result in found.protocols.items():
            history = parts.visible(parts.history, protocol)
            for row in range(0, len(result.questions), 37):
                source, time_s = result.questions.source[row], result.questions.time_s[row]
                expected = np.count_nonzero((history.source == source) & (history.time_s < time_s))
                assert result.known_before[row] == expected

    def test_places_are_uniform_for_the_truth(self, found: Evaluation) -> None:
        place = np.concatenate([result.answers["oracle"].pit for result in found.protocols.values()])
        place = np.sort(place[~np.isnan(place)])
        assert np.abs(place - np.arange(len(place)) / len(place)).max() < 0.07

    @pytest.mark.slow
    def test_all_standard_baselines_answer(self, parts: Split) -> None:
        got = evaluate(parts, {}, questions=50).to_json()["protocols"]
        for by_name in got.values():
            assert len(by_name) >= len(standard_baselines())
            assert all(np.isfinite(list(found.values())).all() for found in by_name.values())


@dataclass(eq=False)
class Spy:
    """A baseline that remembers what it was fitted to."""

    causal: bool
    fitted: list[Observations] = field(default_factory=list)
    name: str = "spy"

    def fit(self, train: Observations) -> Predict:
        self.fitted.append(train)
        return GlobalMedian().fit(train)


class TestWhatBaselinesKnow:
    def test_static_ones_know_nothing_of_the_time_of_questions_nor_of_other_unseen_things(self, parts: Split) -> None:
        spy = Spy(causal=False)
        evaluate(parts, {}, baselines=[spy], questions=10)
        rehearsal, heard, apart = spy.fitted
        assert len(apart) == len(parts.visible(heard, "disconnected")) < len(heard)
        assert len(rehearsal) < len(parts.train) < len(heard)
        assert heard.time_s.max() < parts.cut_time_s
        more = heard.take(~np.isin(heard.source, parts.train.source))
        assert len(parts.train) + len(more) == len(heard)
        assert np.isin(parts.questions["unseen_probe"].source, more.source).all()

    def test_causal_ones_look_at_the_history(self, parts: Split) -> None:
        spy = Spy(causal=True)
        evaluate(parts, {}, baselines=[spy], questions=10)
        rehearsal, ahead, history, *_, apart = spy.fitted  # unseen pairs, seen pairs, unseen probes, disconnected
        assert len(apart) == len(parts.visible(parts.history, "disconnected")) < len(history)
        assert len(rehearsal) < len(ahead) == len(parts.train) < len(history) == len(parts.history)

    @pytest.mark.parametrize("baseline", BASELINES, ids=lambda baseline: baseline.name)
    @pytest.mark.parametrize("protocol", ["unseen_pair", "seen_pair", "unseen_probe", "disconnected"])
    def test_answers_do_not_depend_on_anything_later(self, parts: Split, protocol: str, baseline: Baseline) -> None:
        asked = parts.questions[protocol].take(slice(40, 41))
        history = parts.history
        later = history.time_s >= asked.time_s[0]
        assert later.any()
        altered = replace(history, rtt_ms=np.where(later, 1.0, history.rtt_ms))
        expected, got = (
            next(baseline_forecasts(replace(parts, history=known), {protocol: asked}, [baseline], 0))[2]
            for known in (history, altered)
        )
        assert got.median == pytest.approx(expected.median)
        assert got.p_failed == pytest.approx(expected.p_failed)
        assert got.quantile(0.9) == pytest.approx(expected.quantile(0.9))

    def test_measurements_without_times_all_count_as_known(self) -> None:
        rng = np.random.default_rng(0)
        low, high = np.triu_indices(60, 1)
        access_ms = rng.lognormal(3.0, 1.0, 60)
        rtt = access_ms[low] + access_ms[high]
        nowhen = np.full(len(low), np.nan)
        measured = MeasurementSet(
            nodes=tuple(f"10.0.0.{i}" for i in range(60)),
            observations=Observations(source=low, destination=high, time_s=nowhen, rtt_ms=rtt),
        )
        got = evaluate(split(measured), {}, baselines=(GlobalMedian(), LastValue()))
        assert set(got.protocols) == {"unseen_pair", "unseen_probe", "disconnected"}
        for result in got.protocols.values():
            found = {name: answers.scores["mae"] for name, answers in result.answers.items()}
            assert found["last value"] < 0.9 * found["global median"]
        assert (got.protocols["unseen_probe"].known_before > 0).all()


class TestWhatIsEnoughForBaselines:
    def test_little_data_is_used_whole(self, parts: Split) -> None:
        assert sufficient(parts, parts.questions.values()) is parts

    def test_asked_sources_are_kept_whole_and_asked_destinations_with_some_who_measured_them(self) -> None:
        large = split(random_world(40_000, sources=6000, targets=3000))
        asked = [sampled(questions, 1) for questions in large.questions.values()]
        part = sufficient(large, asked, enough=0, pairs=0)
        assert 0 < len(part.train) < len(large.train) / 2
        for every, kept in ((large.train, part.train), (large.history, part.history)):
            assert not set(as_rows(kept)) - set(as_rows(every))
            for questions in asked:
                own = np.isin(every.source, questions.source)
                assert set(as_rows(every.take(own))) <= set(as_rows(kept))
        for destination in np.unique(np.concatenate([questions.destination for questions in asked])):
            who, known = (np.unique(m.source[m.destination == destination]) for m in (large.train, part.train))
            assert len(known) >= min(20, len(who))

    @pytest.mark.parametrize("targets", [10, 60])  # the latest are a few of each pair; of some, all
    def test_sources_keep_all_their_pairs_and_the_latest_of_each(self, targets: int) -> None:
        large = split(random_world(40_000, sources=30, targets=targets))
        asked = sampled(large.questions["seen_pair"], 2)
        part = sufficient(large, [asked], enough=0, pairs=0)
        others = part.train.take(~np.isin(part.train.source, asked.source))
        assert set(others.pair) == set(large.train.pair[np.isin(large.train.source, others.source)])
        for pair in np.unique(others.pair)[:20]:
            every, kept = (m.time_s[m.pair == pair] for m in (large.train, others))
            np.testing.assert_array_equal(kept, every[-16:])


def as_rows(known: Observations) -> list[tuple[float, ...]]:
    columns = (known.source, known.destination, known.time_s, np.nan_to_num(known.rtt_ms))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_mesh_is_where_most_nodes_are_at_both_ends() -> None:
    low, high = np.triu_indices(20, 1)
    pairs = Observations(source=low, destination=high, time_s=np.zeros(len(low)), rtt_ms=low + 1.0)
    assert is_mesh(pairs)
    assert not is_mesh(replace(pairs, destination=high + 100))
