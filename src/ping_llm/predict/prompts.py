"""What the language model reads: measurements of one source as tokens, the question last, with its answer cut off.

Either every measurement of a sequence carries its time, or none does: the two are how most training contexts look. With
times, the first measurement has an absolute one and the others say how many seconds they come later. Of a history that
does not fit the context, the most recent measurements are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import (
    ADDRESS_BYTES,
    MAX_RTT_MS,
    MAX_TIME_US,
    NAMED,
    UNPARSABLE,
    ipv4_mapped,
    of_two_families,
    parse_nodes,
)
from ping_llm.core.rtt import Floats, Ints, Observations, Questions
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS, LONGEST_DELTA1_S, RESULT_LAST, TimeKind, token_counts

Tokens = npt.NDArray[np.uint16]

DESTINATION_LAST: Final = FIELD_ORDERS.index(("time", "source", "result", "destination"))
MIN_TOKENS: Final = 12
"""Of a measurement. Bounds how many fit a context."""
_RTT_TOKENS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens up to where the answer of the question would come."""

    history: Tokens
    """What the source measured before; the same for all questions that share it."""
    question: Tokens
    measurements: int
    """Of the history that was kept."""


def spell(
    row: ProbeRow, chosen: Ints, *, timed: bool, order: npt.ArrayLike, sources: npt.NDArray[np.uint8] | None = None
) -> tuple[Tokens, Ints]:
    """A context of measurements of a row, in order of time: its tokens, and how many each measurement takes.

    `sources` are those of its measurements, if they are not the row's.
    """
    from ping_llm.tokens.encode import encode_history

    seconds = row.time_us[chosen] // 1_000_000 if timed else None
    return encode_history(
        row.family,
        row.source if sources is None else sources[chosen],
        row.destinations[chosen],
        row.rtt_ms[chosen],
        seconds,
        starts=np.array([0]),
        order=order,
    )


@dataclass(frozen=True, kw_only=True)
class TokenOffsets:
    """Which measurements of a row fit a context: those from `first` up to `stop` take `ends[stop] - begins[first]`."""

    ends: Ints
    begins: Ints
    """Earlier than where the measurement before ends: the first of a context has a longer time field."""

    @classmethod
    def of(cls, row: ProbeRow, *, timed: bool) -> Self:
        failed = np.isnan(row.rtt_ms)
        gap = np.diff(row.time_us // 1_000_000, prepend=0)
        later = np.where(gap <= LONGEST_DELTA1_S, TimeKind.DELTA1, TimeKind.DELTA4) if timed else TimeKind.NONE
        counts = token_counts(row.family, failed, later)
        as_first = token_counts(row.family, failed, TimeKind.ABSOLUTE if timed else TimeKind.NONE)
        ends = np.append(0, np.cumsum(counts))
        return cls(ends=ends, begins=ends[1:] - as_first)

    def first(self, stop: int, length: int) -> int:
        """The first measurement of a context that holds as many as fit and ends before `stop`."""
        return int(np.searchsorted(self.begins[:stop], self.ends[stop] - length))

    def windows(self, length: int) -> list[tuple[int, int, int]]:
        """Contexts that overlap by half: their first measurement, the first one that is new, and where they stop."""
        windows, new = [], 0
        while new < len(self.begins):
            half = np.searchsorted(self.begins[:new], self.ends[new] - length // 2, side="right") - 1
            first = max(0, int(half), self.first(new + 1, length))
            stop = int(np.searchsorted(self.ends, self.begins[first] + length, side="right")) - 1
            windows.append((first, new, stop))
            new = stop
        return windows


def prompt_of(
    row: ProbeRow,
    length: int,
    *,
    timed: bool,
    order: int,
    answer_tokens: int,
    sources: npt.NDArray[np.uint8] | None = None,
) -> Prompt:
    """Ask for the end of the last measurement of a row, after as many of those before it as fit."""
    chosen = np.arange(TokenOffsets.of(row, timed=timed).first(len(row), length), len(row))
    tokens, counts = spell(row, chosen, timed=timed, order=order, sources=sources)
    begin = len(tokens) - int(counts[-1])
    return Prompt(history=tokens[:begin], question=tokens[begin:-answer_tokens], measurements=len(chosen) - 1)


def with_query(
    row: ProbeRow, time_us: int | None, destination: npt.NDArray[np.uint8], rtt_ms: float, length: int
) -> ProbeRow:
    """What a row has before a time (None: all of it), as much as may fit, and one more measurement, the question."""
    stop = len(row) if time_us is None else int(np.searchsorted(row.time_us, time_us))
    kept = slice(max(0, stop - length // MIN_TOKENS), stop)
    return replace(
        row,
        destinations=np.append(row.destinations[kept], destination[None], axis=0),
        time_us=np.append(row.time_us[kept], time_us or 0),
        rtt_ms=np.append(row.rtt_ms[kept], np.float32(rtt_ms)),
    )


# Questions for results.


class Histories:
    """What each source measured, in time order. Nodes are numbers, `nodes` their addresses.

    An IPv6 address stands in for a name without an address; an IPv4 address at the other end is mapped. `crossing`: a
    question is asked after what its pair measured, and what others measured to its destination, too.
    """

    def __init__(self, known: Observations, nodes: Sequence[str], *, crossing: bool = False) -> None:
        self._families, self._packed, _ = parse_nodes(nodes)
        self._mapped = ipv4_mapped(self._families, self._packed)
        self._nodes = nodes
        order = np.lexsort((known.time_s, known.source))
        source, destination = (self._families[end[order]] for end in (known.source, known.destination))
        order = order[~of_two_families(source, destination)]
        self._order, self._known = order, known.take(order)
        self._crossing = crossing
        # By destination, in time order: in the numbering of `_known`.
        self._to = np.lexsort((self._known.time_s, self._known.destination)) if crossing else order
        self.row = cache(self._row)

    @classmethod
    def about(cls, questions: Questions, known: Observations, nodes: Sequence[str], *, crossing: bool = False) -> Self:
        """Those of the sources that are asked about, if others do not matter."""
        return cls(known if crossing else known.take(np.isin(known.source, questions.source)), nodes, crossing=crossing)

    def prompts(self, questions: Questions, length: int) -> list[Prompt]:
        columns: list[npt.NDArray[np.generic]] = [questions.source, questions.destination, questions.time_s]
        ends = zip(*(column.tolist() for column in columns), strict=True)
        return [self.prompt(source, destination, time_s, length) for source, destination, time_s in ends]

    def _row(self, source: int, family: int | None = None) -> tuple[ProbeRow, Ints]:
        """The measurements of a source, and which of the known ones they are. An IPv4 row has none with names."""
        rows = np.arange(*np.searchsorted(self._known.source, [source, source + 1]))
        is_named = self._families[self._known.destination[rows]] == NAMED
        if family is None:
            family = 6 if is_named.any() else self._family(source)
        if family == 4:
            rows = rows[~is_named]
        own = self._known.take(rows)
        packed = (self._packed if family == 4 else self._mapped)[:, : ADDRESS_BYTES[family]]
        row = ProbeRow(
            family=family,
            source=packed[source].tobytes(),
            destinations=packed[own.destination],
            time_us=(np.nan_to_num(own.time_s, nan=0.0) * 1e6).round().astype(np.int64),
            rtt_ms=own.rtt_ms.astype(np.float32),
        )
        return row, self._order[rows]

    def own(self, source: int) -> ProbeRow:
        """The measurements of a source under its own address, which is of one family."""
        row, _ = self.row(source, self._family(source))
        return row

    def _family(self, node: int) -> int:
        if self._families[node] == UNPARSABLE:
            raise PingLlmError(f"{self._nodes[node]!r} is neither an address nor a name")
        return 4 if self._families[node] == 4 else 6

    def prompt(self, source: int, destination: int, time_s: float, length: int) -> Prompt:
        """What the source measured strictly before, as much of the latest as fits, and the question."""
        family = max(self._family(source), self._family(destination))
        if of_two_families(self._families[[source]], self._families[[destination]])[0]:
            ends = self._nodes[source], self._nodes[destination]
            raise PingLlmError(f"{ends[0]} and {ends[1]} are not of one family: no ping goes from one to the other")
        if self._crossing:
            return self._crossing_prompt(source, destination, time_s, length)
        row, _ = self.row(source, family)
        now = int(row.time_us[-1]) + 1_000_000 if len(row) else 0
        if not np.isnan(time_s):
            now = round(time_s * 1e6)
        packed = (self._packed if family == 4 else self._mapped)[destination, : ADDRESS_BYTES[family]]
        question = with_query(row, now, packed, 1.0, length)  # any RTT: its tokens are cut off
        return prompt_of(question, length - _RTT_TOKENS, timed=True, order=RESULT_LAST, answer_tokens=_RTT_TOKENS)

    def _crossing_prompt(self, source: int, destination: int, time_s: float, length: int) -> Prompt:
        """In time order: what the pair measured last, then each other pair once, the last time: others with the
        destination, the source with others, and at last others with these."""
        known, family = self._known, self._family(source)
        own = self._before(np.arange(*np.searchsorted(known.source, [source, source + 1])), time_s)
        is_pair = known.destination[own] == destination
        limit = length // int(token_counts(family, False, TimeKind.DELTA4))
        parts = [own[is_pair][-(limit // 2) :]]
        others = self._others(source, destination, time_s)
        left = limit - len(parts[0])
        parts.append(others[max(0, len(others) - left // 2) :])
        left -= len(parts[1])
        rest = _latest_of_each(own[~is_pair], known.destination)
        parts.append(rest[max(0, len(rest) - left) :])
        left -= len(parts[2])
        for other in known.destination[parts[2][::-1]].tolist():
            if left > 0:
                more = self._others(source, other, time_s)[-(-(-left // len(parts[2])) + 1) :][-left:]
                parts.append(more)
                left -= len(more)
        chosen = np.concatenate(parts)
        chosen = chosen[np.argsort(known.time_s[chosen], kind="stable")]
        times = np.nan_to_num(known.time_s[chosen], nan=0.0)
        now = time_s if not np.isnan(time_s) else times[-1] + 1 if len(chosen) else 0.0
        sources = np.append(known.source[chosen], source)
        destinations = np.append(known.destination[chosen], destination)
        if (self._families[sources] == NAMED).any() or (self._families[destinations] == NAMED).any():
            family = 6
        packed = (self._packed if family == 4 else self._mapped)[:, : ADDRESS_BYTES[family]]
        row = ProbeRow(
            family=family,
            source=packed[source].tobytes(),
            destinations=packed[destinations],
            time_us=(np.append(times, now) * 1e6).round().astype(np.int64),
            rtt_ms=np.append(known.rtt_ms[chosen], 1.0).astype(np.float32),
        )
        return prompt_of(
            row,
            length - _RTT_TOKENS,
            timed=True,
            order=RESULT_LAST,
            answer_tokens=_RTT_TOKENS,
            sources=packed[sources],
        )

    def _others(self, source: int, destination: int, time_s: float) -> Ints:
        """The latest that each other source measured to a destination."""
        known = self._known
        to = self._to[slice(*np.searchsorted(known.destination, [destination, destination + 1], sorter=self._to))]
        to = self._before(to, time_s)
        return _latest_of_each(to[known.source[to] != source], known.source)

    def _before(self, rows: Ints, time_s: float) -> Ints:
        return rows if np.isnan(time_s) else rows[: np.searchsorted(self._known.time_s[rows], time_s)]


def _latest_of_each(rows: Ints, ends: Ints) -> Ints:
    """Of rows in time order, the last one of each end; in time order."""
    latest = np.unique(ends[rows][::-1], return_index=True)[1]
    return rows[len(rows) - 1 - np.sort(latest)[::-1]]


def prompts_for(
    known: Observations, questions: Questions, nodes: Sequence[str], length: int, *, crossing: bool = False
) -> list[Prompt]:
    """One for each question. Without a time, a question comes a second after the last measurement of its source."""
    return Histories.about(questions, known, nodes, crossing=crossing).prompts(questions, length)


# Questions for destinations.


def destination_prompt(
    source: str, rtt_ms: float | None, history: ProbeRow | None, time_s: float | None, length: int
) -> Prompt:
    """Where does a source ping, at a time or at any, with this result? `rtt_ms`: None for any, NaN for failed.

    With a time, what the history has from then on is not used. Without, the context has no times at all.
    """
    packed = pack([source])[0]
    family = 4 if len(packed) == 4 else 6
    if history is not None and history.source != packed.tobytes():
        raise PingLlmError(f"the history is of {history.source_address}, the question of {source}")
    if rtt_ms is not None and not np.isnan(rtt_ms) and not 0 < rtt_ms <= MAX_RTT_MS:
        raise PingLlmError(f"an RTT of {rtt_ms} ms is not above 0 and at most {MAX_RTT_MS:.0f}")
    if time_s is not None and not 0 <= time_s * 1_000_000 <= MAX_TIME_US:
        raise PingLlmError(f"{time_s} is not a time in Unix seconds between 1970 and 2100")
    row = history or ProbeRow(
        family=family,
        source=packed.tobytes(),
        time_us=np.zeros(0, np.int64),
        destinations=np.zeros((0, len(packed)), np.uint8),
        rtt_ms=np.zeros(0, np.float32),
    )
    # A result that may be any is cut off as well: a single token that stands after the destination.
    now, rtt = None if time_s is None else round(time_s * 1_000_000), np.nan if rtt_ms is None else rtt_ms
    return prompt_of(
        with_query(row, now, np.zeros_like(packed), rtt, length),
        length,
        timed=time_s is not None,
        order=RESULT_LAST if rtt_ms is None else DESTINATION_LAST,
        answer_tokens=len(packed) + (rtt_ms is None),
    )


def pack(addresses: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Bytes of addresses, all of the family of the first, (addresses, 4 or 16). Names have IPv6 addresses."""
    families, packed, _ = parse_nodes(addresses)
    families = np.where(families == NAMED, np.uint8(6), families)
    bad = np.flatnonzero((families == UNPARSABLE) | (families != families[:1]))
    if len(bad):
        which = addresses[int(bad[0])]
        if families[bad[0]] == UNPARSABLE:
            raise PingLlmError(f"{which!r} is neither an address nor a name")
        raise PingLlmError(f"{which} is of another family than {addresses[0]}")
    return packed[:, : ADDRESS_BYTES[int(families[0])]] if len(families) else packed


# Answers about addresses.


@dataclass(frozen=True, kw_only=True)
class LikelyAddresses:
    """The likeliest addresses that were found, best first."""

    addresses: tuple[str, ...]
    probability: Floats
    """Of each: exact, and given the prefix that was to be completed."""
    covered: float
    """Probability of all addresses that were looked at. What is missing to 1 is that of all others together."""
