"""Numbers as smooth features: sines and cosines at several scales, so that a matrix can read near and far alike."""

# mypy: disallow-untyped-calls=False
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

_VALUE_SCALES: Final = 0.5 * 2.0 ** (np.arange(19) / 2)
"""Radians for each unit of ln RTT: from 0.5, which tells a whole range apart, to 256, which tells 0.1 % apart."""
_MIDDLE: Final = 3.5
"""ln of 33 ms."""
_AGE_SCALES: Final = 0.25 * 2.0 ** np.arange(6)
_AGE_UNIT_S: Final = 10.0
_DAY_S: Final = 86_400.0
_CYCLES_S: Final = np.array([_DAY_S, _DAY_S / 2, 7 * _DAY_S])

VALUE_FEATURES: Final = 2 * len(_VALUE_SCALES) + 1
TIME_FEATURES: Final = 2 * len(_AGE_SCALES) + 2 * len(_CYCLES_S) + 2


def value_features(log_rtt: jax.Array) -> jax.Array:
    value = (jnp.clip(log_rtt, -4.0, 9.0) - _MIDDLE)[..., None]
    return jnp.concatenate([*_waves(value, _VALUE_SCALES), value / 2], axis=-1)


def time_features(age_s: jax.Array) -> jax.Array:
    """Of seconds before the question: how long ago, and at what time of its day and week. All 0 where it is unknown.

    The hour is the question's own: what hour it is where, no measurement says.
    """
    known = (age_s >= 0)[..., None]
    age = jnp.maximum(age_s, 0.0)[..., None]
    long_ago = jnp.log1p(age / _AGE_UNIT_S)
    cycle = _waves(2 * np.pi * (age % _CYCLES_S) / _CYCLES_S, np.ones(1))
    features = jnp.concatenate([*_waves(long_ago, _AGE_SCALES), *cycle, long_ago / 8, jnp.ones_like(age)], axis=-1)
    return jnp.where(known, features, 0.0)


def _waves(value: jax.Array, scales: npt.NDArray[np.floating[Any]]) -> tuple[jax.Array, jax.Array]:
    angle = value * jnp.asarray(scales, jnp.float32)
    return jnp.sin(angle), jnp.cos(angle)
