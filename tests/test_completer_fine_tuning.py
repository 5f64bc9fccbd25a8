"""Fine-tuning the completer: contexts and questions from real measurements."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations
from ping_llm.prior.fine_tuning import measured_batch, on_device_measurements
from ping_llm.prior.prng import Columns
from ping_llm.prior.selection import ANSWERED, EMPTY, FAILED
from ping_llm.prior.worlds import WorldSettings
from ping_llm.runs.trained import load_trained
from ping_llm.training import train

SETTINGS = WorldSettings(context=48, questions=16)
NODES = 20
NAMES = [f"node {number}" for number in range(NODES)]
"""No addresses, so that nobody shares a prefix."""
Contexts = dict[str, np.ndarray]


def measurements(timed: bool, count: int = 600, seed: int = 0) -> Observations:
    random = np.random.default_rng(seed)
    source = random.integers(0, NODES, count)
    destination = (source + random.integers(1, NODES, count)) % NODES
    place = random.normal(size=(NODES, 2)) * 30
    rtt = np.hypot(*(place[source] - place[destination]).T) + 5 + random.exponential(0.5, count)
    rtt *= 1 + 1e-5 * np.argsort(np.argsort(rtt))  # no two alike: a measurement can be recognised by its RTT
    rtt[random.random(count) < 0.05] = np.nan
    time = np.sort(random.uniform(0, 1e5, count)) + 1.7e9 if timed else np.full(count, np.nan)
    return Observations(source=source, destination=destination, time_s=time, rtt_ms=rtt.astype(np.float32))


@partial(jax.jit, static_argnums=0)
def _made(settings: WorldSettings, data: Columns, step: Any, rows: Any) -> Any:
    return measured_batch(settings, data, rows * 0, rows * 0 + step, rows)


def contexts(known: Observations, step: int = 0, rows: int = 32) -> Contexts:
    made = _made(SETTINGS, on_device_measurements(known, NAMES), step, np.arange(rows))
    return {name: np.asarray(column) for name, column in made.items()}


@pytest.fixture(scope="module", params=[True, False], ids=["timed", "timeless"])
def case(request: pytest.FixtureRequest) -> tuple[bool, Observations, Contexts]:
    known = measurements(timed=request.param)
    return request.param, known, contexts(known)


def nodes_of_numbers(known: Observations, answered: list[tuple[int, int, float]]) -> dict[int, int]:
    """The nodes that numbers of one context stand for: a measurement is recognised by its RTT."""
    log_rtt = np.log(np.maximum(known.rtt_ms, 0.01))
    nodes: dict[int, int] = {}
    for source, destination, value in answered:
        (which,) = np.flatnonzero(np.abs(log_rtt - value) < 4e-6)
        for number, node in ((source, known.source[which]), (destination, known.destination[which])):
            assert nodes.setdefault(number, int(node)) == node
    assert len(set(nodes.values())) == len(nodes)
    return nodes


def test_every_part_of_a_context_was_measured_and_every_question_has_the_answer_that_was(
    case: tuple[bool, Observations, Contexts],
) -> None:
    _, known, shown = case
    failures = set(zip(known.source[np.isnan(known.rtt_ms)], known.destination[np.isnan(known.rtt_ms)], strict=True))
    for row in range(len(shown["context_length"])):
        kind = shown["context_kind"][row]
        asked, lost = shown["question_counts"][row], shown["question_failed"][row]
        answered, failed = [], []
        for part, is_answered, is_failed in (
            ("context", kind == ANSWERED, kind == FAILED),
            ("question", asked & ~lost, asked & lost),
        ):
            columns = [shown[f"{part}_{name}"][row] for name in ("source", "destination", "log_rtt")]
            answered += list(zip(*(column[is_answered] for column in columns), strict=True))
            failed += list(zip(*(column[is_failed] for column in columns[:2]), strict=True))
        nodes = nodes_of_numbers(known, answered)
        assert len(answered) > 10
        for source, destination in failed:
            if source in nodes and destination in nodes:
                assert (nodes[source], nodes[destination]) in failures


def test_no_answer_is_in_the_context(case: tuple[bool, Observations, Contexts]) -> None:
    timed, _, shown = case
    for row in range(len(shown["context_length"])):
        holds = shown["context_kind"][row] == ANSWERED
        context = set(
            zip(*(shown[f"context_{end}"][row][holds] for end in ("source", "destination", "log_rtt")), strict=True)
        )
        asked = shown["question_counts"][row] & ~shown["question_failed"][row]
        questions = set(
            zip(*(shown[f"question_{end}"][row][asked] for end in ("source", "destination", "log_rtt")), strict=True)
        )
        assert not context & questions
        if timed:  # and nothing in it is later than any question
            ages = shown["context_age_s"][row][shown["context_kind"][row] != EMPTY]
            assert (ages > 0).all()


def test_without_times_queried_pairs_are_never_known_in_either_direction() -> None:
    shown = contexts(measurements(timed=False))
    for row in range(len(shown["context_length"])):
        holds = shown["context_kind"][row] != EMPTY
        context = {
            frozenset(p)
            for p in zip(shown["context_source"][row][holds], shown["context_destination"][row][holds], strict=True)
        }
        first = frozenset((shown["question_source"][row, 0], shown["question_destination"][row, 0]))
        assert first not in context


@pytest.mark.slow
def test_with_times_some_questions_are_about_pairs_that_are_known_and_some_are_not() -> None:
    shown = contexts(measurements(timed=True), rows=64)
    known_before = []
    for row in range(64):
        holds = shown["context_kind"][row] != EMPTY
        context = {
            frozenset(p)
            for p in zip(shown["context_source"][row][holds], shown["context_destination"][row][holds], strict=True)
        }
        known_before.append(
            frozenset((shown["question_source"][row, 0], shown["question_destination"][row, 0])) in context
        )
    assert 0.1 < np.mean(known_before) < 0.7


@pytest.mark.slow
def test_a_context_depends_on_its_own_numbers_alone() -> None:
    known = measurements(timed=True)
    data = on_device_measurements(known, NAMES)
    whole = contexts(known, step=3, rows=8)
    part = _made(SETTINGS, data, 3, np.array([5, 2]))
    for name, column in part.items():
        np.testing.assert_array_equal(np.asarray(column), whole[name][[5, 2]])
    other = contexts(known, step=4, rows=8)
    assert (other["question_log_rtt"] != whole["question_log_rtt"]).any()


@pytest.mark.slow
def test_shared_prefixes_are_those_of_the_addresses() -> None:
    known = measurements(timed=True)
    data = on_device_measurements(known, [f"192.0.{node % 3}.{node}" for node in range(NODES)])
    made = {name: np.asarray(column) for name, column in _made(SETTINGS, data, 0, np.arange(4)).items()}
    for row in range(4):
        holds = made["context_kind"][row] == ANSWERED
        columns = [made[f"context_{name}"][row][holds] for name in ("source", "destination", "log_rtt")]
        nodes = nodes_of_numbers(known, list(zip(*columns, strict=True)))
        groups = made["node_words"][row, :, 1:]
        for one, node in nodes.items():
            for other, another in nodes.items():
                assert (groups[one, 0] == groups[other, 0]) == (node % 3 == another % 3)
                assert (groups[one, 1] == groups[other, 1]) == (node == another)  # all share it: it makes no group


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(PingLlmError, match="at least two"):
        on_device_measurements(measurements(timed=True, count=1), NAMES)


@pytest.mark.slow
def test_a_completer_learns_from_measurement_files_through_the_same_trainer(tmp_path: Path) -> None:
    known = measurements(timed=True)
    table = pa.table(
        {
            "src_addr": [f"192.0.2.{n}" for n in known.source],
            "dst_addr": [f"192.0.2.{n}" for n in known.destination],
            "event_time": known.time_s,
            "rtt": pa.array(known.rtt_ms, from_pandas=True),
        }
    )
    csv.write_csv(table, tmp_path / "pings.csv")
    csv.write_csv(table.slice(1), tmp_path / "other.csv")
    config = Config(
        run_name="tuned",
        base_output_directory=str(tmp_path),
        dataset_type="measured",
        network_train_files=str(tmp_path / "pings.csv"),
        measured_share=1.0,
        worlds_context=32,
        worlds_questions=8,
        worlds_most_nodes=12,
        completer_identity=8,
        base_num_decoder_layers=1,
        base_emb_dim=32,
        base_num_query_heads=2,
        head_dim=16,
        base_mlp_dim=32,
        dtype="float32",
        per_device_batch_size=8,
        steps=30,
        learning_rate=3e-3,
        enable_tensorboard=False,
    )
    lines = [json.loads(line) for line in (Path(train(config)["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    (tmp_path / "pings.csv").unlink()
    assert load_trained(tmp_path / "ping-llm" / "tuned").is_completer  # the measurements are not needed any more
    with pytest.raises(PingLlmError, match="measurements"):
        train(config.replace(steps=40, network_train_files=str(tmp_path / "other.csv")))
    with pytest.raises(PingLlmError, match="network_train_files is not set"):
        train(config.replace(run_name="none", network_train_files=""))
