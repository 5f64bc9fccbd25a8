"""The command line as a person meets it: help that teaches, results as text or JSON, errors in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    ["simulate"],
    ["import", "atlas"],
    ["split"],
    ["plan"],
    ["prepare"],
    ["train"],
    ["evaluate"],
    ["report"],
    ["predict"],
    ["anomalies"],
    ["destinations"],
    ["complete"],
    ["export"],
    ["inspect", "rows"],
    ["inspect", "batches"],
    ["inspect", "batch"],
    ["bench", "prepare"],
    ["bench", "pipeline"],
]


def run(*arguments: str | int | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ping_llm", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_teaches_by_example_and_speaks_json(command: list[str]) -> None:
    text = run(*command, "--help").stdout
    assert "Example" in text
    assert f"ping-llm {' '.join(command)} " in text
    assert "--json" in text


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    for command in COMMANDS:
        assert command[0] in text


@pytest.mark.slow
def test_the_whole_path_from_simulation_to_batches(tmp_path: Path) -> None:
    made = json.loads(run("simulate", "-n", 20_000, "--seed", 3, "-o", tmp_path / "raw", "--json").stdout)
    assert made["measurements"] == 20_000
    rows = json.loads(run("prepare", "-i", tmp_path / "raw", "-o", tmp_path / "rows", "--json").stdout)
    assert rows["written"] == 20_000
    seen = json.loads(run("inspect", "rows", tmp_path / "rows", "--json").stdout)
    assert seen["fingerprint"] == rows["fingerprint"]
    lines = run("inspect", "batches", tmp_path / "rows", "--steps", "0:3", "--batch-size", 4, "--json").stdout
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [0, 1, 2]


def test_simulator_settings_are_checked_and_misspellings_corrected(tmp_path: Path) -> None:
    done = run("simulate", "-o", tmp_path / "raw", "--set", "ipv6_shar=0", code=1)
    assert done.stderr == "error: unknown simulator setting 'ipv6_shar'; did you mean 'ipv6_share'?\n"
    done = run("simulate", "-n", 1000, "-o", tmp_path / "raw", "--set", "ipv6_share=0", "--json")
    assert json.loads(done.stdout)["measurements"] == 1000


def test_an_import_reports_what_it_dropped_and_where(tmp_path: Path) -> None:
    result = {"type": "ping", "from": "192.0.2.1", "dst_addr": "198.51.100.7", "af": 4, "timestamp": 1_700_000_000}
    lines = [json.dumps(result | {"result": [{"rtt": 12.5}]}), "not json", json.dumps(result | {"type": "dns"})]
    (tmp_path / "dump.jsonl").write_text("\n".join(lines))
    text = run("import", "atlas", tmp_path / "dump.jsonl", "-o", tmp_path / "raw").stdout
    assert "3 results gave 1 measurements" in text.replace("\n", " ")
    assert "malformed_json" in text
    assert "dump.jsonl:2" in text.replace("\n", "")
    assert "not_ping" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "batches", "nowhere"], "no such folder: nowhere"),
        (["inspect", "rows", "nowhere"], "no such folder: nowhere"),
        (["import", "atlas", "nowhere.json", "-o", "x"], "nowhere.json: no such file"),
        (["prepare", "-i", "a.csv", "-o", "x", "--columns", "rtt"], "write COLUMN=NAME"),
        (["prepare", "-i", "a.csv", "-o", "x", "--max-row-size-mb", "0"], "largest row size"),
        (["simulate", "-o", "x", "--set", "seed"], "write NAME=VALUE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_are_one_line_that_says_what_to_do(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(*(argument if argument != "x" else tmp_path / "x" for argument in arguments), code=1)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_wrong_option_is_a_usage_error() -> None:
    assert "--imput" in run("prepare", "--imput", "a", code=2).stderr
