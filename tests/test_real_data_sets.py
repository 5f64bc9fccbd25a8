"""How files of real measurements become known parts and queries; on small files of the same form."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from ping_llm.baselines.forecasts import PointWithResiduals, cumulative
from ping_llm.core.rtt import Observations
from ping_llm.evaluate.scores import scores_of
from real_data import losses_of
from real_data_sets import AWS_FILE, DATA_SETS, FILECOIN_FILE, WONDER_FILE, PairTask, QueriedResults, RealPairs

SETS = {data_set.name: data_set for data_set in DATA_SETS}


@pytest.fixture
def filecoin(tmp_path: Path) -> RealPairs:
    """Thirty pairs; of three results of a pair the last failed, and of every fifth destination all."""
    lines = [
        f"A{a},XX,1,2,10.{d}.0.1,{-1 if d == 4 or n == 2 else 10 * d + 1 + a + n},2021-10-0{n + 1}"
        for a in range(6)
        for d in range(5)
        for n in range(3)
    ]
    write(tmp_path / FILECOIN_FILE, "airport,country,latitude,longitude,dst_addr,avg_ms,first_export", *lines)
    found = SETS["filecoin"].read(tmp_path)
    assert isinstance(found, RealPairs)
    return found


def write(path: Path, *lines: str) -> None:
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_a_pair_of_single_results_has_the_median_of_those_that_were_answered(filecoin: RealPairs) -> None:
    value = {
        (filecoin.nodes[s], filecoin.nodes[d]): rtt
        for s, d, rtt in zip(filecoin.pairs.source, filecoin.pairs.destination, filecoin.pairs.rtt_ms, strict=True)
    }
    assert len(value) == 30
    assert value[filecoin.nodes[2], "10.3.0.1"] == 33.5
    assert np.isnan(value[filecoin.nodes[2], "10.4.0.1"])


def test_what_is_known_are_single_results_of_other_pairs_than_those_queried(filecoin: RealPairs) -> None:
    task = filecoin.task(0.5, 1, 8)
    assert len(task.known) == 15 * 3
    assert len(np.unique(task.queries.pair)) == len(task.queries) == 8
    assert not np.isin(task.queries.pair, task.known.pair).any()
    assert np.isnan(task.known.rtt_ms).sum() >= 15
    assert task.results is not None
    assert task.results.tried.tolist() == [3.0] * 8
    assert task.results.failed == pytest.approx(np.where(np.isnan(task.queries.rtt_ms), 1.0, 1 / 3))


def test_failures_are_scored_by_single_results_which_count_alike() -> None:
    ends = {"source": np.arange(2), "destination": np.arange(2, 4)}
    queries = Observations(**ends, time_s=np.full(2, np.nan), rtt_ms=np.array([10.0, np.nan]))
    results = QueriedResults(tried=np.array([4.0, 1.0]), failed=np.array([0.25, 1.0]))
    task = PairTask(known=queries, queries=queries, nodes=(), symmetric=False, results=results)
    predicted = PointWithResiduals(
        p_failed=np.array([0.2, 0.7]),
        point_ms=np.array([10.0, 20.0]),
        bucket=np.zeros(2, np.int64),
        cumulative=cumulative(np.zeros(100))[None],
    )
    single = [(0.2 - 0) ** 2] * 3 + [(0.2 - 1) ** 2] + [(0.7 - 1) ** 2]
    found = scores_of(losses_of(predicted, task))
    assert found["brier"] == pytest.approx(np.mean(single))
    assert found["mae"] == pytest.approx(0.0)
    assert found["nll_bits"] < 10  # of the answered pair alone


def test_both_directions_of_an_unordered_pair_count_half(tmp_path: Path) -> None:
    write(tmp_path / AWS_FILE, "src,dst,p50_ms", "a,a,1", "a,b,10", "b,a,14", "b,c,30", "c,b,30", "c,a,7")
    found = SETS["aws"].read(tmp_path)
    assert isinstance(found, RealPairs)
    assert found.pairs.rtt_ms.tolist() == [12.0, 7.0, 30.0]
    assert list(zip(found.pairs.source, found.pairs.destination, strict=True)) == [(0, 1), (0, 2), (1, 2)]
    assert found.symmetric
    assert len(set(found.nodes)) == 3


def test_distances_come_with_the_pairs_that_have_them(tmp_path: Path) -> None:
    write(
        tmp_path / WONDER_FILE,
        "src,dst,min_ms,avg_ms,max_ms,mdev_ms,distance_km,time",
        "B,A,1,20,3,1,1500,2018-11-10 12:23:34",
        "A,C,1,40,3,1,3000,2018-11-10 12:23:34",
    )
    found = SETS["wonder"].read(tmp_path)
    assert isinstance(found, RealPairs)
    assert found.distance_km is not None
    assert found.distance_km.tolist() == [[0, 1500, 3000], [1500, 0, 0], [3000, 0, 0]]


def test_every_set_is_for_design_or_for_testing() -> None:
    roles = {data_set.name: data_set.role for data_set in DATA_SETS}
    assert roles == {"planetlab": "design", "menog": "design", "next-ping": "design"} | dict.fromkeys(
        ("wonder", "filecoin", "aws"), "test"
    )
