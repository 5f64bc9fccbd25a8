"""The benchmarks of speed: what they measure, not how fast this machine is."""

import sys
from pathlib import Path

import pytest

from backend_speed import measure_backends
from conftest import random_measurements
from ping_llm.cli.benchmarks import measure_rates
from ping_llm.core.errors import PingLlmError
from pipeline_fixtures import prepare_table
from pipeline_speed import compared
from prepare_speed import measure_prepare, run_measured


@pytest.mark.slow
def test_all_backends_that_are_installed_are_measured_and_the_others_named(shared_data: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
    found = measure_backends(shared_data / "c4-minimal", seconds=0.3)["backends"]
    in_order = ["grain_arrayrecord", "grain_parquet", "grain_tfrecord", "hf", "tfds", "c4_mlperf", "synthetic"]
    assert list(found) == in_order
    for name, numbers in found.items():
        assert "skipped" in numbers or numbers["tokens_per_core_s"] > 0, name
    assert set(found["grain_arrayrecord"]["time"]) >= {"read", "encode"}


def test_a_folder_that_is_not_the_c4_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PingLlmError, match="is not laid out as the C4 sample"):
        measure_backends(tmp_path)


def test_batches_are_measured_beside_the_plain_encoder() -> None:
    dataset = prepare_table(random_measurements(3_000))
    found = compared(dataset.folder, workers=0, batch_size=4, length=256, seconds=0.1)
    assert found["speedup"] == pytest.approx(found["real_tokens_per_s"] / found["reference_tokens_per_s"], abs=0.06)
    assert 0 <= found["padding_fraction"] < 1


@pytest.mark.slow
def test_preparation_is_measured_beside_its_yardsticks(tmp_path: Path) -> None:
    found = measure_prepare(20_000, workers=1, inside=tmp_path)
    assert found["measurements_per_s"] == pytest.approx(20_000 / found["prepare_seconds"], rel=0.01)
    assert found["peak_rss_mb"] > 50
    assert list(tmp_path.iterdir()) == []
    rates, _ = measure_rates(20_000)
    assert min(rates.partition, rates.shard, rates.index) > 0


def test_a_command_is_watched_with_the_processes_it_starts() -> None:
    child = "import time; data = bytes(range(256)) * 400_000; time.sleep(1); print('done')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    measured = run_measured([sys.executable, "-c", parent])
    assert measured.peak_rss_mb > 100
    assert measured.output == "done\n"
    with pytest.raises(PingLlmError, match=r"failed: .*no such thing"):
        run_measured([sys.executable, "-c", "raise SystemExit('no such thing')"])
