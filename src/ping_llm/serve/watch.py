"""Measurements that arrive while the server runs, and the metrics of the watched pairs.

One thread polls all feeds in turn (feeds.py). It scores new measurements by the current predictions, adds them to the
known measurements, and then has the next predictions computed in the background. So a measurement never contributes to
the prediction that scores it.
"""

import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any, Final, Self

import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats, RttDistribution
from ping_llm.rows.measurement_set import MeasurementSet, joined
from ping_llm.serve.access import log
from ping_llm.serve.answers import Query
from ping_llm.serve.api import Service
from ping_llm.serve.feeds import Feed, Pair
from ping_llm.serve.metrics import PairValues
from ping_llm.serve.store import KnownMeasurements, MeasurementStore

ANOMALOUS_BITS: Final = 10.0
"""Above the expected score: a thousand times less likely."""
_LEVELS: Final = (np.arange(16) + 0.5) / 16  # quantiles over which the expected score is averaged
_SCORED_PER_CALL: Final = 4096


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    feeds: Mapping[str, Feed] = field(default_factory=dict)
    """By name, which is a label of their metrics."""
    pairs: tuple[Pair, ...] | None = None
    """None: all, the most measured first."""
    max_pairs: int = 200
    refresh_seconds: float = 15.0
    """The pause between two refreshes, at least; it is as long as the last refresh if that took longer."""
    max_known: int = 1_000_000
    """The latest measurements are kept, up to this many."""


class Watcher:
    """Use it in a `with` block; `start` it when the model is warm."""

    def __init__(self, service: Service, settings: WatchSettings) -> None:
        if settings.pairs is not None and len(settings.pairs) > settings.max_pairs:
            raise PingLlmError(
                f"{len(settings.pairs):,} pairs to watch are more than --max-pairs {settings.max_pairs:,}"
            )
        self._service, self._settings, self._metrics = service, settings, service.metrics
        for name in settings.feeds:
            self._metrics.add_feed(name)
        self._stop = Event()
        self._thread = Thread(target=self._work, name="watch", daemon=True)
        self._complaints: dict[str, str] = {}
        self._number: dict[Pair, int] = {}
        self._expected: RttDistribution | None = None
        self._expected_bits = np.zeros(0)
        self._is_stale = True
        self._computing: Future[Any] | None = None
        names = "observed_s", "observed_at", "bits", "observations", "anomalies"
        self._seen: dict[str, Any] = {name: np.zeros(0) for name in names}  # a value of each pair, by its number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._computing is not None:
            self._computing.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            begin = time.monotonic()
            try:
                self._refresh()
            except CancelledError:  # the server stops
                return
            except Exception:
                self._metrics.refresh_errors.inc()
                log.exception("the predictions of the watched pairs could not be computed")
            pause = max(self._settings.refresh_seconds, time.monotonic() - begin)

    def _refresh(self) -> None:
        """Score and add what has arrived, then predict again."""
        begin, arrived = time.monotonic(), self._arrived()
        if arrived is not None:
            arrived = self._service.store.named(arrived)
            self._service.store = self._service.store.extended(arrived, self._settings.max_known)
            self._is_stale = True
            if self._expected is not None:
                self._score(arrived)
        if not self._is_stale:
            return
        if self._expected is None and len(self._service.store):
            self._score_latest()
        self._choose_pairs()
        self._look_up_latest()
        support = self._expect(self._service.store)
        self._is_stale = False
        if self._expected is not None:
            values = {
                "expected": self._expected,
                "expected_bits": self._expected_bits,
                "support": support,
                **self._seen,
            }
            self._metrics.show(PairValues(pairs=tuple(self._number), **values))
        self._metrics.refreshed.set_to_current_time()
        self._metrics.refresh_seconds.set(time.monotonic() - begin)

    def _arrived(self) -> MeasurementSet | None:
        """New measurements of all feeds, up to as many as are kept."""
        sets: list[MeasurementSet] = []
        for name, feed in self._settings.feeds.items():
            try:
                while sum(len(one.observations) for one in sets) < self._settings.max_known:
                    if (found := feed()) is None:
                        break
                    sets.append(found)
                    self._metrics.arrived.labels(name).inc(len(found.observations))
                    self._metrics.dropped.labels(name).inc(sum(found.dropped.values()))
                self._complaints.pop(name, None)
            except Exception as error:  # of any kind: the measurements of other feeds must not be lost
                self._metrics.feed_errors.labels(name).inc()
                if self._complaints.get(name) != str(error):
                    log.warning("%s: %s", name, error)
                self._complaints[name] = str(error)
        return joined(sets) if sets else None

    def _choose_pairs(self) -> None:
        chosen, most = self._settings.pairs, self._settings.max_pairs
        if chosen is not None:
            name_of = self._service.store.name_of
            chosen = tuple((name_of(source), name_of(destination)) for source, destination in chosen)
        else:
            measured = self._service.store.measured
            pairs, count = np.unique(measured.observations.pair, return_counts=True)
            ends = [divmod(pair, 1 << 32) for pair in pairs[np.argsort(-count, kind="stable")].tolist()]
            chosen = tuple((measured.nodes[source], measured.nodes[destination]) for source, destination in ends)
            self._metrics.over_limit.set(max(0, len(chosen) - most))
        for pair in chosen:
            if len(self._number) < most:
                self._number.setdefault(pair, len(self._number))
        for name, values in self._seen.items():
            missing = 0.0 if name in {"observations", "anomalies"} else np.nan
            self._seen[name] = np.pad(values, (0, len(self._number) - len(values)), constant_values=missing)

    def _expect(self, store: MeasurementStore) -> dict[str, Floats]:
        """Predict all watched pairs. Gives the columns of their support."""
        queries = [Query(source=source, destination=destination) for source, destination in self._number]
        if not queries:
            return {}
        job = self._service.model.predict(queries, KnownMeasurements(store=store))
        self._computing = self._service.thread.submit(job, background=True)
        self._expected, supports = self._computing.result()
        p_failed = self._expected.p_failed
        answered = np.mean([self._expected.bits(rtt) for rtt in self._expected.quantile(_LEVELS).T], axis=0)
        self._expected_bits = (1 - p_failed) * answered + p_failed * self._expected.bits(np.nan)
        return {
            name: np.array([np.nan if row[name] is None else row[name] for row in supports], np.float64)
            for name in (supports[0] or ())
            if name != "reason"
        }

    def _score_latest(self) -> None:
        """At the start, score the latest measurement of every pair as if it had just arrived."""
        self._choose_pairs()
        store = self._service.store
        latest = [rows[-1] for pair in self._number if len(rows := store.rows_of(*pair))]
        kept = np.ones(len(store), bool)
        kept[latest] = False
        observations = store.measured.observations
        self._expect(MeasurementStore(replace(store.measured, observations=observations.take(kept))))
        self._score(replace(store.measured, observations=observations.take(~kept)), is_new=False)

    def _look_up_latest(self) -> None:
        """The latest measurements of pairs that were not watched when they were measured."""
        store = self._service.store
        known = store.measured.observations
        for pair, number in self._number.items():
            if np.isnan(self._seen["observed_at"][number]) and len(rows := store.rows_of(*pair)):
                latest = known.time_s[rows[-1]]
                self._seen["observed_at"][number] = time.time() if np.isnan(latest) else latest
                self._seen["observed_s"][number] = known.rtt_ms[rows[-1]] / 1000

    def _score(self, arrived: MeasurementSet, *, is_new: bool = True) -> None:
        """Score measurements by the current predictions. The latest score of a pair is kept."""
        known, nodes, seen = arrived.observations, arrived.nodes, self._seen
        pairs, number = np.unique(known.pair, return_inverse=True)
        ends = [divmod(pair, 1 << 32) for pair in pairs.tolist()]
        watched = [self._number.get((nodes[source], nodes[destination]), -1) for source, destination in ends]
        of_row = np.array(watched, np.int64)[number]
        rows = np.flatnonzero(of_row >= 0)
        at, rtt_ms, time_s = of_row[rows], known.rtt_ms[rows].astype(np.float64), known.time_s[rows]
        time_s = np.where(np.isnan(time_s), time.time(), time_s)
        bits = np.full(len(rows), np.nan)
        of_expected = np.flatnonzero(at < len(self._expected_bits))
        for start in range(0, len(of_expected), _SCORED_PER_CALL):
            some = of_expected[start : start + _SCORED_PER_CALL]
            bits[some] = self._expected.take(at[some]).bits(rtt_ms[some])  # type: ignore[union-attr]
        if is_new:
            np.add.at(seen["observations"], at, 1)
            scored = at[of_expected]
            np.add.at(seen["anomalies"], scored, bits[of_expected] >= self._expected_bits[scored] + ANOMALOUS_BITS)
        is_latest = ~(time_s < seen["observed_at"][at])  # a late arrival is not
        at, latest = at[is_latest], {"observed_s": rtt_ms / 1000, "observed_at": time_s, "bits": bits}
        for name, values in latest.items():  # in time order, so the last value of a pair remains
            seen[name][at] = values[is_latest]
