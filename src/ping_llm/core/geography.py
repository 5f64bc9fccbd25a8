"""Where nodes are, and how fast light gets there.

A position is a unit vector from the centre of the Earth, or zeros if it is not known. Functions take arrays of NumPy or
of JAX, [..., 3].
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from ping_llm.core.rtt import Ints

EARTH_KM: Final = 6371.0
KM_PER_MS: Final = 100.0
"""Length of fibre per ms of RTT: light in glass covers 200 km in a millisecond, one way."""

Array = Any
Positions = npt.NDArray[np.float32]
"""[nodes, 3]."""

UNKNOWN: Final = (float("nan"), float("nan"))
_TOLERANCE: Final = 0.9
"""Positions are those of cities rather than of hosts, and signals in air or hollow fibre are faster than in glass."""


class LocatedNodes(tuple[str, ...]):
    """Addresses of nodes, as models are told of them, with the positions of those whose position is known."""

    positions: Positions

    @classmethod
    def of(cls, addresses: Iterable[str], degrees: Sequence[tuple[float, float]]) -> Self:
        """Latitude and longitude of each node, or `UNKNOWN`."""
        nodes = cls(addresses)
        latitude, longitude = np.deg2rad(np.array(degrees, np.float64).reshape(-1, 2)).T
        flat = np.cos(latitude)
        found = np.stack([flat * np.cos(longitude), flat * np.sin(longitude), np.sin(latitude)], axis=1)
        nodes.positions = np.nan_to_num(found).astype(np.float32)
        return nodes


def positions_of(nodes: Sequence[str]) -> Positions | None:
    """The positions that come with the nodes; None if no position is known."""
    return nodes.positions if isinstance(nodes, LocatedNodes) and nodes.positions.any() else None


def misplaced(positions: Positions, source: Ints, destination: Ints, rtt_ms: npt.NDArray[Any]) -> Ints:
    """Nodes whose positions cannot be right, since there are RTTs between them and others that light would not reach:
    the fewest that explain all such pairs, found greedily, most pairs first."""
    light = light_ms(positions[source], positions[destination])
    is_wrong = (light > 0) & (rtt_ms < _TOLERANCE * light)
    ends = np.unique(np.sort(np.stack([source, destination])[:, is_wrong], axis=0), axis=1)
    found = []
    while ends.size:
        found.append(np.argmax(np.bincount(ends.ravel())))
        ends = ends[:, (ends != found[-1]).all(axis=0)]
    return np.array(found, np.int64)


def is_known(position: Array) -> Array:
    return (position != 0).any(axis=-1)


def distance_km(one: Array, other: Array) -> Array:
    """Distance along the surface, computed from the chord: by the cosine, short distances would be lost to rounding."""
    xp = one.__array_namespace__()
    chord = xp.sqrt(((one - other) ** 2).sum(axis=-1))
    return 2.0 * EARTH_KM * xp.arcsin(xp.minimum(chord / 2.0, 1.0))


def light_ms(one: Array, other: Array) -> Array:
    """RTT of light in a fibre along the great circle; -1 where a position is not known."""
    known = is_known(one) & is_known(other)
    return one.__array_namespace__().where(known, distance_km(one, other) / KM_PER_MS, -1.0)
