"""What people see of an evaluation: tables, pictures and the command."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ping_llm.baselines.forecasts import PointWithResiduals, cumulative
from ping_llm.baselines.interface import GlobalMedian
from ping_llm.baselines.sequential import LastValue
from ping_llm.cli.evaluate import evaluate as command
from ping_llm.cli.options import expanded, input_options
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations, Questions
from ping_llm.evaluate import protocols
from ping_llm.evaluate.plots import equal_bins, plot
from ping_llm.evaluate.scores import (
    Comparison,
    Evaluation,
    ProtocolResult,
    ScoredAnswers,
    comparison_table,
    confidence_interval,
    resampled_counts,
    resampled_score,
    tables,
)
from ping_llm.evaluate.split import SplitSettings, split, write_split
from ping_llm.rows.measurement_set import MeasurementSet, read_observations, rows_observations
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.simulator import SimulatorSettings, simulate


def text_of(renderable: Any, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


class TestTable:
    SCORES = {  # noqa: RUF012
        "dmfsgd": {"median_re": 0.2, "mae": 10.0, "nll_bits": 9.0, "coverage90": 0.97},
        "model": {"median_re": 0.1, "mae": 10.001, "nll_bits": 8.0, "coverage90": 0.85},
        "point only": {"median_re": 0.15, "mae": 12.0},
    }
    INTERVALS = {name: {key: (v - 0.002, v + 0.004) for key, v in of.items()} for name, of in SCORES.items()}  # noqa: RUF012

    def lines(self) -> list[str]:
        leaders = {"median_re": "model", "nll_bits": "model"}
        comparison = Comparison(scores=self.SCORES, intervals=self.INTERVALS, leaders=leaders)
        return text_of(comparison_table("Title", comparison)).splitlines()

    def of(self, name: str) -> tuple[str, str]:
        lines = self.lines()
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(name))
        return lines[at], lines[at + 1]

    def test_a_star_only_where_there_is_a_leader(self) -> None:
        assert self.of("model")[0].split()[1:] == ["0.1000*", "10.00", "8.00*", "85.0%"]
        assert self.of("dmfsgd")[0].split()[1:] == ["0.2000", "10.00", "9.00", "97.0%"]

    def test_shows_half_of_the_interval_below(self) -> None:
        assert self.of("model")[1].split() == ["±0.0030", "±0.00", "±0.00", "±0.3%"]

    def test_leaves_empty_what_is_not_given(self) -> None:
        assert self.of("point only")[0].split()[2:] == ["0.1500", "12.00"]

    def test_fits_eighty_columns_and_explains_itself(self, evaluation: Evaluation) -> None:
        shown = text_of(tables(evaluation), width=80)
        assert "…" not in shown
        assert "(60 questions)" in shown
        assert "NLL        negative log-likelihood" in shown
        assert shown.count("Unseen pairs") == shown.count("best in its column") == 1


class TestNoise:
    """Intervals and leads by resampling the questions."""

    def test_the_interval_of_a_mean_is_that_of_the_textbook(self) -> None:
        values = np.random.default_rng(0).normal(5.0, 2.0, 4000)
        low, high = confidence_interval(resampled_score(values, None, resampled_counts(np.arange(4000))))
        assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 4000**0.5, rel=0.1)
        assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.01)

    def test_the_interval_of_a_median_is_that_of_order_statistics(self) -> None:
        values = np.random.default_rng(1).permutation(2001) / 2001  # 95 %: 1.96 standard deviations of a rank
        low, high = confidence_interval(resampled_score(values, 0.5, resampled_counts(np.arange(2001))))
        assert [low, high] == pytest.approx([0.5 - 0.98 / 2001**0.5, 0.5 + 0.98 / 2001**0.5], abs=0.003)

    @pytest.mark.parametrize("level", [None, 0.5, 0.9])
    def test_a_resample_is_scored_as_if_its_questions_had_been_asked(self, level: float | None) -> None:
        rng = np.random.default_rng(2)
        values, counts = rng.random(50), rng.integers(0, 3, (20, 50)).astype(np.uint16)
        values[:5] = np.nan
        found = resampled_score(values, level, counts)
        for row, score in zip(counts, found, strict=True):
            asked = np.repeat(values[5:], row[5:])
            expected = asked.mean() if level is None else np.quantile(asked, level, method="inverted_cdf")
            assert score == pytest.approx(expected)

    def test_nothing_to_score_is_no_number(self) -> None:
        nothing = np.full(30, np.nan)
        for level in (None, 0.5):
            assert np.isnan(resampled_score(nothing, level, resampled_counts(np.arange(30)))).all()
        assert np.isnan(confidence_interval(nothing)).all()

    def test_questions_of_a_group_are_drawn_together(self) -> None:
        group = np.repeat(np.arange(40), 5)
        counts = resampled_counts(group)
        assert (counts.reshape(-1, 40, 5) == counts[:, ::5, None]).all()
        assert (counts.sum(axis=1) == 200).all()
        one_pair = resampled_counts(np.zeros(200, np.int64))
        assert one_pair.std() > 0

    def test_a_lead_is_one_only_outside_the_noise(self) -> None:
        rng = np.random.default_rng(3)
        hard = rng.lognormal(0, 1, 500)  # the same questions are hard for everyone
        losses = {
            "ahead": {"error": hard * rng.uniform(0.8, 1.0, 500), "relative": hard},
            "behind": {
                "error": hard * rng.uniform(0.9, 1.1, 500),
                "relative": hard * rng.permutation([0.9, 1.1] * 250),
            },
        }
        found = Comparison.of(losses, np.arange(500))
        assert found.leaders == {"mae": "ahead", "median_ae": "ahead"}
        (low, high), mean = found.intervals["behind"]["mae"], found.scores["behind"]["mae"]
        assert low < found.scores["ahead"]["mae"] < mean < high  # far inside of the unpaired noise
        assert Comparison.of({"twin": losses["ahead"], **losses}, np.arange(500)).leaders == {}

    def test_the_truth_competes_with_nobody(self) -> None:
        losses = {"mine": np.arange(2.0, 50), "other": np.arange(4.0, 52), "oracle": np.arange(48.0)}
        found = Comparison.of({name: {"error": of} for name, of in losses.items()}, np.arange(48))
        assert found.leaders == {"mae": "mine", "median_ae": "mine"}
        alone = Comparison.of({"mine": {"error": losses["mine"]}}, np.arange(48))
        assert not alone.leaders


@pytest.fixture
def evaluation() -> Evaluation:
    rng = np.random.default_rng(0)
    asked = Observations(
        source=np.zeros(60, np.int64),
        destination=np.arange(60),
        time_s=np.arange(60.0),
        rtt_ms=np.where(np.arange(60) % 9 == 8, np.nan, rng.lognormal(3, 1, 60)),
    )
    answers = {
        name: ScoredAnswers.of(certain(asked.rtt_ms * rng.lognormal(0, 0.2, 60)), asked)
        for name in ("last value", "vivaldi + log factors", "mine", "oracle")
    }
    result = ProtocolResult(questions=asked, known_before=rng.integers(0, 9, 60), answers=answers)
    return Evaluation(models=("mine",), protocols={"unseen_pair": result})


def certain(rtt_ms: Any) -> PointWithResiduals:
    return PointWithResiduals(
        p_failed=np.full(len(rtt_ms), 0.1),
        point_ms=np.nan_to_num(rtt_ms, nan=10.0),
        bucket=np.zeros(len(rtt_ms), np.int64),
        cumulative=cumulative(np.linspace(-0.1, 0.1, 300))[None],
    )


class TestPlots:
    def test_one_picture_for_each_protocol(self, evaluation: Evaluation, tmp_path: Path) -> None:
        (picture,) = plot(evaluation, tmp_path / "new" / "folder")
        assert picture.name == "unseen_pair.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 50_000

    @pytest.mark.parametrize("rows", [slice(0, 1), slice(8, 9)], ids=["one answer", "no answer"])
    def test_hardly_any_answers_are_no_reason_to_fail(
        self, evaluation: Evaluation, tmp_path: Path, rows: slice
    ) -> None:
        asked = evaluation.protocols["unseen_pair"].questions.take(rows)
        answers = {"mine": ScoredAnswers.of(certain(np.array([3.0])), asked)}
        few = ProtocolResult(questions=asked, known_before=np.zeros(1, np.int64), answers=answers)
        assert plot(Evaluation(models=("mine",), protocols={"seen_pair": few}), tmp_path)

    def test_bins_hold_every_value_once_and_never_cut_through_equal_ones(self) -> None:
        known = np.random.default_rng(0).integers(0, 30, 500) ** 2
        bins = equal_bins(known)
        assert 3 < len(bins) <= 10
        assert sorted(np.concatenate(bins).tolist()) == list(range(500))
        edges = [(known[rows].min(), known[rows].max()) for rows in bins]
        assert all(before[1] < after[0] for before, after in pairwise(edges))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    simulate(SimulatorSettings(measurements=40_000), folder)
    return folder


class Model:
    """Stands in for a trained model."""

    trained_on: Path | None = None

    def __init__(self, where: str | None) -> None:
        self.name = where or "shipped"

    @classmethod
    def from_pretrained(cls, where: str | None, context: int) -> "Model":
        if where == "gone":
            raise PingLlmError("gone holds no trained model")
        return cls(where)

    def training_measurements(self) -> list[MeasurementSet]:
        return [] if self.trained_on is None else [rows_observations(self.trained_on, "train")]

    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> PointWithResiduals:
        return certain(np.full(len(questions), 40.0))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("ping_llm.predict.predictor")
    module.Predictor = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(protocols, "standard_baselines", lambda *_, **__: [GlobalMedian(), LastValue()])
    yield
    Model.trained_on = None


def run(*arguments: Any) -> SimpleNamespace:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command()(expanded(command, "how", input_options))
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, PingLlmError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return SimpleNamespace(stdout=result.stdout, stderr=result.stderr, code=result.exit_code)


class TestCommand:
    def test_json_is_the_last_line(self, raw: Path) -> None:
        done = run("--data", raw / "*.parquet", "--questions", 30, "--world", raw, "--json")
        found = json.loads(done.stdout.splitlines()[-1])
        assert set(found) == {"protocols", "intervals", "leads"}
        for scores in found["protocols"].values():
            assert set(scores) == {"model", "global_median", "last_value", "oracle"}
            assert scores["oracle"]["questions"] <= 30

    def test_shows_a_table_for_each_protocol_and_draws_them(self, raw: Path, tmp_path: Path) -> None:
        shown = run("one", "two", "--data", raw, "--questions", 20, "--plots", tmp_path / "plots").stdout
        assert shown.count("predictor") == len(list((tmp_path / "plots").glob("*.png"))) >= 2
        assert {"one", "two", "last"} <= {line.split(" ")[0] for line in shown.splitlines()}

    def test_asks_for_one_protocol_only(self, raw: Path) -> None:
        found = json.loads(run("--data", raw, "--protocol", "seen_pair", "--json").stdout)
        assert list(found["protocols"]) == ["seen_pair"]
        with pytest.raises(PingLlmError, match="no questions of unseen_pairs, only of unseen_pair"):
            run("--data", raw, "--protocol", "unseen_pairs")

    def test_asks_the_predictors_that_are_named(self, raw: Path) -> None:
        data = ("--data", raw, "--protocol", "seen_pair", "--questions", 20, "--json")
        found = json.loads(run("mine", *data, "--predictors", "last*, mine").stdout)["protocols"]["seen_pair"]
        assert list(found) == ["last_value", "model"]
        found = json.loads(run("mine", *data, "--predictors", "*median").stdout)["protocols"]["seen_pair"]
        assert list(found) == ["global_median"]
        with pytest.raises(PingLlmError, match=r"called 'vivald': there are global median, last value, mine$"):
            run("mine", *data, "--predictors", "last value", "--predictors", "vivald")

    def test_tells_of_every_predictor_when_it_has_finished(self, raw: Path) -> None:
        done = run("mine", "--data", raw, "--questions", 20, "--json")
        lines = {line.split(":")[0]: line for line in done.stderr.splitlines() if "median RE" in line}
        assert sorted(lines) == ["global median", "last value", "mine"]  # models and baselines run side by side
        scores = json.loads(done.stdout)["protocols"]["seen_pair"]["model"]
        assert f"seen_pair {scores['median_re']:.4f}" in lines["mine"]

    def test_takes_a_split_that_was_written(self, raw: Path, tmp_path: Path) -> None:
        write_split(read_observations([raw]), tmp_path / "split", SplitSettings(seed=3))
        again, other = (
            json.loads(run("--data", data, "--questions", 10**9, "--json").stdout)["protocols"]["seen_pair"]["model"]
            for data in (tmp_path / "split", raw)
        )
        expected = split(read_observations([raw]), SplitSettings(seed=3)).questions["seen_pair"]
        assert again["questions"] == len(expected) != other["questions"]
        with pytest.raises(PingLlmError, match="as the only --data"):
            run("--data", tmp_path / "split", "--data", raw)

    def test_needs_measurements_of_one_kind(self, raw: Path) -> None:
        for arguments in ((), ("--data", raw, "--rows", raw)):
            with pytest.raises(PingLlmError, match="either --data"):
                run(*arguments)

    def test_models_are_loaded_before_measurements_are_read(self, raw: Path, tmp_path: Path) -> None:
        data = ("--data", tmp_path / "not there")
        with pytest.raises(PingLlmError, match="gone holds no trained model"):
            run("mine", "gone", *data)
        with pytest.raises(PingLlmError, match=r"holds no world\.json"):
            run("mine", *data, "--world", tmp_path)
        with pytest.raises(PingLlmError, match="not there"):
            run("mine", *data, "--world", raw)

    def test_refuses_a_model_that_was_trained_on_what_is_asked(self, raw: Path, tmp_path: Path) -> None:
        def prepared(inputs: Path, name: str) -> Path:
            prepare(PrepareSettings(inputs=(str(inputs / "*.parquet"),), output=tmp_path / name, workers=1))
            return tmp_path / name

        write_split(read_observations([raw]), tmp_path / "split")
        Model.trained_on = prepared(tmp_path / "split" / "train", "allowed")
        allowed = json.loads(run("mine", "--data", raw, "--questions", 5, "--json").stdout)
        Model.trained_on = prepared(raw, "everything")
        with pytest.raises(PingLlmError, match=r"mine was trained on .*unseen_pair.*`ping-llm split`") as refused:
            run("mine", "--data", raw)
        assert "\n" not in str(refused.value)
        by_rows = json.loads(run_without_check("--rows", tmp_path / "everything", "--questions", 5, "--json").stdout)
        assert set(by_rows["protocols"]) == set(allowed["protocols"])
        Model.trained_on = tmp_path / "gone"
        with pytest.raises(PingLlmError, match="cannot check that mine was not trained on"):
            run("mine", "--data", raw)

    def test_help_teaches(self) -> None:
        shown = run("--help").stdout
        for word in ("unseen_pair", "seen_pair", "unseen_probe", "ping-llm evaluate --data my_pings.csv", "--plots"):
            assert word in " ".join(shown.split())


def run_without_check(*arguments: Any) -> SimpleNamespace:
    Model.trained_on = None
    return run(*arguments)
