"""`ping-llm bench backends`: every backend in one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ping_llm", "bench", "backends", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_measures_all_backends_that_are_installed_and_names_the_others(shared_data: Path) -> None:
    done = bench("--data", str(shared_data / "c4-minimal"), "--seconds", "0.3", "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    found = result["backends"]
    assert list(found) == [
        "grain_arrayrecord",
        "grain_parquet",
        "grain_tfrecord",
        "hf",
        "tfds",
        "c4_mlperf",
        "synthetic",
    ]
    for name, numbers in found.items():
        assert "skipped" in numbers or numbers["tokens_per_core_s"] > 0, name
    # Ten times the 55,000 that are published for one worker.
    assert found["grain_arrayrecord"]["tokens_per_core_s"] > 550_000
    # All but tokenising itself costs less than tokenising does.
    assert found["grain_arrayrecord"]["ratio"] > 0.5
    assert found["grain_arrayrecord"]["time"]["encode"] > 0.5


def test_says_what_is_wrong_with_the_folder(tmp_path: Path) -> None:
    done = bench("--data", str(tmp_path))
    assert done.returncode == 1
    assert "is not laid out as the C4 sample" in done.stderr
    assert len(done.stderr.splitlines()) == 1
