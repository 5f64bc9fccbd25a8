"""Positions of nodes, if they are known, as evidence beside the measurements of a context.

    identity   nodes near each other have similar identities, as those with a common prefix do: the parts of the longer
               prefixes stay, those of the shorter ones give way to random Fourier features of the position, whose dot
               product falls off with the distance (a Gaussian kernel)
    distance   a model of the context, RTT = slope x light + an offset of either end, predicts RTTs from distances. Its
               density and that of the network are pooled: their logarithms are added, with weights from a small
               network that has seen in simulated Internets how much each is worth, by the features below
    light      no RTT is shorter than light in fibre needs

The completer itself was trained without positions, and where there are none, they change nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ping_llm.core.errors import explained
from ping_llm.core.geography import EARTH_KM, Positions, light_ms
from ping_llm.core.randomness import hash32, hash_with, unit_interval
from ping_llm.core.rtt import Floats, Ints
from ping_llm.models.layers import Array, Singles, functions_of

WEIGHTS: Final = Path(__file__).parents[2] / "pretrained" / "geography.safetensors"
"""Of the small network: made by `scripts/train_geography.py`."""

# Identities.

_DIMENSIONS: Final = 3
_REACH_KM: Final = (200.0, 1500.0)
"""Distances at which the dot product of two nodes' features has fallen to 0.61, for both parts of an identity."""


def nearness(position: Array, level: int, size: int) -> Array:
    """[..., size]: random Fourier features, each of variance 1: similar where positions are near each other."""
    xp = position.__array_namespace__()
    words = xp.arange(size * (_DIMENSIONS + 1), dtype=np.uint32)
    uniform = unit_interval(hash32(hash_with(words, 100 + level))).reshape(_DIMENSIONS + 1, size)
    frequency = 2**0.5 * functions_of(uniform).erf_inv(2.0 * uniform[:-1] - 1.0) * (EARTH_KM / _REACH_KM[level])
    return 2**0.5 * xp.cos(position @ frequency.astype(np.float32) + 2 * np.pi * uniform[-1])


# RTTs from distances.

_ROUNDS: Final = 20
_USUAL_SLOPE, _USUAL_OFFSET_MS = 1.6, 3.0
"""Without measurements: fibre takes detours, and each end some milliseconds."""
_PRIOR: Final = 1.0
"""What counts for them, and for the common offset as that of a node: so many measurements."""
_FAST: Final = 0.02
"""Errors below this share of the RTT count alike."""
_SHORTEST_MS: Final = 0.3


@dataclass(frozen=True, kw_only=True)
class DistanceModel:
    """RTT = slope x light + an offset of either end, by least absolute relative deviations."""

    slope: float
    common_ms: float
    """Offset of a node that was not measured."""
    offset_ms: Floats
    """Of each node, beyond the common one."""
    count: Ints
    """Measurements of each node."""
    scale: float
    """Median absolute deviation of ln RTT."""

    @classmethod
    def between(cls, position: Positions, source: Ints, destination: Ints, rtt_ms: Floats) -> Self:
        """Fitted to the answered measurements between nodes with positions."""
        light = light_ms(position[source], position[destination]).astype(np.float64)
        some = np.flatnonzero((light >= 0) & ~np.isnan(rtt_ms) & (source != destination))
        return cls.of(source[some], destination[some], light[some], rtt_ms[some], len(position))

    @classmethod
    def of(cls, source: Ints, destination: Ints, light: Floats, rtt_ms: Floats, nodes: int) -> Self:
        """Fitted by reweighted least squares, slope and common offset in turn with the offsets of nodes."""
        ends = np.concatenate([source, destination])
        slope, common, offset = _USUAL_SLOPE, _USUAL_OFFSET_MS, np.zeros(nodes)
        floor = np.maximum(rtt_ms, _SHORTEST_MS)
        design = np.stack([light, np.full(len(light), 2.0)])
        prior = np.array([[1 / 50, 0], [0, 1 / 5]]) ** 2 * _PRIOR  # as precise as one RTT of 50 ms, of 5 ms
        usual = np.array([_USUAL_SLOPE, _USUAL_OFFSET_MS])
        for _ in range(_ROUNDS if len(rtt_ms) else 0):
            of_ends = offset[source] + offset[destination]
            error = rtt_ms - slope * light - 2 * common - of_ends
            weight = 1 / (np.maximum(np.abs(error), _FAST * floor) * floor)
            weighted = design * weight
            slope, common = np.linalg.solve(
                weighted @ design.T + prior, weighted @ (rtt_ms - of_ends) + prior @ usual
            ).clip([1.0, 0.0], [10.0, 1e3])
            error = rtt_ms - slope * light - 2 * common - of_ends
            total = np.bincount(ends, np.tile(weight, 2), nodes)
            moved = np.bincount(ends, np.tile(weight * error, 2), nodes) - _PRIOR * np.median(weight) * offset
            offset = np.maximum(offset + 0.5 * moved / (total + _PRIOR * np.median(weight)), -common)
        count = np.bincount(ends, minlength=nodes)
        model = cls(slope=float(slope), common_ms=float(common), offset_ms=offset, count=count, scale=0.5)
        if not len(rtt_ms):
            return model
        off = np.log(floor) - np.log(model.predict(source, destination, light))
        scale = float(np.median(np.append(np.abs(off), 0.5)))
        return cls(**{**vars(model), "scale": max(scale, 0.01)})

    def predict(self, source: Ints, destination: Ints, light: Floats) -> Floats:
        rtt = self.slope * light + 2 * self.common_ms + self.offset_ms[source] + self.offset_ms[destination]
        return np.maximum(rtt, light + _SHORTEST_MS)


# Both densities as one.


class Densities(NamedTuple):
    """On a grid of ln RTT, [queries, bins]."""

    probability: Array
    centres: Array


def features(answers: Densities, model: DistanceModel, source: Ints, destination: Ints, light: Floats) -> Singles:
    """[queries, FEATURES]: what the weights of both densities depend on."""
    until = np.cumsum(answers.probability, axis=1)
    low, median, high = (
        answers.centres[np.argmax(until >= level * until[:, -1:], axis=1)] for level in (0.1, 0.5, 0.9)
    )
    predicted = np.log(model.predict(source, destination, light))
    fewer, more = np.sort(np.log1p(np.stack([model.count[source], model.count[destination]])), axis=0)
    measured = model.offset_ms[model.count > 0]
    spread = np.median(np.abs(measured)) if len(measured) else _USUAL_OFFSET_MS
    of_model = (model.scale, model.slope, model.common_ms + 1.0, spread + 0.1, model.count.sum() + 1.0)
    of_network = median - predicted, np.log(high - low + 0.01)
    of_ends = fewer, more, np.log1p(model.slope * light) - predicted  # the latter: how little the offsets are
    columns = np.log(light + _SHORTEST_MS), predicted, *of_network, *of_ends
    constant = np.broadcast_to(np.log(of_model), (len(light), len(of_model)))
    return np.concatenate([np.stack(columns, axis=1), constant], axis=1).astype(np.float32)


FEATURES: Final = 12
HIDDEN: Final = 32
OUTPUTS: Final = 5
SHAPES: Final = {
    "mean": (FEATURES,),
    "deviation": (FEATURES,),
    "first": (FEATURES, HIDDEN),
    "first_bias": (HIDDEN,),
    "second": (HIDDEN, HIDDEN),
    "second_bias": (HIDDEN,),
    "last": (HIDDEN, OUTPUTS),
    "last_bias": (OUTPUTS,),
}
_REACH: Final = 3.0
"""Features beyond so many deviations of training count as these."""
_TAIL: Final = 4.0
"""The second part of the model's density is so many times as wide as the first."""


def log_pooled(weights: Mapping[str, Array], found: Array, answers: Densities, log_predicted: Array) -> Array:
    """The logarithm of the pooled density, not normalized."""
    xp = found.__array_namespace__()
    x = xp.clip((found - weights["mean"]) / weights["deviation"], -_REACH, _REACH)
    x = xp.tanh(x @ weights["first"] + weights["first_bias"])
    x = xp.tanh(x @ weights["second"] + weights["second_bias"])
    share, trust, shift, log_width, tail = (x @ weights["last"] + weights["last_bias"]).T[..., None]
    width = xp.exp(xp.clip(log_width, -4.0, 1.0))
    distance = xp.abs(answers.centres - log_predicted[:, None] - xp.tanh(shift)) / width
    tail = 0.5 / (1 + xp.exp(-tail))
    of_model = xp.log((1 - tail) * xp.exp(-distance) + tail / _TAIL * xp.exp(-distance / _TAIL) + 1e-9)
    of_network = xp.log(xp.maximum(answers.probability, 1e-12))
    return xp.exp(xp.clip(share, -3.0, 0.5)) * of_network + xp.exp(xp.clip(trust, -6.0, 1.0)) * of_model


@cache
def _weights() -> dict[str, Singles]:
    with explained(f"{WEIGHTS} cannot be read", OSError, SafetensorError):
        return safetensors.numpy.load_file(WEIGHTS)


def pooled(answers: Densities, model: DistanceModel, source: Ints, destination: Ints, light: Floats) -> Singles:
    """Probabilities of the bins for queries whose two ends have positions."""
    found = features(answers, model, source, destination, light)
    predicted = np.log(model.predict(source, destination, light)).astype(np.float32)
    log = log_pooled(_weights(), found, answers, predicted)
    log[:, :-1][(np.exp(answers.centres) < light[:, None])[:, :-1]] = -np.inf
    probability = np.exp(log - log.max(axis=1, keepdims=True))
    return np.asarray(probability / probability.sum(axis=1, keepdims=True), np.float32)
