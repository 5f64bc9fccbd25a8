"""Gradient-boosted trees on address prefixes: what neighbours measured says what a new node will measure."""

import numpy as np
import pytest

from ping_llm.baselines.interface import GlobalMedian, PairTable, Predict
from ping_llm.baselines.prefix_trees import KeyMeans, PrefixTrees, mean_features, numbered_prefixes, pair_keys
from ping_llm.core.rtt import DEFAULT_RTT_MS, Observations, Questions

SITES, HOSTS = 12, 20


def addresses(family: int = 4) -> tuple[str, ...]:
    """Hosts of a few sites, one /24 (or /48) each."""
    written = "10.{}.7.{}" if family == 4 else "2001:db8:{:x}::{:x}"
    return tuple(written.format(16 * site, host) for site in range(SITES) for host in range(HOSTS))


def between_sites(count: int, *, seed: int, hosts: range = range(HOSTS)) -> Observations:
    """RTTs that the two sites decide, with a little noise."""
    rng = np.random.default_rng(seed)
    sites, host = rng.integers(0, SITES, (2, count)), rng.choice(np.array(hosts), (2, count))
    distance = 5 + 200 * np.random.default_rng(99).random((SITES, SITES))
    rtt = distance[sites[0], sites[1]] * rng.lognormal(0.0, 0.02, count)
    source, destination = sites * HOSTS + host
    return Observations(source=source, destination=destination, time_s=np.arange(count, dtype=np.float64), rtt_ms=rtt)


def median_error(fitted: Predict, asked: Observations) -> float:
    predicted = fitted(asked.questions)
    return float(np.median(np.abs(predicted / asked.rtt_ms - 1)))


class TestPrefixTrees:
    @pytest.mark.slow
    @pytest.mark.parametrize("family", [4, 6])
    def test_new_nodes_are_like_their_neighbours(self, family: int) -> None:
        train, asked = between_sites(4000, seed=0, hosts=range(15)), between_sites(500, seed=1, hosts=range(15, 20))
        fitted = PrefixTrees(nodes=addresses(family), trees=60, rate=0.2).fit(train)
        assert median_error(fitted, asked) < 0.1 < median_error(GlobalMedian().fit(train), asked)

    @pytest.mark.slow
    def test_without_neighbours_it_learns_nothing_from_them(self) -> None:
        rng = np.random.default_rng(0)
        scattered = tuple(f"{a}.{b}.{c}.1" for a, b, c in rng.integers(1, 250, (SITES * HOSTS, 3)))
        train, asked = between_sites(4000, seed=0, hosts=range(15)), between_sites(500, seed=1, hosts=range(15, 20))
        assert median_error(PrefixTrees(nodes=scattered, trees=60, rate=0.2).fit(train), asked) > 0.2

    @pytest.mark.slow
    def test_the_same_again(self) -> None:
        train = between_sites(500, seed=0)
        once, again = (PrefixTrees(nodes=addresses(), trees=60).fit(train)(train) for _ in range(2))
        np.testing.assert_array_equal(once, again)

    @pytest.mark.slow
    def test_unknown_nodes_and_hardly_any_data_get_an_answer(self) -> None:
        train = between_sites(500, seed=0)
        ask = Questions(source=np.array([-1, 10**6, 3]), destination=np.array([4, -1, 10**6]), time_s=np.zeros(3))
        for known in (train, train.take(slice(0, 3))):
            predicted = PrefixTrees(nodes=addresses(), trees=60, rate=0.2).fit(known)(ask)
            assert (np.isfinite(predicted) & (predicted > 0)).all()
        nothing = PrefixTrees(nodes=addresses(), trees=60, rate=0.2).fit(train.take(slice(0, 0)))(ask)
        assert nothing == pytest.approx([DEFAULT_RTT_MS] * 3)

    def test_in_training_no_pair_sees_its_own_answer(self) -> None:
        pairs = PairTable.of(between_sites(400, seed=0))
        keys = list(pair_keys(numbered_prefixes(addresses()), pairs.questions))
        fold = np.random.default_rng(0).integers(0, 5, len(pairs))
        altered = np.log(pairs.rtt_ms)
        altered[7] += 5.0
        before, after = (
            np.stack(mean_features([KeyMeans.of(key, value, fold) for key in keys], keys, fold))
            for value in (np.log(pairs.rtt_ms), altered)
        )
        np.testing.assert_allclose(before[:, fold == fold[7]], after[:, fold == fold[7]], atol=1e-9)
        assert not np.allclose(before, after)


def test_prefixes_are_nested_and_families_apart() -> None:
    numbers = numbered_prefixes(("10.0.0.1", "10.0.0.2", "10.0.9.1", "11.0.0.1", "a00::1"))
    same = numbers[:, :1] == numbers[:, 1:-1]
    assert same.sum(axis=0).tolist() == [5, 4, 0, 0]  # of 6 levels: /8, /12, /16, /20, /24, /32
    assert (np.diff(same.astype(int), axis=0) <= 0).all()
    assert (numbers[:, -1] == -1).all()
