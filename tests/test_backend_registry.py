"""Finding backends: ours, those of other packages, and what is said when there is none."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from config_fixtures import refusal
from ping_llm.config import Config
from ping_llm.config.keys import DATASET_TYPES, installed_backends
from ping_llm.core.errors import PingLlmError
from ping_llm.data import registry

_BACKEND = """
from ping_llm.data.registry import StepLoader
from ping_llm.data.synthetic import random_batch

def train_loader(config, part, state):
    return StepLoader(lambda step: random_batch(2, 64, number=step), {"dataset_type": "other"}, state=state)

def eval_loader(config, part):
    return StepLoader(lambda step: random_batch(2, 64, seed=1), {}, last_step=0)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts a package with a backend `other` where Python finds packages, as pip would leave it."""

    def installed(code: str) -> None:
        (tmp_path / "other_backend.py").write_text(code)
        info = tmp_path / "other_backend-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ping_llm.backends]\nother = other_backend\n")
        monkeypatch.syspath_prepend(tmp_path)
        installed_backends.cache_clear()

    yield installed
    sys.modules.pop("other_backend", None)
    monkeypatch.undo()
    installed_backends.cache_clear()


def test_every_dataset_type_has_a_module_with_both_functions_and_imports_no_optional_package() -> None:
    code = (
        "import sys\nfrom ping_llm.data import registry\nfrom ping_llm.config.keys import DATASET_TYPES\n"
        "found = [registry.find(name) for name in DATASET_TYPES]\n"
        "print(all(callable(b.train_loader) and callable(b.eval_loader) for b in found), len(found))\n"
        "print([m for m in ('tensorflow', 'datasets', 'sentencepiece', 'tiktoken', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [f"True {len(DATASET_TYPES)}", "[]"]


def test_another_package_adds_a_backend_by_its_entry_point(install: Callable[[str], None]) -> None:
    install(_BACKEND)
    config = Config(dataset_type="other")
    with registry.make_train_loader(config) as loader:
        assert next(loader)["inputs"].shape == (2, 64)
    with registry.make_eval_loader(config) as evaluation:
        assert len(list(evaluation)) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_the_kind", "the backend 'other' (other_backend) cannot be loaded: ModuleNotFoundError"),
        ("train_loader = print", "the backend 'other' (other_backend) has no function eval_loader"),
    ],
)
def test_a_backend_that_cannot_be_used_is_named(install: Callable[[str], None], code: str, message: str) -> None:
    install(code)
    with pytest.raises(PingLlmError) as caught:
        registry.make_train_loader(Config(dataset_type="other"))
    assert message in str(caught.value)


def test_a_name_that_nobody_has_is_refused_with_those_there_are() -> None:
    assert refusal(None, "dataset_type=other").endswith(
        "one of network, grain, hf, tfds, c4_mlperf, synthetic, worlds, measured, not 'other'"
    )
