"""How the measurements of a context are chosen and laid out, in training and in prediction.

A history that fits becomes the context as a whole. From a larger one, measurements are chosen for the pairs between two
sets of nodes, of which the first is a single node in training and for a single question:

    source, queried   the first set of nodes, and the second
    distance          of a node to the source (or to the nearest queried one): the least RTT measured between the two,
                      or what a common prefix of their addresses suggests; if there is neither, the shortest way over a
                      third node
    round             of a measurement, how many later ones its pair has

1. Measurements of the queried pairs, latest first, in up to a quarter of the slots (half of them in a context that many
   pairs share).
2. Measurements that share one end with them, in up to half of the slots (two thirds of what is left): first those whose
   other end is near both the source and a queried node, nearest to either first. Distances over a third node do not
   count here.
3. All others, by how well they stand in for a queried pair: one end near the source, the other near a queried node.
   The best are between nodes of the same prefixes, or between nodes that were measured with both.
4. If slots remain, the rest of 2, then the rest of 1.

In 2 and 3 the distance is doubled for each round, so many measurements of one pair do not displace the others. Neither
the answers to the questions nor anything measured after them plays a part.

`score_pairs`, `quotas` and `slot_columns` are the rule, on NumPy and on JAX arrays alike. `ContextIndex` applies it in
NumPy to the pairs of a history of any size; `worlds.rank_measurements` to every measurement of a small world, compiled.
A test checks that both choose the same.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import dijkstra  # type: ignore[import-untyped]

from ping_llm.core.geography import Positions, is_known, light_ms
from ping_llm.core.measurements import UNPARSABLE, parse_addresses, source_hash
from ping_llm.core.randomness import mix64
from ping_llm.core.rtt import MIN_RTT_MS, Bools, Floats, Ints, Observations

Array = Any
"""An array of NumPy or of JAX."""
Arrays = dict[str, npt.NDArray[Any]]
Singles = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

ANSWERED: Final = 0
FAILED: Final = 1
EMPTY: Final = 2
"""Kinds of slots."""
UNKNOWN_AGE: Final = -1.0

OWN, SHARED, OTHERS, UNKNOWN = range(4)
"""Classes of measurements: those of steps 1, 2 and 3 of the rule, and those that may not be used."""
FAR_MS: Final = 1e4
"""Distance between nodes that were never measured. Longer RTTs count as this."""
HALF_MS: Final = 5.0
"""Added to distances before they are doubled for each round, so that neighbours at 0.1 ms do not fill all slots."""
MAX_ROUNDS: Final = 20

PREFIX_BITS: Final = {4: (24, 16, 8), 6: (48, 32, 16)}
"""Lengths of shared prefixes, by family: those of a site, of a network, of a registry's block."""
LEVELS: Final = len(PREFIX_BITS[4])
PREFIX_MS: Final = (2.0, 10.0, 50.0)
"""Distance of nodes that share a prefix of each length, unless less was measured."""
NEAREST_MS: Final = 3.0
STRETCH: Final = 1.6
"""Distance of nodes by their positions: a usual RTT over fibre, to lines that take a few ms."""


class Target(NamedTuple):
    """One end of the questions, the source or the queried nodes, as columns over all nodes."""

    is_target: Array
    prefix_ms: Array
    """Distance to the nearest target as suggested by a common prefix."""


def score_pairs(one: Array, other: Array, rtt_ms: Array, source: Target, queried: Target) -> tuple[Array, ...]:
    """The class of each pair and its distances: (class, shared, stand-in, near).

    `rtt_ms` is the least RTT known of a pair, `FAR_MS` where there is none. Distances of pairs in class SHARED are in
    `shared`, by their node that is no end of the questions; those of class OTHERS in `stand-in`, by pair. `near`
    are the distances of nodes to the source and to the queried nodes, [2, nodes], of which `stand-in` is made.
    """
    xp = rtt_ms.__array_namespace__()
    direct_source, direct_queried = (_direct(one, other, rtt_ms, end) for end in (source, queried))
    is_source, is_queried = source.is_target, queried.is_target
    is_end = is_source | is_queried
    is_own = (is_source[one] & is_queried[other]) | (is_source[other] & is_queried[one])
    class_ = xp.where(is_own, OWN, xp.where(is_end[one] | is_end[other], SHARED, OTHERS))
    by_both = (direct_source < FAR_MS) & (direct_queried < FAR_MS)
    shared = xp.minimum(direct_source, direct_queried) + xp.where(by_both, 0.0, FAR_MS).astype(np.float32)
    near = xp.stack([_shortened(direct, one, other, rtt_ms) for direct in (direct_source, direct_queried)])
    return class_, shared, pair_distance(near, one, other), near


def pair_distance(near: Array, one: Array, other: Array) -> Array:
    """Distance between a measurement of these two nodes and one between the source and a queried node."""
    return near.__array_namespace__().minimum(near[0, one] + near[1, other], near[0, other] + near[1, one])


def quotas(count: Any, room: Any, xp: Any = np, *, is_shared: bool = False) -> list[Any]:
    """The numbers to choose (own, shared, others, more shared, more own), from the `count` there is of each class.

    `is_shared`: a context that many pairs share gets more of their own measurements: with half of PlanetLab known, the
    median RE is .006 instead of .009.
    """
    own = xp.minimum(count[OWN], room // 2 if is_shared else (room + 3) // 4)
    shared = xp.minimum(count[SHARED], (room - own) * 2 // 3 if is_shared else room // 2)
    others = xp.minimum(count[OTHERS], room - own - shared)
    more_shared = xp.minimum(count[SHARED] - shared, room - own - shared - others)
    more_own = xp.minimum(count[OWN] - own, room - own - shared - others - more_shared)
    return [own, shared, others, more_shared, more_own]


def slot_columns(
    length: Any, source: Array, destination: Array, failed: Array, log_rtt: Array, age_s: Array
) -> dict[str, Any]:
    """Columns of slots: the first is empty, the next `length` hold measurements, and the rest is padding.

    Attention weights sum to 1. Without an empty slot to attend to, a context in which every measurement matches the
    query would look like one in which none does, and a history of a single pair would be of no use.
    """
    xp = log_rtt.__array_namespace__()
    counts = xp.arange(log_rtt.shape[0]) < length
    kind = xp.where(counts, xp.where(failed, FAILED, ANSWERED), EMPTY)
    columns = {
        "source": xp.where(counts, source, 0),
        "destination": xp.where(counts, destination, 0),
        "kind": kind,
        "log_rtt": xp.where(kind == ANSWERED, log_rtt, 0.0),
        "age_s": xp.where(counts, age_s, UNKNOWN_AGE),
    }
    empty = {"kind": EMPTY, "age_s": UNKNOWN_AGE}
    moved = {name: xp.pad(column, (1, 0), constant_values=empty.get(name, 0)) for name, column in columns.items()}
    return {**moved, "length": length + 1}


def _direct(one: Array, other: Array, rtt_ms: Array, target: Target) -> Array:
    """For each node, the direct distance to the nearest target; only pairs of which an end is a target count."""
    xp = rtt_ms.__array_namespace__()
    start = xp.where(target.is_target, 0.0, FAR_MS).astype(np.float32)
    return xp.minimum(_shortened(start, one, other, rtt_ms), target.prefix_ms)


def _shortened(distance: Array, one: Array, other: Array, rtt_ms: Array) -> Array:
    """Distances of nodes if one more hop is allowed."""
    xp = distance.__array_namespace__()
    if xp is np:
        further = distance.copy()
        np.minimum.at(further, other, distance[one] + rtt_ms)
        np.minimum.at(further, one, distance[other] + rtt_ms)
        return np.minimum(further, np.float32(FAR_MS))
    further = distance.at[other].min(distance[one] + rtt_ms)
    return xp.minimum(further.at[one].min(distance[other] + rtt_ms), FAR_MS)


# Shared-prefix groups: nodes whose addresses share a prefix are often near each other.
#
# A node is represented by words: one of its own, and one for each length of prefix, which all nodes of a group share.
# In simulated worlds, and where the device needs indices, groups are [nodes, levels]: the index of the first node with
# the same prefix.


def node_words(nodes: Sequence[str], is_known: npt.NDArray[np.bool_] | None = None) -> Words:
    """[nodes, 1 + levels]: stable hashes of addresses and of their prefixes. A name shares no prefix.

    A prefix that most of the known nodes share (such as 10.0.0.0/8 in a laboratory) does not distinguish them and makes
    no group. These words are all that the model sees of an address.
    """
    families, packed = parse_addresses(nodes)
    is_address = families != UNPARSABLE
    own = source_hash(families, packed).astype(np.uint32)
    own[~is_address] = [zlib.crc32(name.encode()) for name, usable in zip(nodes, is_address, strict=True) if not usable]
    is_known = np.ones(len(nodes), bool) if is_known is None else is_known
    words = [own]
    for level in range(LEVELS):
        kept = packed.copy()
        for family, bits in PREFIX_BITS.items():
            kept[families == family, bits[level] // 8 :] = 0
        prefix = source_hash(families, kept).astype(np.uint32)
        found, count = np.unique(prefix[is_known & is_address], return_counts=True)
        of_most = np.isin(prefix, found[2 * count > is_known.sum()])
        words.append(np.where(is_address & ~of_most, prefix, own))
    return np.stack(words, axis=1)


# The rule over the pairs of a history of any size.

_TWICE: Final = 1 << 22
"""Doubling a distance adds this to its key."""
_WORST_KEY: Final = 1 << 31
_REACHES_MS: Final = (25.0, 100.0, 400.0, np.inf)
"""Distances within which measurements are looked for that stand in for others, one after the other."""
_FEW_PAIRS: Final = 20_000
"""Of so many, all are looked at together."""
_LATEST: Final = 25
"""Measurements of a pair that count in its summary."""


class ContextIndex:
    """All known measurements, ordered by pair and time: those of a pair that are older than a question come first.

    Most of the rule is computed for pairs, of which there are far fewer than measurements, and only then for the
    measurements that may be chosen.
    """

    def __init__(self, known: Observations, words: Words, positions: Positions | None = None) -> None:
        """`words` and positions of all nodes, also of those that were never measured."""
        self.words, self.positions = words, positions
        is_measured = np.zeros(len(words), bool)
        for end in (known.source, known.destination):
            is_measured[end[end >= 0]] = True
        self.nodes = np.flatnonzero(is_measured)
        number = (np.cumsum(is_measured) - 1).astype(np.int32)  # half the memory, of columns as long as the history
        source, destination = number[known.source], number[known.destination]
        pair = np.minimum(source, destination) * np.int64(len(self.nodes)) + np.maximum(source, destination)
        time = np.where(np.isnan(known.time_s), -np.inf, known.time_s)
        usable = np.flatnonzero((known.source >= 0) & (known.destination >= 0))
        if (time[1:] < time[:-1]).any():
            usable = usable[np.argsort(time[usable], kind="stable")]
        order = np.argsort(pair[usable], kind="stable")
        self._in_time_order = np.empty_like(order)
        self._in_time_order[order] = np.arange(len(order))
        given = usable[order]
        is_equal = (np.diff(pair[given]) == 0) & (time[given[1:]] == time[given[:-1]])
        equal = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
        some = given[equal]  # in an order that is not that of the history: it decides between equals
        given[equal] = some[np.lexsort((known.rtt_ms[some], words[known.source[some], 0], time[some], pair[some]))]
        self.given = given
        """For each row of the index, its row in the known measurements."""
        self.time_s = time[self.given]
        self.source, self.destination = source[self.given], destination[self.given]
        self.rtt_ms = known.rtt_ms[self.given].astype(np.float64)
        self.pair = np.cumsum(np.diff(pair[given], prepend=pair[given[:1]]) != 0, dtype=np.int32)
        self.starts = np.flatnonzero(np.diff(self.pair, prepend=-1))
        self.counts = np.diff(self.starts, append=len(self.pair))
        ends = np.stack([self.source[self.starts], self.destination[self.starts]]).astype(np.int64)
        self.low, self.high = np.sort(ends, axis=0)
        self.fastest = _least_so_far(np.fmin(self.rtt_ms, FAR_MS).astype(np.float32), self.pair)  # failed: far
        self._usable = np.zeros(len(self.starts), np.int64)
        self._counted = 0
        """The number of rows, in order of time, that are counted in `_usable`."""

    def __len__(self) -> int:
        return len(self.pair)

    def usable(self, time_s: float) -> Ints:
        """For each pair, the number of measurements strictly before a time."""
        if np.isnan(time_s):
            return self.counts
        before = int(np.searchsorted(self.time_s, time_s, sorter=self._in_time_order))
        changed = self._in_time_order[min(before, self._counted) : max(before, self._counted)]  # few, of the next time
        usable = self._usable.copy()
        np.add.at(usable, self.pair[changed].astype(np.int64), 1 if before > self._counted else -1)
        self._usable, self._counted = usable, before
        return usable

    def is_measured(self, source: int, destination: int, time_s: float) -> bool:
        """Whether two nodes were measured before, in either direction."""
        if not np.isin([source, destination], self.nodes).all():
            return False
        low, high = np.sort(np.searchsorted(self.nodes, [source, destination]))
        first, end = np.searchsorted(self.low, [low, low + 1])  # pairs are in the order of both ends
        pair = first + np.searchsorted(self.high[first:end], high)
        return bool(pair < end and self.high[pair] == high and self.usable(time_s)[pair])

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint64]:
        """Of each pair, which depends on its nodes only."""
        one, other = np.sort(self.words[self.nodes[np.stack([self.low, self.high])], 0].astype(np.uint64), axis=0)
        return mix64(one << 32 | other)

    def sample(self, time_s: float, room: int) -> Ints:
        """At most `room` rows that are not chosen for particular pairs: the latest of each pair, in an order that
        depends on the nodes only, then the ones before."""
        usable = self.usable(time_s)
        order = np.argsort(self._hashes, kind="stable")
        order = order[usable[order] > 0]
        chosen, left = [], room
        for round_ in range(int(usable.max(initial=0))):
            order = order[usable[order] > round_][:left]
            chosen.append(self.starts[order] + usable[order] - 1 - round_)
            left -= len(order)
            if not left or not len(order):
                break
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def clusters(self, most: int, size: int) -> Ints:
        """The cluster of each measured node: at most `most` clusters, of about `size` nodes or more.

        Each part is divided between two nodes that are far apart, by which of them is nearer along chains of
        measurements. Nothing but the measurements decides.
        """
        cluster = np.zeros(len(self.nodes), np.int64)
        rtt, word = self.fastest[self.starts + self.counts - 1], self.words[self.nodes, 0]
        links = csr_array((np.maximum(rtt, MIN_RTT_MS), (self.low, self.high)), shape=(len(cluster),) * 2)
        degree = np.bincount(np.concatenate([self.low, self.high]), minlength=len(cluster))
        parts = [(np.lexsort((word, -degree)), min(most, -(-len(cluster) // size)))]
        while parts:
            members, count = parts.pop()
            if count < 2:
                continue
            from_first = dijkstra(links, directed=False, indices=members[0], limit=FAR_MS)[members]
            other = members[np.argsort(from_first, kind="stable")[len(members) * 9 // 10]]
            from_other = dijkstra(links, directed=False, indices=other, limit=FAR_MS)[members]
            nearer = np.minimum(from_first, FAR_MS) - np.minimum(from_other, FAR_MS)
            order = np.argsort(nearer, kind="stable")
            cut = len(members) * (count // 2) // count
            near, far = np.sort(order[:cut]), np.sort(order[cut:])
            cluster[members[far]] = cluster.max() + 1
            parts += [(members[near], count // 2), (members[far], count - count // 2)]
        return cluster

    def choose(
        self,
        sources: Ints,
        destinations: Ints,
        time_s: float,
        room: int,
        *,
        is_shared: bool = False,
        of_pairs: bool = False,
    ) -> Ints:
        """At most `room` rows for the context of questions between two sets of nodes, in either direction, best first;
        with `of_pairs`, those that stand for their pairs."""
        usable, most = self.usable(time_s), 1 if of_pairs else len(self)
        ends = self._target(sources), self._target(destinations)
        is_end = ends[0].is_target | ends[1].is_target
        touching = self._touching(is_end, usable)
        columns = self._columns_of(touching, usable)
        class_, distance, _, _ = score_pairs(*columns, *ends)
        count = [int(np.minimum(usable[touching[class_ == number]], most).sum()) for number in (OWN, SHARED)]
        count.append(int(np.minimum(usable, most).sum()) - sum(count))
        own, shared, rest, more_shared, more_own = map(int, quotas(count, room, is_shared=is_shared))

        of_own = self._best(touching[class_ == OWN], usable, None, own + more_own, most)
        low, high = (column[class_ == SHARED] for column in columns[:2])
        thirds = np.stack([np.where(is_end[low], high, low), np.where(is_end[high], low, high)])
        of_shared = self._best(touching[class_ == SHARED], usable, distance[thirds], shared + more_shared, most)
        direct = [_direct(*columns, end) for end in ends]
        stand_ins, distance = self._stand_ins(usable, direct, is_end, rest, most)
        of_rest = self._best(stand_ins, usable, distance, rest, most)
        rows = np.concatenate([of_own[:own], of_shared[:shared], of_rest, of_shared[shared:], of_own[own:]])
        return self.of_pairs(rows, room) if of_pairs else rows

    def _stand_ins(
        self, usable: Ints, direct: list[Singles], is_end: Bools, count: int, most: int
    ) -> tuple[Ints, Singles]:
        """Pairs between other nodes than those of the question, among them all that have one of the `count` best
        measurements, and their distances. Most often a small part of the pairs is near enough."""
        for reach_ms in _REACHES_MS if len(self.starts) > _FEW_PAIRS else _REACHES_MS[-1:]:
            near_by = self._touching(np.minimum(*direct) <= reach_ms, usable)  # all that decide who is in reach
            near = np.stack([_shortened(part, *self._columns_of(near_by, usable)) for part in direct])
            pairs = self._touching(near[0] <= reach_ms, usable)
            pairs = pairs[~(is_end[self.low[pairs]] | is_end[self.high[pairs]])]
            distance = pair_distance(near, self.low[pairs], self.high[pairs])
            pairs, distance = pairs[distance <= reach_ms], distance[distance <= reach_ms]
            below = _keys(np.array(reach_ms, np.float32)) - 1
            if np.minimum(_rounds(_keys(distance), usable[pairs], below), most).sum() >= count:
                break
        return pairs, np.broadcast_to(distance, (2, len(distance)))

    def _touching(self, is_node: Bools, usable: Ints) -> Ints:
        """The usable pairs of these nodes."""
        if is_node.all():
            return np.flatnonzero(usable)
        nodes = np.flatnonzero(is_node)
        first, count = self._pairs_of_nodes[0][nodes], self._pairs_of_nodes[1][nodes]
        at = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
        is_pair = np.zeros(len(self.starts), bool)
        is_pair[self._pairs_of_nodes[2][at]] = True
        pairs = np.flatnonzero(is_pair)
        return pairs[usable[pairs] > 0]

    @cached_property
    def _pairs_of_nodes(self) -> tuple[Ints, Ints, Ints]:
        """For each measured node, where its pairs begin in the third column, and how many it has."""
        ends = np.concatenate([self.low, self.high])
        count = np.bincount(ends, minlength=len(self.nodes))
        return np.cumsum(count) - count, count, np.argsort(ends, kind="stable") % max(len(self.low), 1)

    def _columns_of(self, pairs: Ints, usable: Ints) -> tuple[Ints, Ints, Singles]:
        """Both ends, and the least RTT."""
        return self.low[pairs], self.high[pairs], self.fastest[self.starts[pairs] + usable[pairs] - 1]

    def _target(self, targets: Ints) -> Target:
        """These nodes as a `Target`, whose columns are of the measured nodes."""
        targets = targets[targets >= 0]
        distance = np.full(len(self.nodes), FAR_MS, dtype=np.float32)
        for level in reversed(range(1, 1 + LEVELS)):
            distance[np.isin(self._node_words[level], self.words[targets, level])] = PREFIX_MS[level - 1]
        if self.positions is not None:
            distance = np.minimum(distance, self._near_ms(targets))
        return Target(np.isin(self.nodes, targets), distance)

    def _near_ms(self, targets: Ints) -> Singles:
        """For each measured node, the RTT that its distance to the nearest of the targets suggests."""
        assert self.positions is not None
        targets = targets[is_known(self.positions[targets])]
        nearest = np.full(len(self.nodes), FAR_MS, dtype=np.float32)
        for target in targets.tolist():
            light = light_ms(self.positions[self.nodes], self.positions[target])
            nearest = np.minimum(nearest, np.where(light < 0, FAR_MS, NEAREST_MS + STRETCH * light).astype(np.float32))
        return nearest

    @cached_property
    def _node_words(self) -> Words:
        """[1 + levels, measured nodes]"""
        return np.ascontiguousarray(self.words[self.nodes].T)

    def _best(self, pairs: Ints, usable: Ints, distance: Singles | None, count: int, most: int) -> Ints:
        """Measurements of these pairs, at most so many of each, best first: by distance, or without distances the
        latest first. `usable` is that of all pairs.

        Ties are broken by their contents, so the order of the history does not matter.
        """
        if count == 0:
            return np.zeros(0, np.int64)
        usable = usable[pairs]
        rounds = np.minimum(usable, count)
        if distance is not None:  # at least `count` measurements have keys up to the worst
            nearest, farthest = _keys(np.minimum(*distance)), _keys(np.maximum(*distance))
            worst = np.partition(farthest, count - 1)[count - 1] if count <= len(pairs) else _WORST_KEY
            near = np.flatnonzero(nearest <= worst)
            pairs, usable, distance = pairs[near], usable[near], distance[:, near]
            rounds = _rounds(nearest[near], usable, worst)
        rounds = np.minimum(rounds, most)
        member = np.repeat(np.arange(len(rounds)), rounds)
        round_ = np.arange(len(member)) - np.repeat(np.cumsum(rounds) - rounds, rounds)
        rows = (self.starts[pairs] + usable - 1)[member] - round_
        keys = round_
        if distance is not None:
            backwards = (self.source[rows] != self.low[pairs[member]]).astype(np.int64)
            keys = _keys(distance[backwards, member]) + np.minimum(round_, MAX_ROUNDS) * _TWICE
        if count < len(rows):
            best = keys <= np.partition(keys, count - 1)[count - 1]
            rows, keys = rows[best], keys[best]
        time = np.where(np.isfinite(self.time_s[rows]), self.time_s[rows], np.inf)
        source, destination = self.words[self.nodes[np.stack([self.source[rows], self.destination[rows]])], 0]
        return rows[np.lexsort((self.rtt_ms[rows], time, destination, source, keys))][:count]

    def columns(self, rows: Ints, time_s: float, slots: int, *, of_pairs: bool = False) -> Arrays:
        """Slots that hold these rows, or (`of_pairs`) what they stand for. Ends are node numbers; ages count from
        `time_s`, or (NaN) from the latest row."""
        rtt = self._summaries(rows)[0] if of_pairs else self.rtt_ms[rows]
        failed = np.isnan(rtt)
        log_rtt = np.log(np.maximum(np.where(failed, 1.0, rtt), MIN_RTT_MS))
        times = self.time_s[rows]
        is_timed = np.isfinite(times)
        now = times.max(initial=-np.inf, where=is_timed) if np.isnan(time_s) else time_s
        age_s = np.subtract(now, times, where=is_timed, out=np.full(len(rows), UNKNOWN_AGE))
        ends = self.nodes[self.source[rows]], self.nodes[self.destination[rows]]
        padded = (np.pad(column, (0, slots - 1 - len(rows))) for column in (*ends, failed, log_rtt, age_s))
        found = slot_columns(np.asarray(len(rows)), *padded)
        return {
            name: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for name, value in found.items()
        }

    # What stands for a pair: its latest answered row, for the median of its latest measurements, and its latest failed
    # row, for the failures. With both, half of the slots of a pair would be failures. So one of them is left out as
    # often as it takes for the share of failures to be right (a hash of the pair decides).

    def of_pairs(self, latest: Ints, room: int | None = None) -> Ints:
        """The rows that stand for pairs, given the latest row of each, best first; at most `room`."""
        _, failed = self._summaries(latest)
        uniform, odds = self._hashes[self.pair[latest]] / 2.0**64, failed / np.maximum(1 - failed, 1e-9)
        answers = self._latest_answer[latest][uniform * odds < 1]
        failures = self._latest_failure[latest][uniform < odds]
        return np.concatenate([answers[: None if room is None else max(room - len(failures), 0)], failures])[:room]

    def _summaries(self, rows: Ints) -> tuple[Floats, Floats]:
        """Of the latest measurements of the pair up to each row: the median RTT (of a failed row NaN), and the share of
        failures."""
        at = rows[:, None] - np.arange(_LATEST)
        counts = at >= self.starts[self.pair[rows]][:, None]
        rtt = np.sort(np.where(counts, self.rtt_ms[np.maximum(at, 0)], np.nan), axis=1)
        answers = np.isfinite(rtt).sum(axis=1)
        middle = np.stack([(answers - 1) // 2, answers // 2], axis=1).clip(min=0)
        median = np.take_along_axis(rtt, middle, axis=1).mean(axis=1)
        return np.where(np.isnan(self.rtt_ms[rows]), np.nan, median), 1 - answers / counts.sum(axis=1)

    @cached_property
    def _latest_answer(self) -> Ints:
        """For each row, the latest answered one of its pair up to it; where there is none, any other."""
        return _latest(np.isfinite(self.rtt_ms))

    @cached_property
    def _latest_failure(self) -> Ints:
        return _latest(np.isnan(self.rtt_ms))


def _latest(holds: npt.NDArray[np.bool_]) -> Ints:
    """For each row, the latest one up to it for which it holds."""
    return np.maximum.accumulate(np.where(holds, np.arange(len(holds)), 0))


def _keys(distance: Singles) -> Ints:
    """Integers in the order of the distances: all but the last bit of their sum with `HALF_MS`, as in `worlds`."""
    return ((distance + np.float32(HALF_MS)).view(np.uint32) >> 1).astype(np.int64)


def _rounds(nearest: Ints, usable: Ints, worst: Any) -> Ints:
    """How many measurements of each pair have keys that are not above the worst."""
    in_reach = (worst - nearest) // _TWICE + 1
    return np.where(in_reach > MAX_ROUNDS, usable, np.minimum(in_reach, usable))


def _least_so_far(values: Singles, group: npt.NDArray[np.integer[Any]]) -> Singles:
    """The running minimum within each group of consecutive values."""
    falling = group.astype(np.int64) << 32  # the bits of non-negative floats are ordered like the floats
    least = np.minimum.accumulate(values.view(np.uint32).astype(np.int64) - falling) + falling
    return least.astype(np.uint32).view(np.float32)
