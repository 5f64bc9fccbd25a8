"""What to measure next: candidates that nobody measured, wide intervals, rare nodes, and links between islands."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from ping_llm import Predictor
from ping_llm.cli.main import app
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Observations, Questions
from ping_llm.predict.suggest import most_informative, shortlist, unmeasured_pairs


def measured(*ends: tuple[int, int]) -> Observations:
    source, destination = np.array(ends).T
    return Observations(
        source=source, destination=destination, time_s=np.full(len(ends), np.nan), rtt_ms=np.full(len(ends), 9.0)
    )


def pairs(*ends: tuple[int, int]) -> Questions:
    source, destination = np.array(ends).T
    return Questions(source=source, destination=destination, time_s=np.full(len(ends), np.nan))


def listed(found: Questions) -> list[tuple[int, int]]:
    return list(zip(found.source.tolist(), found.destination.tolist(), strict=True))


def test_candidates_are_pairs_of_one_family_that_nobody_measured_in_either_direction() -> None:
    nodes = ("192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1", "2001:db8::2")
    known = measured((0, 1), (1, 2), (2, 1), (3, 4), (4, 3))
    assert listed(unmeasured_pairs(known, nodes)) == [(0, 2)]


def test_of_too_many_candidates_those_of_rare_nodes_are_likelier() -> None:
    known = measured(*[(0, 1)] * 50, *[(2, 3)])
    common, rare = [(0, 1)] * 5_000, [(2, 3)] * 5_000
    rows = shortlist(pairs(*common, *rare), known, 50)
    assert len(rows) == len(set(rows.tolist())) == 1_050
    assert (rows >= 5_000).mean() > 0.9
    assert shortlist(pairs(*rare), known, 4_000).tolist() == list(range(5_000)), "few enough: all"


def test_the_widest_interval_comes_first_then_nodes_that_had_no_turn() -> None:
    known = measured((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0))
    possible = pairs((0, 2), (0, 3), (0, 4), (1, 5))
    assert most_informative(possible, np.array([2.0, 2.1, 2.0, 1.5]), known, 2).tolist() == [1, 3]
    assert sorted(most_informative(possible, np.ones(4), known, 9).tolist()) == [0, 1, 2, 3]


def test_two_islands_are_not_linked_again_and_again() -> None:
    known = measured(*[(n, n + 1) for n in range(5)], *[(n, n + 1) for n in range(10, 15)])
    across, inside = [(n, n + 10) for n in range(1, 4)], [(0, 2), (10, 12), (3, 5)]
    width = np.array([3.0] * 3 + [2.0] * 3)
    first, second, *_ = most_informative(pairs(*across, *inside), width, known, 6).tolist()
    assert first < 3 <= second, "inside, although narrower"


@pytest.fixture(scope="module")
def history() -> pa.Table:
    """Six nodes that measured each other, and one that measured only one of them."""
    ends = [(a, b) for a in range(6) for b in range(6) if a < b and (a, b) != (0, 5)] + [(6, 0)]
    columns = [[f"192.0.2.{n + 1}" for n in column] for column in zip(*ends, strict=True)]
    return pa.table([*columns, 10.0 + np.arange(len(ends))], names=["src_addr", "dst_addr", "rtt"])


def test_the_predictor_suggests_pairs_with_their_predictions(history: pa.Table) -> None:
    predictor = Predictor.from_pretrained(context=64)
    found = predictor.suggest(history, budget=3).to_pylist()
    assert len(found) == 3
    assert all("192.0.2.7" in (row["src_addr"], row["dst_addr"]) for row in found[:2]), "of the new node is known least"
    assert all(row["pair_measurements"] == 0 and row["0.05"] < row["predictions"] < row["0.95"] for row in found)
    among = pa.table({"src": ["192.0.2.1", "192.0.2.7"], "dst": ["192.0.2.6", "192.0.2.3"], "note": ["a", "b"]})
    assert predictor.suggest(history, budget=9, among=among)["note"].to_pylist() == ["b", "a"]
    with pytest.raises(PingLlmError, match="at least 1"):
        predictor.suggest(history, budget=0)
    with pytest.raises(PingLlmError, match="no measurements to add to"):
        predictor.suggest(None)


@pytest.mark.slow
def test_the_command_suggests(history: pa.Table, tmp_path: Path) -> None:
    pa.csv.write_csv(history, tmp_path / "pings.csv")
    arguments = ["suggest", "--history", str(tmp_path / "pings.csv"), "--budget", "2"]
    answer = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert len(answer["suggestions"]) == 2
    assert "192.0.2.7" in CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
