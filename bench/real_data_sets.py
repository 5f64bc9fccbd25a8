"""Real measurements and the protocols of the classical baselines on them: what `real_data.py` and the tests ask.

- PlanetLab, frame 1: a symmetric matrix of 490 nodes; 5, 20 or 50 % of the unordered pairs are known, three seeds.
- MENOG: 2,161 pairs of RIPE Atlas probes and destinations with at least ten answers, each the median of its results'
  minima; 50 or 80 % known, three seeds. And single pings, each asked from what was measured before it.

`predictor` is anything with `predict(known, questions)`. Nothing is fitted.
"""

import bz2
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from ping_llm.baselines.interface import PairTable
from ping_llm.core.rtt import Floats, History, Observations, Questions, RttDistribution
from ping_llm.evaluate.scores import Scores, scores
from ping_llm.sources.atlas.parse import read_ping

PLANETLAB_FILE: Final = "planetlab-rtt-frame1.npz"
MENOG_FILE: Final = "ripe-atlas-ping-menog.jsonl.bz2"
PLANETLAB_KNOWN: Final = (0.05, 0.2, 0.5)
MENOG_KNOWN: Final = (0.5, 0.8)
_FEWEST_ANSWERS: Final = 10


class ContextPredictor(Protocol):
    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str] | None) -> RttDistribution: ...


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
    return _timeless(source, destination, rtt[source, destination].astype(np.float64))


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
    return _timeless(table.source, table.destination, table.rtt_ms)


def parted(pairs: Observations, known: float, seed: int) -> tuple[Observations, Observations]:
    """What is known and what is asked, the latter in random order."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    learned, asked = np.split(order, [round(known * len(pairs))])
    return pairs.take(learned), pairs.take(asked)


def unseen_pairs(
    predictor: ContextPredictor,
    pairs: Observations,
    known: float,
    *,
    nodes: Sequence[str] | None = None,
    seeds: Iterable[int] = range(3),
    most_questions: int | None = None,
) -> Scores:
    """Means over the seeds. `most_questions` asks a random part of what was held out."""
    results = []
    for seed in seeds:
        learned, asked = parted(pairs, known, seed)
        test = asked.take(slice(0, most_questions))
        results.append(scores(predictor.predict(learned, test.questions, nodes), test))
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def answered_later(pings: Pings, most_questions: int = 2000, seed: int = 0) -> Observations:
    """Answered pings whose pair was measured before, to be asked from everything that was measured before them."""
    answered = pings.first.answered
    start, stop = History.of(answered.pair, answered.time_s, answered.rtt_ms).span(answered.pair, answered.time_s)
    seen = np.flatnonzero(stop > start)
    return answered.take(np.random.default_rng(seed).permutation(seen)[:most_questions])


def _timeless(source: npt.NDArray[Any], destination: npt.NDArray[Any], rtt_ms: Floats) -> Observations:
    return Observations(
        source=source.astype(np.int64),
        destination=destination.astype(np.int64),
        time_s=np.full(len(source), np.nan),
        rtt_ms=rtt_ms,
    )
