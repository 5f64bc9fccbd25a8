"""In-context prediction: from known measurements and queries to distributions.

What a query looks at is its context, and `History` decides it from the history, the query and the settings alone, so
the answer depends on nothing else: not on what else is queried, nor in which order.

A query without a time, about a pair that was never measured, is answered from the other pairs, each of which is
summarized as one slot, or two if it has timed out, too (`ContextIndex.of_pairs`). Repeats would only distract: on MENOG
with twelve results of each pair the median relative error falls from .125 to .098. The context is

    all pairs                  where they are less than `part`, or less than `whole` and dense
    a part of them             chosen by `prior.selection` for all pairs between two clusters of nodes, of which a
                               history has at most `clusters`

All other queries are answered from single measurements:

    all of them                if they are less than `part`, and the query has no time
    those chosen for the pair  otherwise: of what was measured strictly before the time of the query

A context is encoded once for all queries that share it, and the latest ones are kept. One of all pairs is encoded
several times, with other random identities and, every second time, with sources and destinations exchanged (an RTT
takes both directions), and the answers are averaged: a test-time ensemble.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import expit  # type: ignore[import-untyped]

from ping_llm.core.console import Advance
from ping_llm.core.errors import PingLlmError, extras_needed
from ping_llm.core.geography import is_known, light_ms, positions_of
from ping_llm.core.rtt import CODE_MS, Floats, Ints, Observations, Questions, RttDistribution, search_rows
from ping_llm.models.completer.geography import Densities, DistanceModel, pooled
from ping_llm.models.completer.network import (
    FINE,
    Bins,
    CompleterSettings,
    Encoded,
    Measurements,
    PlainNetwork,
    identities,
)
from ping_llm.models.layers import Array, Singles, by_rows, single_threaded_blas
from ping_llm.prior.selection import ANSWERED, LEVELS, ContextIndex, node_words

_CLUSTER_SIZE: Final = 32
"""Nodes of a cluster, about so many or more."""
_KEPT_SLOTS: Final = 16_384
"""Of the contexts that are kept: 0.5 GB of keys and values in 32 bits."""
_DENSE: Final = 4
"""Pairs for each node: with 5 (2 % of PlanetLab) one context is as good as many chosen ones, with 12 better, and with
1.5 (simulated Internets) worse."""
_VOTES: Final = 4
_VOTED_SLOTS: Final = 8192
"""Of all members of an ensemble together: four times 2,048, or once 8,192."""
_NOBODY: Final = np.array([[1] * (1 + LEVELS), [2] * (1 + LEVELS)], np.uint32)
"""Words of a source and of a destination that are not known by any address."""


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    context: int = 1024
    """Measurements that are chosen for a single pair, at most."""
    measured: int = 256
    """Likewise, for one that was itself measured: then more help nothing, and take five times as long."""
    part: int = 2048
    """Slots of a context that many queries share, at most: as in training."""
    whole: int = 8192
    """Less than so many pairs are one context all the same where they are dense: four or more for each node. In a
    sparse history, most pairs have nothing to do with a query."""
    clusters: int = 11
    """Clusters of nodes, at most: 66 contexts of 2,048, 1.1 s each on a CPU, are all that a larger history needs. With
    0, a context is chosen for each pair."""
    votes: int | None = None
    """Ensemble members. None: 4 for a context of all pairs, fewer if it has more than 2,048 slots, 1 for any other."""
    contexts_per_call: int = 8
    """What an accelerator encodes at once. Memory grows with it, and speed up to what it can do in parallel."""
    backend: str = "auto"
    """`jax` compiles the network for the device that JAX finds, `numpy` runs it on the CPU: at once, and as fast as JAX
    there. `auto` is `jax` where there is an accelerator."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"context": 8, "measured": 8, "whole": 8, "part": 8, "clusters": 0, "votes": 1, "contexts_per_call": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is None and name == "votes":
                continue
            if not isinstance(value, int | np.integer) or value < fewest:
                raise PingLlmError(f"{name} must be a whole number of at least {fewest}, not {value!r}")
        if self.backend not in ("auto", "numpy", "jax"):
            raise PingLlmError(f"backend must be auto, numpy or jax, not {self.backend!r}")


@dataclass(frozen=True, kw_only=True)
class Completer:
    """A trained set transformer that answers queries from measurements it has never seen.

    >>> completer = Completer(settings=settings, weights=weights)
    >>> completer.predict(known, questions, nodes).median
    """

    settings: CompleterSettings
    weights: dict[str, Singles]
    """By name, see `CompleterSettings.shapes`."""
    prediction: PredictionSettings = PredictionSettings()
    _last: list["History"] = field(default_factory=list, repr=False, compare=False)
    _kept: dict[bytes, Encoded] = field(default_factory=dict, repr=False, compare=False)
    """The latest encoded contexts, by what they hold, so that a second query about the same history finds them."""

    def predict(
        self, known: Observations, questions: Questions, nodes: Sequence[str], advance: Advance | None = None
    ) -> "BinDistribution":
        """One distribution for each question, from what was known strictly before its time (NaN: from everything).

        `nodes` are the addresses of the nodes' numbers, of which the model learns who shares a prefix with whom.
        """
        p_failed = np.zeros(len(questions))
        probability = np.zeros((len(questions), FINE), np.float32)
        for rows, answers in self.in_parts(known, questions, nodes, advance):
            p_failed[rows], probability[rows] = answers.p_failed, answers.probability
        return BinDistribution(p_failed=p_failed, probability=probability)

    def in_parts(
        self, known: Observations, questions: Questions, nodes: Sequence[str], advance: Advance | None = None
    ) -> Iterator[tuple[Ints, "BinDistribution"]]:
        """The same as they come, some dozens at a time: rows of the questions, and their answers."""
        return self.history(known, nodes, questions).answer(questions, advance)

    def history(self, known: Observations, nodes: Sequence[str], questions: Questions) -> "History":
        """Known measurements, ready for these questions."""
        if self._last and self._last[0].known is known and _are_same(self._last[0].nodes, nodes):
            return self._last[0]
        is_known = np.ones(len(nodes), bool)
        is_known[np.concatenate([questions.source, questions.destination])] = False
        is_known[np.concatenate([known.source, known.destination])] = True  # one that is only queried decides nothing
        self._last.clear()  # the index of a large history is gigabytes: not two at a time
        index = ContextIndex(known, node_words(nodes, is_known), positions_of(nodes))
        self._last[:] = [History(self, known, nodes, index)]
        return self._last[0]

    @cached_property
    def network(self) -> "RunningNetwork":
        if self.prediction.backend == "numpy" or (self.prediction.backend == "auto" and not _has_accelerator()):
            return _OnNumPy(PlainNetwork(self.settings, self.weights))
        with extras_needed("backend=jax"):
            from ping_llm.models.completer.model import OnJax

        return OnJax(self.settings, self.weights, self.prediction.contexts_per_call)

    def encoded(self, key: bytes, encode: Callable[[], Encoded]) -> Encoded:
        """What was kept under this key, or what is now."""
        found = self._kept.pop(key, None) or encode()
        self._kept[key] = found  # the latest last
        slots = itertools.accumulate(one.log_rtt.shape[1] for one in reversed(self._kept.values()))
        for oldest in list(self._kept)[: sum(so_far > _KEPT_SLOTS for so_far in slots)]:
            del self._kept[oldest]
        return found


class _Context(NamedTuple):
    """What some queries look at."""

    rows: Ints
    """Of the index."""
    time_s: float
    queries: Ints
    is_shared: bool = False
    of_pairs: bool = False
    """Whether a row stands for all measurements of its pair."""
    votes: int = 1


class History:
    """Known measurements, ready to be queried."""

    def __init__(self, completer: Completer, known: Observations, nodes: Sequence[str], index: ContextIndex) -> None:
        self.completer, self.known, self.nodes, self.index = completer, known, nodes, index
        self.settings = completer.prediction
        self.words = np.concatenate([index.words, _NOBODY])
        self.positions = None if index.positions is None else np.pad(index.positions, ((0, len(_NOBODY)), (0, 0)))
        self._of_votes: dict[int, Singles] = {}

    def answer(self, questions: Questions, advance: Advance | None = None) -> Iterator[tuple[Ints, "BinDistribution"]]:
        """Rows of the questions and their answers."""
        waiting: list[_Context] = []
        for context in self._contexts(questions):
            waiting.append(context)
            if len(waiting) == self.completer.network.contexts_at_once or context.is_shared:
                yield from self._answers(questions, waiting, advance)
                waiting = []
        if waiting:
            yield from self._answers(questions, waiting, advance)

    def context(self, source: int, destination: int, time_s: float) -> Ints:
        """Which of the known measurements a query looks at, most informative first."""
        question = Questions(source=np.array([source]), destination=np.array([destination]), time_s=np.array([time_s]))
        (context,) = self._contexts(question)
        best = self.index.choose(question.source, question.destination, time_s, len(self.index))
        return self.index.given[best[np.isin(best, context.rows)]]

    def _contexts(self, questions: Questions) -> Iterator[_Context]:
        s, index = self.settings, self.index
        alone, measured = ~np.isnan(questions.time_s), _counts(self._sorted_pairs, questions.unordered_pair)
        repeated, untimed = np.flatnonzero(~alone & (measured > 1)), np.flatnonzero(~alone & (measured <= 1))
        if len(repeated) and len(index) < s.part:
            yield _Context(index.sample(np.nan, len(index)), np.nan, repeated, True)
        else:
            alone[repeated] = True
        if not len(untimed):
            pass
        elif self._is_whole:
            rows = index.of_pairs(index.sample(np.nan, len(index.starts)))
            yield _Context(rows, np.nan, untimed, True, of_pairs=True, votes=_votes_of(rows))
        elif not s.clusters:
            alone[untimed] = True
        else:
            clusters = np.sort(self._cluster_of_node[np.stack([questions.source, questions.destination])], axis=0)
            between, context_of = np.unique(clusters[:, untimed], axis=1, return_inverse=True)
            cluster = self._cluster_of_node[index.nodes]
            for number, (one, other) in enumerate(between.T):
                ends = index.nodes[cluster == one], index.nodes[cluster == other]
                rows = index.choose(*ends, np.nan, s.part - 1, is_shared=True, of_pairs=True)
                queries = untimed[context_of == number]
                held = _counts(np.sort(self._pairs[rows]), questions.take(queries).unordered_pair)
                alone[queries] = held < measured[queries]
                if not alone[queries].all():
                    yield _Context(rows, np.nan, queries[~alone[queries]], True, of_pairs=True)
        for row in np.flatnonzero(alone).tolist():
            source, destination, time_s = (column[row : row + 1] for column in vars(questions).values())
            is_measured = bool(measured[row]) and index.is_measured(source.item(), destination.item(), time_s.item())
            room = min(s.context, s.measured) if is_measured else s.context
            of_pairs = bool(np.isnan(time_s[0])) and not is_measured
            rows = index.choose(source, destination, time_s.item(), room - 1, of_pairs=of_pairs)
            yield _Context(rows, time_s.item(), np.array([row]), of_pairs=of_pairs)

    @cached_property
    def _is_whole(self) -> bool:
        """Whether one context of all pairs is all that queries without a time need."""
        pairs = len(self.index.starts)
        is_dense = pairs >= _DENSE * len(self.index.nodes)
        return pairs < (self.settings.whole if is_dense else self.settings.part)

    @cached_property
    def _pairs(self) -> Ints:
        """Of each row of the index, in either direction."""
        return self.known.unordered_pair[self.index.given]

    @cached_property
    def _sorted_pairs(self) -> Ints:
        return np.sort(self._pairs)

    @cached_property
    def _cluster_of_node(self) -> Ints:
        """Of every node and, last, of -1. One that was never measured is where the nearest other is, if positions are
        known, or others of its prefix, or in none."""
        index, words = self.index, self.index.words
        found = np.full(len(words) + 1, -1)
        found[index.nodes] = index.clusters(self.settings.clusters, _CLUSTER_SIZE)
        if index.positions is not None:
            rest = np.flatnonzero((found[:-1] < 0) & is_known(index.positions))
            there = index.nodes[is_known(index.positions[index.nodes])]
            if len(there):
                found[rest] = found[there[[np.argmax(index.positions[there] @ index.positions[node]) for node in rest]]]
        measured = index.nodes[np.argsort(words[index.nodes, 0])]
        for level in range(1, 1 + LEVELS):
            prefixes, first = np.unique(words[measured, level], return_index=True)
            rest = np.flatnonzero(found[:-1] < 0)
            at = np.minimum(np.searchsorted(prefixes, words[rest, level]), len(prefixes) - 1)
            is_alike = prefixes[at] == words[rest, level]
            found[rest[is_alike]] = found[measured[first[at[is_alike]]]]
        return found

    def _answers(
        self, questions: Questions, contexts: list[_Context], advance: Advance | None
    ) -> Iterator[tuple[Ints, "BinDistribution"]]:
        """Answers to queries of some contexts, which are encoded together."""
        encoded = [self._encoded(contexts, vote) for vote in range(self.settings.votes or contexts[0].votes)]
        network = self.completer.network
        at_once = network.queries_at_once
        for start in range(0, max(len(context.queries) for context in contexts), at_once):
            parts = [context.queries[start : start + at_once] for context in contexts]
            slots = network.padded_queries(max(map(len, parts)))
            empty = [np.zeros(0, np.int64)] * (len(encoded[0].length) - len(parts))
            filled = np.stack([np.pad(part, (0, slots - len(part)), constant_values=-1) for part in parts + empty])
            source, destination = (
                np.where(end[filled] >= 0, end[filled], len(self.words) - 2 + which)
                for which, end in enumerate((questions.source, questions.destination))
            )
            is_query = filled >= 0
            votes = []
            for vote, of_vote in enumerate(encoded):
                one, other = (destination, source) if _is_exchanged(vote) else (source, destination)
                bins, failed = network.answer(of_vote, self._identities(vote)[one], self._identities(vote)[other])
                votes.append((bins[is_query], failed[is_query].astype(np.float64)))
            p_failed = np.mean([failed for _, failed in votes], axis=0)
            probability = _pooled([bins for bins, _ in votes])
            for number, context in enumerate(contexts if self.positions is not None else ()):
                rows = np.nonzero(is_query)[0] == number
                ends = source[number][is_query[number]], destination[number][is_query[number]]
                probability[rows] = self._with_distances(probability[rows], context, *ends)
            yield filled[is_query], BinDistribution(p_failed=p_failed, probability=probability)
            if advance is not None:
                advance(int(is_query.sum()))

    def _encoded(self, contexts: list[_Context], vote: int) -> Encoded:
        network = self.completer.network
        slots = network.padded_context(1 + max(len(context.rows) for context in contexts))
        columns = [
            self.index.columns(context.rows, context.time_s, slots, of_pairs=context.of_pairs) for context in contexts
        ]
        if len(columns) > 1:  # a single question does not wait for the padding of a whole batch
            columns += columns[:1] * (network.contexts_at_once - len(columns))
        batch: dict[str, Any] = {name: np.stack([one[name] for one in columns]) for name in columns[0]}
        ends = {end: self._identities(vote)[batch[end]] for end in ("source", "destination")}
        if _is_exchanged(vote):
            ends = {"source": ends["destination"], "destination": ends["source"]}
        measurements = Measurements(**(batch | ends))
        if len(columns) > 1:
            return network.encode(measurements)
        content = hashlib.sha256(b"".join(np.asarray(column).tobytes() for column in measurements))
        return self.completer.encoded(content.digest(), lambda: network.encode(measurements))

    def _with_distances(self, probability: Singles, context: _Context, source: Ints, destination: Ints) -> Singles:
        """The answers to the queries of one context, those with two known positions improved by their distance."""
        assert self.positions is not None
        slots = self.index.columns(context.rows, context.time_s, 1 + len(context.rows), of_pairs=context.of_pairs)
        rtt_ms = np.where(slots["kind"] == ANSWERED, np.exp(slots["log_rtt"]), np.nan)
        model = DistanceModel.between(self.positions, slots["source"], slots["destination"], rtt_ms)
        light = light_ms(self.positions[source], self.positions[destination])
        some = light >= 0
        answers = Densities(probability[some], Bins(FINE).centres)
        found = probability.copy()
        found[some] = pooled(answers, model, source[some], destination[some], light[some])
        return found

    def _identities(self, vote: int) -> Singles:
        """Of all nodes; of a quarter of a million they take two seconds, and most answers have a single vote."""
        if vote not in self._of_votes:
            salts = np.random.default_rng(self.settings.seed).integers(1 << 32, size=vote + 1, dtype=np.uint32)
            position = None if self.positions is None else self.positions[None]
            words = (self.words ^ salts[vote])[None]
            self._of_votes[vote] = identities(words, self.completer.settings.identity, position)[0]
        return self._of_votes[vote]


def _votes_of(rows: Ints) -> int:
    return min(_VOTES, max(1, _VOTED_SLOTS // (1 + len(rows))))


def _is_exchanged(vote: int) -> bool:
    return vote % 2 == 1


def _pooled(votes: Sequence[Singles]) -> Singles:
    """The geometric mean of distributions (a logarithmic pool): narrower than their mean where they agree."""
    if len(votes) == 1:
        return votes[0]
    log = np.mean([np.log(np.maximum(probability, np.float32(1e-9))) for probability in votes], axis=0)
    pooled = np.exp(log)
    return np.asarray(pooled / pooled.sum(axis=1, keepdims=True))


def _are_same(nodes: Sequence[str], others: Sequence[str]) -> bool:
    position, other = positions_of(nodes), positions_of(others)
    if position is None or other is None:
        return nodes == others and position is other
    return nodes == others and np.array_equal(position, other)


def _counts(pairs: Ints, queried: Ints) -> Ints:
    """How often each of the queried pairs is among sorted ones."""
    return np.searchsorted(pairs, queried, "right") - np.searchsorted(pairs, queried)


class RunningNetwork(Protocol):
    """Where the network runs, and in what shapes."""

    @property
    def contexts_at_once(self) -> int: ...
    @property
    def queries_at_once(self) -> int: ...
    def padded_context(self, slots: int) -> int: ...
    def padded_queries(self, queries: int) -> int: ...
    def encode(self, context: Measurements) -> Encoded: ...
    def answer(self, encoded: Encoded, source: Array, destination: Array) -> tuple[Singles, Singles]:
        """Probabilities of the fine bins, and of failure."""


@dataclass(frozen=True)
class _OnNumPy:
    """Any shape will do."""

    network: PlainNetwork
    contexts_at_once: int = 1
    queries_at_once: int = 512

    def padded_context(self, slots: int) -> int:
        return slots

    def padded_queries(self, queries: int) -> int:
        return queries

    def encode(self, context: Measurements) -> Encoded:
        with single_threaded_blas():
            return self.network.encode(context)

    def answer(self, encoded: Encoded, source: Array, destination: Array) -> tuple[Singles, Singles]:
        def answer(source: Singles, destination: Singles) -> tuple[Singles, Singles]:
            answers = self.network.answer(encoded, source, destination)
            return answers.probabilities(), expit(answers.failure_logit)

        with single_threaded_blas():
            return by_rows(answer, source, destination)


def _has_accelerator() -> bool:
    """Whether JAX is installed with a plugin for one and finds it. Without a plugin, JAX is not even imported."""
    if not any(find_spec(name) for name in ("jax_plugins", "libtpu")):
        return False
    import jax

    return jax.default_backend() != "cpu"


# The distribution of an answer. Distribution function and quantiles come from quadratic equations, not from sampling.
#
# In training, an RTT outside of the bins was one of the first or last bin. Half of that bin's probability therefore
# lies beyond its centre, and falls off as a power of the RTT. And a little is spread evenly over all bins, so that no
# RTT is impossible: one that was not expected at all has 27 bits.

_ANYWHERE: Final = 1e-4
"""Probability that is spread over all bins."""
_FALL: Final = 1.5
"""Power of the RTT by which probability falls off outside of the bins; above 1, so that there is a mean."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BinDistribution(RttDistribution):
    probability: npt.NDArray[np.floating[Any]]
    """[n, bins], each row sums to 1."""

    def __post_init__(self) -> None:
        if np.ndim(self.probability) != 2 or len(self.probability) != len(self.p_failed):
            raise ValueError(f"{len(self.p_failed)} questions, but probabilities {np.shape(self.probability)}")

    @property
    def bins(self) -> Bins:
        return Bins(self.probability.shape[1])

    @property
    def mean(self) -> Floats:
        """Exact: of the triangles around the centres, less the outer half of the first and last, plus the tails."""
        width, centres = self.bins.width, np.exp(self.bins.centres)
        whole = (2 * np.sinh(width / 2) / width) ** 2 * centres
        whole[0] += centres[0] * (_FALL / (_FALL + 1) / 2 - _half_triangle(-width))
        whole[-1] += centres[-1] * (_FALL / (_FALL - 1) / 2 - _half_triangle(width))
        return np.asarray(self._corners @ whole)

    def _cdf(self, rtt_ms: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            at = (np.log(rtt_ms) - self.bins.centres[0]) / self.bins.width
        last = self.bins.count - 1
        inside = np.clip(at, 0.0, last)
        corner = np.minimum(inside.astype(np.int64), last - 1)
        share = inside - corner
        row = np.arange(len(self))[:, None]
        left, right = self._corners[row, corner], self._corners[row, corner + 1]
        until = self._until[row, corner] + left * (share - share**2 / 2) + right * share**2 / 2
        until = np.where(at < 0, until * np.exp(_FALL * self.bins.width * np.minimum(at, 0.0)), until)
        beyond = self._corners[:, -1:] / 2 * np.exp(-_FALL * self.bins.width * np.maximum(at - last, 0.0))
        return np.where(at > last, 1.0 - beyond, until)

    def _quantile(self, level: Floats) -> Floats:
        row = np.broadcast_to(np.arange(len(self))[:, None], level.shape)
        corner = np.clip(search_rows(self._until, row, level) - 1, 0, self.bins.count - 2)
        left, right = self._corners[row, corner], self._corners[row, corner + 1]
        rest = np.maximum(level - self._until[row, corner], 0.0)
        root = np.sqrt(np.maximum(left**2 + 2 * (right - left) * rest, 0.0))
        at = corner + np.clip(2 * rest / (left + root), 0.0, 1.0)
        found = np.exp(self.bins.centres[0] + at * self.bins.width)
        lower, upper = self._until[:, :1], self._corners[:, -1:] / 2
        found *= np.minimum(level / lower, 1.0) ** (1 / _FALL)
        with np.errstate(divide="ignore"):
            found *= np.maximum(upper / (1.0 - level), 1.0) ** (1 / _FALL)
        return np.minimum(found, CODE_MS[-1])

    @cached_property
    def _corners(self) -> Floats:
        """Probabilities of the bins, each also the density of ln RTT at the centre, in bins."""
        return (1 - _ANYWHERE) * self.probability.astype(np.float64) + _ANYWHERE / self.bins.count

    @cached_property
    def _until(self) -> Floats:
        """The distribution function at the centres."""
        halves = np.cumsum(self._corners / 2, axis=1)
        return halves + np.pad(halves[:, :-1], ((0, 0), (1, 0)))


def _half_triangle(width: float) -> float:
    """The integral of exp over the half of a triangle from its top at 0 down to `width`, of which the area is 1/2."""
    return float(np.expm1(width) - width) / width**2
