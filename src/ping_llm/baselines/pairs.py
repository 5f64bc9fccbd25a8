"""All answered measurements of a pair become one value, their median: what static baselines learn from.

The median makes one bad measurement harmless, and it bounds the work: five million measurements of a hundred thousand
pairs are a table of a hundred thousand rows.
"""

from dataclasses import dataclass

import numpy as np

from ping_llm.core.observations import MIN_RTT_MS, Floats, Ints, Observations, Questions


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """One row for each measured pair, sorted by `pair`."""

    pair: Ints
    source: Ints
    destination: Ints
    rtt_ms: Floats

    @classmethod
    def of(cls, train: Observations) -> "PairTable":
        known = train.answered
        pair = known.pair
        rtt = np.maximum(known.rtt_ms.astype(np.float64), MIN_RTT_MS)
        order = np.lexsort((rtt, pair))
        pair, rtt = pair[order], rtt[order]
        first = np.flatnonzero(np.diff(pair, prepend=pair[:1] - 1)) if len(pair) else np.zeros(0, dtype=np.int64)
        count = np.diff(first, append=len(pair))
        median = (rtt[first + (count - 1) // 2] + rtt[first + count // 2]) / 2
        return cls(
            pair=pair[first],
            source=known.source[order[first]].astype(np.int64),
            destination=known.destination[order[first]].astype(np.int64),
            rtt_ms=median,
        )

    def __len__(self) -> int:
        return len(self.pair)

    @property
    def nodes(self) -> int:
        """One more than the largest id."""
        return int(max(self.source.max(), self.destination.max())) + 1 if len(self) else 0

    @property
    def questions(self) -> Questions:
        return Questions(source=self.source, destination=self.destination, time_s=np.full(len(self), np.nan))

    def lookup(self, questions: Questions) -> Floats:
        """The median of each question's pair, NaN where the pair was never measured."""
        return find(self.pair, self.rtt_ms, questions.pair)


def find(keys: Ints, values: Floats, wanted: Ints) -> Floats:
    """The value of each wanted key in a sorted column of keys, NaN where it is not there."""
    if not len(keys):
        return np.full(len(wanted), np.nan)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], np.nan)


def rows_of(nodes: Ints, count: int) -> Ints:
    """The row of each node in a table of `count` nodes and one last row that stands for every unknown node."""
    return np.where((nodes >= 0) & (nodes < count), nodes, count)
