"""The contexts of real questions: which of all known measurements each may look at.

The rule is the one written out in `selection`, which training uses; a test holds the two to the same answer. Here it is
NumPy over all pairs at once. Questions with one source and one time (or one destination, where there are fewer of
those) can share a context, and share that work.

What a question may look at was measured strictly before it: its own answer, and anything later, plays no part. Nodes
are numbered in the order in which a context names them, so their ids make no difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.observations import MIN_RTT_MS, Bools, Ints, Observations, Questions
from ping_llm.prior.selection import FAR_MS, HALF_MS, MOST_ROUNDS, NEVER
from ping_llm.prior.shared_prefixes import KIN_MS, LEVELS, kin_among
from ping_llm.prior.worlds import ANSWERED, FAILED, NOTHING, UNKNOWN_AGE

Singles = npt.NDArray[np.float32]
Columns = dict[str, npt.NDArray[Any]]

_TWICE: Final = 1 << 22
"""What doubling a distance adds to its key."""
_WORST_KEY: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Group:
    """Questions that share a context: rows of the questions, the node that all have in common, and their time."""

    rows: Ints
    common: int
    others: Ints
    time_s: float


def groups(questions: Questions, most: int) -> Iterator[Group]:
    """Questions of one time and one source (or destination), at most so many to a group."""
    by_source = len(np.unique(questions.source)) <= len(np.unique(questions.destination))
    common, other = questions.source, questions.destination
    if not by_source:
        common, other = other, common
    order = np.lexsort((other, common, questions.time_s))
    time_s = questions.time_s[order]
    is_new = np.diff(common[order], prepend=0) != 0
    is_new |= ~((time_s == np.roll(time_s, 1)) | (np.isnan(time_s) & np.isnan(np.roll(time_s, 1))))
    is_new[:1] = True
    starts = np.flatnonzero(is_new)
    for start, stop in zip(starts, np.append(starts, len(order))[1:], strict=True):
        for first in range(start, stop, most):
            rows = order[first : min(first + most, stop)]
            yield Group(rows=rows, common=int(common[rows[0]]), others=other[rows], time_s=float(time_s[first]))


class Known:
    """All known measurements, ordered by pair and time: what a question may see of a pair are its first ones.

    Most of the rule is about pairs, of which there are far fewer than measurements. Single measurements are looked at
    only where they may be chosen.
    """

    def __init__(self, known: Observations, room: int, kin: Ints) -> None:
        """`kin` of all nodes (see `kinship`), also of those that were never measured."""
        known = known.take((known.source >= 0) & (known.destination >= 0))
        self.room = room
        self.kin = kin
        self.nodes, numbers = np.unique(np.concatenate([known.source, known.destination]), return_inverse=True)
        source, destination = numbers[: len(known)], numbers[len(known) :]
        low, high = np.minimum(source, destination), np.maximum(source, destination)
        _, pair = np.unique(low * max(1, len(self.nodes)) + high, return_inverse=True)
        time = np.where(np.isnan(known.time_s), -np.inf, known.time_s)
        self.given = np.lexsort((np.arange(len(known)), time, pair))
        self.time_s = time[self.given]
        self.source, self.destination = source[self.given], destination[self.given]
        self.rtt_ms = known.rtt_ms[self.given].astype(np.float64)
        self.pair = pair[self.given]
        self.starts = np.flatnonzero(np.diff(self.pair, prepend=-1))
        self.counts = np.diff(self.starts, append=len(self.pair))
        self.low, self.high = low[self.given][self.starts], high[self.given][self.starts]
        self.fastest = _least_so_far(np.fmin(self.rtt_ms, FAR_MS).astype(np.float32), self.pair)  # failed: far
        self._usable: tuple[float, Ints] | None = None

    def __len__(self) -> int:
        return len(self.pair)

    def number(self, node: Any) -> Ints:
        """The number of each node; `len(nodes)` for one that was never measured."""
        if not len(self.nodes):
            return np.zeros(np.shape(node), np.int64)
        at = np.minimum(np.searchsorted(self.nodes, node), len(self.nodes) - 1)
        return np.where(self.nodes[at] == node, at, len(self.nodes))

    def usable(self, time_s: float) -> Ints:
        """Of each pair, how many measurements were made strictly before."""
        if np.isnan(time_s) or not len(self):
            return self.counts
        if self._usable is None or self._usable[0] != time_s:
            self._usable = time_s, np.add.reduceat(self.time_s < time_s, self.starts, dtype=np.int64)
        return self._usable[1]

    def choose(self, common: int, others: Ints, time_s: float) -> Ints:
        """Rows of the context of questions between one node and others, best first."""
        usable = self.usable(time_s)
        pairs = np.flatnonzero(usable)
        usable = usable[pairs]
        class_, distance = self._distances(pairs, usable, common, others)
        parts = [np.flatnonzero(class_ == number) for number in range(NEVER)]
        own, shared, rest, more_shared, more_own = _shares([int(usable[part].sum()) for part in parts], self.room)
        counts = own + more_own, shared + more_shared, rest
        first = [
            self._best(pairs[part], usable[part], None if number == 0 else distance[:, part], count)
            for number, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        return np.concatenate([first[0][:own], first[1][:shared], first[2], first[1][shared:], first[0][own:]])

    def _distances(self, pairs: Ints, usable: Ints, common: int, others: Ints) -> tuple[Ints, Singles]:
        """Of pairs their class, and how far their measurements count as being: from low to high, from high to low."""
        size = len(self.nodes) + 1
        is_common, is_asked = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        is_common[self.number(common)], is_asked[self.number(others)] = True, True
        is_common[-1], is_asked[-1] = False, False
        low, high, rtt = self.low[pairs], self.high[pairs], self.fastest[self.starts[pairs] + usable - 1]
        direct_common, near_common = _near(low, high, rtt, self._kin_distance(np.array([common])), is_common)
        direct_asked, near_asked = _near(low, high, rtt, self._kin_distance(others), is_asked)
        is_end = is_common | is_asked
        is_pair = is_common[low] & is_asked[high] | is_common[high] & is_asked[low]
        shares = is_end[low] | is_end[high]
        by_both = (direct_common < FAR_MS) & (direct_asked < FAR_MS)
        shared = np.minimum(direct_common, direct_asked) + np.where(by_both, 0.0, FAR_MS).astype(np.float32)
        stand_in = np.minimum(near_common[low] + near_asked[high], near_common[high] + near_asked[low])
        thirds = np.where(is_end[low], high, low), np.where(is_end[high], low, high)
        distance = np.stack([np.where(shares, shared[third], stand_in) for third in thirds])
        return np.where(is_pair, 0, np.where(shares, 1, 2)), distance

    def _kin_distance(self, targets: Ints) -> Singles:
        """Of each measured node, how far the nearest of its kin among the targets counts as being."""
        distance = np.full(len(self.nodes) + 1, FAR_MS, dtype=np.float32)
        targets = targets[targets >= 0]
        for level in reversed(range(LEVELS)):
            related = np.isin(self.kin[self.nodes, level], self.kin[targets, level])
            distance[:-1][related] = KIN_MS[level]
        return distance

    def _best(self, pairs: Ints, usable: Ints, distance: Singles | None, count: int) -> Ints:
        """Measurements of these pairs, best first: by distance, or, where that does not count, the latest ones.

        Of equal ones those that were given first.
        """
        if count == 0:
            return np.zeros(0, np.int64)
        rounds = np.minimum(usable, count)
        if distance is not None:  # at least `count` measurements have keys up to the worst
            nearest, farthest = _keys(distance.min(axis=0)), _keys(distance.max(axis=0))
            worst = np.partition(farthest, count - 1)[count - 1] if count <= len(pairs) else _WORST_KEY
            in_reach = (worst - nearest) // _TWICE + 1  # rounds whose keys are not above the worst
            rounds = np.where(in_reach > MOST_ROUNDS, usable, np.clip(in_reach, 0, usable))
        member, round_ = _counted_up(rounds)
        rows = (self.starts[pairs] + usable - 1)[member] - round_
        if distance is None:
            keys = round_
        else:
            backwards = (self.source[rows] != self.low[pairs[member]]).astype(np.int64)
            keys = _keys(distance[backwards, member]) + np.minimum(round_, MOST_ROUNDS) * _TWICE
        if count < len(rows):
            near = keys <= np.partition(keys, count - 1)[count - 1]
            rows, keys = rows[near], keys[near]
        return rows[np.lexsort((self.given[rows], keys))][:count]

    def columns(self, rows: Ints, time_s: float) -> tuple[Columns, Ints, Ints]:
        """Context of a batch, of these rows, and the ids of their ends."""
        times = self.time_s[rows]
        is_timed = np.isfinite(times)
        now = time_s if not np.isnan(time_s) else times.max(initial=-np.inf, where=is_timed)
        rtt, failed = self.rtt_ms[rows], np.isnan(self.rtt_ms[rows])
        columns = {
            "context_kind": np.where(failed, FAILED, ANSWERED),
            "context_log_rtt": np.log(np.maximum(np.where(failed, 1.0, rtt), MIN_RTT_MS)),
            "context_age_s": np.where(
                is_timed, now - np.where(is_timed, times, now if np.isfinite(now) else 0), UNKNOWN_AGE
            ),
        }
        return columns, self.nodes[self.source[rows]], self.nodes[self.destination[rows]]


def filled(known: Known, questions: Questions, group: Group, context: int, places: int) -> Columns:
    """One row of a batch: the context of a group, behind a place that holds nothing (see `worlds.told`); questions."""
    rows = known.choose(group.common, group.others, group.time_s)[: context - 1]
    columns, source, destination = known.columns(rows, group.time_s)
    asked = questions.take(group.rows)
    numbers, ids = _numbered(asked, source, destination)
    ends = np.split(numbers, np.cumsum([len(asked), len(asked), len(rows)]))
    columns |= {"context_source": ends[2], "context_destination": ends[3]}
    empty = {"context_kind": NOTHING, "context_age_s": UNKNOWN_AGE}
    row = {
        name: np.pad(value, (1, context - 1 - len(rows)), constant_values=empty.get(name, 0))
        for name, value in columns.items()
    }
    row |= {
        name: np.pad(value, (0, places - len(asked)))
        for name, value in (("question_source", ends[0]), ("question_destination", ends[1]))
    }
    row["node_kin"] = np.pad(kin_among(ids, known.kin), ((0, 2 * (context + places) - len(ids)), (0, 0)))
    row["context_length"] = np.asarray(1 + len(rows))
    return {name: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for name, value in row.items()}


def _numbered(asked: Questions, source: Ints, destination: Ints) -> tuple[Ints, Ints]:
    """Small numbers for nodes, in the order in which they are met, and the node of each number.

    Unknown nodes differ from all others.
    """
    unknown_source, unknown_destination = asked.source < 0, asked.destination < 0
    ids = np.concatenate(
        [
            np.where(unknown_source, -1, asked.source),
            np.where(unknown_destination, -2, asked.destination),
            source,
            destination,
        ]
    )
    _, first, numbers = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[numbers], ids[np.sort(first)]


def _shares(there_are: list[int], room: int) -> tuple[int, int, int, int, int]:
    """How many of each class are chosen: own, sharing an end, others; then what is left over of the first two."""
    own, shared = min(there_are[0], -(-room // 4)), min(there_are[1], room // 2)
    others = min(there_are[2], room - own - shared)
    more_shared = min(there_are[1] - shared, room - own - shared - others)
    more_own = min(there_are[0] - own, room - own - shared - others - more_shared)
    return own, shared, others, more_shared, more_own


def _keys(distance: Singles) -> Ints:
    """Numbers that order distances as `selection` does: all but the last bit of the sum with `HALF_MS`."""
    return ((distance + np.float32(HALF_MS)).view(np.uint32) >> 1).astype(np.int64)


def _counted_up(counts: Ints) -> tuple[Ints, Ints]:
    """`[2, 3]` to `[0, 0, 1, 1, 1]` and `[0, 1, 0, 1, 2]`."""
    member = np.repeat(np.arange(len(counts)), counts)
    return member, np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)


def _least_so_far(values: Singles, group: Ints) -> Singles:
    """The least of each value and those before it in its group; groups lie one after the other."""
    falling = group.astype(np.int64) << 32  # bits of floats that are not negative are ordered as these
    least = np.minimum.accumulate(values.view(np.uint32).astype(np.int64) - falling) + falling
    return least.astype(np.uint32).view(np.float32)


def _near(
    source: Ints, destination: Ints, rtt: Singles, kin_distance: Singles, targets: Bools
) -> tuple[Singles, Singles]:
    """Of each node, the distance to the nearest target: directly, and over at most one third node."""
    start = np.where(targets, 0.0, FAR_MS).astype(np.float32)
    touching = np.flatnonzero(targets[source] | targets[destination])
    direct = np.minimum(_shorter(start, source[touching], destination[touching], rtt[touching]), kin_distance)
    return direct, _shorter(direct, source, destination, rtt)


def _shorter(distance: Singles, source: Ints, destination: Ints, rtt: Singles) -> Singles:
    further = distance.copy()
    np.minimum.at(further, destination, distance[source] + rtt)
    np.minimum.at(further, source, distance[destination] + rtt)
    return np.minimum(further, np.float32(FAR_MS))
