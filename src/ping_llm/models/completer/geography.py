"""Positions of nodes as optional features of the completer, and adapters that know what to do with them.

A position is a unit vector, or zeros if it is not known. It stands behind a node's identity, [..., identity + 3], and
matters in two ways:

    identity   nodes near each other have similar identities, as those with a common prefix do: the parts of the longer
               prefixes stay, those of the shorter ones give way to random Fourier features of the position, whose dot
               product falls off with the distance (a Gaussian kernel)
    distance   between the two ends, of measurements and of queries, as the RTT of light in fibre; of measurements also
               how much longer their RTT is, in ln RTT

The network was trained without. Low-rank adapters of the matrices of its blocks (LoRA) were trained later, with all
else frozen, and count only where a history comes with positions: every other answer is what it was, bit for bit.
"""

from typing import Any, Final

import numpy as np

from ping_llm.core.geography import EARTH_KM, light_ms
from ping_llm.core.randomness import hash32, hash_with, unit_interval
from ping_llm.models.layers import Array, functions_of

DIMENSIONS: Final = 3
ADAPTED: Final = ("qkv", "out", "gate_up", "down")
"""Matrices of each block that have adapters, called `qkv_lora_a` and `qkv_lora_b`."""
_REACH_KM: Final = (200.0, 1500.0)
"""Distances at which the dot product of positions has fallen to 0.61, for the two parts of an identity."""
_SCALES: Final = 0.5 * 2.0 ** (np.arange(12) / 2)
"""Radians per unit of ln RTT, up to 23."""
_NEAREST_MS: Final = 0.3
"""Added to the RTT of light: below some 30 km, distance says little about the RTT."""
FEATURES: Final = 2 * 2 * len(_SCALES) + 3
"""Sines, cosines and value of both numbers, and whether there is a distance."""


def adapters(name: str) -> tuple[str, str]:
    return f"{name}_lora_a", f"{name}_lora_b"


def is_adapter(name: str) -> bool:
    """Of the weight with this name: whether it counts only where there are positions."""
    return "_lora_" in name or name.startswith("geography")


def nearness(position: Array, level: int, size: int) -> Array:
    """[..., size]: random Fourier features, each of variance 1: similar where positions are near each other."""
    xp = position.__array_namespace__()
    words = xp.arange(size * (DIMENSIONS + 1), dtype=np.uint32)
    uniform = unit_interval(hash32(hash_with(words, 100 + level))).reshape(DIMENSIONS + 1, size)
    frequency = 2**0.5 * functions_of(uniform).erf_inv(2.0 * uniform[:-1] - 1.0) * (EARTH_KM / _REACH_KM[level])
    return 2**0.5 * xp.cos(position @ frequency.astype(np.float32) + 2 * np.pi * uniform[-1])


def features(one: Array, other: Array, log_rtt: Array | None = None, is_answered: Array | None = None) -> Array:
    """[..., FEATURES] of two ends and, of a measurement, of its RTT; 0 where there is no distance."""
    xp = one.__array_namespace__()
    light = light_ms(one, other)
    known = light >= 0
    log_light = xp.log(xp.maximum(light, 0.0) + _NEAREST_MS)
    parts = [*_waves(log_light - 3.0, known)]
    if log_rtt is None or is_answered is None:
        parts.append(xp.zeros((*light.shape, 2 * len(_SCALES) + 1), np.float32))
    else:
        parts += _waves(xp.clip(log_rtt - log_light, -4.0, 8.0), known & is_answered)
    return xp.concatenate([*parts, known[..., None]], axis=-1).astype(np.float32)


def _waves(value: Array, counts: Array) -> list[Any]:
    xp = value.__array_namespace__()
    value = value[..., None]
    angle = value * _SCALES.astype(np.float32)
    return [xp.where(counts[..., None], part, 0.0) for part in (xp.sin(angle), xp.cos(angle), value / 2)]
