"""Simulated worlds: a pure function of the step, and Internets of a believable kind."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from ping_llm.prior.internet import OCTAVES, drift, make_disturbances
from ping_llm.prior.prng import Columns, Draws
from ping_llm.prior.selection import ANSWERED, EMPTY, FAILED
from ping_llm.prior.worlds import WorldSettings, make_world
from world_fixtures import world_batch

SMALL = WorldSettings(context=48, questions=16, most_nodes=40, most_asked=3)
WORLDS = 256
compiles_worlds = pytest.mark.slow  # ten seconds


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in world_batch(SMALL, 7, 3, 0, 16).items()}


@pytest.fixture(scope="module")
def worlds() -> Columns:
    keys = jax.random.split(jax.random.key(1), WORLDS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(partial(make_world, SMALL)))(keys))


@compiles_worlds
@pytest.mark.parametrize("part", [8, 4])
def test_parts_of_a_batch_are_those_of_the_whole(batch: dict[str, Any], part: int) -> None:
    parts = [world_batch(SMALL, 7, 3, first, part) for first in range(0, 16, part)]
    for name, whole in batch.items():
        assert np.array_equal(np.concatenate([made[name] for made in parts]), whole), name


@compiles_worlds
def test_a_batch_depends_on_seed_and_step_only(batch: dict[str, Any]) -> None:
    other_step, other_seed = world_batch(SMALL, 7, 4, 0, 16), world_batch(SMALL, 8, 3, 0, 16)
    again = world_batch(SMALL, jnp.int32(7), jnp.int32(3), 0, 16)
    for name in ("context_log_rtt", "question_log_rtt", "node_words"):
        assert np.array_equal(again[name], batch[name])
        assert not np.array_equal(other_step[name], batch[name])
        assert not np.array_equal(other_seed[name], batch[name])


@compiles_worlds
def test_worlds_with_positions_tell_where_most_nodes_are_and_ask_about_unmeasured_ones(batch: dict[str, Any]) -> None:
    located = world_batch(replace(SMALL, geography=True), 7, 3, 0, 64)
    position = np.asarray(located["node_position"])
    length = np.linalg.norm(position, axis=-1)
    is_given = length > 0
    np.testing.assert_allclose(length[is_given], 1.0, rtol=1e-5)
    assert 0.5 < is_given.mean() < 0.95
    assert (is_given.all(axis=1)).mean() > 0.3, "in about half of the worlds they are known of all nodes"
    usual = world_batch(SMALL, 7, 3, 0, 64)
    assert _share_of_unmeasured_sources(located) > 0.1 + _share_of_unmeasured_sources(usual)
    assert "node_position" not in batch, "and other worlds are as they were"


def _share_of_unmeasured_sources(batch: dict[str, Any]) -> float:
    holds = np.asarray(batch["context_kind"]) != EMPTY
    ends = [np.asarray(batch[f"context_{end}"]) for end in ("source", "destination")]
    measured = [np.append(*(end[world][holds[world]] for end in ends)) for world in range(len(holds))]
    asked = np.asarray(batch["question_source"])[:, 0]
    return float(np.mean([node not in nodes for node, nodes in zip(asked, measured, strict=True)]))


@compiles_worlds
def test_a_context_lies_between_one_empty_slot_and_others_that_fill_it_up(
    batch: dict[str, Any],
) -> None:
    slot = np.arange(SMALL.context)
    assert (batch["context_kind"][:, 0] == EMPTY).all()
    counts = slot < batch["context_length"][:, None]
    holds = batch["context_kind"] != EMPTY
    assert np.array_equal(holds | (slot == 0), counts)
    assert np.all(batch["context_source"][holds] != batch["context_destination"][holds])
    assert np.all(batch["context_log_rtt"][batch["context_kind"] != ANSWERED] == 0)
    assert batch["context_source"].max() < SMALL.most_nodes
    assert batch["question_counts"].any(axis=1).all()


@compiles_worlds
def test_no_pair_comes_twice_in_a_world(worlds: Columns) -> None:
    low, high = np.minimum(worlds.one, worlds.other), np.maximum(worlds.one, worlds.other)
    for pair, exists in zip(low * 1000 + high, worlds.exists, strict=True):
        assert len(np.unique(pair[exists])) == exists.sum()


def is_quiet(worlds: Columns) -> Any:
    """Worlds without noise: a pair measured twice in the same direction gives the same value."""
    same = worlds.rtt_ms[:, : SMALL.pairs] == worlds.now_ms
    turned = worlds.backwards[:, : SMALL.pairs] != worlds.now_backwards
    compared = worlds.exists & ~turned
    return np.all(same | ~compared, axis=1) & compared.any(axis=1)


@compiles_worlds
def test_questions_never_repeat_what_is_known_without_noise(worlds: Columns) -> None:
    quiet = is_quiet(worlds)
    assert 0.4 < quiet.mean() < 0.6
    known = worlds.known[:, : SMALL.pairs]
    repeated = np.any(known[quiet] & worlds.may_be_queried[quiet], axis=1)
    assert np.mean(repeated) < 0.03  # worlds of noise below the resolution of their clock
    assert np.any(known[~quiet] & worlds.may_be_queried[~quiet])


@compiles_worlds
def test_latencies_are_of_a_believable_size(worlds: Columns) -> None:
    medians = [np.median(rtt[exists]) for rtt, exists in zip(worlds.undisturbed_ms, worlds.exists, strict=True)]
    assert 20 < np.median(medians) < 120
    assert 0.5 < np.quantile(medians, 0.02) < np.quantile(medians, 0.96) < 1000
    everything = worlds.now_ms[worlds.exists]
    assert everything.min() >= 0.03
    assert everything.max() <= 10_000
    assert 0.005 < np.mean(everything > 2000) < 0.05  # slow worlds


@compiles_worlds
def test_sizes_reach_from_very_small_to_large(worlds: Columns) -> None:
    largest = np.max(np.where(worlds.exists, np.maximum(worlds.one, worlds.other), 0), axis=1) + 1
    assert largest.min() == SMALL.fewest_nodes
    assert largest.max() == SMALL.most_nodes
    assert 0.15 < np.mean(largest < 10) < 0.5


@compiles_worlds
def test_quiet_worlds_are_exactly_symmetric_or_not_at_all(worlds: Columns) -> None:
    turned = worlds.exists & (worlds.backwards[:, : SMALL.pairs] != worlds.now_backwards)
    same = worlds.rtt_ms[:, : SMALL.pairs] == worlds.now_ms
    worlds_with_both = is_quiet(worlds) & (turned.sum(axis=1) >= 5)
    shares = np.array([same[w][turned[w]].mean() for w in np.flatnonzero(worlds_with_both)])
    assert np.sum(shares == 1.0) > 12
    assert np.sum(shares < 0.9) > 10


@compiles_worlds
def test_repetitions_are_noisy_and_never_much_shorter(worlds: Columns) -> None:
    """Of the pairs of worlds of single pings, the spread covers what the MENOG study saw: 0.4 % to 12 %."""
    spreads = []
    has_copies = copies(worlds).any(axis=1)
    for world in range(WORLDS):
        rows = np.flatnonzero(worlds.known[world] & ~worlds.failed[world])
        if has_copies[world]:
            continue
        for pair in np.unique(worlds.pair[world, rows][worlds.round[world, rows] > 0])[:8]:
            mine = rows[worlds.pair[world, rows] == pair]
            if len(mine) >= 8:
                log_rtt = np.log(worlds.rtt_ms[world, mine])
                spreads.append(np.median(np.abs(log_rtt - np.median(log_rtt))))
    assert len(spreads) > 15
    low, middle, high = np.quantile(spreads, [0.1, 0.5, 0.9])
    assert low < 0.012
    assert 0.005 < middle < 0.08
    assert high > 0.06


def copies(worlds: Columns) -> Any:
    """Repetitions that are exactly the latest measurement of their pair, at the same time."""
    first = {name: np.take_along_axis(getattr(worlds, name), worlds.pair, axis=1) for name in ("rtt_ms", "age_s")}
    is_same = (worlds.rtt_ms == first["rtt_ms"]) & (worlds.age_s == first["age_s"]) & (worlds.age_s >= 0)
    return is_same & (worlds.round > 0)


@compiles_worlds
def test_some_worlds_repeat_their_measurements_exactly(worlds: Columns) -> None:
    has_copies = copies(worlds).any(axis=1)
    assert 0.01 < has_copies.mean() < 0.15


@compiles_worlds
def test_later_rounds_are_older(worlds: Columns) -> None:
    timed = worlds.age_s[:, 0] >= 0
    assert 0.2 < timed.mean() < 0.6
    first_age = np.take_along_axis(np.asarray(worlds.age_s), np.asarray(worlds.pair), axis=1)
    later = (worlds.round > 0) & ~copies(worlds)
    assert np.all(worlds.age_s[timed][later[timed]] > first_age[timed][later[timed]])
    assert np.all(worlds.age_s[timed] > 0)


@compiles_worlds
def test_failures_are_there_but_not_everywhere(worlds: Columns) -> None:
    rates = np.array([failed[exists].mean() for failed, exists in zip(worlds.now_failed, worlds.exists, strict=True)])
    assert np.mean(rates == 0) > 0.4
    assert 0.01 < rates.mean() < 0.1
    assert rates.max() > 0.1


@compiles_worlds
def test_worlds_show_failures_in_contexts() -> None:
    kinds = np.concatenate([np.ravel(world_batch(SMALL, 0, step, 0, 16)["context_kind"]) for step in range(6)])
    assert FAILED in kinds


@compiles_worlds
def test_routes_seldom_change_in_most_worlds_often_in_some_and_go_back_for_many_pairs() -> None:
    def one(key: jax.Array) -> Columns:
        return make_disturbances(Draws(key), 4, 400, noisy=jnp.asarray(True), interval_s=jnp.asarray(60.0))

    made = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), WORLDS)))
    changed = np.isfinite(made.pair_change_s)
    assert np.median(changed.mean(axis=(1, 2))) < 0.1
    assert 0.15 < np.mean(changed.mean(axis=(1, 2)) > 0.2) < 0.4
    before = made.pair_before
    unclipped = (np.abs(before) < 1).all(axis=1)
    assert 0.3 < np.mean((before[:, 0] == -before[:, 1])[unclipped]) < 0.5


def test_draws_are_uniform_normal_and_independent() -> None:
    draw = Draws(jax.random.key(5))
    first, second = np.asarray(draw.uniform(shape=(40_000,))), np.asarray(draw.uniform(shape=(40_000,)))
    assert 0 < first.min() < first.max() < 1
    assert np.abs(np.histogram(first, 20, (0, 1))[0] / 2000 - 1).max() < 0.1
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02
    normal = np.asarray(draw.normal((40_000,)))
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert abs(np.mean(normal**4) - 3) < 0.25
    neighbours = [float(Draws(jax.random.fold_in(jax.random.key(0), k)).uniform()) for k in range(300)]
    assert abs(np.mean(neighbours) - 0.5) < 0.06
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.15


# --- drift: what was measured long ago says less than what was measured just now

SALT = jnp.uint32(12345)
STEP_S = jnp.float32(100.0)
MANY = jnp.arange(20_000)


def at(age_s: float, who: jax.Array = MANY, salt: jax.Array = SALT) -> npt.NDArray[np.float32]:
    return np.asarray(drift(who, jnp.full(who.shape, age_s), STEP_S, salt))


def median_change(between_s: float) -> float:
    return float(np.median(np.abs(at(between_s) - at(0.0))))


def test_a_level_is_a_function_of_whom_when_and_world() -> None:
    np.testing.assert_array_equal(at(777.0), at(777.0))
    np.testing.assert_array_equal(at(777.0, MANY[50:60]), at(777.0)[50:60])
    assert np.mean(at(777.0) == at(777.0, salt=jnp.uint32(54321))) < 0.01


def test_levels_differ_by_a_power_of_the_time_between() -> None:
    times = np.array([100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0])
    power = np.polyfit(np.log(times), np.log([median_change(time) for time in times]), 1)[0]
    assert 0.3 < power < 0.5


def test_within_a_step_nothing_changes() -> None:
    same = np.mean(at(1.0) == at(0.0))
    assert same == pytest.approx(1 - 0.01 * sum(2.0**-octave for octave in range(OCTAVES)), abs=0.004)


def test_levels_go_up_as_often_as_down_and_nobody_follows_another() -> None:
    level = at(0.0)
    assert np.mean(level > 0) == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(level[:-1], level[1:])[0, 1]) < 0.03
