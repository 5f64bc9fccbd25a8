"""Feeds: where measurements come from while the server runs, and the file that says which pairs are watched."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.predict.predictor import read_questions
from ping_llm.rows.measurement_set import MeasurementSet, joined, read_observations
from ping_llm.serve.store import read_upload
from ping_llm.sources.columns import InputOptions
from ping_llm.sources.remote import prometheus
from ping_llm.sources.tables import read_table

Feed = Callable[[], MeasurementSet | None]
"""Gives the measurements that are new since its last call, or None."""
Pair = tuple[str, str]

_FEW_ROWS: Final = InputOptions(allow_bad_rows=True)  # the share of bad rows says nothing where there are few
_MAX_TRIES: Final = 64  # to find the readable ones of some lines


def from_queue(arrivals: Queue[MeasurementSet]) -> Feed:
    """The measurements that clients have sent."""

    def feed() -> MeasurementSet | None:
        with suppress(Empty):
            return arrivals.get_nowait()
        return None

    return feed


class FileTail:
    """The complete lines of CSV or JSON that were added to a file: from its beginning at first, and again whenever the
    file was replaced or truncated."""

    def __init__(self, path: Path, max_bytes: int = 4_000_000) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file, self._offset, self._head = (-1, -1), 0, b""

    def __call__(self) -> MeasurementSet | None:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._file, self._offset, self._head = (status.st_dev, status.st_ino), 0, b""
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


class PrometheusFeed:
    """Samples of a Prometheus server since the last call, at first those of its last day. `sources.remote` explains the
    URL."""

    def __init__(self, source: str) -> None:
        self._source, self._last_s = source, -np.inf

    def __call__(self) -> MeasurementSet | None:
        source = self._source
        if self._last_s > 0:  # including the last sample, which the next counter is compared with
            source += f"{'&' if '?' in source else '?'}start={self._last_s:.3f}"
        with tempfile.TemporaryDirectory(prefix="ping-llm-follow-") as folder:
            answers = list(prometheus(source, Path(folder)))
            if not answers:
                return None
            measured = read_observations(answers, options=_FEW_ROWS)
        observations = measured.observations
        new = observations.take(observations.time_s > self._last_s + 0.001)
        if not len(new):
            return None
        self._last_s = float(new.time_s[-1])
        return replace(measured, observations=new)


def feeds_of(sources: Sequence[str]) -> dict[str, Feed]:
    """A feed for each growing file or Prometheus server, by its name in the metrics."""
    feeds: dict[str, Feed] = {}
    for source in sources:
        path = Path(source)
        if source.lower().startswith("prometheus+"):
            feed: Feed = PrometheusFeed(source)
            name = urlsplit(source.removeprefix("prometheus+")).netloc.rpartition("@")[2]
        elif path.is_file():
            feed, name = FileTail(path), path.name
        else:
            raise PingLlmError(f"--follow {source}: no such file")
        feeds[source if name in feeds else name] = feed
    return feeds


def _readable(head: bytes, lines: Sequence[bytes], path: Path) -> MeasurementSet:
    """The readable ones of some lines. Where reading fails, the lines are halved until the broken ones are found."""
    parts: list[MeasurementSet] = []
    whole = [line for line in lines if not head or line.count(b'"') % 2 == 0]  # no value continues in the next line
    waiting, tries, broken, why = [whole], _MAX_TRIES, len(lines) - len(whole), ""
    while waiting:
        some = waiting.pop()
        try:
            parts.append(read_upload(head + b"".join(some), len(lines) + 1, _FEW_ROWS))
        except PingLlmError as error:
            tries, why = tries - 1, why or str(error)
            if len(some) == 1 or tries < 0:
                broken += len(some)
            else:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
    if not parts:
        raise PingLlmError(f"{path}: none of {broken:,} new lines can be read: {why}")
    dropped = sum((Counter(part.dropped) for part in parts), Counter(unreadable=broken))
    return replace(joined(parts), dropped=+dropped)


def read_pairs(path: Path) -> tuple[Pair, ...]:
    """The distinct pairs of a file with the columns src_addr and dst_addr."""
    questions, nodes = read_questions(read_table(path), ())
    ends = zip(questions.source.tolist(), questions.destination.tolist(), strict=True)
    pairs = tuple(dict.fromkeys((nodes[source], nodes[destination]) for source, destination in ends))
    if not pairs:
        raise PingLlmError(f"{path}: there are no pairs to watch")
    return pairs
