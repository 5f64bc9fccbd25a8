"""Classical predictors of latency: what a learned model has to beat, made as strong as they can be.

interface    what a baseline is; one value for each measured pair; global median
factors      matrix factorisation of ln RTT by robust alternating least squares; pair median
coordinates  network coordinates (Vivaldi) and DMFSGD, by minibatch gradient descent
sequential   last value, median of the last few, moving average
neighbours   collaborative filtering: what nodes with similar RTTs measured
prefix_trees gradient-boosted trees on the prefixes of addresses
forecasts    a distribution of errors around any of them, and P(failed)

A new one is a file with a dataclass that has a `name`, `causal` and `fit`, and a line in `standard_baselines`.
"""

from collections.abc import Sequence

import numpy as np

from ping_llm.baselines.coordinates import Descent, Dmfsgd, Vivaldi
from ping_llm.baselines.factors import LogFactors, PairMedian
from ping_llm.baselines.interface import Baseline, GlobalMedian, PairTable
from ping_llm.baselines.neighbours import Neighbours
from ping_llm.baselines.prefix_trees import PrefixTrees
from ping_llm.baselines.sequential import LastValue, MedianOfLast, MovingAverage
from ping_llm.core.rtt import Observations


def standard_baselines(nodes: Sequence[str] | None = None, *, symmetric: bool = False, seed: int = 0) -> list[Baseline]:
    """All of them, simplest first, with the settings that proved best.

    `symmetric`: for data where RTT(i, j) = RTT(j, i). `nodes` has the address of each node; without addresses there are
    no prefix trees.
    """
    vivaldi = Vivaldi(descent=Descent(rate=0.03, seed=seed))
    both = LogFactors(symmetric=symmetric, seed=seed, base=vivaldi, name="vivaldi + log factors")
    return [
        GlobalMedian(),
        PairMedian(),
        LastValue(),
        MedianOfLast(),
        MovingAverage(),
        vivaldi,
        Dmfsgd(symmetric=symmetric, descent=Descent(seed=seed)),
        LogFactors(symmetric=symmetric, seed=seed),
        both,
        Neighbours(symmetric=symmetric, base=both),
        *([] if nodes is None else [PrefixTrees(nodes=nodes, seed=seed)]),
    ]


def shortcuts(train: Observations, baselines: Sequence[Baseline]) -> list[str]:
    """Where some of these make do with less than all of these measurements, in words."""
    descents = [one.name for one in baselines if isinstance(one, Vivaldi | Dmfsgd)]
    factors = [one for one in baselines if isinstance(one, LogFactors)]
    has_neighbours, said = any(isinstance(one, Neighbours) for one in baselines), []
    if not descents and not factors and not has_neighbours:
        return []
    table = PairTable.of(train)
    pairs, nodes = len(table), max(len(np.unique(end)) for end in (table.source, table.destination))
    epochs = Descent().epochs_of(pairs)
    if descents and epochs < Descent.epochs:
        said.append(f"{', '.join(descents)}: each of {pairs:,} pairs is visited {epochs} times, not {Descent.epochs}")
    if factors and (sweeps := factors[0].sweeps_of(pairs)) < factors[0].sweeps:
        said.append(f"{', '.join(one.name for one in factors)}: {sweeps} sweeps, not {factors[0].sweeps}")
    if has_neighbours and nodes > Neighbours.most_nodes:
        said.append(f"neighbours: answers as its base, for there are more than {Neighbours.most_nodes:,} nodes")
    return said
