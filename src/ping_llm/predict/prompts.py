"""What the language model is shown for a question: the recent history of the source, then the question itself.

A question's measurement is written with its result last, so that everything that is known stands before what is asked.
Of a history that does not fit, the most recent measurements are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.addresses import ADDRESS_BYTES, UNPARSABLE, parse_addresses
from ping_llm.core.errors import PingLlmError
from ping_llm.core.observations import Ints, Observations, Questions
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS, LONGEST_DELTA1_S, TimeKind, token_counts

RESULT_LAST: Final = FIELD_ORDERS.index(("time", "source", "destination", "result"))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens up to the place where the result of the question would come."""

    history: npt.NDArray[np.uint16]
    """What the source measured before; the same for all questions that share it."""
    question: npt.NDArray[np.uint16]
    measurements: int
    """Of the history that was kept."""


def prompt_for(row: ProbeRow, history: npt.NDArray[np.int64], question: int, length: int) -> Prompt:
    """Ask for measurement `question` of a row, given those at `history` (in order of time, all before it)."""
    from ping_llm.tokens.encode import encode_history

    chosen = np.append(history, question)
    seconds = row.time_us[chosen] // 1_000_000
    gap = np.diff(seconds, prepend=seconds[0])
    kind = np.where(gap <= LONGEST_DELTA1_S, TimeKind.DELTA1, TimeKind.DELTA4)
    rtt = row.rtt_ms[chosen].astype(np.float32)
    rtt[-1] = 1.0  # any RTT: its tokens are cut off
    counts = token_counts(row.family, np.isnan(rtt), kind)
    # The oldest one that is kept carries an absolute time, which takes more tokens than a delta.
    first_costs = token_counts(row.family, np.isnan(rtt), np.full(len(rtt), TimeKind.ABSOLUTE))
    after = np.cumsum(counts[::-1])[::-1] - counts
    first = int(np.argmax(after + first_costs <= length))
    kept = chosen[first:]
    tokens, counts = encode_history(
        row.family, row.source, row.destinations[kept], rtt[first:], seconds[first:], order=RESULT_LAST
    )
    begin = len(tokens) - int(counts[-1])
    return Prompt(history=tokens[:begin], question=tokens[begin:-3], measurements=len(kept) - 1)


# Known measurements by source, as the rows that the language model reads, and its prompts for questions.

_RESULT_TOKENS = 3
_LEAST_TOKENS = 12
"""Of a measurement: no fewer. Bounds how many can fit a context."""


class Histories:
    """What each source measured, in time order. Nodes are numbers, `nodes` their addresses."""

    def __init__(self, known: Observations, nodes: Sequence[str]) -> None:
        self._families, self._packed = parse_addresses(nodes)
        self._nodes = nodes
        order = np.lexsort((known.time_s, known.source))
        order = order[self._families[known.source[order]] == self._families[known.destination[order]]]
        self._order, self._known = order, known.take(order)
        self.row = cache(self._row)

    def _row(self, source: int) -> tuple[ProbeRow, Ints]:
        """The measurements of a source, and which of the known ones they are."""
        family = self.family(source)
        start, stop = np.searchsorted(self._known.source, [source, source + 1])
        own = self._known.take(slice(start, stop))
        row = ProbeRow(
            family=family,
            source=self._bytes(source),
            destinations=self._packed[own.destination, : ADDRESS_BYTES[family]],
            time_us=(np.nan_to_num(own.time_s, nan=0.0) * 1e6).round().astype(np.int64),
            rtt_ms=own.rtt_ms.astype(np.float32),
        )
        return row, self._order[start:stop]

    def family(self, node: int) -> int:
        if self._families[node] == UNPARSABLE:
            raise PingLlmError(f"{self._nodes[node]!r} is not an address, and the language model reads addresses")
        return int(self._families[node])

    def _bytes(self, node: int) -> bytes:
        return self._packed[node, : ADDRESS_BYTES[self.family(node)]].tobytes()

    def prompt(self, source: int, destination: int, time_s: float, length: int) -> Prompt:
        """What the source measured strictly before, as much of the latest as fits, and the question."""
        if self.family(source) != self.family(destination):
            ends = self._nodes[source], self._nodes[destination]
            raise PingLlmError(f"{ends[0]} and {ends[1]} are not of one family: no ping goes from one to the other")
        row, _ = self.row(source)
        now = int(row.time_us[-1]) + 1_000_000 if len(row) else 0
        if not np.isnan(time_s):
            now = round(time_s * 1e6)
        stop = int(np.searchsorted(row.time_us, now))
        kept = slice(max(0, stop - length // _LEAST_TOKENS), stop)
        asked = np.frombuffer(self._bytes(destination), dtype=np.uint8)[None]
        with_question = ProbeRow(
            family=row.family,
            source=row.source,
            destinations=np.concatenate([row.destinations[kept], asked]),
            time_us=np.append(row.time_us[kept], now),
            rtt_ms=np.append(row.rtt_ms[kept], np.float32(np.nan)),
        )
        count = len(with_question) - 1
        return prompt_for(with_question, np.arange(count), count, length - _RESULT_TOKENS)


def prompts_for(known: Observations, questions: Questions, nodes: Sequence[str], length: int) -> list[Prompt]:
    """One for each question. A question without a time is asked a second after the last measurement of its source."""
    histories = Histories(known, nodes)
    columns: list[npt.NDArray[np.generic]] = [questions.source, questions.destination, questions.time_s]
    asked = zip(*(column.tolist() for column in columns), strict=True)
    return [histories.prompt(source, destination, time_s, length) for source, destination, time_s in asked]
