"""Helpers of the tests of the split: measurements as tuples, and random ones."""

import dataclasses
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

import numpy as np

from ping_llm.core.rtt import Observations
from ping_llm.evaluate.split import Split, SplitSettings
from ping_llm.rows.measurement_set import MeasurementSet

Measurement = tuple[str, str, float | None, float | None]
"""Source, destination, time and RTT. None: no time; failed."""

NODES = tuple(f"10.0.{i}.1" for i in range(9)) + tuple(f"2001:db8::{i:x}" for i in range(1, 5))
GENEROUS = SplitSettings(held_out_pairs=0.3, unseen_probes=0.25, later=0.4)


def measured(measurements: Sequence[Measurement], nodes: Sequence[str] = NODES) -> MeasurementSet:
    number = {node: i for i, node in enumerate(nodes)}
    source, destination, time_s, rtt_ms = zip(*measurements, strict=True) if measurements else ((), (), (), ())
    return MeasurementSet(
        nodes=tuple(nodes),
        observations=Observations(
            source=np.array([number[s] for s in source], dtype=np.int64),
            destination=np.array([number[d] for d in destination], dtype=np.int64),
            time_s=np.array([np.nan if t is None else t for t in time_s], dtype=np.float64),
            rtt_ms=np.array([np.nan if r is None else r for r in rtt_ms], dtype=np.float32),
        ),
    )


def plain(nodes: Sequence[str], part: Observations) -> list[Measurement]:
    columns = zip(*(column.tolist() for column in vars(part).values()), strict=True)
    return [(nodes[s], nodes[d], None if t != t else t, None if r != r else r) for s, d, t, r in columns]


def random_world(count: int, *, sources: int = 120, targets: int = 60, seed: int = 0) -> MeasurementSet:
    """Sources measure targets and each other, in time order."""
    random = np.random.default_rng(seed)
    nodes = sources + targets
    return MeasurementSet(
        nodes=tuple(str(ip_address((10 << 24) + 7 * i)) for i in range(nodes)),
        observations=Observations(
            source=random.integers(0, sources, count),
            destination=random.integers(0, nodes, count),
            time_s=np.sort(random.integers(1_700_000_000_000_000, 1_700_001_000_000_000, count)) / 1e6,
            rtt_ms=np.where(random.random(count) < 0.05, np.nan, random.lognormal(3, 1, count)).astype(np.float32),
        ),
    )


def without_times(world: MeasurementSet) -> MeasurementSet:
    timeless = dataclasses.replace(world.observations, time_s=np.full(len(world.observations), np.nan))
    return dataclasses.replace(world, observations=timeless)


def equal(one: Observations, other: Observations) -> bool:
    columns = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in columns)


def leaks(split: Split) -> list[str]:
    """What the arrays of a split break of its promises; empty if they keep them all. For sets of any size."""
    return [f"{mask.sum()} {what}" for what, mask in _broken_promises(split) if mask.any()]


def _broken_promises(split: Split) -> Iterator[tuple[str, np.ndarray]]:
    train, history, nothing = split.train, split.history, split.train.take(slice(0, 0))
    trained = np.concatenate([train.source, train.destination])
    earlier = history
    if not split.timeless:
        earlier = history.take(history.time_s < split.cut_time_s)
        yield "measurements of train are not before the cut time", ~(train.time_s < split.cut_time_s)
    for name, questions in split.questions.items():
        if not split.timeless:
            yield f"questions of {name} are before the cut time", ~(questions.time_s >= split.cut_time_s)
        yield f"questions of {name} have a destination that is not in train", ~np.isin(questions.destination, trained)
    pairs, seen, probes = (split.questions.get(name, nothing) for name in ("unseen_pair", "seen_pair", "unseen_probe"))
    for name, known in {"train": train, "the history": history}.items():
        among = np.isin(pairs.unordered_pair, known.unordered_pair)
        yield f"questions of unseen_pair have their pair in {name}", among
    yield "questions of unseen_pair have a source that is not in train", ~np.isin(pairs.source, trained)
    yield "questions of seen_pair have a pair that is not in train", ~np.isin(seen.pair, train.pair)
    yield "questions of unseen_probe have a source that is in train", np.isin(probes.source, trained)
    yield "questions of unseen_probe have a source without history", ~np.isin(probes.source, earlier.source)
    if split.timeless:
        yield "questions of seen_pair are not later than what is known: nothing has a time", np.isnan(seen.time_s)
        among = np.isin(probes.unordered_pair, history.unordered_pair)
        yield "questions of unseen_probe have their pair in the history", among
