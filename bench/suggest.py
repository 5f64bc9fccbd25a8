"""What `ping-llm suggest` is worth: `python bench/suggest.py FOLDER [--seeds 2]`.

Of PlanetLab 1 % of the pairs are known, of MENOG 20 % (FOLDER holds them, see `real_data_sets.py`). More are measured:
random ones, the suggested ones, or one after the other of the node with the fewest measurements, with

    rarest nodes first      the other node with the fewest measurements
    landmarks               that which had most measurements at the start
    nearest, in hindsight   that to which its true RTT is the shortest: nobody can, but it is a limit to compare with

Then the model is queried about held-out pairs, which nobody could choose. Errors are means over the seeds.

`--judge classical` asks Vivaldi + log factors about thousands of held-out pairs instead: seconds, and less noise.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ping_llm import Predictor
from ping_llm.baselines import standard_baselines
from ping_llm.core.rtt import Floats, Ints, Observations
from ping_llm.evaluate.protocols import is_mesh
from ping_llm.rows.measurement_set import MeasurementSet
from real_data_sets import menog_pairs, menog_pings, parted, planetlab_pairs

WAYS = ("random", "rarest nodes first", "landmarks", "suggested", "nearest, in hindsight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", default="50,200,1000")
    parser.add_argument("--judge", choices=("completer", "classical"), default="completer")
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--votes", type=int, default=None)
    options = parser.parse_args()
    classical = options.judge == "classical"
    model = Predictor.from_pretrained(options.model, context=options.context, votes=options.votes)
    for name, pairs, nodes, share in _sets(options.folder):
        sys.stdout.write(f"\n{name}\n{'':30s}{'median RE':>10s}{'MAE ms':>9s}{'mean |ln|':>11s}\n")
        for budget in (0, *map(int, options.budgets.split(","))):
            for way in WAYS if budget else ("as it is",):
                found = [
                    _after(model, pairs, nodes, way, budget, share, options.held_out, seed, classical)
                    for seed in range(options.seeds)
                ]
                median, mae, log = np.mean(found, axis=0)
                sys.stdout.write(f"{budget:6d}  {way:22s}{median:10.3f}{mae:9.1f}{log:11.3f}\n")
                sys.stdout.flush()


def _sets(folder: Path) -> Iterator[tuple[str, Observations, tuple[str, ...], float]]:
    planetlab = planetlab_pairs(folder)
    nodes = tuple(f"{0x2000 + node:x}::1" for node in range(int(planetlab.destination.max()) + 1))
    yield "PlanetLab, 1 % known", planetlab, nodes, 0.01
    pings = menog_pings(folder)
    pairs = menog_pairs(pings.fastest)
    names, number = np.unique(pings.nodes, return_inverse=True)  # two probes behind one address are one node
    pairs = replace(pairs, source=number[pairs.source], destination=number[pairs.destination])
    yield "MENOG, 20 % known", pairs, tuple(names.tolist()), 0.2


def _after(
    model: Predictor,
    pairs: Observations,
    nodes: tuple[str, ...],
    way: str,
    budget: int,
    share: float,
    held: int,
    seed: int,
    classical: bool,
) -> Floats:
    known, rest = parted(pairs, share, seed)
    held = min(held, len(rest) // 3)
    test, possible = rest.take(slice(0, held)), rest.take(slice(held, None))
    if way == "suggested":
        chosen = _suggested(model, MeasurementSet(nodes=nodes, observations=known), possible, budget)
    elif way == "random":
        chosen = np.arange(min(budget, len(possible)))
    else:
        chosen = _rarest_first(known, possible, budget, len(nodes), way)
    new = possible.take(chosen)
    more = {name: np.append(column, vars(new)[name]) for name, column in vars(known).items()}
    if classical:
        baselines = {one.name: one for one in standard_baselines(None, symmetric=is_mesh(pairs), seed=seed)}
        predicted = baselines["vivaldi + log factors"].fit(
            Observations(**more | {"time_s": np.zeros(len(known) + len(new))})
        )(test.questions)
    else:
        predicted = model.predict(Observations(**more), test.questions, nodes).median
    error = np.abs(predicted - test.rtt_ms)
    return np.array([np.median(error / test.rtt_ms), error.mean(), np.abs(np.log(predicted / test.rtt_ms)).mean()])


def _suggested(model: Predictor, known: MeasurementSet, possible: Observations, budget: int) -> Ints:
    ends = {name: [known.nodes[node] for node in vars(possible)[name]] for name in ("source", "destination")}
    rows = pa.array(np.arange(len(possible)))
    among = pa.table({"src_addr": ends["source"], "dst_addr": ends["destination"], "row": rows})
    return np.asarray(model.suggest(known, budget=budget, among=among)["row"].to_numpy())


def _rarest_first(known: Observations, possible: Observations, budget: int, nodes: int, way: str) -> Ints:
    """The pair of the node with the fewest measurements that is the best by the way's second key, then again."""
    count = np.bincount(np.append(known.source, known.destination), minlength=nodes)
    at_first, left = count.copy(), np.ones(len(possible), dtype=bool)
    chosen = np.zeros(min(budget, len(possible)), np.int64)
    for number in range(len(chosen)):
        one, other = count[possible.source], count[possible.destination]
        partner = np.where(one <= other, possible.destination, possible.source)
        second = {"landmarks": -at_first[partner], "nearest, in hindsight": possible.rtt_ms}.get(way, count[partner])
        rarity = np.minimum(one, other)
        rows = np.flatnonzero(left & (rarity == rarity[left].min()))
        best = chosen[number] = rows[np.argmin(second[rows])]
        left[best] = False
        count[[possible.source[best], possible.destination[best]]] += 1
    return chosen


if __name__ == "__main__":
    main()
