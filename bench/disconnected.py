"""Answers where nothing links the two ends, and the constants of `widened`: `python bench/disconnected.py FOLDER`.

FOLDER holds PlanetLab and MENOG (`real_data_sets.py`); each simulated Internet has 20 to 220 nodes, two of five of them
probes and targets. Of each, 3 to 20 pairs for each node are known, none of them between its parts, and the model is
asked about pairs between these:

    halves        two random halves, as the protocol `disconnected` of `ping-llm evaluate` has them
    regions       what is nearest to one of two nodes far apart: most that is known is shorter than what is asked
    regions4      likewise, four of them
    few           two to eight random nodes, and the rest
    local         some neighbours, and the rest
    onenew        of one end, one of three in twenty nodes, nothing is known
    new           of both
    timeouts      of one end, nothing is known but timeouts

It prints NLL, given an answer, and the coverage of the 90 % interval of the model alone and of what `ping-llm predict`
answers. With `--choose` it tries other constants, too: those with the least mean NLL and, for every bit by which a
design of a kind of sets is worse than now or every 33 % of coverage below 86 %, a bit more.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import dijkstra  # type: ignore[import-untyped]

from ping_llm import Predictor
from ping_llm.core.rtt import Floats, Ints, Observations
from ping_llm.evaluate.scores import ScoredAnswers
from ping_llm.models.completer.inference import BinDistribution, Completer
from ping_llm.predict.support import FAR, NO_CHAIN, Far, Support, widened
from ping_llm.sources.simulator import SimulatorSettings, World
from real_data_sets import menog_pairs, menog_pings, planetlab_pairs, timeless, unrelated_addresses

DESIGNS = ("halves", "regions", "regions4", "few", "local", "onenew", "new", "timeouts")
ENDS_KNOWN = {"new": 0, "onenew": 1}
QUERIES = 64
_COARSE = 8
"""Bins of the answers that are taken together, so that hundreds of constants can be tried."""

Pairs = tuple[Observations, tuple[str, ...]]
Scores = dict[tuple[str, str], Floats]
"""NLL in bits and coverage of each kind of set and design."""


class Answered(NamedTuple):
    kind: str
    design: str
    answers: BinDistribution
    """Of the model alone, if the measurement does not fail."""
    support: Support
    observed: Observations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--seeds", type=int, default=4, help="of each real set")
    parser.add_argument("--internets", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--choose", action="store_true")
    options = parser.parse_args()
    model = Predictor.from_pretrained(options.model, context=options.context).model
    assert isinstance(model, Completer)
    real = product(("planetlab", "menog"), range(options.seeds))
    found = []
    for kind, seed in [*real, *(("simulated", 23 + number) for number in range(options.internets))]:
        found += list(_answers(model, options.folder, kind, seed))
    _show(found, "as it is now", FAR)
    if options.choose:
        tried = [
            Far(least=least, median_ms=median_ms, spread=spread, short_ms=short_ms)
            for least in (0.1, 0.15, 0.2)
            for median_ms in (150.0, 175.0, 200.0)
            for spread in (0.6, 0.8, 1.0)
            for short_ms in (70.0, 100.0, 140.0)
        ]
        now = _scores(found, FAR)
        best = min(tried, key=lambda far: _cost(_scores(found, far), now))
        _show(found, f"best: {best}", best)


def _answers(model: Completer, folder: Path, kind: str, seed: int) -> Iterator[Answered]:
    for design in DESIGNS:
        random = np.random.default_rng([seed, sum(map(ord, design))])
        pairs, nodes = _simulated(seed, random) if kind == "simulated" else _real(folder, kind)
        known, asked = _designed(design, pairs, len(nodes), random)
        if not len(asked) or not len(known):
            continue
        support = Support.of(known, asked.questions)
        ends_known = (support.source > 0).astype(int) + (support.destination > 0)
        asked = asked.take((ends_known == ENDS_KNOWN.get(design, 2)) & (support.chain == NO_CHAIN))
        asked = asked.take(random.permutation(len(asked))[:QUERIES])
        if len(asked) >= 4:
            fine = model.predict(known, asked.questions, nodes).probability
            coarse = fine.reshape(len(asked), -1, _COARSE).sum(axis=-1)
            answers = BinDistribution(p_failed=np.zeros(len(asked)), probability=coarse)
            support = Support.of(known, asked.questions)
            yield Answered(kind, design, answers, support, asked)


def _designed(design: str, pairs: Observations, nodes: int, random: np.random.Generator) -> tuple[Observations, ...]:
    """What is known, and pairs of which some may be asked."""
    per_node = np.exp(random.uniform(np.log(3.0), np.log(20.0)))
    if design in ("new", "onenew", "timeouts"):
        apart = random.random(nodes) < 0.15
        one, other = apart[pairs.source], apart[pairs.destination]
        inside, across = ~one & ~other, (one & other) if design == "new" else one != other
    else:
        part = _parts(design, pairs, nodes, random)
        inside = part[pairs.source] == part[pairs.destination]
        across = ~inside
    is_known = random.random(len(pairs)) < min(0.8, per_node * nodes / 2 / max(inside.sum(), 1))
    if design in ("few", "local"):
        is_known |= part[pairs.source] == 1
    known, asked = pairs.take(inside & is_known), pairs.take(across)
    if design == "timeouts":
        lost = random.random(len(asked)) < 0.1
        failed = replace(asked.take(lost), rtt_ms=np.full(lost.sum(), np.nan))
        known = Observations(**{name: np.append(column, vars(failed)[name]) for name, column in vars(known).items()})
        asked = asked.take(~lost)
    return known, asked


def _parts(design: str, pairs: Observations, nodes: int, random: np.random.Generator) -> Ints:
    """The part of each node."""
    if design == "halves":
        return (random.random(nodes) < 0.5).astype(np.int64)
    part = np.zeros(nodes, np.int64)
    if design == "few":
        part[random.choice(nodes, int(random.integers(2, 9)), replace=False)] = 1
        return part
    distances = [_distances(pairs, nodes, int(random.choice(pairs.source)))]
    if design == "local":
        part[np.argsort(distances[0])[: int(random.integers(3, max(4, nodes // 6) + 1))]] = 1
        return part
    for _ in range(3 if design == "regions4" else 1):
        nearest = np.min(distances, axis=0)
        far = np.argsort(np.where(np.isfinite(nearest), nearest, -1.0))[-max(1, nodes // 5) :]
        distances.append(_distances(pairs, nodes, int(random.choice(far))))
    return np.argmin(distances, axis=0)


def _distances(pairs: Observations, nodes: int, start: int) -> Floats:
    graph = csr_array((pairs.rtt_ms, (pairs.source, pairs.destination)), shape=(nodes, nodes))
    return np.asarray(dijkstra(graph, directed=False, indices=start))


@cache
def _real(folder: Path, kind: str) -> Pairs:
    if kind == "planetlab":
        pairs = planetlab_pairs(folder)
        return pairs, unrelated_addresses(int(pairs.destination.max()) + 1)
    pings = menog_pings(folder)
    return menog_pairs(pings.fastest), pings.nodes


def _simulated(seed: int, random: np.random.Generator) -> Pairs:
    """All pairs of some nodes of an Internet, each with the median of five measurements at one time."""
    world = World(SimulatorSettings(measurements=100_000, seed=seed, ipv6_share=0))
    probes = np.unique(world.streams.source)
    ends = np.union1d(probes, world.streams.target)
    count = int(np.exp(random.uniform(np.log(20), np.log(220))))
    if random.random() < 0.4:
        targets = np.setdiff1d(ends, probes)
        some = random.choice(probes, max(6, count // 3), replace=False)
        others = random.choice(targets, min(len(targets), count - len(some)), replace=False)
        chosen = np.concatenate([some, others])
        source, destination = np.indices((len(some), len(others))).reshape(2, -1)
        destination += len(some)
    else:
        chosen = random.choice(ends, min(count, len(ends)), replace=False)
        source, destination = np.triu_indices(len(chosen), 1)
    time_s = np.full(len(source), world.settings.start_s + random.uniform(0, 6e5))
    paths = world.delays.paths(chosen[source], chosen[destination])
    delays = world.delays.distribution(paths, time_s, world.loss_scale)
    rtt_ms = np.median([np.nan_to_num(delays.draw(random), nan=np.inf) for _ in range(5)], axis=0)
    addresses = world.endpoints.address.take(chosen).to_pylist()
    return timeless(source, destination, rtt_ms).take(np.isfinite(rtt_ms)), tuple(addresses)


def _scores(found: list[Answered], far: Far) -> Scores:
    of_each: dict[tuple[str, str], list[Floats]] = {}
    for one in found:
        losses = ScoredAnswers.of(widened(one.answers, one.support, far), one.observed).losses
        of_each.setdefault((one.kind, one.design), []).append(np.stack([losses["bits"], losses["inside"]]))
    return {key: np.concatenate(parts, axis=1).mean(axis=1) for key, parts in of_each.items()}


def _cost(scores: Scores, now: Scores) -> float:
    bits, inside = np.stack(list(scores.values()), axis=1)
    worse = np.maximum(bits - np.stack([now[key][0] for key in scores]), 0.0).sum()
    return float(bits.mean() + worse + 3 * np.maximum(0.86 - inside, 0.0).sum())


def _show(found: list[Answered], title: str, far: Far) -> None:
    alone, answered = _scores(found, Far(least=0.0, most=0.0)), _scores(found, far)
    sys.stdout.write(f"\n{title}\n{'':26s}{'queries':>8s}{'NLL, bits':>20s}{'in 90 %':>18s}\n")
    for kind, design in alone:
        queries = sum(len(one.observed) for one in found if (one.kind, one.design) == (kind, design))
        (before, inside), (after, inside_after) = alone[kind, design], answered[kind, design]
        cells = f"{before:12.2f} -> {after:4.2f}{inside:12.0%} -> {inside_after:3.0%}"
        sys.stdout.write(f"{kind:12s}{design:14s}{queries:8d}{cells}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
