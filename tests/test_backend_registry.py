"""Finding backends: ours, those of other packages, and what is said when there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config_fixtures import refusal
from ping_llm.config import Config
from ping_llm.config.keys import DATASET_TYPES
from ping_llm.data import registry
from ping_llm.data.registry import make_eval_loader, make_train_loader

_BACKEND = """
import numpy as np
from fractions import Fraction
from ping_llm.pipeline.synthetic import SyntheticLoader, SyntheticSettings

def train_loader(config, *, devices, host, hosts, state):
    settings = SyntheticSettings(global_batch_size=2, length=64, seed=7)
    return SyntheticLoader(settings, host=host, hosts=hosts, state=state)

def eval_loader(config, *, devices, host, hosts):
    return SyntheticLoader(SyntheticSettings(global_batch_size=2, length=64, seed=8), last_step=0)
"""

_USE = """
from ping_llm.config import Config
from ping_llm.pipeline.factory import make_eval_loader, make_train_loader
config = Config(dataset_type="other")
with make_train_loader(config) as loader:
    print(next(loader)["inputs"].shape)
with make_eval_loader(config) as loader:
    print(len(list(loader)))
"""


def install(folder: Path, code: str) -> dict[str, str]:
    """A package with a backend `other`, as pip would leave it; the environment that sees it."""
    (folder / "other_backend.py").write_text(code)
    info = folder / "other_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ping_llm.backends]\nother = other_backend\n")
    return os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}


def use(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _USE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_every_dataset_type_has_a_module_with_both_functions() -> None:
    for name in DATASET_TYPES:
        backend = registry.find(name)
        assert callable(backend.train_loader)
        assert callable(backend.eval_loader)


def test_finding_ours_imports_none_of_the_optional_packages() -> None:
    code = (
        "import sys\nfrom ping_llm.backends import registry\nfrom ping_llm.config.keys import DATASET_TYPES\n"
        "for name in DATASET_TYPES: registry.find(name)\n"
        "print([m for m in ('tensorflow', 'datasets', 'sentencepiece', 'tiktoken', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


def test_another_package_adds_a_backend_by_its_entry_point(tmp_path: Path) -> None:
    done = use(install(tmp_path, _BACKEND))
    assert done.stdout.split("\n")[:2] == ["(2, 64)", "1"], done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_the_kind", "the backend 'other' (other_backend) cannot be loaded: ModuleNotFoundError"),
        ("train_loader = print", "the backend 'other' (other_backend) has no function eval_loader"),
    ],
)
def test_a_backend_that_cannot_be_used_is_named(tmp_path: Path, code: str, message: str) -> None:
    done = use(install(tmp_path, code))
    assert done.returncode != 0
    assert message in done.stderr


def test_a_name_that_nobody_has_is_refused_with_those_there_are() -> None:
    assert refusal(None, "dataset_type=other").endswith(
        "one of network, grain, hf, tfds, c4_mlperf, synthetic, worlds, measured, not 'other'"
    )


def test_synthetic_batches_go_through_the_same_two_functions() -> None:
    config = Config(dataset_type="synthetic", per_device_batch_size=4, max_target_length=64, eval_steps=3)
    with make_train_loader(config, host=1, hosts=2) as loader:
        assert next(loader)["inputs"].shape == (2, 64)
    with make_eval_loader(config) as evaluation:
        assert len(list(evaluation)) == 3
