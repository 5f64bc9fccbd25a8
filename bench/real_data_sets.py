"""Real measurements, and the queries that everyone is asked about them: for `real_data.py` and the tests.

A set is a table of pairs with one value each. A share of its pairs, drawn by the seed, is known; a random sample of the
others is queried. `DATA_SETS` has them all, and which of them had a part in the design of this package:

planetlab   design  490 nodes, a symmetric matrix: unordered pairs
menog       design  2,161 pairs of RIPE Atlas probes and destinations with at least ten answers; the median of their
                    results' minima
next-ping   design  MENOG again: single pings of pairs that were measured before, each queried from what lies before it
wonder      test    248 cities: unordered pairs, the mean of both directions' average; nodes are names; distances
filecoin    test    airports (where RIPE Atlas probes are near) to storage providers: directed pairs, the median of a
                    pair's answered results; its single results are known, and score the probability of a failure
aws         test    32 regions: unordered pairs, the mean of both directions' medians; nodes are names

Nothing may be chosen by looking at a test set: no weight, no setting of the prior, none of an opponent.
"""

import bz2
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow.csv

from ping_llm.baselines.interface import PairTable
from ping_llm.core.rtt import Floats, History, Observations
from ping_llm.sources.atlas_results import read_ping

PLANETLAB_FILE: Final = "planetlab-rtt-frame1.npz"
MENOG_FILE: Final = "ripe-atlas-ping-menog.jsonl.bz2"
WONDER_FILE: Final = "wondernetwork-2018.csv.gz"
FILECOIN_FILE: Final = "filecoin-atlas-2021.csv.gz"
AWS_FILE: Final = "aws-regions-2026.csv"
_FEWEST_ANSWERS: Final = 10


Column = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Pings:
    """Results of (probe, destination): the first ping of each, and the fastest."""

    first: Observations
    fastest: Observations
    nodes: tuple[str, ...]
    """Addresses of the nodes' numbers; of a probe, that of its first result."""


def planetlab_pairs(folder: Path) -> Observations:
    """One row for each unordered pair, without a time."""
    rtt = np.load(folder / PLANETLAB_FILE)["rtt"][0]
    source, destination = np.triu_indices(len(rtt), 1)
    return timeless(source, destination, rtt[source, destination].astype(np.float64))


def menog_pings(folder: Path) -> Pings:
    """Reading takes eight seconds."""
    numbers, addresses = dict[Any, int](), dict[Any, str]()
    source, destination, time_s, first, fastest = [], [], [], [], []
    with bz2.open(folder / MENOG_FILE, "rb") as lines:
        for line in lines:
            result = orjson.loads(line)
            ping = read_ping(result, each_packet=True)
            probe = ("probe", result["prb_id"])
            addresses.setdefault(probe, result.get("from", ""))
            source.append(probe)
            destination.append(ping.destination)
            time_s.append(ping.time_us / 1e6)
            first.append(np.nan if ping.rtts[0] is None else ping.rtts[0])
            fastest.append(min((rtt for rtt in ping.rtts if rtt is not None), default=np.nan))
    sources, destinations = (
        np.array([numbers.setdefault(node, len(numbers)) for node in ends]) for ends in (source, destination)
    )
    columns = {"source": sources, "destination": destinations, "time_s": np.array(time_s)}
    return Pings(
        first=Observations(**columns, rtt_ms=np.array(first)),
        fastest=Observations(**columns, rtt_ms=np.array(fastest)),
        nodes=tuple(addresses.get(node, str(node)) for node in numbers),
    )


def menog_pairs(fastest: Observations) -> Observations:
    """One row for each pair with enough answers, without a time."""
    answered = fastest.answered
    _, number, count = np.unique(answered.pair, return_inverse=True, return_counts=True)
    table = PairTable.of(answered.take(count[number] >= _FEWEST_ANSWERS))
    return timeless(table.source, table.destination, table.rtt_ms)


def parted(pairs: Observations, known: float, seed: int) -> tuple[Observations, Observations]:
    """What is known and what is asked, the latter in random order."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    learned, asked = np.split(order, [round(known * len(pairs))])
    return pairs.take(learned), pairs.take(asked)


def measured_later(pings: Pings, most_questions: int = 2000, seed: int = 0) -> Observations:
    """Pings, failed ones too, of pairs that answered before, to be asked from everything that was measured earlier."""
    answered = pings.first.answered
    known = History(answered.pair, answered.time_s, answered.rtt_ms)
    start, stop = known.span(pings.first.pair, pings.first.time_s)
    seen = np.flatnonzero(stop > start)
    return pings.first.take(np.random.default_rng(seed).permutation(seen)[:most_questions])


# All sets alike.


@dataclass(frozen=True, kw_only=True)
class QueriedResults:
    """Of each query, how many single results there are, and which share of them failed."""

    tried: Floats
    failed: Floats


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """What is known, and what is queried of it."""

    known: Observations
    queries: Observations
    """With the values that are expected, NaN where a pair never answered."""
    nodes: tuple[str, ...]
    symmetric: bool
    results: "QueriedResults | None" = None
    distance_km: Floats | None = None
    """[nodes, nodes]"""

    @property
    def at_once(self) -> Observations:
        """What is known, for baselines: they take what has no time to be later than everything."""
        return Observations(**{**vars(self.known), "time_s": np.nan_to_num(self.known.time_s)})


@dataclass(frozen=True, kw_only=True)
class RealPairs:
    pairs: Observations
    nodes: tuple[str, ...]
    symmetric: bool
    results: Observations | None = None
    """Single results, failures among them, if they are known instead of the pairs' values."""
    distance_km: Floats | None = None

    def task(self, share: float, seed: int, queries: int) -> PairTask:
        known, asked = parted(self.pairs, share, seed)
        asked = asked.take(slice(0, queries))
        queried = None
        if self.results is not None:
            order = np.argsort(asked.pair)
            results = self.results.take(np.isin(self.results.pair, asked.pair))
            row = order[np.searchsorted(asked.pair[order], results.pair)]
            tried, failed = (
                np.bincount(row, weights=weight, minlength=len(asked)).astype(np.float64)
                for weight in (np.ones(len(row)), np.isnan(results.rtt_ms))
            )
            queried = QueriedResults(tried=tried, failed=failed / tried)
            known = self.results.take(np.isin(self.results.pair, known.pair))
        return PairTask(
            known=known,
            queries=asked,
            nodes=self.nodes,
            symmetric=self.symmetric,
            results=queried,
            distance_km=self.distance_km,
        )


@dataclass(frozen=True, kw_only=True)
class NextPings:
    pings: Pings

    def task(self, share: float, seed: int, queries: int) -> PairTask:
        asked = measured_later(self.pings, queries, seed)
        return PairTask(known=self.pings.first, queries=asked, nodes=self.pings.nodes, symmetric=False)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    name: str
    title: str
    role: str
    """"design", or "test": see above."""
    shares: tuple[float, ...]
    """Of the pairs, what is known; none where every query has its own past."""
    read: Callable[[Path], RealPairs | NextPings]

    @property
    def names(self) -> dict[str, float]:
        return {f"{self.name}-{100 * share:g}": share for share in self.shares} or {self.name: 0.0}

    def title_of(self, share: float) -> str:
        return f"{self.title}, {share:.0%} known" if share else self.title


def _planetlab(folder: Path) -> RealPairs:
    pairs = planetlab_pairs(folder)
    return RealPairs(pairs=pairs, nodes=unrelated_addresses(_nodes_of(pairs)), symmetric=True)


@cache
def _menog(folder: Path) -> Pings:
    return menog_pings(folder)


def _menog_pairs(folder: Path) -> RealPairs:
    pings = _menog(folder)
    return RealPairs(pairs=menog_pairs(pings.fastest), nodes=pings.nodes, symmetric=False)


def _wonder(folder: Path) -> RealPairs:
    table = read_csv(folder / WONDER_FILE)
    pairs, names = _both_directions(table["src"], table["dst"], table["avg_ms"])
    distances, _ = _both_directions(table["src"], table["dst"], table["distance_km"])
    distance_km = np.zeros((len(names), len(names)))
    distance_km[distances.source, distances.destination] = distances.rtt_ms
    return RealPairs(
        pairs=pairs,
        nodes=unrelated_addresses(len(names)),
        symmetric=True,
        distance_km=np.maximum(distance_km, distance_km.T),
    )


def _aws(folder: Path) -> RealPairs:
    table = read_csv(folder / AWS_FILE)
    pairs, names = _both_directions(table["src"], table["dst"], table["p50_ms"])
    return RealPairs(pairs=pairs, nodes=unrelated_addresses(len(names)), symmetric=True)


def _filecoin(folder: Path) -> RealPairs:
    """Without times: the file says when a result was exported, not when it was measured."""
    table = read_csv(folder / FILECOIN_FILE)
    airports, source = np.unique(table["airport"], return_inverse=True)
    addresses, destination = np.unique(table["dst_addr"], return_inverse=True)
    rtt = table["avg_ms"].astype(np.float64)
    results = timeless(source, destination + len(airports), np.where(rtt < 0, np.nan, rtt))
    of_pair, first = np.unique(results.pair, return_index=True)
    medians = PairTable.of(results)
    value = np.full(len(of_pair), np.nan)
    value[np.searchsorted(of_pair, medians.pair)] = medians.rtt_ms
    return RealPairs(
        pairs=timeless(results.source[first], results.destination[first], value),
        nodes=(*unrelated_addresses(len(airports)), *addresses.tolist()),
        symmetric=False,
        results=results,
    )


DATA_SETS: Final = (
    DataSet(name="planetlab", title="PlanetLab", role="design", shares=(0.05, 0.2, 0.5), read=_planetlab),
    DataSet(name="menog", title="MENOG, unseen pairs", role="design", shares=(0.5, 0.8), read=_menog_pairs),
    DataSet(
        name="next-ping",
        title="MENOG, next ping of a pair",
        role="design",
        shares=(),
        read=lambda folder: NextPings(pings=_menog(folder)),
    ),
    DataSet(name="wonder", title="WonderNetwork 2018, 248 cities", role="test", shares=(0.05, 0.2, 0.5), read=_wonder),
    DataSet(name="filecoin", title="Filecoin/Atlas 2021", role="test", shares=(0.2, 0.5, 0.8), read=_filecoin),
    DataSet(name="aws", title="AWS regions 2026", role="test", shares=(0.2, 0.5), read=_aws),
)


def unrelated_addresses(count: int) -> tuple[str, ...]:
    """For nodes without one: no two share a prefix."""
    return tuple(f"{0x2000 + node:x}::1" for node in range(count))


def read_csv(path: Path) -> dict[str, Column]:
    table = pyarrow.csv.read_csv(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def _both_directions(source: Column, destination: Column, value: Column) -> tuple[Observations, tuple[str, ...]]:
    """The mean of the directions of each pair of two names, and the names."""
    names, number = np.unique(np.concatenate([source, destination]), return_inverse=True)
    ends = np.sort(np.stack(np.split(number, 2)), axis=0)
    (low, high), value = ends[:, ends[0] != ends[1]], value[ends[0] != ends[1]]
    pair, row = np.unique(low << 32 | high, return_inverse=True)
    mean = np.bincount(row, value) / np.bincount(row)
    return timeless(pair >> 32, pair & 0xFFFFFFFF, mean), tuple(names.tolist())


def _nodes_of(pairs: Observations) -> int:
    return int(max(pairs.source.max(), pairs.destination.max())) + 1


def timeless(source: npt.NDArray[Any], destination: npt.NDArray[Any], rtt_ms: Floats) -> Observations:
    return Observations(
        source=source.astype(np.int64),
        destination=destination.astype(np.int64),
        time_s=np.full(len(source), np.nan),
        rtt_ms=rtt_ms,
    )
