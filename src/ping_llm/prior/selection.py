"""Which measurements make the context of a question, and how a context is laid out: for training and prediction.

    source, queried   the source of some questions, and their destinations
    distance          of a node to the source (or to the nearest queried one): the least RTT measured between the two,
                      or what a common prefix of their addresses suggests; if there is neither, the shortest way over a
                      third node
    round             of a measurement, how many later ones its pair has

1. Measurements of the queried pairs, latest first, up to a quarter of the context.
2. Measurements that share one end with them, up to half of the context: first those whose other end is near both the
   source and a queried node, nearest to either first; no way over a third node counts here.
3. All others, by how well they stand in for a queried pair: one end near the source, the other near a queried node.
   The first of them are between nodes of the same prefixes, or between nodes that were measured with both.
4. If there is still room, what was left over from 2, then from 1.

In 2 and 3 every later round counts as twice the distance, so many measurements of one pair do not displace the others.
Answers of the questions play no part, nor does anything that was measured after them.

`score_pairs`, `quotas` and `context_columns` are the rule, on NumPy and on JAX arrays alike. `rank_measurements` and
`select` apply it to every measurement of a small world, compiled; `ContextIndex` applies it in NumPy to the pairs of a
history of any size. A test holds the two to the same choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ping_llm.core.measurements import UNPARSABLE, parse_addresses, prefix_numbers
from ping_llm.core.rtt import MIN_RTT_MS, Floats, Ints, Observations, Questions

# mypy: disallow-untyped-calls=False

Array = Any
"""Of NumPy or of JAX."""
Arrays = dict[str, npt.NDArray[Any]]
Singles = npt.NDArray[np.float32]

ANSWERED: Final = 0
FAILED: Final = 1
EMPTY: Final = 2
"""Kinds of slots of a context."""
UNKNOWN_AGE: Final = -1.0

OWN, SHARED, OTHERS, UNKNOWN = range(4)
"""Classes of measurements: the first three steps of the rule, and what may not be used."""
FAR_MS: Final = 1e4
"""Distance of what was never measured. Longer RTTs count as this."""
HALF_MS: Final = 5.0
"""Added to distances before they are doubled for each round, so that neighbours at 0.1 ms do not fill everything."""
MAX_ROUNDS: Final = 20

PREFIX_BITS: Final = {4: (24, 16, 8), 6: (48, 32, 16)}
"""Levels of shared prefixes, by family, longest first: those of a site, of a network, of a registry's block."""
LEVELS: Final = len(PREFIX_BITS[4])
PREFIX_MS: Final = (2.0, 10.0, 50.0)
"""How far apart nodes that share a prefix count as being, as long as nothing shorter was measured."""


class Target(NamedTuple):
    """One side of the questions: the source, or the queried nodes. Columns of nodes."""

    is_target: Array
    prefix_ms: Array
    """Distance that a common prefix with the nearest target suggests."""


def score_pairs(one: Array, other: Array, rtt_ms: Array, source: Target, queried: Target) -> tuple[Array, ...]:
    """The class of each pair and its distances: (class, shared, stand-in, near).

    `rtt_ms` is the least RTT known of a pair, `FAR_MS` where there is none. `shared` is a column of nodes: how far a
    measurement between an end of the questions and this node counts as being. `stand-in` is a column of pairs for those
    that share no end, and `near` are the columns of nodes it is made of, [2, nodes].
    """
    xp = _module(rtt_ms)
    direct_source, near_source = _near(one, other, rtt_ms, source)
    direct_queried, near_queried = _near(one, other, rtt_ms, queried)
    is_source, is_queried = source.is_target, queried.is_target
    is_end = is_source | is_queried
    is_own = (is_source[one] & is_queried[other]) | (is_source[other] & is_queried[one])
    class_ = xp.where(is_own, OWN, xp.where(is_end[one] | is_end[other], SHARED, OTHERS))
    by_both = (direct_source < FAR_MS) & (direct_queried < FAR_MS)
    shared = xp.minimum(direct_source, direct_queried) + xp.where(by_both, 0.0, FAR_MS).astype(np.float32)
    stand_in = xp.minimum(near_source[one] + near_queried[other], near_source[other] + near_queried[one])
    return class_, shared, stand_in, xp.stack([near_source, near_queried])


def quotas(count: Any, room: int, xp: Any = jnp) -> list[Any]:
    """How many are chosen, from how many there are of the three classes: own, shared, others, more shared, more own."""
    own = xp.minimum(count[OWN], -(-room // 4))
    shared = xp.minimum(count[SHARED], room // 2)
    others = xp.minimum(count[OTHERS], room - own - shared)
    more_shared = xp.minimum(count[SHARED] - shared, room - own - shared - others)
    more_own = xp.minimum(count[OWN] - own, room - own - shared - others - more_shared)
    return [own, shared, others, more_shared, more_own]


def context_columns(
    length: Any, source: Array, destination: Array, failed: Array, log_rtt: Array, age_s: Array
) -> dict[str, Any]:
    """A context of the first `length` measurements, behind one empty slot.

    Attention has to go somewhere. Without that slot it cannot tell a context in which everything matches from one in
    which nothing does, and a history of a single pair would say nothing.
    """
    xp = _module(log_rtt)
    counts = xp.arange(source.shape[0]) < length
    kind = xp.where(counts, xp.where(failed, FAILED, ANSWERED), EMPTY)
    columns = {
        "context_source": (xp.where(counts, source, 0), 0),
        "context_destination": (xp.where(counts, destination, 0), 0),
        "context_kind": (kind, EMPTY),
        "context_log_rtt": (xp.where(kind == ANSWERED, log_rtt, 0.0), 0.0),
        "context_age_s": (xp.where(counts, age_s, UNKNOWN_AGE), UNKNOWN_AGE),
    }
    context = {name: xp.pad(column, (1, 0), constant_values=empty) for name, (column, empty) in columns.items()}
    return {**context, "context_length": length + 1}


def _near(one: Array, other: Array, rtt_ms: Array, target: Target) -> tuple[Array, Array]:
    """Of each node, the distance to the nearest target: directly, and over at most one third node."""
    xp, is_target = _module(rtt_ms), target.is_target
    start = xp.where(is_target, 0.0, FAR_MS).astype(np.float32)
    touching: Any = slice(None)
    if xp is np:  # few of many pairs: no other pair can shorten anything yet
        touching = np.flatnonzero(is_target[one] | is_target[other])
    measured = _shortened(start, one[touching], other[touching], rtt_ms[touching])
    direct = xp.minimum(measured, target.prefix_ms)
    return direct, _shortened(direct, one, other, rtt_ms)


def _shortened(distance: Array, one: Array, other: Array, rtt_ms: Array) -> Array:
    """Distances of nodes, after one more hop."""
    if _module(distance) is np:
        further = distance.copy()
        np.minimum.at(further, other, distance[one] + rtt_ms)
        np.minimum.at(further, one, distance[other] + rtt_ms)
        return np.minimum(further, np.float32(FAR_MS))
    further = distance.at[other].min(distance[one] + rtt_ms)
    return jnp.minimum(further.at[one].min(distance[other] + rtt_ms), FAR_MS)


def _module(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


# The rule over every measurement of a world, compiled for training.


def rank_measurements(
    source: jax.Array,
    destination: jax.Array,
    rtt_ms: jax.Array,
    round_: jax.Array,
    known: jax.Array,
    groups: jax.Array,
    *,
    query_source: jax.Array,
    is_queried: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Classes and sortable keys of measurements, and how near nodes are to (the source, a queried node).

    `rtt_ms` is NaN where a measurement failed; `groups` are those of shared prefixes; `is_queried` is a mask of nodes.
    """
    rtt = jnp.where(known & ~jnp.isnan(rtt_ms), jnp.minimum(rtt_ms, FAR_MS), FAR_MS)
    is_source = jnp.arange(is_queried.shape[0]) == query_source
    targets = [Target(mask, prefix_distance(groups, mask)) for mask in (is_source, is_queried)]
    class_, shared, stand_in, near = score_pairs(source, destination, rtt, *targets)
    third = jnp.where((is_source | is_queried)[source], destination, source)
    distance = jnp.where(class_ == OTHERS, stand_in, shared[third])
    doubled = (distance + HALF_MS) * jnp.exp2(jnp.minimum(round_, MAX_ROUNDS).astype(jnp.float32))
    score = jnp.where(class_ == OWN, round_.astype(jnp.float32), doubled)
    class_ = jnp.where(known, class_, UNKNOWN)
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)  # of positive numbers: ordered like them
    return class_, (class_.astype(jnp.uint32) << 30) | (bits >> 1), near


def select(class_: jax.Array, keys: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the measurements of the context, best first, and how many of them count."""
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    _, order = jax.lax.sort((keys, rows), num_keys=1, is_stable=True)
    count = jnp.sum(class_[:, None] == jnp.arange(UNKNOWN), axis=0)
    own, shared, *_ = parts = quotas(count, room)
    lengths = jnp.stack(parts)
    starts = jnp.stack([jnp.zeros_like(own), count[0], count[0] + count[1], count[0] + shared, own])
    ends = jnp.cumsum(lengths)
    slot = jnp.arange(room)
    part = jnp.minimum(jnp.sum(slot[:, None] >= ends, axis=1), len(parts) - 1)
    at = starts[part] + slot - (ends - lengths)[part]
    return order[jnp.minimum(at, len(rows) - 1)], ends[-1].astype(jnp.int32)


# Shared-prefix groups: nodes whose addresses share a prefix are often near each other.
#
# Groups are [nodes, levels]: the first node that has the same prefix; a node itself, where no earlier one has it.
# Nothing else of an address reaches the model. A prefix that most nodes share (a laboratory's 10.0.0.0/8, say)
# distinguishes none of them and makes no group.


def prefix_groups(nodes: Sequence[str]) -> Ints:
    """Of addresses. What is not an address shares nothing."""
    numbers = prefix_numbers(nodes, PREFIX_BITS)
    is_address = parse_addresses(nodes)[0] != UNPARSABLE
    for level, of_level in enumerate(numbers):
        of_most = 2 * np.bincount(of_level, minlength=1) > len(nodes)
        numbers[level] = np.where(is_address & ~of_most[of_level], of_level, _all_different(len(nodes)))
    return _first_of_equals(numbers)


def no_prefix_groups(nodes: int) -> Ints:
    return np.tile(np.arange(nodes)[:, None], (1, LEVELS))


def groups_among(ids: Ints, groups: Ints) -> Ints:
    """Of some of the nodes, numbered anew in the order of `ids`. Negative ids are nodes that nobody knows."""
    return _first_of_equals(np.where(ids >= 0, groups[np.maximum(ids, 0)].T, _all_different(len(ids))))


def _first_of_equals(numbers: Ints) -> Ints:
    """Groups of nodes that share a prefix where their numbers are equal: [levels, nodes]."""
    firsts = np.empty_like(numbers)
    for level, of_level in enumerate(numbers):
        _, first, group = np.unique(of_level, return_index=True, return_inverse=True)
        firsts[level] = first[group]
    return firsts.T


def _all_different(count: int) -> Ints:
    return -1 - np.arange(count)


def first_equal(numbers: jax.Array) -> jax.Array:
    """Of each number, the index of the first one in its row that equals it."""
    return jnp.argmax(numbers[..., :, None] == numbers[..., None, :], axis=-1).astype(jnp.int32)


def prefix_distance(groups: jax.Array, is_target: jax.Array) -> jax.Array:
    """Of each node, the distance that the longest prefix shared with a target suggests."""
    distance = jnp.full(is_target.shape, FAR_MS, jnp.float32)
    for level in reversed(range(LEVELS)):
        has_target = jnp.zeros(is_target.shape, bool).at[groups[:, level]].max(is_target)
        distance = jnp.where(has_target[groups[:, level]], PREFIX_MS[level], distance)
    return distance


# The rule over the pairs of a history of any size.

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


def group_questions(questions: Questions, at_most: int) -> Iterator[Group]:
    """Questions of one time and one source (or destination), at most so many to a group."""
    common, other = questions.source, questions.destination
    if len(np.unique(common)) > len(np.unique(other)):
        common, other = other, common
    order = np.lexsort((other, common, questions.time_s))
    time_s = questions.time_s[order]
    is_new = np.diff(common[order], prepend=0) != 0
    is_new |= ~((time_s == np.roll(time_s, 1)) | (np.isnan(time_s) & np.isnan(np.roll(time_s, 1))))
    is_new[:1] = True
    starts = np.flatnonzero(is_new)
    for start, stop in zip(starts, np.append(starts, len(order))[1:], strict=True):
        for first in range(start, stop, at_most):
            rows = order[first : min(first + at_most, stop)]
            yield Group(rows=rows, common=int(common[rows[0]]), others=other[rows], time_s=float(time_s[first]))


class ContextIndex:
    """All known measurements, ordered by pair and time: what a question may see of a pair are its first ones.

    Most of the rule is about pairs, of which there are far fewer than measurements. Single measurements are looked at
    only where they may be chosen.
    """

    def __init__(self, known: Observations, room: int, groups: Ints) -> None:
        """`groups` of shared prefixes, of all nodes, also of those that were never measured."""
        known = known.take((known.source >= 0) & (known.destination >= 0))
        self.room = room
        self.groups = groups
        self.nodes, numbers = np.unique(np.concatenate([known.source, known.destination]), return_inverse=True)
        source, destination = numbers[: len(known)], numbers[len(known) :]
        low, high = np.minimum(source, destination), np.maximum(source, destination)
        _, pair = np.unique(low * max(1, len(self.nodes)) + high, return_inverse=True)
        time = np.where(np.isnan(known.time_s), -np.inf, known.time_s)
        self.given = np.lexsort((np.arange(len(known)), time, pair))
        """Of each row here, which of the known measurements it is."""
        self.time_s = time[self.given]
        self.source, self.destination = source[self.given], destination[self.given]
        self.rtt_ms = known.rtt_ms[self.given].astype(np.float64)
        self.pair = pair[self.given]
        self.starts = np.flatnonzero(np.diff(self.pair, prepend=-1))
        self.counts = np.diff(self.starts, append=len(self.pair))
        self.low, self.high = low[self.given][self.starts], high[self.given][self.starts]
        self.fastest = _least_so_far(np.fmin(self.rtt_ms, FAR_MS).astype(np.float32), self.pair)  # failed: far
        self._usable: tuple[float, Ints] | None = None

    def usable(self, time_s: float) -> Ints:
        """Of each pair, how many measurements were made strictly before."""
        if np.isnan(time_s) or not len(self.pair):
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
        parts = [np.flatnonzero(class_ == number) for number in range(UNKNOWN)]
        count = [int(usable[part].sum()) for part in parts]
        own, shared, rest, more_shared, more_own = map(int, quotas(count, self.room, np))
        of_own, of_shared, of_rest = (
            self._best(pairs[part], usable[part], None if class_number == OWN else distance[:, part], number)
            for class_number, part, number in zip(
                range(UNKNOWN), parts, (own + more_own, shared + more_shared, rest), strict=True
            )
        )
        return np.concatenate([of_own[:own], of_shared[:shared], of_rest, of_shared[shared:], of_own[own:]])

    def _distances(self, pairs: Ints, usable: Ints, common: int, others: Ints) -> tuple[Ints, Singles]:
        """Of pairs their class, and how far their measurements count as being: from low to high, from high to low."""
        low, high, rtt = self.low[pairs], self.high[pairs], self.fastest[self.starts[pairs] + usable - 1]
        source, queried = self._target(np.array([common])), self._target(others)
        class_, shared, stand_in, _ = score_pairs(low, high, rtt, source, queried)
        is_end = source.is_target | queried.is_target
        thirds = np.where(is_end[low], high, low), np.where(is_end[high], low, high)
        return class_, np.stack([np.where(class_ == OTHERS, stand_in, shared[third]) for third in thirds])

    def _target(self, targets: Ints) -> Target:
        """Arrays of the measured nodes."""
        targets = targets[targets >= 0]
        distance = np.full(len(self.nodes), FAR_MS, dtype=np.float32)
        for level in reversed(range(LEVELS)):
            distance[np.isin(self.groups[self.nodes, level], self.groups[targets, level])] = PREFIX_MS[level]
        return Target(np.isin(self.nodes, targets), distance)

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
            rounds = np.where(in_reach > MAX_ROUNDS, usable, np.clip(in_reach, 0, usable))
        member = np.repeat(np.arange(len(rounds)), rounds)
        round_ = np.arange(len(member)) - np.repeat(np.cumsum(rounds) - rounds, rounds)
        rows = (self.starts[pairs] + usable - 1)[member] - round_
        keys = round_
        if distance is not None:
            backwards = (self.source[rows] != self.low[pairs[member]]).astype(np.int64)
            keys = _keys(distance[backwards, member]) + np.minimum(round_, MAX_ROUNDS) * _TWICE
        if count < len(rows):
            near = keys <= np.partition(keys, count - 1)[count - 1]
            rows, keys = rows[near], keys[near]
        return rows[np.lexsort((self.given[rows], keys))][:count]

    def fill(self, questions: Questions, group: Group, question_slots: int) -> Arrays:
        """One row of a batch: the context of a group, and its questions."""
        rows = self.choose(group.common, group.others, group.time_s)
        query = questions.take(group.rows)
        ids, numbers = _numbered(query, self.nodes[self.source[rows]], self.nodes[self.destination[rows]])
        question_ends, context_ends = numbers[: 2 * len(query)], numbers[2 * len(query) :]
        rtt, failed = self.rtt_ms[rows], np.isnan(self.rtt_ms[rows])
        log_rtt = np.log(np.maximum(np.where(failed, 1.0, rtt), MIN_RTT_MS))
        empty = (0, self.room - len(rows))
        columns = [*np.split(context_ends, 2), failed, log_rtt, self._age_s(rows, group.time_s)]
        row: Arrays = context_columns(np.asarray(len(rows)), *(np.pad(column, empty) for column in columns))
        for name, ends in zip(("question_source", "question_destination"), np.split(question_ends, 2), strict=True):
            row[name] = np.pad(ends, (0, question_slots - len(query)))
        unused = 2 * (1 + self.room + question_slots) - len(ids)
        row["node_groups"] = np.pad(groups_among(ids, self.groups), ((0, unused), (0, 0)))
        return {name: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for name, value in row.items()}

    def _age_s(self, rows: Ints, time_s: float) -> Floats:
        """Before the questions or, if they have no time, before the latest of the rows."""
        times = self.time_s[rows]
        is_timed = np.isfinite(times)
        now = times.max(initial=-np.inf, where=is_timed) if np.isnan(time_s) else time_s
        return np.subtract(now, times, where=is_timed, out=np.full(len(rows), UNKNOWN_AGE))


def _numbered(query: Questions, source: Ints, destination: Ints) -> tuple[Ints, Ints]:
    """Nodes in the order in which they are met, and the number of each end. Unknown nodes differ from all others."""
    unknown = np.where(query.source < 0, -1, query.source), np.where(query.destination < 0, -2, query.destination)
    ids = np.concatenate([*unknown, source, destination])
    _, first, numbers = np.unique(ids, return_index=True, return_inverse=True)
    return ids[np.sort(first)], np.argsort(np.argsort(first))[numbers]


def _keys(distance: Singles) -> Ints:
    """Numbers that order distances as `selection` does: all but the last bit of the sum with `HALF_MS`."""
    return ((distance + np.float32(HALF_MS)).view(np.uint32) >> 1).astype(np.int64)


def _least_so_far(values: Singles, group: Ints) -> Singles:
    """The least of each value and those before it in its group; groups lie one after the other."""
    falling = group.astype(np.int64) << 32  # bits of floats that are not negative are ordered as these
    least = np.minimum.accumulate(values.view(np.uint32).astype(np.int64) - falling) + falling
    return least.astype(np.uint32).view(np.float32)
