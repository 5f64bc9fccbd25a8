"""How levels wander: the longer ago a measurement was made, the less it says.

Between pings of one pair of the MENOG study that lie one, five, or forty measurements apart, the median difference is
1.0, 1.9, or 3.8 %: it grows like a power of the time between them, about 0.4. So levels are sums of steps that last
one, two, four … as long as the first, each lasting twice as long and 2^0.4 times as high as the one before.

    step    a time through which a level does not change
    octave  all steps of one length

The height of a step is a hash of who wanders, octave, and number of the step: any moment can be asked for alone.
"""

# mypy: disallow-untyped-calls=False
from typing import Final

import jax
import jax.numpy as jnp

from ping_llm.completer.draws import hashed

OCTAVES: Final = 8
_ROUGHNESS: Final = 0.4
_GOLDEN: Final = 0x9E3779B9


def wandered(who: jax.Array, age_s: jax.Array, shortest_step_s: jax.Array, salt: jax.Array) -> jax.Array:
    """Sums of steps up and down, with many small and few large ones. The shortest have a mean height of 1."""
    total = jnp.zeros(age_s.shape)
    of_whom = hashed(who.astype(jnp.uint32) * jnp.uint32(OCTAVES) ^ salt)
    for octave in range(OCTAVES):
        of_octave = hashed(of_whom + jnp.uint32(octave * _GOLDEN & 0xFFFFFFFF))
        begins = _unit(of_octave)  # in the middle of a step
        number = jnp.floor(age_s / (shortest_step_s * 2.0**octave) + begins).astype(jnp.uint32)
        unit = 2.0 * _unit(hashed(of_octave ^ hashed(number + jnp.uint32(1)))) - 1.0
        total += 2.0 ** (_ROUGHNESS * octave) * jnp.sign(unit) * -jnp.log1p(-jnp.abs(unit))
    return total


def _unit(words: jax.Array) -> jax.Array:
    """Uniform in (0, 1)."""
    return ((words >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
