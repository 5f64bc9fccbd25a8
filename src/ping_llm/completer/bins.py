"""The grid of ln RTT on which distributions are predicted.

Bins are equally wide in ln RTT, 2 % for 512 of them. A value between the centres of two bins belongs to both, by how
near it is to each, so that a certain prediction is exact to a fraction of a bin: what a bin's probability stands for is
a triangle over its neighbours, and the density is the straight line from centre to centre.
"""

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.baselines.interface import Floats

LEAST_MS: Final = 0.05
MOST_MS: Final = 2000.0


@dataclass(frozen=True)
class Bins:
    count: int

    @property
    def width(self) -> float:
        return float(np.log(MOST_MS / LEAST_MS)) / self.count

    @property
    def centres(self) -> Floats:
        return np.log(LEAST_MS) + self.width * (np.arange(self.count) + 0.5)

    def between(self, log_rtt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin whose centre is at or below each value, and how far it is on the way to the next. Both ends hold."""
        at = jnp.clip((log_rtt - np.log(LEAST_MS)) / self.width - 0.5, 0.0, self.count - 1.0)
        lower = jnp.minimum(at.astype(jnp.int32), self.count - 2)
        return lower, at - lower
