"""Measurements that arrive while the server runs, and the pairs that are watched meanwhile.

A feed is any callable that gives the measurements that are new since its last call, None if there are none. One thread
asks all feeds in turn, scores what has arrived by what had been expected, adds it to what is known, and computes in the
background what is expected next. So a measurement is never part of the expectation that it is scored by.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from pyarrow import csv

from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.rtt import Floats, RttDistribution
from ping_llm.predict.predictor import read_questions
from ping_llm.rows.measurement_set import MeasurementSet, joined, read_observations
from ping_llm.serve.access import log
from ping_llm.serve.answers import Query
from ping_llm.serve.api import Service
from ping_llm.serve.metrics import PairValues
from ping_llm.serve.store import KnownMeasurements, MeasurementStore, read_upload
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.remote import prometheus

Feed = Callable[[], MeasurementSet | None]
Pair = tuple[str, str]

ANOMALOUS_BITS: Final = 10.0
"""Above the usual score: a thousand times less likely."""
_LEVELS: Final = (np.arange(16) + 0.5) / 16  # at which scores are averaged
_AT_ONCE: Final = 4096  # scores
_FEW: Final = InputOptions(allow_bad_rows=True)  # few lines do not show what is usual in them
_MOST_TRIES: Final = 64  # to read what is good of some lines


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    feeds: Mapping[str, Feed] = field(default_factory=dict)
    """By name, which is a label of their metrics."""
    pairs: tuple[Pair, ...] | None = None
    """None: all, the most measured first."""
    max_pairs: int = 200
    refresh_seconds: float = 15.0
    """At most so often, and during half of the time at most."""
    max_known: int = 1_000_000
    """Measurements that are kept: the latest."""


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
        self._seen = {name: np.zeros(0) for name in ("observed_s", "observed_at", "bits", "observations", "anomalies")}

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
                log.exception("what is expected of the watched pairs could not be computed")
            took = time.monotonic() - begin
            pause = max(self._settings.refresh_seconds, took)

    def _refresh(self) -> None:
        """What has arrived since the last time, and what is expected now."""
        begin, arrived = time.monotonic(), self._arrived()
        if arrived is not None:
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
            seen = {name: values.copy() for name, values in self._seen.items()}
            of_each = {"expected": self._expected, "expected_bits": self._expected_bits, "support": support}
            self._metrics.show(PairValues(pairs=tuple(self._number), **of_each, **seen))  # type: ignore[arg-type]
        self._metrics.refreshed.set_to_current_time()
        self._metrics.refresh_seconds.set(time.monotonic() - begin)

    def _arrived(self) -> MeasurementSet | None:
        """Of all feeds, as much as is kept at most."""
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
            except Exception as error:  # of any kind: what other feeds have brought is not to be lost
                self._metrics.feed_errors.labels(name).inc()
                if self._complaints.get(name) != str(error):
                    log.warning("%s: %s", name, error)
                self._complaints[name] = str(error)
        return joined(sets) if sets else None

    def _choose_pairs(self) -> None:
        chosen, most = self._settings.pairs, self._settings.max_pairs
        if chosen is None:
            measured = self._service.store.measured
            pairs, count = np.unique(measured.observations.pair, return_counts=True)
            ends = [divmod(pair, 1 << 32) for pair in pairs[np.argsort(-count, kind="stable")].tolist()]
            chosen = tuple((measured.nodes[source], measured.nodes[destination]) for source, destination in ends)
            self._metrics.passed_over.set(max(0, len(chosen) - most))
        for pair in chosen:
            if len(self._number) < most:
                self._number.setdefault(pair, len(self._number))
        for name, values in self._seen.items():
            missing = 0.0 if name in {"observations", "anomalies"} else np.nan
            self._seen[name] = np.pad(values, (0, len(self._number) - len(values)), constant_values=missing)

    def _expect(self, store: MeasurementStore) -> dict[str, Floats]:
        """Predict all pairs. Gives what the predictions rest on."""
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
        """At the start: the latest measurement of every pair, as if it had just arrived."""
        self._choose_pairs()
        store = self._service.store
        latest = [rows[-1] for pair in self._number if len(rows := store.rows_of(*pair))]
        kept = np.ones(len(store), bool)
        kept[latest] = False
        observations = store.measured.observations
        self._expect(MeasurementStore(replace(store.measured, observations=observations.take(kept))))
        self._score(replace(store.measured, observations=observations.take(~kept)), is_new=False)

    def _look_up_latest(self) -> None:
        """Of pairs that were not watched when they were measured."""
        store = self._service.store
        known = store.measured.observations
        for pair, number in self._number.items():
            if np.isnan(self._seen["observed_at"][number]) and len(rows := store.rows_of(*pair)):
                latest = known.time_s[rows[-1]]
                self._seen["observed_at"][number] = time.time() if np.isnan(latest) else latest
                self._seen["observed_s"][number] = known.rtt_ms[rows[-1]] / 1000

    def _score(self, arrived: MeasurementSet, *, is_new: bool = True) -> None:
        """By what was expected before they came. Of a pair, the latest score is kept."""
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
        for start in range(0, len(of_expected), _AT_ONCE):
            some = of_expected[start : start + _AT_ONCE]
            bits[some] = self._expected.take(at[some]).bits(rtt_ms[some])  # type: ignore[union-attr]
        if is_new:
            np.add.at(seen["observations"], at, 1)
            scored = at[of_expected]
            np.add.at(seen["anomalies"], scored, bits[of_expected] >= self._expected_bits[scored] + ANOMALOUS_BITS)
        is_latest = ~(time_s < seen["observed_at"][at])  # not one that comes late
        at, latest = at[is_latest], {"observed_s": rtt_ms / 1000, "observed_at": time_s, "bits": bits}
        for name, values in latest.items():  # in time order: the last one stays
            seen[name][at] = values[is_latest]


# Feeds.


def from_queue(arrivals: Queue[MeasurementSet]) -> Feed:
    """What clients have sent."""

    def feed() -> MeasurementSet | None:
        with suppress(Empty):
            return arrivals.get_nowait()
        return None

    return feed


class FileTail:
    """Lines of CSV or JSON that were added to a file; from its beginning at first, and whenever it was replaced or cut.
    A line is read when it has ended."""

    def __init__(self, path: Path, max_bytes: int = 4_000_000) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file, self._offset, self._head = (-1, -1), 0, b""

    def __call__(self) -> MeasurementSet | None:
        try:
            with self._path.open("rb") as file:
                self._find_place(os.fstat(file.fileno()))
                file.seek(self._offset)
                content = file.read(self._max_bytes)
        except OSError as error:
            raise PingLlmError(f"cannot read {self._path}: {error.strerror}") from error
        lines = content[: content.rfind(b"\n") + 1]
        if not lines and len(content) < self._max_bytes:
            return None
        self._offset += len(lines or content)
        if not lines:
            raise PingLlmError(f"{self._path}: a line of more than {self._max_bytes:,} bytes")
        if not self._head and not lines.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            self._head, end, lines = lines.partition(b"\n")
            self._head += end
        text = lines.decode(errors="replace").encode()
        return _readable(self._head, text.splitlines(keepends=True), self._path) if text.strip() else None

    def _find_place(self, about: os.stat_result) -> None:
        if (about.st_dev, about.st_ino) != self._file or about.st_size < self._offset:
            self._file, self._offset, self._head = (about.st_dev, about.st_ino), 0, b""


class PrometheusFeed:
    """What a Prometheus server has got since the last call, and its last day at first; `sources.remote` has the URL."""

    def __init__(self, source: str) -> None:
        self._source, self._last_s = source, -np.inf

    def __call__(self) -> MeasurementSet | None:
        source = self._source
        if self._last_s > 0:  # from the latest on, which counters are compared with
            source += f"{'&' if '?' in source else '?'}start={self._last_s:.3f}"
        with tempfile.TemporaryDirectory(prefix="ping-llm-follow-") as folder:
            answers = list(prometheus(source, Path(folder)))
            if not answers:
                return None
            measured = read_observations(answers, options=_FEW)
        observations = measured.observations
        new = observations.take(observations.time_s > self._last_s + 0.001)
        if not len(new):
            return None
        self._last_s = float(new.time_s[-1])
        return replace(measured, observations=new)


def feeds_of(sources: Sequence[str]) -> dict[str, Feed]:
    """Of files that grow, and of Prometheus servers, by their names."""
    feeds: dict[str, Feed] = {}
    for source in sources:
        path = Path(source)
        if source.lower().startswith("prometheus+"):
            feed: Feed = PrometheusFeed(source)
            name = urlsplit(source.removeprefix("prometheus+")).netloc.rpartition("@")[2]
        elif path.is_file():
            feed, name = FileTail(path), path.name
        else:
            raise PingLlmError(f"--follow {source}: there is no such file")
        feeds[source if name in feeds else name] = feed
    return feeds


def _readable(head: bytes, lines: Sequence[bytes], path: Path) -> MeasurementSet:
    """What can be read of some lines: one that is broken makes no others unreadable."""
    parts: list[MeasurementSet] = []
    whole = [line for line in lines if not head or line.count(b'"') % 2 == 0]  # a value does not go on in the next line
    waiting, tries, broken, why = [whole], _MOST_TRIES, len(lines) - len(whole), ""
    while waiting:
        some = waiting.pop()
        try:
            parts.append(read_upload(head + b"".join(some), len(lines) + 1, _FEW))
        except PingLlmError as error:
            tries, why = tries - 1, why or str(error)
            if len(some) == 1 or tries < 0:
                broken += len(some)
            else:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
    if not parts:
        raise PingLlmError(f"nothing could be read of {broken:,} new lines of {path}: {why}")
    dropped = sum((Counter(part.dropped) for part in parts), Counter(unreadable=broken))
    return replace(joined(parts), dropped=+dropped)


def read_pairs(path: Path) -> tuple[Pair, ...]:
    """Each once, from a CSV file with src_addr and dst_addr."""
    with explained(f"cannot read {path}", OSError, pa.ArrowException):
        table = csv.read_csv(path)
    questions, nodes = read_questions(table, ())
    ends = zip(questions.source.tolist(), questions.destination.tolist(), strict=True)
    pairs = tuple(dict.fromkeys((nodes[source], nodes[destination]) for source, destination in ends))
    if not pairs:
        raise PingLlmError(f"{path} names no pair to watch")
    return pairs
