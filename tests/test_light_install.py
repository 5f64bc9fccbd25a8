"""`pip install ping-llm`, without extras: what can be done with it, what it loads, and how NumPy stands in for JAX."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from ping_llm.core.rtt import Observations, Questions
from ping_llm.predict.predictor import Predictor
from ping_llm.runs.trained import SHIPPED

EXTRAS: Final = (
    "array_record", "duckdb", "fastapi", "flax", "fsspec", "grain", "jax", "jaxlib", "llvmlite",
    "matplotlib", "numba", "optax", "orbax", "pandas", "psutil", "ray", "tenacity", "tensorstore", "uvicorn",
)  # fmt: skip
PROGRAM: Final = """
import json, sys
class WithoutExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
EXTRAS, sys.argv = json.loads(sys.argv[1]), ["ping-llm", *sys.argv[2:]]
sys.meta_path.insert(0, WithoutExtras())
from ping_llm.cli.main import main
try:
    main()
finally:
    print("\\nloaded", *sys.modules)
"""


def run(*arguments: str, folder: Path) -> tuple[str, set[str], str]:
    """What a command prints, which modules it loads, and its last line of errors, where there are no extras."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(EXTRAS), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    printed, _, loaded = done.stdout.rpartition("\nloaded ")
    return printed, set(loaded.split()), (done.stderr.splitlines() or [""])[-1]


@pytest.fixture
def pings(tmp_path: Path) -> Path:
    pairs = [(s, d) for s in range(6) for d in range(6) if s != d and (s, d) != (1, 4)]
    lines = [f"10.0.{s}.1,10.0.{d}.1,{20 + 3 * s + 5 * d}" for s, d in pairs]
    (tmp_path / "pings.csv").write_text("\n".join(["src_addr,dst_addr,rtt", *lines]))
    return tmp_path


def test_help_loads_neither_arrays_nor_configuration(tmp_path: Path) -> None:
    printed, loaded, _ = run("--help", folder=tmp_path)
    assert "predict" in printed
    assert not loaded & {"numpy", "pyarrow", "scipy", "sklearn", "yaml", "ping_llm.config.keys", "asyncio"}


def test_a_prediction_loads_what_it_needs(pings: Path) -> None:
    question = ["--history", "pings.csv", "--src", "10.0.1.1", "--dst", "10.0.4.1", "--json"]
    printed, loaded, error = run("predict", *question, folder=pings)
    assert 20 < json.loads(printed.splitlines()[-1])["predictions"][0]["predictions"] < 90, error
    assert not loaded & {"sklearn", "jinja2", "ping_llm.evaluate", "ping_llm.baselines", "ping_llm.training"}


def test_measurements_are_simulated_split_evaluated_and_a_run_is_reported(pings: Path) -> None:
    assert run("simulate", "--output", "raw", "--measurements", "3000", folder=pings)[2] == ""
    assert "for training" in run("split", "pings.csv", "--output", "split", folder=pings)[0]
    chosen = ["--protocol", "unseen_pair", "--predictors", "completer,vivaldi,dmfsgd,prefix*", "--json"]
    printed, _, error = run("evaluate", "--data", "split", *chosen, folder=pings)
    scores = json.loads(printed.splitlines()[-1])["protocols"]["unseen_pair"]
    assert {"model", "vivaldi", "dmfsgd", "prefix_trees"} == scores.keys(), error
    (pings / "run").mkdir()
    (pings / "run" / "config.yml").write_text((SHIPPED / "config.yml").read_text())
    (pings / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n')
    run("report", "run", folder=pings)
    assert "completer-long" in (pings / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("train", "train dataset_type=synthetic"),
        ("train", "predict --history pings.csv --src 10.0.1.1 --dst 10.0.4.1 --checkpoint run"),
        ("data", "prepare --input pings.csv --output rows"),
        ("data", "inspect rows rows"),
        ("remote", "predict --history s3://bucket/x.csv --src 10.0.1.1 --dst 10.0.4.1"),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(pings: Path, extra: str, command: str) -> None:
    (pings / "run").mkdir()
    (pings / "run" / "config.yml").write_text("run_name: run\n")
    error = run(*command.split(), folder=pings)[2]
    assert error.startswith("error: ")
    assert error.endswith(f'pip install "ping-llm[{extra}]"')


def test_the_web_page_and_plots_name_their_extras(pings: Path) -> None:
    assert run("serve", folder=pings)[2].endswith('pip install "ping-llm[serve]"')
    plots = run("evaluate", "--data", "pings.csv", "--predictors", "completer", "--plots", "plots", folder=pings)[2]
    assert "ping-llm[plots]" in plots


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"whole": 64, "context": 64, "votes": 2}])
def test_numpy_answers_as_jax_does(settings: dict[str, Any]) -> None:
    """Also from more positions than are computed at once, with failures, times, prefixes and unknown nodes."""
    rng, count = np.random.default_rng(0), 400
    known = Observations(
        source=rng.integers(0, 30, count),
        destination=rng.integers(30, 60, count),
        time_s=1.7e9 + rng.uniform(0, 1e6, count),
        rtt_ms=np.where(rng.random(count) < 0.1, np.nan, rng.lognormal(3, 1, count)),
    )
    nodes = [f"10.{n % 5}.{n % 7}.{n}" for n in range(62)]
    moment = np.where(np.arange(300) < 3, 1.7e9 + 5e5, np.nan)
    asked = Questions(source=rng.integers(-1, 61, 300), destination=rng.integers(-1, 62, 300), time_s=moment)
    plain, compiled = (
        Predictor.from_pretrained(None, backend=backend, **settings).predict(known, asked, nodes)
        for backend in ("numpy", "jax")
    )
    values = np.geomspace(0.1, 5000, 200)[None]
    np.testing.assert_allclose(plain.cdf(values), compiled.cdf(values), atol=1e-4)
    np.testing.assert_allclose(plain.p_failed, compiled.p_failed, atol=1e-5)
    levels = [0.05, 0.5, 0.95]
    np.testing.assert_allclose(plain.quantile(levels), compiled.quantile(levels), rtol=1e-3)
