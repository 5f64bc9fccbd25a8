"""The text pipelines that come with MaxText, through the launcher, offline."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from maxtext_runs import TINY, run_here

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")

PIPELINES: dict[str, dict[str, str]] = {
    "arrayrecord": {
        "dataset_type": "grain",
        "grain_file_type": "arrayrecord",
        "grain_train_files": "{c4}/c4/en/3.0.1/c4-train.array_record*",
        "grain_eval_files": "{c4}/c4/en/3.0.1/c4-validation.array_record*",
    },
    "parquet": {
        "dataset_type": "grain",
        "grain_file_type": "parquet",
        "grain_train_files": "{c4}/hf/c4/c4-train-*.parquet",
        "grain_eval_files": "{c4}/hf/c4/c4-validation-*.parquet",
    },
    "tfrecord": {
        "dataset_type": "grain",
        "grain_file_type": "tfrecord",
        "grain_train_files": "{c4}/c4/en/3.0.1/__local_c4_builder-train.tfrecord*",
        "grain_eval_files": "{c4}/c4/en/3.0.1/__local_c4_builder-validation.tfrecord*",
    },
    "hf": {
        "dataset_type": "hf",
        "hf_path": "parquet",
        "hf_train_files": "{c4}/hf/c4/c4-train-*.parquet",
        "hf_eval_files": "{c4}/hf/c4/c4-validation-*.parquet",
        "tokenizer_path": "{maxtext}/assets/tokenizers/qwen3-tokenizer",
        "vocab_size": "151936",
    },
    "tfds": {
        "dataset_type": "tfds",
        "dataset_path": "{c4}",
        "dataset_name": "c4/en:3.0.1",
        "eval_dataset_name": "c4/en:3.0.1",
    },
    "synthetic": {"dataset_type": "synthetic"},
}
NEEDS = {"hf": "datasets", "tfds": "tensorflow_datasets"}


@pytest.mark.parametrize("name", PIPELINES)
def test_text_pipelines_of_maxtext_run_through_the_launcher(
    name: str, c4: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"dataset_type={name} needs the package {NEEDS[name]}")
    keys: dict[str, Any] = TINY | {
        "run_name": name,
        "base_output_directory": str(tmp_path),
        "enable_checkpointing": False,
        "steps": 3,
        "per_device_batch_size": 2,
        "eval_interval": 2,
        "eval_steps": 1,
        "vocab_size": 32768,
        "tokenizer_path": c4 / "tokenizer.default.model",
        "grain_worker_count": 0,
        "grain_worker_count_eval": 0,
    }
    package = importlib.import_module("maxtext").__path__[0]
    keys |= {key: value.format(c4=c4, maxtext=package) for key, value in PIPELINES[name].items()}
    caplog.set_level("INFO")
    assert run_here(keys, tmp_path / "notes", config="base.yml").code == 0
    assert "completed step: 2" in caplog.text
    assert "Completed eval after train step 2" in caplog.text
    assert "total_weights: 0" not in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        {"dataset_type": "grain", "grain_file_type": "arrayrecord", "grain_train_files": "/nowhere/x*"},
        {"dataset_type": "tfds", "dataset_path": "/nowhere", "dataset_name": "c4/en:3.0.1"},
    ],
)
def test_data_that_maxtext_cannot_use_is_one_line(
    data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"run_name": "none", "base_output_directory": str(tmp_path), "enable_checkpointing": False, "steps": 1}
    assert run_here(TINY | keys | {"vocab_size": 32768} | data, tmp_path / "notes", config="base.yml").code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: MaxText cannot use its data: ")
