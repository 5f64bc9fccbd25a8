"""What `make dist` builds installs into an empty environment, with the newest dependencies: few, and it answers."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MOST_PACKAGES, MOST_BYTES = 25, 600e6
ROOT = Path(__file__).resolve().parents[1]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_", "PING_LLM"))}


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, folder=ROOT)
    return folder


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    sdist = next(dist.glob("*.tar.gz"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", tmp_path, sdist, folder=tmp_path)
    built = names_in(next(tmp_path.glob("*.whl")))
    assert built == names_in(next(dist.glob("*.whl")))
    assert any(name.endswith(".safetensors") for name in built), "the weights of the completer belong to the package"


def test_the_wheel_answers_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    install = [f"{tmp_path}/env/bin/python", "-m", "pip", "install", "--quiet", str(next(dist.glob("*.whl")))]
    installed = subprocess.run(install, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    if "No matching distribution" in installed.stderr or "Temporary failure in name resolution" in installed.stderr:
        pytest.skip("no package registry can be reached from here")
    assert installed.returncode == 0, installed.stderr[-2000:]
    pairs = [(s, d) for s in range(6) for d in range(6) if s != d and (s, d) != (1, 4)]
    pings = [f"10.0.{s}.1,10.0.{d}.1,{20 + 3 * s + 5 * d}" for s, d in pairs]
    (tmp_path / "pings.csv").write_text("\n".join(["src_addr,dst_addr,rtt", *pings]))
    question = ["--history", "pings.csv", "--src", "10.0.1.1", "--dst", "10.0.4.1", "--json"]
    answer = run(tmp_path / "env/bin/ping-llm", "predict", *question, folder=tmp_path)
    assert 20 < json.loads(answer.splitlines()[-1])["predictions"][0]["predictions"] < 90
    scored = run(tmp_path / "env/bin/ping-llm", "evaluate", "--data", "pings.csv", "--json", folder=tmp_path)
    assert json.loads(scored.splitlines()[-1])["protocols"]["unseen_pair"].keys() > {"model", "vivaldi", "prefix_trees"}
    listed = run(tmp_path / "env/bin/python", "-m", "pip", "list", "--format", "json", folder=tmp_path)
    packages = {found["name"].lower() for found in json.loads(listed)} - {"pip", "setuptools", "ping-llm"}
    assert len(packages) <= MOST_PACKAGES, sorted(packages)
    files = [file for file in (tmp_path / "env/lib").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES  # with pip itself
    version = run(tmp_path / "env/bin/python", "-c", "import ping_llm; print(ping_llm.__version__)", folder=tmp_path)
    assert version.strip() in next(dist.glob("*.whl")).name
