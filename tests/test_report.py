"""The report of a run: complete, self-contained, safe, and there whatever state the run is in."""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ping_llm.cli.train import report
from ping_llm.core.errors import PingLlmError
from report_fixtures import BEGIN, PIPELINE, finished, make_run, page_of, records

HOSTILE = "<script>alert(1)<script>\"'><img src=x onerror=alert(2)>"
FOLDER = HOSTILE.replace("/", "")
END: dict[str, Any] = {"event": "end", "error": None}
SCORES = {"median_re": 0.2, "p90_re": 0.9, "mae": 9.0, "median_ae": 3.0, "nll_bits": 8.0, "crps": 4.0, "questions": 60}
EVALUATION = {
    "protocols": {
        "unseen_pair": {
            "model": {**SCORES, "coverage90": 0.85, "brier": 0.01},
            "vivaldi": {**SCORES, "median_re": 0.1, "coverage90": 0.99, "brier": None},
            "oracle": {**SCORES, "median_re": 0.01, "coverage90": 0.9, "brier": 0.01},
        },
        "seen_pair": {"model": SCORES, "last_value": {**SCORES, "median_re": 0.3}},
    }
}


@pytest.fixture
def run_report() -> Callable[..., Any]:
    app = typer.Typer()
    app.command()(report)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


class TestPage:
    def test_the_key_figures_are_those_of_the_run(self, tmp_path: Path) -> None:
        text = page_of(finished(tmp_path / "mine")).text
        assert "mine complete" in text
        assert "50 of 50 steps, 100k tokens, on 2 × Abacus" in text
        assert "Evaluation loss 3.25 nats/token lowest, at step 50" in text
        assert "Speed 54.3k tokens/s" in text
        assert "MFU 41.2 %" in text
        assert "Waiting for data 2 %" in text

    def test_it_asks_for_nothing_else_and_runs_no_other_script(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run", evaluation=EVALUATION, pipeline=PIPELINE))
        for tag, attributes in page.elements:
            assert tag not in {"link", "img", "iframe", "object", "embed", "form", "base"}
            assert "src" not in attributes
            assert attributes.get("href", "#").startswith("#")
            assert not [name for name in attributes if name.startswith("on")]
        assert "@import" not in page.source
        assert "url(" not in page.source.replace("url(#", "")
        assert "http://" not in page.source.replace("http://www.w3.org/", "")
        assert "https://" not in page.source.replace("https://github.com/leeoniya/uPlot", "")  # where a licence is

    def test_the_policy_allows_exactly_the_scripts_of_the_page(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run"))
        policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"script-src {allowed};" in policy
        assert "default-src 'none'" in policy

    def test_every_chart_has_a_name_data_and_a_table(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run", pipeline=PIPELINE))
        assert page.count("figure") == 6  # no padding: the batch is not known without a checkpoint
        assert len(page.charts) == 6
        names = [a["aria-label"] for tag, a in page.elements if tag == "div" and a.get("class") == "plot"]
        assert len(names) == 6
        assert names[0].startswith(
            "Loss, cross entropy, nats per token, by step: evaluation from 3.25 to 3.25; training"
        )
        assert sum(a.get("class") == "data" for tag, a in page.elements if tag == "details") == 6
        assert "Gradient norm: before clipping (40 of 50 rows) step gradient norm" in page.text
        assert "49 1.05k 50 1.05k" in page.text
        pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
        assert [(a["role"], a["aria-label"]) for a in pictures] == [
            ("img", "Pipeline: files, plan 1.25 ms, encode 5.0 ms, training")
        ]

    def test_charts_show_what_was_measured(self, tmp_path: Path) -> None:
        evaluation, training = page_of(finished(tmp_path / "run")).charts[0]["series"]
        assert training["x"] == list(range(1, 51))
        assert training["y"] == pytest.approx([r["loss"] for r in records(50)], rel=1e-4)
        assert (evaluation["x"], evaluation["y"]) == ([50], [3.25])

    def test_the_pipeline_names_its_bottleneck_and_what_to_change(self, tmp_path: Path) -> None:
        text = page_of(finished(tmp_path / "run", pipeline=PIPELINE)).text
        assert "The bottleneck is “encode”: raise grain_worker_count." in text
        assert "training waited 31 % of the time" in text
        assert "plan 1.25 20 %" in text

    def test_changed_keys_come_first_and_all_are_there(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run", learning_rate=0.123))
        changed, _, every = page.text.partition("All 99 keys" if "All 99 keys" in page.text else "Search")
        assert re.search(r"learning_rate 0\.123 0\.004", changed)
        assert "adam_b2" not in changed.partition("Configuration Changed")[2]
        assert "adam_b2 0.95 0.95" in every

    def test_a_long_run_stays_small_and_keeps_its_spike(self, tmp_path: Path) -> None:
        metrics = records(60_000)
        metrics[31_234]["loss"] = 77.125
        page = page_of(finished(tmp_path / "run", metrics=metrics))
        assert len(page.source) < 1_000_000
        assert any(77.125 in line["y"] for chart in page.charts for line in chart["series"])


class TestSafety:
    def test_names_and_values_of_others_stay_text(self, tmp_path: Path) -> None:
        stages = {HOSTILE: {"ms_per_batch": 1.0, "share": 1.0}}
        run = finished(
            tmp_path / FOLDER,
            project=FOLDER,
            network_train_files=HOSTILE,
            pipeline={**PIPELINE, "stages": stages, "bottleneck": HOSTILE, "advice": HOSTILE},
            evaluation={"protocols": {HOSTILE: {HOSTILE: SCORES, "model": SCORES}}, "names": {"model": HOSTILE}},
            sessions=[{**BEGIN, "device": HOSTILE, "jax": HOSTILE}, {"event": "end", "error": HOSTILE}],
        )
        for page in (page_of(run), page_of(run, finished(tmp_path / "other"))):
            assert page.count("img") == 0
            assert page.source.count("alert(1)") > 3, "it is shown, but as text"
            assert len(page.scripts) == 4
            assert page.count("script") == 4 + len(page.charts)
            assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]

    @pytest.mark.parametrize("other", ["", "key_of_the_future: 1\n"])
    def test_a_secret_of_the_configuration_is_not_shown(self, tmp_path: Path, other: str) -> None:
        run = finished(tmp_path / "run")
        (run / "config.yml").write_text(f"hf_access_token: hf_very_secret\n{other}")
        assert "hf_very_secret" not in page_of(run).source


class TestStates:
    def test_a_run_that_is_running(self, tmp_path: Path) -> None:
        assert "run running" in page_of(make_run(tmp_path / "run", metrics=records(3), sessions=[BEGIN])).text

    def test_a_run_that_was_killed(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", metrics=records(3), sessions=[BEGIN])
        long_ago = time.time() - 86_400
        os.utime(run / "metrics.jsonl", (long_ago, long_ago))
        text = page_of(run).text
        assert "run interrupted" in text
        assert "killed, or its machine is gone" in text

    def test_a_run_that_failed_says_why(self, tmp_path: Path) -> None:
        sessions: list[dict[str, Any]] = [BEGIN, {"event": "end", "error": "PingLlmError: the loss of step 2 is nan"}]
        metrics = [*records(2), {**records(1)[0], "step": 2, "loss": float("nan")}]
        text = page_of(make_run(tmp_path / "run", metrics=metrics, sessions=sessions)).text
        assert "run failed" in text
        assert "PingLlmError: the loss of step 2 is nan" in text
        assert "The loss of step 3 is not a number." in text

    def test_a_run_that_was_stopped_is_resumed_by_the_same_command(self, tmp_path: Path) -> None:
        summary = {"complete": False, "stopped_by_signal": 15}
        text = page_of(finished(tmp_path / "run", summary=summary)).text
        assert "run stopped" in text
        assert "It was stopped by a signal; the same command resumes it." in text

    def test_a_run_without_any_step(self, tmp_path: Path) -> None:
        text = page_of(make_run(tmp_path / "run")).text
        assert "No step has been finished yet" in text
        assert "The model has not been compared with the classical predictors yet." in text

    @pytest.mark.parametrize("loss", [float("nan"), float("inf")])
    def test_a_run_of_nothing_but_nan(self, tmp_path: Path, loss: float) -> None:
        metrics = [{**record, "loss": loss, "grad_norm": loss, "real_tokens_per_s": None} for record in records(200)]
        text = page_of(finished(tmp_path / "run", metrics=metrics)).text
        assert "The loss of step 1, and of 199 more is not a number." in text

    def test_a_resumed_run_shows_where(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run", sessions=[BEGIN, {**BEGIN, "first_step": 20}, END]))
        assert "killed, or its machine was gone" in page.text
        assert all(chart["marks"] == [[20, "resumed"]] for chart in page.charts)

    def test_damaged_files_are_named_and_the_rest_is_shown(self, tmp_path: Path) -> None:
        run = finished(tmp_path / "run")
        (run / "summary.json").write_text('{"complete": tr')
        (run / "pipeline.json").write_text('{"stages": 7}')
        (run / "evaluation.json").write_text("[1, 2]")
        (run / "data.json").write_text("{}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('17\n"x"\n{"step": "z", "loss": 1}\n{"step": 51, "lo')
        page = page_of(run)
        assert "summary.json cannot be read" in page.text
        assert "evaluation.json does not have the expected content" in page.text
        assert "the state of the data cannot be read" in page.text
        assert page.count("figure") == 6

    def test_a_configuration_of_another_version_is_shown_as_it_is(self, tmp_path: Path) -> None:
        run = finished(tmp_path / "run")
        (run / "config.yml").write_text("steps: 50\nkey_of_the_future: 9\n")
        text = page_of(run).text
        assert "the configuration is not one of this version" in text
        assert "key_of_the_future 9 unknown key" in text

    def test_completer_and_text_runs_have_what_applies(self, tmp_path: Path) -> None:
        completer = page_of(finished(tmp_path / "completer", dataset_type="worlds")).text
        assert "A completer with" in completer
        assert "nats/question" in completer
        assert "The device makes its contexts itself" in completer
        text = page_of(finished(tmp_path / "text", dataset_type="grain", pipeline=PIPELINE)).text
        assert "A language model of text: 50 of 50 steps" in text
        assert "tokenise them" in text
        assert "only sequences of measurements are decoded" in text


class TestEvaluation:
    def test_all_predictors_are_ranked_and_the_best_marked(self, tmp_path: Path) -> None:
        page = page_of(finished(tmp_path / "run", evaluation=EVALUATION))
        text = page.text
        assert text.index("vivaldi") < text.index("the truth")
        assert "median error 20 %, worse than the best of the classical predictors (vivaldi, 10 %)" in text
        assert "median error 20 %, better than the best of the classical predictors (last value, 30 %)" in text
        assert "60 questions" in text
        assert "★ 10.0 %" in text
        assert "★ 1.0 %" not in text, "the truth competes with nobody"
        assert "★ 85.0 %" in text, "of an interval of 90 %, the share nearest to it is best"
        assert "★ 99.0 %" not in text

    def test_a_file_can_be_given(self, tmp_path: Path, run_report: Callable[..., Any]) -> None:
        run = finished(tmp_path / "run")
        file = tmp_path / "scores.json"
        file.write_text("dropped 3 nan\n" + json.dumps(EVALUATION) + "\n")
        assert "Unseen pairs" in page_of(run, evaluations=[file]).text
        done = run_report(run, "--evaluation", file, "--json")
        assert json.loads(done.stdout)["report"] == str(run / "report.html")

    @pytest.mark.parametrize(
        ("content", "message"), [("{}", "it has no protocols"), ("x", "not JSON"), (None, "No such file")]
    )
    def test_a_wrong_file_is_one_line(self, tmp_path: Path, content: str | None, message: str) -> None:
        run = finished(tmp_path / "run")
        file = tmp_path / "scores.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(PingLlmError, match=message):
            page_of(run, evaluations=[file])

    def test_curves_that_are_none_are_left_out(self, tmp_path: Path) -> None:
        curves = {"unseen_pair": {"model": {"relative_error": ["x", 1], "inside": [0, 1]}, "vivaldi": None}}
        page = page_of(finished(tmp_path / "run", evaluation={**EVALUATION, "curves": curves, "shares": [0.1, 0.9]}))
        assert page.count("figure") == 6


class TestSeveralRuns:
    def test_what_differs_is_listed_and_nothing_else(self, tmp_path: Path) -> None:
        a = finished(tmp_path / "a", learning_rate=0.5)
        b = finished(tmp_path / "b", learning_rate=0.25, opt_type="adamw")
        text = page_of(a, b).text
        assert "2 runs side by side" in text
        assert "2 keys differ" in text
        assert "learning_rate 0.5 0.25" in text
        assert "opt_type muon adamw" in text

    def test_the_best_of_each_line_is_marked(self, tmp_path: Path) -> None:
        a = finished(tmp_path / "a")
        b = finished(tmp_path / "b", metrics=[*records(50, rate=0.9), {"step": 50, "eval_loss": 1.5}])
        text = page_of(a, b).text
        assert "Lowest evaluation loss, nats 3.25 ★ 1.5" in text
        assert re.search(r"Training loss at the end, nats [\d.]+ ★ [\d.]+", text)

    def test_a_run_that_failed_says_why_among_others(self, tmp_path: Path) -> None:
        sessions = [BEGIN, {"event": "end", "error": "OSError: no space left"}]
        text = page_of(finished(tmp_path / "a"), finished(tmp_path / "b", sessions=sessions)).text
        assert "b OSError: no space left" in text

    def test_runs_of_the_same_name_are_told_apart(self, tmp_path: Path) -> None:
        text = page_of(finished(tmp_path / "a" / "run"), finished(tmp_path / "b" / "run")).text
        assert "a/run" in text
        assert "b/run" in text

    def test_runs_that_have_not_begun_compare_too(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / name) for name in "abc"]
        assert "The runs have the same configuration." in page_of(*runs).text
        assert "Unseen pairs" in page_of(finished(tmp_path / "d", evaluation=EVALUATION), *runs).text


class TestCommand:
    def test_it_says_where_the_page_is(self, tmp_path: Path, run_report: Callable[..., Any]) -> None:
        run = finished(tmp_path / "run")
        done = run_report(run, "--output", tmp_path / "new" / "page.html")
        assert done.exit_code == 0
        assert done.stdout.startswith(f"{tmp_path}/new/page.html (")
        assert (tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")

    @pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "folder", "file"])
    def test_what_is_no_run_is_one_clear_line(
        self, tmp_path: Path, run_report: Callable[..., Any], make: Callable[[Path], None]
    ) -> None:
        make(tmp_path / "other")
        error = run_report(tmp_path / "other").exception
        assert isinstance(error, PingLlmError)
        assert str(error) == f"{tmp_path}/other is not the folder of a run: there is no config.yml in it"

    def test_a_run_may_be_the_folder_that_one_is_in(
        self, tmp_path: Path, run_report: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(finished(tmp_path / "run"))
        assert run_report(".").exit_code == 0

    def test_an_exported_model_is_no_run(self, tmp_path: Path, run_report: Callable[..., Any]) -> None:
        run = make_run(tmp_path / "model")
        (run / "model.safetensors.index.json").write_text("{}")
        assert "is an exported model" in str(run_report(run).exception)

    def test_evaluations_belong_to_runs(self, tmp_path: Path, run_report: Callable[..., Any]) -> None:
        runs = [finished(tmp_path / name) for name in "ab"]
        assert "1 times for 2 runs" in str(run_report(*runs, "--evaluation", "x.json").exception)

    def test_an_output_that_cannot_be_written_is_one_line(self, tmp_path: Path, run_report: Callable[..., Any]) -> None:
        run = finished(tmp_path / "run")
        assert "there is a folder of that name" in str(run_report(run, "--output", tmp_path).exception)
        assert "is a file, not a folder" in str(run_report(run, "-o", run / "config.yml" / "x.html").exception)
