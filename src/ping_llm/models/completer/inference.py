"""In-context prediction: from known measurements and questions to distributions.

`prior.selection` chooses the context of a question from all known measurements. Questions with one source and one time
(or one destination, where there are fewer of those) can share a context, and share that work. `Completer` runs the
network on batches of such contexts, and `BinDistribution` is what it answers.

What a question may look at was measured strictly before it: its own answer, and anything later, plays no part. Nodes
are numbered in the order in which a context names them, so their ids make no difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.core.console import Advance
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import CODE_MS, Floats, Ints, Observations, Questions, RttDistribution, search_rows
from ping_llm.models.completer.model import FINE, Bins, CompleterSettings, SetTransformer
from ping_llm.prior.selection import Arrays, ContextIndex, group_questions, no_prefix_groups, prefix_groups

# mypy: disallow-untyped-calls=False

Nodes = Sequence[str] | None
"""Addresses of the nodes' numbers, if there are any."""

_CONTEXT_SIZES: Final = (64, 256, 1024)
"""Shapes to compile for, below the largest context: a few, each some seconds of compiling."""


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

    def __post_init__(self) -> None:
        for name, least in {"context": 8, "questions_per_context": 1, "votes": 1, "contexts_per_call": 1}.items():
            if not isinstance(value := getattr(self, name), int | np.integer) or value < least:
                raise PingLlmError(f"{name} must be a whole number of at least {least}, not {value!r}")

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
        self, known: Observations, questions: Questions, nodes: Nodes = None, advance: Advance | None = None
    ) -> Iterator[tuple[Ints, "BinDistribution"]]:
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


# The distribution of an answer. Distribution function and quantiles come from quadratic equations, not from sampling.
#
# In training, an RTT outside of the bins was one of the first or last bin. Half of that bin's probability therefore
# lies beyond its centre, and falls off as a power of the RTT. And a little is spread evenly over all bins, so that no
# RTT is impossible: one that was not expected at all has 27 bits.

_ANYWHERE: Final = 1e-4
"""Probability that is spread over all bins."""
_FALL: Final = 1.5
"""Power of the RTT by which probability falls off outside of the bins; above 1, so that there is a mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
