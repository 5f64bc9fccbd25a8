"""In-context prediction: from known measurements and questions to distributions.

`ContextIndex` chooses the context of a question from all known measurements, by the rule of `prior.selection`: NumPy
over all pairs at once. Questions with one source and one time (or one destination, where there are fewer of those) can
share a context, and share that work. `Completer` runs the network on batches of such contexts.

What a question may look at was measured strictly before it: its own answer, and anything later, plays no part. Nodes
are numbered in the order in which a context names them, so their ids make no difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.core.console import Advance
from ping_llm.core.observations import MIN_RTT_MS, Floats, Ints, Observations, Questions
from ping_llm.models.completer.mixture import FINE, BinDistribution, Singles
from ping_llm.models.completer.model import CompleterSettings, SetTransformer
from ping_llm.prior.selection import (
    FAR_MS,
    HALF_MS,
    LEVELS,
    MAX_ROUNDS,
    OTHERS,
    OWN,
    PREFIX_MS,
    UNKNOWN,
    UNKNOWN_AGE,
    Target,
    context_columns,
    groups_among,
    no_prefix_groups,
    prefix_groups,
    quotas,
    score_pairs,
)

# mypy: disallow-untyped-calls=False

Arrays = dict[str, npt.NDArray[Any]]
Nodes = Sequence[str] | None
"""Addresses of the nodes' numbers, if there are any."""

_CONTEXT_SIZES: Final = (64, 256, 1024)
"""Shapes to compile for, below the largest context: a few, each some seconds of compiling."""
_TWICE: Final = 1 << 22
"""What doubling a distance adds to its key."""
_WORST_KEY: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    context: int = 512
    """Measurements to look at, at most."""
    questions_per_context: int = 1
    """Questions of one source and time that share a context: 8 are answered in the time of one, each from a context
    that was chosen for all of them."""
    votes: int = 1
    """Draws of identities whose answers are averaged."""
    contexts_per_call: int = 16
    """What is computed at once. Memory grows with it, and speed up to what the device can do in parallel."""
    seed: int = 0

    @property
    def question_slots(self) -> int:
        """Of a context: whole eights, which attention on a GPU needs."""
        return -(-self.questions_per_context // 8) * 8


@dataclass(frozen=True, kw_only=True)
class Completer:
    """A trained set transformer that answers questions from measurements it has never seen.

    >>> completer = Completer(settings=settings, weights=weights)
    >>> completer.predict(known, questions).median
    """

    settings: CompleterSettings
    weights: Any
    """State of a `SetTransformer`."""
    prediction: PredictionSettings = PredictionSettings()

    def predict(
        self, known: Observations, questions: Questions, nodes: Nodes = None, advance: Advance | None = None
    ) -> BinDistribution:
        """One distribution for each question, from what was known strictly before its time (NaN: from everything).

        `nodes` are the addresses of the nodes' numbers, of which the model learns who shares a prefix with whom.
        """
        p_failed = np.zeros(len(questions))
        probability = np.zeros((len(questions), FINE), np.float32)
        for rows, answers in self.in_parts(known, questions, nodes, advance):
            p_failed[rows], probability[rows] = answers.p_failed, answers.probability
        return BinDistribution(p_failed=p_failed, probability=probability)

    def in_parts(
        self, known: Observations, questions: Questions, nodes: Nodes = None, advance: Advance | None = None
    ) -> Iterator[tuple[Ints, BinDistribution]]:
        """The same as they come, some dozens at a time: rows of the questions, and their answers."""
        p = self.prediction
        if nodes is None:
            ends = known.source, known.destination, questions.source, questions.destination
            prefixes = no_prefix_groups(1 + max((int(column.max()) for column in ends if len(column)), default=0))
        else:
            prefixes = prefix_groups(nodes)
        index = ContextIndex(known, p.context - 1, prefixes)
        groups = list(group_questions(questions, p.questions_per_context))
        for start in range(0, len(groups), p.contexts_per_call):
            part = groups[start : start + p.contexts_per_call]
            batch = _stacked([index.fill(questions, group, p.question_slots) for group in part], p)
            is_question = np.arange(p.question_slots) < np.array([len(group.rows) for group in part])[:, None]
            votes = [self._answers(batch, vote) for vote in range(p.votes)]
            bins, failed = (
                np.mean([answers[: len(part)][is_question] for answers in of_all], axis=0)
                for of_all in zip(*votes, strict=True)
            )
            rows = np.concatenate([group.rows for group in part])
            yield rows, BinDistribution(p_failed=failed, probability=bins)
            if advance is not None:
                advance(len(rows))

    def _answers(self, batch: Arrays, vote: int) -> tuple[Floats, Floats]:
        of_vote = jax.random.key_data(jax.random.fold_in(jax.random.key(self.prediction.seed), vote))
        keys = jnp.broadcast_to(of_vote, (len(batch["context_length"]), *of_vote.shape))  # whatever else is queried
        bins, failed = _compiled(self.settings)(self.weights, {**batch, "identity_key": keys})
        return np.asarray(bins), np.asarray(failed, np.float64)


@cache
def _compiled(settings: CompleterSettings) -> Any:
    if jax.default_backend() == "cpu" and settings.dtype != "float32":  # which computes 16 bits slower than 32
        settings = replace(settings, dtype="float32", attention="plain")
    graph = nnx.split(nnx.eval_shape(lambda: SetTransformer(settings, nnx.Rngs(0))))[0]

    @jax.jit
    def run(weights: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        answers = nnx.merge(graph, weights)(batch)
        return answers.probabilities(), jax.nn.sigmoid(answers.failure_logit)

    return run


def _stacked(rows: list[Arrays], p: PredictionSettings) -> Arrays:
    """A batch of one of two sizes, its contexts cut to the least of a few sizes that holds them."""
    if len(rows) > 1:  # a single question is not to wait for the padding of a whole batch
        rows = rows + rows[:1] * (p.contexts_per_call - len(rows))
    longest = max(int(row["context_length"]) for row in rows)
    room = next((size for size in _CONTEXT_SIZES if longest <= size < p.context), p.context)
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    cut = {name: column[:, :room] for name, column in batch.items() if name.startswith("context") and column.ndim > 1}
    return batch | cut


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
