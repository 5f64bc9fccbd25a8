"""deploy/Dockerfile, without Docker: what it copies is there, what it starts is ours, and nobody is root."""

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from ping_llm.cli.main import app
from ping_llm.core.errors import PingLlmError
from ping_llm.storage.cache import DIRECTORY_VARIABLE

ROOT: Final = Path(__file__).parents[2]
FILE: Final = ROOT / "deploy" / "Dockerfile"
HADOLINT: Final = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_what_is_copied_is_part_of_the_context() -> None:
    lines = Path(f"{FILE}.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines[0] == "*"
    copied = [name for rest in of("COPY") if "--from" not in rest for name in rest.split()[:-1]]
    assert {"src", "pyproject.toml"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in kept), name


def test_it_installs_the_extra_with_the_versions_of_the_lock_file() -> None:
    (install,) = [rest for rest in of("RUN") if "pip install" in rest]
    assert '".[serve]"' in install
    assert "--constraint requirements.lock" in install


def test_it_runs_as_nobody_special_keeps_its_cache_and_looks_after_itself() -> None:
    (user,) = of("USER")
    assert int(user) > 0
    assert f"{DIRECTORY_VARIABLE}={of('VOLUME')[0]}" in of("ENV")[0]
    (check,) = of("HEALTHCHECK")
    assert "/healthz" in check
    compile(json.loads(check[check.index("[") :])[-1], "HEALTHCHECK", "exec")


def test_its_command_is_one_of_ours_and_wants_a_token() -> None:
    (entry,) = of("ENTRYPOINT")
    name, *arguments = json.loads(entry)
    assert name == "ping-llm"
    assert arguments[arguments.index("--port") + 1] == of("EXPOSE")[0]
    error = CliRunner(env={"PING_LLM_TOKEN": ""}).invoke(app, arguments).exception
    assert isinstance(error, PingLlmError)
    assert "--token-file" in str(error)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing_wrong() -> None:
    checked = subprocess.run([str(HADOLINT), str(FILE)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
