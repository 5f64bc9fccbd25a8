"""What the language model is shown for a question: the recent history of the source, then the question itself.

A question's measurement is written with its result last, so that everything that is known stands before what is asked.
Of a history that does not fit, the most recent measurements are kept.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.rows.format import ProbeRow
from ping_llm.tokens.encode import FIELD_ORDERS, EncodableMeasurements, TimeKind, encode, token_counts

RESULT_LAST: Final = FIELD_ORDERS.index(("time", "source", "destination", "result"))
_DELTA1_LONGEST: Final = 255


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
    chosen = np.append(history, question)
    seconds = row.time_us[chosen] // 1_000_000
    gap = np.diff(seconds, prepend=seconds[0])
    kind = np.where(gap <= _DELTA1_LONGEST, TimeKind.DELTA1, TimeKind.DELTA4)
    rtt = row.rtt_ms[chosen].astype(np.float32)
    rtt[-1] = 1.0  # any RTT: its tokens are cut off
    counts = token_counts(row.family, np.isnan(rtt), kind)
    # The oldest one that is kept carries an absolute time, which takes more tokens than a delta.
    first_costs = token_counts(row.family, np.isnan(rtt), np.full(len(rtt), TimeKind.ABSOLUTE))
    after = np.cumsum(counts[::-1])[::-1] - counts
    first = int(np.argmax(after + first_costs <= length))
    kind, gap = kind[first:].copy(), gap[first:].copy()
    kind[0], gap[0] = TimeKind.ABSOLUTE, seconds[first]
    kept = chosen[first:]
    destination = np.zeros((len(kept), 16), dtype=np.uint8)
    destination[:, : row.destinations.shape[1]] = row.destinations[kept]
    source = np.zeros((len(kept), 16), dtype=np.uint8)
    source[:, : len(row.source)] = np.frombuffer(row.source, dtype=np.uint8)
    tokens, counts = encode(
        EncodableMeasurements(
            family=np.full(len(kept), row.family, dtype=np.uint8),
            source=source,
            destination=destination,
            rtt_ms=rtt[first:],
            time_kind=kind.astype(np.uint8),
            time_value=gap,
            order=np.full(len(kept), RESULT_LAST, dtype=np.uint8),
        )
    )
    begin = len(tokens) - int(counts[-1])
    return Prompt(history=tokens[:begin], question=tokens[begin:-3], measurements=len(kept) - 1)
