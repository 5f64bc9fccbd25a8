"""Run folders of strangers: hostile and damaged files give a page with a note, never a trace or markup of theirs."""

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ping_llm.batches.mixture import Mixture
from ping_llm.batches.spec import DataState
from ping_llm.core.errors import PingLlmError
from report_fixtures import BEGIN, PIPELINE, finished, page_of, records

HOSTILE = "\"><img src=x onerror=alert(1)>'</script><script>alert(2)</script>{{7*7}}\u2028\x00\ud800"
VALUES: list[Any] = [
    *(HOSTILE, "", None, True, -1, 0, 2**70, -(10**400), 1e308, float("nan"), float("inf"), -0.0, "9" * 400),
    *([], {}, [HOSTILE], {HOSTILE: HOSTILE}, [[]], {"a": {"b": [1]}}),
]
FILES = (
    "metrics.jsonl",
    "sessions.jsonl",
    "summary.json",
    "pipeline.json",
    "evaluation.json",
    "data.json",
    "config.yml",
)
SCORES = {"median_re": 0.2, "p90_re": 0.5, "mae": 3.0, "nll_bits": 9.0, "questions": 10}
EVALUATION = {
    "protocols": {"unseen_pair": {"model": SCORES, "vivaldi": SCORES, "oracle": SCORES}},
    "names": {"model": "mine", "vivaldi": "vivaldi"},
    "models": ["model"],
    "shares": [0.25, 0.5, 0.75],
    "curves": {"unseen_pair": {"model": {"relative_error": [0.1, 0.2, 0.3], "inside": [0.2, 0.5, 0.8]}}},
}
IDENTITY = {"global_batch_size": 4, "rows": ["ab" * 32], "dataset_type": "network"}
DATA = DataState(next_step=5, identity=IDENTITY, mixture=Mixture.of((Fraction(1),)))


def run_of(folder: Path) -> Path:
    run = finished(folder, 5, pipeline=PIPELINE, evaluation=EVALUATION)
    (run / "data.json").write_text(DATA.to_json())
    return run


def spoiled(value: Any, random: random.Random) -> Any:
    """The value with one of its parts, or a key, exchanged for something that nobody expects."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {HOSTILE if k == key else k: v for k, v in value.items()}
        return value | {key: spoiled(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], spoiled(value[at], random), *value[at + 1 :]]
    return random.choice(VALUES)


def spoil(file: Path, random: random.Random) -> None:
    text = file.read_text(errors="replace")
    if file.suffix == ".yml" or random.random() < 0.3:  # bytes: flipped, cut off, or put in
        at, data = random.randrange(len(text)), text.encode()
        cut = [
            data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
            data[:at],
            data[:at] + HOSTILE.encode("utf-8", "replace") + data[at:],
        ]
        file.write_bytes(random.choice(cut))
    elif file.suffix == ".jsonl":
        lines = text.splitlines()
        at = random.randrange(len(lines))
        lines[at] = again(lines[at], random)
        file.write_text("\n".join(lines))
    else:
        file.write_text(again(text, random))


def again(text: str, random: random.Random) -> str:
    try:
        return json.dumps(spoiled(json.loads(text), random))
    except ValueError:  # spoiled before
        return "{"


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_run_folder_holds_its_report_is_a_page_of_ours_alone(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    expected = page_of(run_of(tmp_path / "whole"))
    for number in range(25):
        run = run_of(tmp_path / f"run-{number}")
        for _ in range(rng.choice((1, 1, 3))):
            spoil(run / rng.choice(FILES), rng)
        page = page_of(run)
        assert page.scripts == expected.scripts
        assert page.count("img") == 0
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert page.open == []
    page_of(*(tmp_path / f"run-{number}" for number in range(5)))


def test_lines_of_metrics_that_cannot_be_read_are_counted_in_a_note(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 5)
    lines = [json.dumps(record) for record in records(5)]
    broken = ['{"step": 7, "loss"', "[1]", '{"step": "x", "loss": 1}', "\x00\x00", "\ufffd"]
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], *broken, *lines[3:], '{"step": 9, "lo']))
    page = page_of(run)
    assert "5 lines of metrics.jsonl cannot be read" in page.text
    assert "5 of 50 steps" in page.text


def test_a_last_line_that_was_cut_off_is_no_fault(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 5, sessions=[BEGIN])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert "cannot be read" not in page_of(run).text


@pytest.mark.parametrize(
    "text", ["{" * 100_000, '{"protocols": ' + "[" * 100_000, "\x00", '{"protocols": {}}' * 2, "9" * 5000]
)
def test_an_evaluation_of_a_stranger_is_shown_or_refused_in_one_line(tmp_path: Path, text: str) -> None:
    run, file = finished(tmp_path / "run", 5), tmp_path / "evaluation.json"
    file.write_text(text)
    with pytest.raises(PingLlmError) as refused:
        page_of(run, evaluations=[file])
    assert "\n" not in str(refused.value)
    (run / "evaluation.json").write_text(text)
    assert "evaluation.json" in page_of(run).text
