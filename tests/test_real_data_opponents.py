"""Opponents that are made for the benchmark recover what they are made for."""

from collections.abc import Callable

import numpy as np
import pytest

from ping_llm.baselines.factors import LogFactors
from ping_llm.baselines.interface import Baseline
from ping_llm.core.rtt import Floats, Ints
from real_data import Answered, Fitting
from real_data_opponents import DistanceOffsets, NodeTrees, SchattenCompletion, blend_weights
from real_data_sets import PairTask, RealPairs, timeless, unrelated_addresses

NODES = 60


@pytest.fixture(scope="module")
def places() -> Floats:
    place = np.random.default_rng(0).uniform(0, 8000, (NODES, 2))
    return np.asarray(np.linalg.norm(place[:, None] - place, axis=2))


def task_of(rtt: Callable[[Ints, Ints], Floats], known: float = 0.5) -> PairTask:
    source, destination = np.triu_indices(NODES, 1)
    pairs = timeless(source, destination, rtt(source.astype(np.int64), destination.astype(np.int64)))
    return RealPairs(pairs=pairs, nodes=unrelated_addresses(NODES), symmetric=True).task(known, 0, 500)


def median_error(baseline: Baseline, task: PairTask) -> float:
    predicted = baseline.fit(task.at_once)(task.queries.questions)
    return float(np.median(np.abs(predicted / task.queries.rtt_ms - 1)))


def test_distance_and_offsets_are_recovered_beside_outliers(places: Floats) -> None:
    rng = np.random.default_rng(1)
    offset = rng.uniform(1, 30, NODES)
    spoilt = np.where(rng.random((NODES, NODES)) < 0.1, 5.0, 1.0)

    def rtt(source: Ints, destination: Ints) -> Floats:
        plain = 1.5 * places[source, destination] / 100 + offset[source] + offset[destination]
        return np.asarray(plain * spoilt[source, destination])

    assert median_error(DistanceOffsets(distance_km=places), task_of(rtt)) < 0.01


def test_nothing_is_predicted_below_light_in_fibre(places: Floats) -> None:
    task = task_of(lambda source, destination: np.full(len(source), 2.0))
    predicted = DistanceOffsets(distance_km=places).fit(task.at_once)(task.queries.questions)
    assert (predicted >= places[task.queries.source, task.queries.destination] / 100).all()


def test_a_matrix_of_small_nuclear_norm_is_completed() -> None:
    factor = np.random.default_rng(2).normal(0, 0.7, (2, NODES))

    def rtt(source: Ints, destination: Ints) -> Floats:
        return np.asarray(20 * np.exp((factor[:, source] * factor[:, destination]).sum(axis=0)))

    base = LogFactors(rank=0, symmetric=True)
    task = task_of(rtt)
    assert median_error(SchattenCompletion(base=base, symmetric=True), task) < 0.3 * median_error(base, task)


@pytest.mark.parametrize("forest", [False, True], ids=["boosted", "forest"])
def test_trees_learn_what_a_distance_is_good_for(places: Floats, forest: bool) -> None:
    def rtt(source: Ints, destination: Ints) -> Floats:
        return np.asarray(10 + places[source, destination] / 50)

    base, task = LogFactors(rank=0, symmetric=True), task_of(rtt)
    trees = NodeTrees(base=base, distance_km=places, symmetric=True, forest=forest)
    assert median_error(trees, task) < 0.6 * median_error(base, task)


def test_a_blend_finds_the_mixture_and_is_equal_where_there_is_nothing_to_learn_from() -> None:
    rng = np.random.default_rng(3)
    members = rng.normal(3, 1, (400, 3))
    measured = members @ [0.7, 0.3, 0.0] + np.where(rng.random(400) < 0.1, 5.0, 0.0)
    assert blend_weights(members, measured, prior=0) == pytest.approx([0.7, 0.3, 0.0], abs=0.01)
    assert blend_weights(members[:0], measured[:0]) == pytest.approx([1 / 3] * 3)


def test_a_blend_is_no_worse_than_its_members_and_what_is_held_out_is_not_learned() -> None:
    effect = np.random.default_rng(4).normal(0, 1, NODES)
    task = task_of(lambda source, destination: np.asarray(np.exp(4 + effect[source] + effect[destination])))
    fitting = Fitting(task, 0)
    assert not np.isin(fitting.held_out.unordered_pair, fitting.learned.unordered_pair).any()
    assert len(fitting.held_out) + len(fitting.learned) == len(task.known)
    good = Answered(**fitting.answered(LogFactors(rank=0, symmetric=True)))
    bad = Answered(queried=good.queried * 3, held_out=good.held_out * 3)
    blend = fitting.blend([bad, good])
    assert np.abs(np.log(blend.queried / good.queried)).max() < 0.1
