"""The command line as a person meets it: help that teaches, results as text or JSON, errors in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ping_llm.cli.main import app


def commands(command: object, *path: str) -> Iterator[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    for name, inner in below.items():
        yield from commands(inner, *path, name)
    if not below:
        yield path


COMMANDS = list(commands(get_command(app)))


def run(*arguments: str | int | Path) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def run_process(*arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_teaches_by_example_and_speaks_json(command: tuple[str, ...]) -> None:
    text = run(*command, "--help")
    assert "Example" in text
    assert f"ping-llm {' '.join(command)} " in text
    assert "--json" in text or command == ("serve",)


def test_help_lists_every_command() -> None:
    text = run("--help")
    assert {"predict", "prepare", "train"} <= {command[0] for command in COMMANDS}
    assert all(command[0] in text for command in COMMANDS)


def test_help_is_quick_because_nothing_heavy_is_imported_for_it() -> None:
    code = "import sys, ping_llm.cli.main; print(*{'jax', 'numba', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules))"
    assert run_process("-c", code, code=0).stdout == "\n"


@pytest.mark.slow
def test_the_whole_path_from_simulation_to_batches(tmp_path: Path) -> None:
    made = json.loads(run("simulate", "-n", 20_000, "--seed", 3, "-o", tmp_path / "raw", "--json"))
    assert made["measurements"] == 20_000
    rows = json.loads(run("prepare", "-i", tmp_path / "raw", "-o", tmp_path / "rows", "--json"))
    assert rows["written"] == 20_000
    seen = json.loads(run("inspect", "rows", tmp_path / "rows", "--json"))
    assert seen["fingerprint"] == rows["fingerprint"]
    lines = run("inspect", "batches", tmp_path / "rows", "--steps", "0:3", "--batch-size", 4, "--json")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [0, 1, 2]


def test_simulator_settings_reach_the_simulator(tmp_path: Path) -> None:
    text = run("simulate", "-n", 1000, "-o", tmp_path / "raw", "--set", "ipv6_share=0", "--json")
    assert json.loads(text)["measurements"] == 1000
    assert json.loads((tmp_path / "raw" / "world.json").read_text())["settings"]["ipv6_share"] == 0


def test_an_import_reports_what_it_dropped_and_where(tmp_path: Path) -> None:
    result = {"type": "ping", "from": "192.0.2.1", "dst_addr": "198.51.100.7", "af": 4, "timestamp": 1_700_000_000}
    lines = [json.dumps(result | {"result": [{"rtt": 12.5}]}), "not json", json.dumps(result | {"type": "dns"})]
    (tmp_path / "dump.jsonl").write_text("\n".join(lines))
    text = run("import", "atlas", tmp_path / "dump.jsonl", "-o", tmp_path / "raw")
    assert "3 results gave 1 measurements" in text.replace("\n", " ")
    assert "malformed_json" in text
    assert "dump.jsonl:2" in text.replace("\n", "")
    assert "not_ping" in text


def test_an_error_is_one_line_on_standard_error() -> None:
    done = run_process("-m", "ping_llm", "inspect", "rows", "nowhere", code=1)
    assert done.stderr == "error: no such folder: nowhere\n"
    assert done.stdout == ""


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ping_llm", "--version"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert done.returncode == 1
    assert done.stderr == b"error: No space left on device\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "ping_llm", "--version"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == b""


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    # So many that it takes longer than the signal does, and not so many that making their world takes a minute.
    command = [sys.executable, "-m", "ping_llm", "simulate", "-n", "20000000", "-o", str(tmp_path / "raw")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not list(tmp_path.rglob("*")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(said.splitlines()) <= 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_wrong_option_is_a_usage_error() -> None:
    done = CliRunner().invoke(app, ["prepare", "--imput", "a"])
    assert done.exit_code == 2
    assert "--imput" in done.stderr
