"""Training on text: the model fits the tokenizer, runs resume exactly, and hosts that run out of data do not hang."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_fixtures import reading, text_config, texts, write_files
from config_fixtures import ROOT
from ping_llm.config import Config, load_config
from ping_llm.core.errors import PingLlmError
from ping_llm.runs import RunFolder, read_metrics
from ping_llm.runs.weights import model_settings
from ping_llm.training import train

pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")

TINY: dict[str, Any] = {
    "base_num_decoder_layers": 1,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "dtype": "float32",
    "enable_tensorboard": False,
    "learning_rate_schedule": "cosine",
    "learning_rate_final_fraction": 1.0,
    "warmup_steps_fraction": 0.0,
    "run_name": "text",
    "steps": 6,
}


def config_of(folder: Path, kind: str, files: list[list[str]], **changes: Any) -> Config:
    if kind == "hf":
        pytest.importorskip("datasets", reason="the package datasets is not installed")
    pattern = write_files(folder / kind, "json" if kind == "hf" else kind, files)
    values = TINY | reading(kind, pattern) | {"base_output_directory": str(folder / "runs")}
    return text_config(folder, **values | changes)


def losses(config: Config) -> list[float]:
    return [record["loss"] for record in read_metrics(RunFolder.of(config).metrics) if "loss" in record]


@pytest.mark.parametrize("kind", ["arrayrecord", "parquet"])
def test_debug_mode_shows_where_the_time_goes(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ping_llm")
    train(config_of(tmp_path, kind, [texts(30)], steps=3, grain_debug_mode=True, enable_checkpointing=False))
    assert caplog.text.count("waiting for data: ") == 1
    assert "  encode  " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "hf"])
def test_an_interrupted_run_has_the_losses_of_one_that_was_not(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, kind, [texts(60), texts(60, seed=1)])
    whole = train(config.replace(run_name="whole"))
    assert whole["complete"]
    train(config.replace(steps=3))
    assert train(config)["resumed_from"] == 3
    assert losses(config) == losses(config.replace(run_name="whole"))
    assert 5 < losses(config)[0] < 8  # about ln 512


def test_the_model_has_as_many_tokens_as_the_tokenizer_or_as_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, "parquet", [texts(5)])
    assert model_settings(config).vocabulary == 512
    assert model_settings(config.replace(vocab_size=1000)).vocabulary == 1000
    assert model_settings(Config()).vocabulary == 267
    with pytest.raises(PingLlmError, match="vocab_size must be 0 or at least 267"):
        model_settings(Config(vocab_size=100))


@pytest.mark.slow
def test_another_vocabulary_on_resume_is_refused_and_harms_no_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, "parquet", [texts(30)], steps=2)
    train(config)
    with pytest.raises(PingLlmError, match="vocab_size: 0 then, 600 now"):
        train(config.replace(vocab_size=600, steps=3))
    assert train(config.replace(vocab_size=512, steps=3))["resumed_from"] == 2


@pytest.mark.slow
def test_training_continues_to_its_end_when_the_data_has_ended(tmp_path: Path) -> None:
    config = config_of(tmp_path, "parquet", [texts(10)], num_epoch=1, steps=8)
    assert train(config)["complete"]
    assert losses(config)[0] > 1
    assert losses(config)[-1] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_two_processes_with_uneven_data_end_together_and_resume_exactly(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, kind, [texts(50), texts(20, seed=1)], num_epoch=1, distributed=True, steps=18)
    run_on_two(tmp_path, config.replace(run_name="whole"))
    run_on_two(tmp_path, config.replace(steps=5))
    run_on_two(tmp_path, config)
    assert len(losses(config)) == 18
    assert losses(config) == pytest.approx(losses(config.replace(run_name="whole")), rel=1e-6)
    assert losses(config)[-1] == 0.0


def run_on_two(folder: Path, config: Config) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (folder / "run.yml").write_text(config.replace(per_device_batch_size=4.0).to_yaml())
    shared = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "ping_llm", "train", "--config", str(folder / "run.yml")]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"JAX_PROCESS_ID": str(index), "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_arrayrecord", "text_parquet", "text_tfrecord", "text_hf"])
def test_the_configurations_train_on_the_sample_of_c4(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("datasets" if name == "text_hf" else "sentencepiece", reason="its package is not installed")
    config = load_config(ROOT / "configs" / f"{name}.yml", ["steps=4", "eval_interval=4", "eval_steps=2"])
    (tmp_path / "here").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").symlink_to(shared_data)
    monkeypatch.chdir(tmp_path / "here")  # the configurations say ../shared/data
    folders = {"base_output_directory": str(tmp_path / "runs"), "data_cache_dir": str(tmp_path / "cache")}
    summary = train(config.replace(run_name=name, max_target_length=64, **folders))
    assert summary["complete"]
    assert 7 < summary["eval_loss"] < 11
