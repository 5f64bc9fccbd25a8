"""The Modal app, as far as it can be tried without Modal: it is built, its options are read, its functions run here."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ping_llm.core.errors import PingLlmError
from ping_llm.runs import read_metrics
from training_fixtures import simulated_rows, tiny_config

pytest.importorskip("modal", reason="the package modal is not installed")

from ping_llm.integrations import modal as engine

ROOT = Path(__file__).resolve().parents[1]


def plan(**changes: Any) -> dict[str, Any]:
    return engine.plan_run(**{"run_name": "my-run", "changes": []} | changes)


class TestPlan:
    def test_options_become_the_configuration_of_a_run_on_the_volumes(self) -> None:
        job = plan(steps=5000, batch_size=128, project="my-project", wandb=True, changes=["learning_rate=1e-3"])
        config = yaml.safe_load(job["config"])
        assert job["run"] == "/runs/my-project/my-run"
        assert job["options"] == ["--batch-size=128"]
        assert job["wandb"]
        assert config["steps"] == 5000
        assert config["network_train_files"] == "/data/rows"
        assert config["base_output_directory"] == "/runs"
        assert config["wandb_mode"] == "offline"
        assert config["learning_rate"] == 1e-3

    def test_a_configuration_file_of_this_machine_is_sent_along(self) -> None:
        config = yaml.safe_load(plan(config=str(ROOT / "configs" / "latency_network.yml"))["config"])
        assert config["eval_interval"] == 500
        assert config["network_train_files"] == "/data/rows"

    def test_keys_that_are_set_count_more_than_what_is_chosen_here(self) -> None:
        config = yaml.safe_load(plan(wandb=True, changes=["wandb_mode=online", "network_eval_files=x"])["config"])
        assert config["wandb_mode"] == "online"
        assert config["network_eval_files"] == "x"

    def test_data_may_be_in_a_bucket_or_something_else_and_wandb_is_off_unless_wanted(self) -> None:
        config = yaml.safe_load(plan(rows="s3://bucket/rows")["config"])
        assert config["network_train_files"] == "s3://bucket/rows"
        assert config["wandb_mode"] == "off"
        config = yaml.safe_load(plan(rows="", changes=["dataset_type=synthetic"])["config"])
        assert config["network_train_files"] == ""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"changes": ["learning_rat=1"]}, "learning_rate"),
            ({"run_name": ""}, "--run-name"),
            ({"run_name": "a/b"}, "--run-name"),
            ({"steps": -1}, "steps"),
        ],
    )
    def test_mistakes_are_found_before_a_machine_is_rented(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            plan(**changes)


class TestEntryPoints:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """What would be asked of Modal."""
        made: list[dict[str, Any]] = []

        monkeypatch.setattr(engine, "render", str)

        def with_options(**options: Any) -> SimpleNamespace:
            def remote(*given: Any, **arguments: Any) -> dict[str, Any]:
                made.append({"chosen": options, "given": given, **arguments})
                return {"steps": 10} if "broken" not in str(arguments) else {"error": "no rows there"}

            return SimpleNamespace(remote=remote)

        for name in ("train_on_gpu", "prepare_on_cpus"):
            monkeypatch.setattr(engine, name, SimpleNamespace(with_options=with_options))
        return made

    def test_run_rents_the_gpu_that_was_asked_for(self, calls: list[dict[str, Any]]) -> None:
        engine.run(run_name="my-run", steps=10, gpu="A100-80GB:2", hours=3)
        (call,) = calls
        assert call["chosen"] == {"gpu": "A100-80GB:2", "timeout": 3 * 3600, "secrets": []}
        assert call["seconds"] < 3 * 3600
        assert call["run"] == "/runs/ping-llm/my-run"

    def test_the_wandb_secret_is_asked_for_only_with_a_wandb_project(self, calls: list[dict[str, Any]]) -> None:
        engine.run(run_name="my-run", wandb_project="my-project")
        (call,) = calls
        assert len(call["chosen"]["secrets"]) == 1
        assert call["wandb"]
        assert call["run"] == "/runs/my-project/my-run"

    def test_keys_are_set(self, calls: list[dict[str, Any]]) -> None:
        engine.run(run_name="my-run", set="opt_type=adamw learning_rate=0.001")
        assert yaml.safe_load(calls[0]["config"])["opt_type"] == "adamw"

    def test_prepare_reads_and_writes_the_data_volume(self, calls: list[dict[str, Any]]) -> None:
        engine.prepare(input="'raw/*.parquet' s3://bucket/raw", output="rows", memory_gb=32)
        (call,) = calls
        assert call["given"] == (["/data/raw/*.parquet", "s3://bucket/raw"], "/data/rows")
        assert call["chosen"]["memory"] == 32 * 1024

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"run_name": "broken"}, "error: no rows there"),
            ({"run_name": "a", "hours": 25}, "error: --hours 25"),
            ({"run_name": "a", "set": "nonsense=1"}, "error: .*nonsense"),
        ],
    )
    def test_errors_are_one_line(self, calls: list[dict[str, Any]], arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(SystemExit, match=message):
            engine.run(**arguments)

    @pytest.mark.parametrize(
        ("name", "options"), [("run", "run-name steps batch-size wandb-project gpu"), ("prepare", "input output")]
    )
    def test_the_modal_command_knows_their_options(self, name: str, options: str) -> None:
        shown = program("-m", "modal", "run", "-m", f"ping_llm.integrations.modal::{name}", "--help")
        assert shown.returncode == 0, shown.stderr
        for option in options.split():
            assert f"--{option}" in shown.stdout


def program(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


def test_without_the_package_an_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['modal'] = None; import ping_llm.integrations.modal"
    ended = program("-c", code)
    assert ended.returncode == 1
    assert 'needs the package modal: pip install "ping-llm[modal]"' in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("upload data/raw", ["volume create ping-llm-data", "volume put --force ping-llm-data data/raw raw"]),
        ("prepare --input raw", ["run -m ping_llm.integrations.modal::prepare --input raw"]),
        ("train my-run --steps 5", ["run --detach -m ping_llm.integrations.modal::run --run-name my-run --steps 5"]),
        ("logs ap-1", ["app logs --follow ap-1"]),
        ("download my-run p", ["volume get ping-llm-runs p/my-run runs/p/"]),
        ("nonsense", []),
    ],
)
def test_the_helper_script_runs_commands_of_modal(tmp_path: Path, words: str, expected: list[str]) -> None:
    tool = tmp_path / "bin" / "modal"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "modal.sh"), *words.split()],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == (0 if expected else 2), ended.stderr
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == expected


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_rows(tmp_path_factory.mktemp("modal"), 5_000)


class TestFunctions:
    """Run here, on folders instead of volumes."""

    def test_prepare_makes_rows(self, rows: Path, tmp_path: Path) -> None:
        summary = engine.prepare_on_cpus.local([str(rows.parent / "raw")], str(tmp_path / "rows"))
        assert summary["written"] == 5_000
        assert list((tmp_path / "rows").glob("train*.arrayrecord"))

    def test_wrong_input_is_not_tried_again(self, tmp_path: Path) -> None:
        answer = engine.prepare_on_cpus.local([str(tmp_path / "nothing")], str(tmp_path / "rows"))
        assert "nothing" in answer["error"]

    @pytest.mark.slow
    def test_a_run_whose_time_is_over_saves_and_the_next_call_resumes(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        config = tiny_config(rows, tmp_path / "runs", run_name="modal", steps=100_000, max_target_length=128)
        folder = tmp_path / "runs" / config.project / "modal"
        commits: list[int] = []
        with pytest.raises(engine.NotFinishedError, match="there are more to do"):
            engine.train_rented(config.to_yaml(), ["--batch-size=8"], folder, 15.0, lambda: commits.append(1))
        done = sum("loss" in record for record in read_metrics(folder / "metrics.jsonl"))
        assert done > 0
        assert commits
        more = config.replace(steps=done + 3)
        summary = engine.train_on_gpu.local(more.to_yaml(), ["--batch-size=8"], str(folder))
        assert summary["resumed_from"] == done
        assert summary["complete"]

    @pytest.mark.slow
    def test_mistakes_end_a_run_and_offline_metrics_are_sent_at_the_end(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        tool = tmp_path / "bin" / "wandb"
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/sent\nexit 1\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
        config = tiny_config(tmp_path / "no-rows", tmp_path / "runs", run_name="modal", steps=2)
        folder = tmp_path / "runs" / config.project / "modal"
        parts = [folder / "wandb" / f"offline-run-2026010{day}_000000-modal" for day in (2, 1)]
        for part in parts:
            part.mkdir(parents=True)
        answer = engine.train_on_gpu.local(config.to_yaml(), [], str(folder), wandb=True)
        assert "last lines above" in answer["error"]
        assert (tmp_path / "sent").read_text().split() == ["sync", str(parts[1]), str(parts[0])]
        captured = capfd.readouterr()
        assert "no-rows" in captured.err
        assert "not sent; later: wandb sync" in captured.err
