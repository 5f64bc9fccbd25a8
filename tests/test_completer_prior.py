"""The prior covers reality: real Internets are ordinary among simulated ones."""

from pathlib import Path

import numpy as np
import pytest

from ping_llm.core.rtt import Observations
from prior_statistics import Character, character, rtts_of_worlds
from real_data_sets import MENOG_FILE, PLANETLAB_FILE, menog_pairs, menog_pings, planetlab_pairs

pytestmark = pytest.mark.slow
WORLDS = 80


def assert_ordinary(pairs: Observations, names: tuple[str, ...]) -> None:
    real = character(pairs.source, pairs.destination, pairs.rtt_ms.astype(np.float64))
    rtts = rtts_of_worlds(pairs.source, pairs.destination, worlds=WORLDS)
    worlds = [character(pairs.source, pairs.destination, rtt.astype(np.float64)) for rtt in rtts]
    for name in names:
        below = np.mean([getattr(world, name) < getattr(real, name) for world in worlds])
        assert 0.05 < below < 0.95, f"{name}: {getattr(real, name):.3g} is above {below:.0%} of worlds"


def test_planetlab_is_an_ordinary_world(shared_data: Path) -> None:
    if not (shared_data / PLANETLAB_FILE).exists():
        pytest.skip("the real data is not there")
    pairs = planetlab_pairs(shared_data)
    some = np.sort(np.random.default_rng(0).choice(490, 100, replace=False))
    pairs = pairs.take(np.isin(pairs.source, some) & np.isin(pairs.destination, some))
    numbered = Observations(
        source=np.searchsorted(some, pairs.source),
        destination=np.searchsorted(some, pairs.destination),
        time_s=pairs.time_s,
        rtt_ms=pairs.rtt_ms,
    )
    assert_ordinary(numbered, tuple(Character.__dataclass_fields__))


def test_menog_is_an_ordinary_world(shared_data: Path) -> None:
    if not (shared_data / MENOG_FILE).exists():
        pytest.skip("the real data is not there")
    pairs = menog_pairs(menog_pings(shared_data).fastest)
    assert len(pairs) == 2161
    assert_ordinary(pairs, ("median_ms", "spread", "additive", "factors", "missed"))


def test_characters_tell_worlds_apart() -> None:
    source, destination = np.triu_indices(40, 1)
    rng = np.random.default_rng(0)
    height = rng.lognormal(2, 0.5, 40)
    star = height[source] * height[destination]
    noise = rng.lognormal(3, 1, len(source))
    of_star, of_noise = character(source, destination, star), character(source, destination, noise)
    assert of_star.additive < 1e-3 < 0.3 < of_noise.additive
    assert of_star.factors < 0.05 < 0.3 < of_noise.factors
    assert of_noise.shortcuts > 0.5
