"""Helpers of tests that train: rows of a simulated Internet, and a language model that is trained in seconds."""

import socket
from pathlib import Path
from typing import Any

from ping_llm.config import Config
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.runs import read_metrics
from ping_llm.sources.simulator import SimulatorSettings, simulate


def simulated_rows(folder: Path, measurements: int) -> Path:
    """The folder of rows, both splits, beside their measurements in `folder / "raw"`."""
    simulate(SimulatorSettings(measurements=measurements), folder / "raw")
    prepare(PrepareSettings(inputs=(str(folder / "raw" / "*.parquet"),), output=folder / "rows", workers=1))
    return folder / "rows"


def tiny_config(rows: Path, runs: Path, **changes: Any) -> Config:
    """One layer of 32 on prepared rows, without evaluation and TensorBoard, in this process."""
    values: dict[str, Any] = {
        "run_name": "tiny",
        "base_output_directory": str(runs),
        "network_train_files": str(rows),
        "per_device_batch_size": 4,
        "max_target_length": 256,
        "base_num_decoder_layers": 1,
        "base_emb_dim": 32,
        "base_num_query_heads": 2,
        "head_dim": 16,
        "base_mlp_dim": 48,
        "dtype": "float32",
        "grain_worker_count": 0,
        "enable_tensorboard": False,
    }
    return Config(**values | changes)


def folder_of(config: Config) -> Path:
    return Path(config.base_output_directory) / config.project / config.run_name


def losses(config: Config) -> list[float]:
    """Of every step, each exactly once and in order."""
    records = [record for record in read_metrics(folder_of(config) / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(len(records)))
    return [record["loss"] for record in records]


def steps_done(config: Config) -> int:
    return sum("loss" in record for record in read_metrics(folder_of(config) / "metrics.jsonl"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
