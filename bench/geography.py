"""What positions of nodes are worth to the completer: `python bench/geography.py FOLDER`.

Of each set, the completer is asked the same queries without and with positions of the nodes, beside distance + offsets
(RTT = slope x distance + an offset of either end, which for a node that was never measured is the median offset):

    known     a share of the pairs is known, others are queried
    one new   a fifth of the nodes was never measured; queried pairs have one such end
    two new   the same; both ends are

Two simulated Internets are for design (`ping-llm simulate`, not the simulator of the training), their positions off by
30 km. FOLDER holds the test sets of `real_data_sets.py`: nothing is chosen by looking at them. WonderNetwork gives only
distances between its cities; positions follow from them up to a rotation, which nobody sees. Of Filecoin, positions are
known on one side only. Of AWS they are those of the cities that its regions are named after.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from ping_llm import Predictor
from ping_llm.baselines.interface import PairTable
from ping_llm.core.console import out
from ping_llm.core.geography import EARTH_KM, UNKNOWN, LocatedNodes, Positions, distance_km
from ping_llm.core.rtt import Floats, Observations
from ping_llm.evaluate.scores import Comparison, Losses, ScoredAnswers, comparison_table
from ping_llm.rows.measurement_set import read_observations
from ping_llm.sources.simulator import SimulatorSettings, World, simulate
from real_data_opponents import DistanceOffsets
from real_data_sets import AWS_FILE, DATA_SETS, FILECOIN_FILE, RealPairs, parted, read_csv, timeless

DESIGNS = ("known 5 %", "known 20 %", "one new", "two new")
AWS_CITIES = {
    "af-south-1": (-33.9, 18.4),
    "ap-east-1": (22.3, 114.2),
    "ap-northeast-1": (35.7, 139.7),
    "ap-northeast-2": (37.6, 127.0),
    "ap-northeast-3": (34.7, 135.5),
    "ap-south-1": (19.1, 72.9),
    "ap-south-2": (17.4, 78.5),
    "ap-southeast-1": (1.35, 103.8),
    "ap-southeast-2": (-33.9, 151.2),
    "ap-southeast-3": (-6.2, 106.8),
    "ap-southeast-4": (-37.8, 145.0),
    "ap-southeast-5": (3.1, 101.7),
    "ap-southeast-7": (13.8, 100.5),
    "ca-central-1": (45.5, -73.6),
    "ca-west-1": (51.0, -114.1),
    "eu-central-1": (50.1, 8.7),
    "eu-central-2": (47.4, 8.5),
    "eu-north-1": (59.3, 18.1),
    "eu-south-1": (45.5, 9.2),
    "eu-south-2": (41.6, -0.9),
    "eu-west-1": (53.3, -6.3),
    "eu-west-2": (51.5, -0.1),
    "eu-west-3": (48.9, 2.4),
    "il-central-1": (32.1, 34.8),
    "me-central-1": (24.5, 54.4),
    "me-south-1": (26.1, 50.6),
    "mx-central-1": (20.6, -100.4),
    "sa-east-1": (-23.5, -46.6),
    "us-east-1": (39.0, -77.5),
    "us-east-2": (40.0, -83.0),
    "us-west-1": (37.4, -122.0),
    "us-west-2": (45.8, -119.7),
}


@dataclass(frozen=True, kw_only=True)
class Located:
    name: str
    pairs: Observations
    nodes: LocatedNodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the test sets; without it, simulated Internets only")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=300, help="of each set, design and seed")
    options = parser.parse_args()
    predictor = Predictor.from_pretrained(options.model)
    for data, design in product(_sets(options.folder), DESIGNS):
        _show(predictor, data, design, range(options.seeds), options.queries)


def _show(predictor: Predictor, data: Located, design: str, seeds: Sequence[int], count: int) -> None:
    found: dict[str, list[Losses]] = {"completer": [], "with positions": []}
    groups = []
    for seed in seeds:
        known, asked = _task(data, design, seed)
        asked = asked.take(slice(0, count))
        if not len(asked):
            return
        groups.append(asked.unordered_pair)
        for name, nodes in zip(found, (tuple(data.nodes), data.nodes), strict=False):
            answers = predictor.predict(known, asked.questions, nodes)
            found[name].append(ScoredAnswers.of(answers, asked).losses)
        if data.nodes.positions.any(axis=1).all():
            table = distance_km(data.nodes.positions[:, None], data.nodes.positions[None]).astype(np.float64)
            predicted = DistanceOffsets(distance_km=table).fit(known)(asked.questions)
            error = np.abs(predicted - asked.rtt_ms)
            found.setdefault("distance + offsets", []).append({"error": error, "relative": error / asked.rtt_ms})
    pooled = {
        name: {key: np.concatenate([one[key] for one in losses]) for key in losses[0]} for name, losses in found.items()
    }
    group = np.concatenate(groups)
    title = f"{data.name}, {design} ({len(group)} queries)"
    out.print(comparison_table(title, Comparison.of(pooled, group), ["completer", "with positions"]), "")


def _task(data: Located, design: str, seed: int) -> tuple[Observations, Observations]:
    pairs = data.pairs.answered
    if design.startswith("known"):
        return parted(pairs, float(design.split()[1]) / 100, seed)
    random = np.random.default_rng(seed)
    is_new = random.random(len(data.nodes)) < 0.2
    new_ends = is_new[pairs.source].astype(int) + is_new[pairs.destination]
    known, _ = parted(pairs.take(new_ends == 0), 0.2, seed)
    asked = pairs.take(new_ends == (1 if design == "one new" else 2))
    return known, asked.take(random.permutation(len(asked)))


def _sets(folder: Path | None) -> Iterator[Located]:
    for seed in (11, 12):
        yield _simulated(seed)
    if folder is None:
        return
    sets = {one.name: one.read(folder) for one in DATA_SETS if one.name in ("wonder", "aws", "filecoin")}
    for name, data in sets.items():
        assert isinstance(data, RealPairs)
        nodes = LocatedNodes.of(data.nodes, [UNKNOWN] * len(data.nodes))
        if name == "wonder":
            assert data.distance_km is not None
            nodes.positions = positions_from(data.distance_km)
        elif name == "aws":
            table = read_csv(folder / AWS_FILE)
            names = np.unique(np.concatenate([table["src"], table["dst"]])).tolist()
            nodes = LocatedNodes.of(data.nodes, [AWS_CITIES[region] for region in names])
        else:
            table = read_csv(folder / FILECOIN_FILE)
            _, first = np.unique(table["airport"], return_index=True)
            degrees = list(zip(table["latitude"][first].tolist(), table["longitude"][first].tolist(), strict=True))
            nodes = LocatedNodes.of(data.nodes, degrees + [UNKNOWN] * (len(data.nodes) - len(degrees)))
        yield Located(name=name, pairs=data.pairs, nodes=nodes)


def _simulated(seed: int) -> Located:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        simulate(SimulatorSettings(measurements=150_000, seed=seed, ipv6_share=0), raw)
        measured, world = read_observations([raw / "*.parquet"]), World.load(raw)
    table = PairTable.of(measured.observations.answered)
    number = {address: i for i, address in enumerate(world.endpoints.address.to_pylist())}
    exact = world.endpoints.position[[number[node] for node in measured.nodes]]
    near = exact + 30 / EARTH_KM * np.random.default_rng(seed).standard_normal(exact.shape)
    nodes = LocatedNodes.of(measured.nodes, [UNKNOWN] * len(measured.nodes))
    nodes.positions = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
    return Located(name=f"simulated {seed}", pairs=timeless(table.source, table.destination, table.rtt_ms), nodes=nodes)


def positions_from(distance: Floats) -> Positions:
    """Unit vectors with these distances in km between them (0: unknown), up to a rotation: their dot products are the
    cosines of the distances, a matrix of rank three."""
    is_given = (distance > 0) | np.eye(len(distance), dtype=bool)
    products = np.where(is_given, np.cos(distance / EARTH_KM), 0.0)
    for _ in range(100):
        values, vectors = np.linalg.eigh(products)
        found = vectors[:, -3:] * np.sqrt(np.maximum(values[-3:], 0))
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        products = np.where(is_given, products, found @ found.T)
    return found.astype(np.float32)


if __name__ == "__main__":
    main()
