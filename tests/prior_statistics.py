"""A few numbers that say what kind of Internet a set of RTTs is, to see whether the prior covers real ones.

Real data against 200 worlds given the same pairs (`tests/test_completer_prior.py` computes them again):

                 PlanetLab (100 nodes)   quantiles of worlds    MENOG    quantiles of worlds
                                         10 %    50 %    90 %            10 %    50 %    90 %
    median RTT   135 ms                  16      88      207     144 ms  16      100     247
    spread       0.85                    0.69    1.23    1.98    0.44    0.24    0.93    1.68
    additive     0.52                    0.33    0.68    1.30    0.27    0.06    0.26    0.83
    factors      0.054                   0.025   0.068   0.156   0.144   0.072   0.201   0.416
    missed       5.5                     3.4     4.6     9.3     6.7     3.0     4.5     8.1
    shortcuts    0.12                    0.07    0.35    0.65

Every real figure lies between the 10 % and the 90 % quantile of the worlds: real Internets are ordinary members of the
prior, a little tamer than most. What time does to a pair (`Disturbances`), in worlds of single pings and in MENOG:

                                              worlds                     MENOG
    spread, quantiles 25 %, 50 %, 75 %, 90 %  0.6 %, 1.9 %, 5.3 %, 12 %  1.3 %, 2.4 %, 4.5 %, 8 %
    failures, mean and 75 %, 90 %, 99 %       8.4 %, 8 %, 21 %, all      7.2 %, 4 %, 18 %, all
    median difference to 1, 6, 25 pings ago   1.1 %, 1.8 %, 2.3 %        1.0 %, 1.9 %, 3.2 %
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.rtt import Floats, Ints
from ping_llm.prior.internet import make_nodes, undisturbed_ms
from ping_llm.prior.prng import Draws
from ping_llm.prior.worlds import WorldSettings

# mypy: disallow-untyped-calls=False


@dataclass(frozen=True, kw_only=True)
class Character:
    median_ms: float
    spread: float
    """Of ln RTT: half the distance between the quantiles of 16 % and 84 %."""
    additive: float
    """Median size of what is left of ln RTT when each node has its own constant: 0 if all were equally far apart."""
    factors: float
    """The same for five factors of each node, fitted to half of the pairs, on the other half."""
    missed: float
    """The 90th percentile of that, by its median: how heavy the tail is."""
    shortcuts: float
    """Share of pairs with a way over a third node that is shorter by a sixth. NaN where no triangle was measured."""


def character(source: Ints, destination: Ints, rtt_ms: Floats, *, seed: int = 0) -> Character:
    """Of the RTTs of distinct pairs."""
    from ping_llm.baselines.factors import LogFactors
    from ping_llm.core.rtt import Observations

    log_rtt = np.log(rtt_ms)
    low, middle, high = np.quantile(log_rtt, [0.16, 0.5, 0.84])
    pairs = Observations(
        source=source, destination=destination, time_s=np.zeros(len(source)), rtt_ms=np.asarray(rtt_ms, np.float64)
    )
    known = np.random.default_rng(seed).random(len(pairs)) < 0.5
    test = pairs.take(~known)
    symmetric = bool(len(np.intersect1d(source, destination)))
    fitted = LogFactors(rank=5, symmetric=symmetric, seed=seed).fit(pairs.take(known))
    missed = np.abs(np.log(fitted(test.questions)) - test.log_rtt)
    return Character(
        median_ms=float(np.exp(middle)),
        spread=float(high - low) / 2,
        additive=float(np.median(np.abs(_without_constants(source, destination, log_rtt)))),
        factors=float(np.median(missed)),
        missed=float(np.quantile(missed, 0.9) / np.median(missed)),
        shortcuts=_shortcuts(source, destination, rtt_ms),
    )


def rtts_of_worlds(
    source: Ints, destination: Ints, *, worlds: int, seed: int = 0, settings: WorldSettings | None = None
) -> npt.NDArray[np.float32]:
    """[worlds, pairs]: what worlds of the prior say about the given pairs of nodes, undisturbed."""
    count = int(max(source.max(), destination.max())) + 1
    s = replace(settings or WorldSettings(), most_nodes=count)
    one, other = jnp.asarray(source), jnp.asarray(destination)
    is_mesh = len(np.intersect1d(source, destination)) > 0
    is_probe = jnp.asarray(np.isin(np.arange(count), source) & (not is_mesh))

    @partial(jax.jit, static_argnums=1)
    def rtts(first: int, size: int) -> jax.Array:
        def world(number: jax.Array) -> jax.Array:
            draw = Draws(jax.random.fold_in(jax.random.key(seed), number))
            nodes, paths = make_nodes(draw, s, jnp.int32(count), is_probe)
            return undisturbed_ms(draw, nodes, paths, one, other)

        return jax.vmap(world)(first + jnp.arange(size))

    return np.asarray(rtts(0, worlds))


def _without_constants(source: Ints, destination: Ints, log_rtt: Floats, sweeps: int = 20) -> Floats:
    left = log_rtt - np.median(log_rtt)
    size = int(max(source.max(), destination.max())) + 1
    nodes = np.concatenate([source, destination])
    count = np.maximum(np.bincount(nodes, minlength=size), 1)
    for _ in range(sweeps):  # half a step each: both ends of a pair move at once
        constant = 0.5 * np.bincount(nodes, np.concatenate([left, left]), minlength=size) / count
        left = left - constant[source] - constant[destination]
    return left


def _shortcuts(source: Ints, destination: Ints, rtt_ms: Floats, most: int = 80) -> float:
    """Over the first nodes only: the work grows with the cube of their number."""
    inside = (source < most) & (destination < most)
    matrix = np.full((most, most), np.inf)
    matrix[source[inside], destination[inside]] = matrix[destination[inside], source[inside]] = rtt_ms[inside]
    around = np.array([(matrix[a] + matrix).min(axis=1) for a in range(most)])
    measured = np.isfinite(matrix) & np.isfinite(around)
    return float(np.mean(matrix[measured] > 1.2 * around[measured])) if measured.any() else float("nan")
