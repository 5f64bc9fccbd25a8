"""Levels that wander: what was measured long ago says less than what was measured just now."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from ping_llm.prior.disturbances import wandered

SALT = jnp.uint32(12345)
STEP_S = jnp.float32(100.0)
MANY = jnp.arange(20_000)


def at(age_s: float, who: jax.Array = MANY, salt: jax.Array = SALT) -> npt.NDArray[np.float32]:
    return np.asarray(wandered(who, jnp.full(who.shape, age_s), STEP_S, salt))


def median_change(between_s: float) -> float:
    return float(np.median(np.abs(at(between_s) - at(0.0))))


def test_a_level_is_a_function_of_whom_when_and_world() -> None:
    np.testing.assert_array_equal(at(777.0), at(777.0))
    np.testing.assert_array_equal(at(777.0, MANY[50:60]), at(777.0)[50:60])
    assert np.mean(at(777.0) == at(777.0, salt=jnp.uint32(54321))) < 0.01


def test_levels_differ_by_a_power_of_the_time_between() -> None:
    times = np.array([100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0])
    slope = np.polyfit(np.log(times), np.log([median_change(time) for time in times]), 1)[0]
    assert 0.3 < slope < 0.5


def test_within_a_step_nothing_changes() -> None:
    same = np.mean(at(1.0) == at(0.0))
    assert same == pytest.approx(1 - 0.01 * sum(2.0**-octave for octave in range(8)), abs=0.004)


def test_levels_go_up_as_often_as_down_and_nobody_follows_another() -> None:
    level = at(0.0)
    assert np.mean(level > 0) == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(level[:-1], level[1:])[0, 1]) < 0.03
