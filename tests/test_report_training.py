"""Training writes the report; what it shows of sequences and evaluations is what they were."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ping_llm.baselines.forecasts import PointWithResiduals, cumulative
from ping_llm.batches.source import BatchSource
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations
from ping_llm.data.registry import spec_from_config
from ping_llm.evaluate.scores import Evaluation, ProtocolResult, ScoredAnswers, save_evaluation
from ping_llm.report import page
from ping_llm.report.page import write_at_end
from ping_llm.report.run import Run
from ping_llm.training import train
from report_fixtures import Page, finished, page_of
from training_fixtures import simulated_rows, tiny_config


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_rows(tmp_path_factory.mktemp("report"), 20_000)


@pytest.fixture(scope="module")
def config(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a run that was trained for four steps and then for two more."""
    runs = tmp_path_factory.mktemp("runs")
    config = tiny_config(rows, runs, max_target_length=128, steps=6, network_eval_files=str(rows), eval_steps=1)
    train(config.replace(steps=4), at_end=write_at_end)
    train(config, at_end=write_at_end)
    return config


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(folder_of(config), tmp_path / config.run_name)


def folder_of(config: Config) -> Path:
    return Path(config.base_output_directory) / config.project / config.run_name


class TestAtTheEndOfARun:
    def test_the_report_shows_the_whole_run(self, config: Config) -> None:
        text = Page((folder_of(config) / "report.html").read_text()).text
        assert "tiny complete" in text
        assert "6 of 6 steps" in text
        assert "stage ms per batch share what it does" in text

    def test_sessions_tell_when_it_was_resumed(self, config: Config) -> None:
        sessions = Run(folder_of(config)).sessions
        assert [session.first_step for session in sessions] == [0, 4]
        assert all(session.ended and session.begun and session.error is None for session in sessions)

    def test_what_it_was_trained_on_is_known(self, config: Config) -> None:
        found = Run(folder_of(config))
        assert found.data is not None
        assert found.data.identity == spec_from_config(config).identity()
        assert found.pipeline is not None
        assert found.pipeline["batches"] >= 2

    def test_a_run_that_breaks_has_a_report_that_says_so(self, rows: Path, tmp_path: Path) -> None:
        broken = tiny_config(rows, tmp_path, opt_type="adamw", learning_rate=1e30, warmup_steps_fraction=0.0, steps=9)
        with pytest.raises(PingLlmError, match="is nan"):
            train(broken.replace(gradient_clipping_threshold=0.0), at_end=write_at_end)
        assert Run(folder_of(broken)).status.word == "failed"
        assert "tiny failed" in Page((folder_of(broken) / "report.html").read_text()).text

    def test_a_report_that_fails_is_a_warning_and_not_the_end_of_the_run(
        self, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        def fail(*_: Any, **__: Any) -> str:
            raise RuntimeError("no\nink")

        monkeypatch.setattr(page, "page_of", fail)
        other = config.replace(base_output_directory=str(tmp_path), steps=2, enable_checkpointing=False)
        assert train(other, at_end=write_at_end)["complete"]
        assert "warning: the report was not written: RuntimeError: no ink" in capsys.readouterr().err
        assert not (folder_of(other) / "report.html").exists()


class TestSequences:
    def test_they_are_those_of_the_run(self, config: Config, run: Path) -> None:
        page = page_of(run)
        explained = BatchSource(spec_from_config(config)).explain(5, 0)
        assert "Step 0 Sequence 0 of its batch" in page.text
        segment = explained["segments"][0]
        assert segment["source"] in page.text
        assert f"{segment['shard']} record {segment['position']:,}" in page.text
        assert any(tag == "span" and a.get("class") == "destination" for tag, a in page.elements)

    def test_they_can_be_left_out(self, run: Path, config: Config) -> None:
        source = BatchSource(spec_from_config(config)).explain(0, 0)["segments"][0]["source"]
        assert source in page_of(run).text
        assert source not in page_of(run, with_sequences=False).source

    def test_rows_that_are_gone_are_said_to_be(self, run: Path, rows: Path, tmp_path: Path) -> None:
        text = (run / "config.yml").read_text().replace(str(rows), str(tmp_path / "gone"))
        (run / "config.yml").write_text(text)
        assert "The rows cannot be read" in page_of(run).text

    def test_other_rows_of_the_same_name_are_not_shown(self, run: Path) -> None:
        state = json.loads((run / "data.json").read_text())
        state["identity"]["sources"] = ["another fingerprint"]
        (run / "data.json").write_text(json.dumps(state))
        text = page_of(run).text
        assert "have changed since" in text
        assert "Sequence 0 of its batch" not in text


class TestEvaluationFile:
    def test_it_is_written_into_every_run_and_found_there(self, tmp_path: Path) -> None:
        run, other = finished(tmp_path / "mine"), finished(tmp_path / "other")
        asked = Observations(
            source=np.zeros(3, int), destination=np.ones(3, int), time_s=np.arange(3.0), rtt_ms=np.array([10.0, 20, 40])
        )
        predicted = {"good": asked.rtt_ms * 1.1, "Global median": np.full(3, 20.0), "bad": np.full(3, 900.0)}
        shared: dict[str, Any] = {"p_failed": np.zeros(3), "bucket": np.zeros(3, np.int64)}
        shared["cumulative"] = cumulative(np.zeros(0))[None]
        answers = {
            name: ScoredAnswers.of(PointWithResiduals(point_ms=median, **shared), asked)
            for name, median in predicted.items()
        }
        result = ProtocolResult(questions=asked, known_before=np.arange(3), answers=answers)
        found = Evaluation(models=["good", "bad"], protocols={"seen_pair": result})
        written = save_evaluation(found, {"good": run, "bad": other, "shipped": None, "file": tmp_path / "none"})
        assert written == [run / "evaluation.json", other / "evaluation.json"]
        text = page_of(run).text
        assert "good: median error 10 %, better than the best of the classical predictors" in text
        assert "bad: median error" in page_of(other).text
        assert page_of(run).count("figure") == page_of(finished(tmp_path / "third")).count("figure") + 2
