"""What the language model reads: measurements of one source as tokens, the question last, with its answer cut off.

Either every measurement of a sequence carries its time, or none does: the two are how most training contexts look. With
times, the first measurement has an absolute one and the others say how many seconds they come later. Of a history that
does not fit the context, the most recent measurements are kept; in a question for a result, half of the context is for
those of its pair, however long ago they were.
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


def spell(row: ProbeRow, chosen: Ints, *, timed: bool, order: npt.ArrayLike) -> tuple[Tokens, Ints]:
    """A context of measurements of a row, in order of time: its tokens, and how many each measurement takes."""
    from ping_llm.tokens.encode import encode_history

    seconds = row.time_us[chosen] // 1_000_000 if timed else None
    return encode_history(
        row.family, row.source, row.destinations[chosen], row.rtt_ms[chosen], seconds, starts=np.array([0]), order=order
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


def prompt_of(row: ProbeRow, length: int, *, timed: bool, order: int, answer_tokens: int) -> Prompt:
    """Ask for the end of the last measurement of a row, after as many of those before it as fit."""
    chosen = np.arange(TokenOffsets.of(row, timed=timed).first(len(row), length), len(row))
    tokens, counts = spell(row, chosen, timed=timed, order=order)
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

    An IPv6 address stands in for a name without an address; an IPv4 address at the other end is mapped.
    """

    def __init__(self, known: Observations, nodes: Sequence[str]) -> None:
        self._families, self._packed, _ = parse_nodes(nodes)
        self._mapped = ipv4_mapped(self._families, self._packed)
        self._nodes = nodes
        order = np.lexsort((known.time_s, known.source))
        source, destination = (self._families[end[order]] for end in (known.source, known.destination))
        order = order[~of_two_families(source, destination)]
        self._order, self._known = order, known.take(order)
        self.row = cache(self._row)

    @classmethod
    def about(cls, questions: Questions, known: Observations, nodes: Sequence[str]) -> Self:
        """Those of the sources that are asked about."""
        return cls(known.take(np.isin(known.source, questions.source)), nodes)

    def prompts(self, questions: Questions, length: int) -> list[Prompt]:
        """One for each. Without a time, a question comes a second after the last measurement of its source."""
        columns: list[npt.NDArray[np.generic]] = [questions.source, questions.destination, questions.time_s]
        ends = zip(*(column.tolist() for column in columns), strict=True)
        return [self.prompt(source, destination, time_s, length) for source, destination, time_s in ends]

    def prompt(self, source: int, destination: int, time_s: float, length: int) -> Prompt:
        """What the source measured before (see `context`), and the question."""
        family = self.family_of(source, destination)
        context = self.context(source, destination, time_s, length)
        row, _ = self.row(source, family)
        now = int(row.time_us[-1]) + 1_000_000 if len(row) else 0
        if not np.isnan(time_s):
            now = round(time_s * 1e6)
        packed = self._addresses(family)[destination]
        question = with_query(_of_row(row, context), now, packed, 1.0, length)  # any RTT: its tokens are cut off
        return prompt_of(question, length - _RTT_TOKENS, timed=True, order=RESULT_LAST, answer_tokens=_RTT_TOKENS)

    def context(self, source: int, destination: int, time_s: float, length: int) -> Ints:
        """Which measurements of the source's row a question comes after, strictly before it: the latest of the pair,
        in at most half of the context, and of the others the latest that fit."""
        family = self.family_of(source, destination)
        row, _ = self.row(source, family)
        stop = len(row) if np.isnan(time_s) else int(np.searchsorted(row.time_us, round(time_s * 1e6)))
        is_pair = (row.destinations[:stop] == self._addresses(family)[destination]).all(axis=1)
        pair, others = (np.flatnonzero(chosen)[-(length // MIN_TOKENS) :] for chosen in (is_pair, ~is_pair))
        room = length - int(token_counts(row.family, False, TimeKind.ABSOLUTE))
        pair = pair[TokenOffsets.of(_of_row(row, pair), timed=True).first(len(pair), room // 2) :]
        while True:
            context = np.sort(np.concatenate([pair, others]))
            offsets = TokenOffsets.of(_of_row(row, context), timed=True)
            excess = int(offsets.ends[-1] - offsets.begins[0]) - room if len(context) else 0
            if excess <= 0:
                return context
            others = others[-(-excess // int(token_counts(row.family, False, TimeKind.DELTA4))) :]

    def _row(self, source: int, family: int | None = None) -> tuple[ProbeRow, Ints]:
        """The measurements of a source, and which of the known ones they are. An IPv4 row has none with names."""
        rows = np.arange(*np.searchsorted(self._known.source, [source, source + 1]))
        is_named = self._families[self._known.destination[rows]] == NAMED
        if family is None:
            family = 6 if is_named.any() else self._family(source)
        if family == 4:
            rows = rows[~is_named]
        own = self._known.take(rows)
        packed = self._addresses(family)
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

    def _addresses(self, family: int) -> npt.NDArray[np.uint8]:
        """Of all nodes, as rows of a family have them."""
        return (self._packed if family == 4 else self._mapped)[:, : ADDRESS_BYTES[family]]

    def family_of(self, source: int, destination: int) -> int:
        """Of the row that a question about both comes after."""
        if of_two_families(self._families[[source]], self._families[[destination]])[0]:
            ends = self._nodes[source], self._nodes[destination]
            raise PingLlmError(f"{ends[0]} and {ends[1]} are not of one family: no ping goes from one to the other")
        return max(self._family(source), self._family(destination))

    def _family(self, node: int) -> int:
        if self._families[node] == UNPARSABLE:
            raise PingLlmError(f"{self._nodes[node]!r} is neither an address nor a name")
        return 4 if self._families[node] == 4 else 6


def _of_row(row: ProbeRow, chosen: Ints) -> ProbeRow:
    """Some of its measurements."""
    columns = {name: getattr(row, name)[chosen] for name in ("destinations", "time_us", "rtt_ms")}
    return replace(row, **columns)


def prompts_for(known: Observations, questions: Questions, nodes: Sequence[str], length: int) -> list[Prompt]:
    return Histories.about(questions, known, nodes).prompts(questions, length)


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
